//! A random engine: it makes legal calls in any order, steps overlapped, and checks the books after each.

use crate::common::{claim, config, finish_copies, salted};
use crate::device::{Cells, Device, Mover, Work, kv_after};
use block_hash::Token;
use block_pool::{GroupId, PageId, Step};
use cache_manager::{
    CopyEnd, Group, GroupKind, Ledger, LedgerConfig, LedgerError, OnDuplicate, PageCopy, Reserve, RowMemory,
    SlotId, VarlenTables,
};
use std::collections::VecDeque;

/// `SplitMix64`: the same seed gives the same run on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Below `limit`; 0 when `limit` is 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        if limit == 0 { 0 } else { (self.next() % limit as u64) as usize }
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// A forward launched for a request; its result is due.
struct Out {
    step: u32,
    /// One past the last token that it computes.
    end: usize,
    /// The tokens that it gives, when it computes the last one: drafts that were right, and one more.
    sampled: Vec<Token>,
}

/// A request as the engine and the device know it.
struct Live {
    slot: SlotId,
    /// Known tokens, then sampled ones that are not delivered yet.
    log: Vec<Token>,
    /// KV of each token of the log.
    kv: Vec<u64>,
    root: u64,
    known: usize,
    drafts: usize,
    planned: bool,
    /// Somebody forked it off since it was planned: its forward may write to a page that both hold.
    forked: bool,
    out: VecDeque<Out>,
    /// Results of forwards that the ledger was told to forget; they come all the same.
    late: VecDeque<Vec<Token>>,
}

impl Live {
    fn push(&mut self, token: Token) {
        self.log.push(token);
        self.kv.push(kv_after(self.kv.last().copied().unwrap_or(self.root), token));
    }

    fn cut(&mut self, len: usize) {
        self.log.truncate(len);
        self.kv.truncate(len);
        self.known = len;
        self.planned = false;
        self.late.extend(self.out.drain(..).map(|out| out.sampled));
    }
}

pub(crate) struct Driver {
    random: Random,
    ledger: Ledger,
    device: Device,
    mover: Mover,
    live: Vec<Live>,
    /// Results due for requests that were released.
    orphans: Vec<(SlotId, VecDeque<Vec<Token>>)>,
    /// Of each group.
    memory: Vec<RowMemory>,
    tables: Vec<Vec<u32>>,
    columns: usize,
    /// Whether prompt chunks are delivered when they are launched, not when they have run.
    eager: bool,
    /// Off in the broken variant.
    copies_pages: bool,
}

const MOST_LIVE: usize = 6;

/// A number of a table, whose type has a sign because kernels want it so.
fn unsigned(number: impl TryInto<usize>) -> usize {
    number.try_into().ok().expect("tables hold no negative number")
}

impl Driver {
    pub(crate) fn new(seed: u64, mover: Mover) -> Driver {
        let mut random = Random(seed);
        let config = LedgerConfig {
            page_size: 1 + random.below(4) as u32,
            on_duplicate: if random.one_in(2) { OnDuplicate::Private } else { OnDuplicate::Adopt },
            reserve: if random.one_in(4) { Reserve::Prompt } else { Reserve::Chunk },
            partial_reuse: !random.one_in(4),
            copy_on_partial_reuse: !random.one_in(4),
            store_partial_tails: !random.one_in(4),
            ..config(5 + random.below(16) as u32)
        };
        Driver::with(config, random, mover)
    }

    /// One to five groups of any kind, which may share a slab.
    pub(crate) fn with_groups(seed: u64, mover: Mover) -> Driver {
        let mut random = Random(seed);
        let huge_pages = random.one_in(2).then(|| 4 + random.below(16) as u32);
        let groups = (0..=random.below(4)).map(|_| Group {
            kind: match random.below(4) {
                0 => GroupKind::Full,
                1 => GroupKind::Chunked { chunk: 1 + random.below(20) as u32 },
                _ => GroupKind::Window {
                    window: 1 + random.below(16) as u32,
                    sinks: random.below(2) as u32 * random.below(6) as u32,
                },
            },
            pages: if huge_pages.is_some() { 1 + random.below(5) } else { 5 + random.below(20) } as u32,
        });
        let groups = groups.collect();
        let config = LedgerConfig {
            page_size: 1 + random.below(4) as u32,
            groups,
            huge_pages,
            on_duplicate: if random.one_in(2) { OnDuplicate::Private } else { OnDuplicate::Adopt },
            reserve: if random.one_in(4) { Reserve::Prompt } else { Reserve::Chunk },
            partial_reuse: !random.one_in(4),
            copy_on_partial_reuse: !random.one_in(4),
            store_partial_tails: !random.one_in(4),
            max_seq_len: Some(1000),
            ..config(1)
        };
        Driver::with(config, random, mover)
    }

    fn with(config: LedgerConfig, mut random: Random, mover: Mover) -> Driver {
        let columns = config.max_blocks_per_request(3) as usize;
        let groups = config.groups.len();
        Driver {
            device: Device::new(&config),
            ledger: Ledger::new(config),
            mover,
            live: Vec::new(),
            orphans: Vec::new(),
            memory: (0..groups).map(|_| RowMemory::default()).collect(),
            tables: vec![vec![0; MOST_LIVE * columns]; groups],
            columns,
            eager: random.one_in(2),
            copies_pages: true,
            random,
        }
    }

    /// The broken variant: page copies are taken and not carried out.
    pub(crate) fn without_page_copies(mut self) -> Driver {
        self.copies_pages = false;
        self
    }

    /// The broken variant: layers with windows of one token more than the ledger knows of.
    pub(crate) fn reading_one_more(mut self) -> Driver {
        self.device.widen_windows();
        self
    }

    /// Tokens that were found in the cache.
    pub(crate) fn reused_tokens(&self) -> u64 {
        let counters = self.ledger.counters();
        counters.reused_tokens + counters.late_reused_tokens
    }

    /// Makes `calls` random calls, then lets everything in flight end.
    pub(crate) fn run(&mut self, calls: usize) -> Result<(), String> {
        for _ in 0..calls {
            match self.random.below(33) {
                0..=3 => self.claim(),
                4..=10 => self.alloc()?,
                11..=14 => self.launch()?,
                15..=18 => self.device.run_one()?,
                19..=22 => self.deliver()?,
                23 => self.append()?,
                24 => self.truncate()?,
                25 => self.preempt()?,
                26 => self.release()?,
                31 => self.fork()?,
                27 | 28 => self.start_copy()?,
                29 => self.mover.begin_one(&self.device, |n| self.random.below(n))?,
                30 => self.finish_copy()?,
                _ if self.random.one_in(6) => self.ledger.reset_prefix_cache(),
                _ => {}
            }
            self.ledger.verify().map_err(|fault| fault.to_string())?;
            self.check_logs()?;
        }
        self.drain()
    }

    fn claim(&mut self) {
        if self.live.len() == MOST_LIVE {
            return;
        }
        // Few prompts, so that most share a prefix with another.
        let (family, own) = (self.random.below(2), self.random.below(4));
        let shared = self.random.below(20);
        let tokens: Vec<Token> = (0..shared)
            .map(|i| (family * 100 + i) as Token)
            .chain((0..=self.random.below(6)).map(|i| (200 + own * 10 + i) as Token))
            .collect();
        let salt = if self.random.one_in(4) { "other" } else { "" };
        let mut request = salted(&tokens, salt, self.ledger.config().page_size);
        request.no_read = self.random.one_in(12);
        request.no_store = self.random.one_in(12);
        request.drafts = if self.random.one_in(3) { 1 + self.random.below(3) as u32 } else { 0 };
        let drafts = request.drafts as usize;
        let slot = claim(&mut self.ledger, request);
        let mut live = Live {
            slot,
            log: Vec::new(),
            kv: Vec::new(),
            root: salt.len() as u64,
            known: tokens.len(),
            drafts,
            planned: false,
            forked: false,
            out: VecDeque::new(),
            late: VecDeque::new(),
        };
        for token in tokens {
            live.push(token);
        }
        self.live.push(live);
    }

    fn alloc(&mut self) -> Result<(), String> {
        let may_refuse = self.random.one_in(8);
        let plannable = |live: &&Live| may_refuse || (!live.planned && live.out.len() < 2);
        let mut batch: Vec<SlotId> = self.live.iter().filter(plannable).map(|live| live.slot).collect();
        for at in (1..batch.len()).rev() {
            batch.swap(at, self.random.below(at + 1));
        }
        batch.truncate(1 + self.random.below(3));
        let bounds: Vec<u32> = batch.iter().map(|_| 1 + self.random.below(12) as u32).collect();
        let before = self.ledger.fingerprint();
        let Err(error) = self.ledger.alloc(&batch, &bounds) else {
            self.live
                .iter_mut()
                .filter(|live| batch.contains(&live.slot))
                .for_each(|live| (live.planned, live.forked) = (true, false));
            return Ok(());
        };
        if self.ledger.fingerprint() != before {
            return Err(format!("a refused alloc changed the ledger: {error}"));
        }
        match error {
            LedgerError::RequestTooLarge { slot, .. } => {
                let index = self.live.iter().position(|live| live.slot == slot).expect("it is in the batch");
                self.release_at(index)
            }
            LedgerError::InsufficientBlocks { .. } if self.random.one_in(2) => self.preempt(),
            LedgerError::InsufficientBlocks { .. }
            | LedgerError::NothingToCompute { .. }
            | LedgerError::AlreadyPlanned { .. }
            | LedgerError::TwoStepsOut { .. } => Ok(()),
            error => Err(format!("alloc: {error}")),
        }
    }

    /// Closes the open step and hands its tables to the device.
    fn launch(&mut self) -> Result<(), String> {
        let (step, open) = self.ledger.newest_step();
        if !open {
            return Ok(());
        }
        let planned: Vec<usize> = (0..self.live.len()).filter(|&index| self.live[index].planned).collect();
        let batch: Vec<SlotId> = planned.iter().map(|&index| self.live[index].slot).collect();
        let work = self.tables(&batch).map_err(|error| error.to_string())?;
        self.ledger.close_step();
        let mut launched = Vec::new();
        for (&index, work) in planned.iter().zip(work) {
            launched.push(self.launch_one(index, step, work)?);
        }
        let groups = self.ledger.pools().groups();
        let mut copies: Vec<PageCopy> =
            groups.flat_map(|group| self.ledger.take_page_copies(group)).collect();
        copies.retain(|_| self.copies_pages);
        self.device.launch(step, copies, launched);
        Ok(())
    }

    /// One request's part of a forward. The device knows by then how many drafts of the forward before were
    /// right, and so where the request stands; the ledger may learn it later.
    fn launch_one(&mut self, index: usize, step: Step, work: Work) -> Result<Work, String> {
        let page_size = self.ledger.config().page_size as usize;
        let live = &mut self.live[index];
        let active = self.ledger.position(live.slot).map_or(0, |position| position.active as usize);
        let drafts = work.computed - active;
        let moved: usize = live.out.iter().map(|out| out.sampled.len().saturating_sub(1)).sum();
        let end = work.kv.len() - drafts + moved;
        let start = end - active;
        let mut sampled = Vec::new();
        if end == live.log.len() {
            for _ in 0..=self.random.below(drafts + 1) {
                let token = (200 + self.random.below(4)) as Token;
                sampled.push(token);
                live.push(token);
            }
        }
        // Drafts that were right have KV now; the drafter writes as many again behind them.
        let computed = end + sampled.len().saturating_sub(1);
        let guessed_to = if sampled.is_empty() { computed } else { end + 2 * live.drafts };
        let mut groups = Vec::new();
        for told in work.groups {
            let cell =
                |position: usize| told.row[position / page_size] as usize * page_size + position % page_size;
            if moved == 0 && told.written.iter().zip((start..).map(cell)).any(|(&given, own)| given != own) {
                return Err(format!("the slot mapping of slot {} is not its row's", live.slot.0));
            }
            let written: Vec<usize> = (start..computed).map(cell).collect();
            let guessed: Vec<usize> = (computed..guessed_to).map(cell).collect();
            groups.push(Cells { row: told.row, written, guessed });
        }
        let kv = live.kv[..computed].to_vec();
        live.planned = false;
        live.out.push_back(Out { step: step.0, end, sampled });
        let work = Work { kv, computed: computed - start, groups };
        self.check_tables(index, &work)?;
        Ok(work)
    }

    /// The batch's block tables and slot mappings; the right KV is not filled in yet.
    fn tables(&mut self, batch: &[SlotId]) -> Result<Vec<Work>, LedgerError> {
        let shape = self.ledger.batch_shape(batch)?;
        let mut lengths = vec![0; batch.len()];
        let mut starts = vec![0; batch.len() + 1];
        let mut work = Vec::new();
        for (group, (memory, table)) in self.memory.iter_mut().zip(&mut self.tables).enumerate() {
            let group = GroupId(group as u8);
            self.ledger.write_rows(group, batch, memory, table, self.columns)?;
            let mut mapping = vec![0; shape.total_active as usize];
            let mut tables = VarlenTables {
                seq_lens: &mut lengths,
                slot_mapping: &mut mapping,
                query_start_loc: &mut starts,
            };
            self.ledger.write_varlen(group, batch, &mut tables)?;
            let spans = starts.windows(2).map(|tokens| unsigned(tokens[0])..unsigned(tokens[1]));
            if work.is_empty() {
                let kv = lengths.iter().map(|&length| vec![0; unsigned(length)]);
                let empty = |(kv, span): (Vec<u64>, std::ops::Range<usize>)| Work {
                    kv,
                    computed: span.len(),
                    groups: Vec::new(),
                };
                work.extend(kv.zip(spans.clone()).map(empty));
            }
            for ((work, row), span) in work.iter_mut().zip(table.chunks_exact(self.columns)).zip(spans) {
                let written = mapping[span].iter().copied().map(unsigned).collect();
                work.groups.push(Cells { row: row.to_vec(), written, guessed: Vec::new() });
            }
        }
        Ok(work)
    }

    /// A row is the request's pages and then null pages, also in memory that held another row before. A
    /// page that a forward writes to belongs to one request, but for those forked off it since, and is not
    /// stored.
    fn check_tables(&self, index: usize, work: &Work) -> Result<(), String> {
        let page_size = self.ledger.config().page_size as usize;
        let Live { slot, forked, .. } = self.live[index];
        for (group, told) in work.groups.iter().enumerate() {
            let group = GroupId(group as u8);
            let pages = self.ledger.pages(slot, group).map_err(|error| error.to_string())?;
            let cells = pages.iter().copied().chain(std::iter::repeat(PageId::NULL));
            if told.row.iter().zip(cells).any(|(&cell, page)| cell != page.0) {
                return Err(format!("the row of slot {} is not its pages", slot.0));
            }
            let pool = &self.ledger.pools()[group];
            for &cell in told.written.iter().chain(&told.guessed) {
                let page = PageId((cell / page_size) as u32);
                if pool.refs(page) == 0 || (pool.refs(page) > 1 && !forked) || pool.node(page).is_some() {
                    return Err(format!("a forward writes to {page}, which others read"));
                }
            }
        }
        Ok(())
    }

    /// Delivers the oldest result of some requests; of a released one, now and then.
    fn deliver(&mut self) -> Result<(), String> {
        if !self.orphans.is_empty() && self.random.one_in(2) {
            let index = self.random.below(self.orphans.len());
            let (slot, results) = &mut self.orphans[index];
            let (slot, tokens) = (*slot, results.pop_front().unwrap_or_default());
            if results.is_empty() {
                self.orphans.swap_remove(index);
            }
            return self.tell_results(&[slot], &[tokens]);
        }
        let fence = self.device.fence().0;
        let (mut batch, mut results) = (Vec::new(), Vec::new());
        for live in &mut self.live {
            if self.random.one_in(3) {
                continue;
            }
            if let Some(tokens) = live.late.pop_front() {
                batch.push(live.slot);
                results.push(tokens);
            } else if live
                .out
                .front()
                .is_some_and(|out| out.step <= fence || (self.eager && out.sampled.is_empty()))
            {
                let tokens = live.out.pop_front().map(|out| out.sampled).unwrap_or_default();
                live.known += tokens.len();
                batch.push(live.slot);
                results.push(tokens);
            }
        }
        self.tell_results(&batch, &results)
    }

    fn tell_results(&mut self, batch: &[SlotId], results: &[Vec<Token>]) -> Result<(), String> {
        let tokens: Vec<Token> = results.iter().flatten().copied().collect();
        let counts: Vec<u32> = results.iter().map(|tokens| tokens.len() as u32).collect();
        self.ledger.step(batch, &tokens, Some(&counts)).map_err(|error| format!("step: {error}"))
    }

    /// The next turn of a request that waits for nothing.
    fn append(&mut self) -> Result<(), String> {
        let Some(index) = self.pick() else { return Ok(()) };
        let live = &mut self.live[index];
        if live.planned || !live.out.is_empty() || !live.late.is_empty() {
            return Ok(());
        }
        for _ in 0..=self.random.below(5) {
            let token = (200 + self.random.below(4)) as Token;
            self.ledger.update(live.slot, token).map_err(|error| format!("update: {error}"))?;
            live.push(token);
            live.known += 1;
        }
        Ok(())
    }

    fn truncate(&mut self) -> Result<(), String> {
        let Some(index) = self.pick() else { return Ok(()) };
        let live = &mut self.live[index];
        let len = self.random.below(live.known + 1);
        self.ledger.truncate(live.slot, len as u32).map_err(|error| format!("truncate: {error}"))?;
        // At its full length nothing is dropped, unless a token was on the way.
        let dropped = self.ledger.position(live.slot).is_ok_and(|position| position.active == 0);
        if len < live.known || dropped {
            live.cut(len);
        }
        Ok(())
    }

    fn preempt(&mut self) -> Result<(), String> {
        let Some(index) = self.pick() else { return Ok(()) };
        let live = &mut self.live[index];
        self.ledger.preempt(&[live.slot]).map_err(|error| format!("preempt: {error}"))?;
        live.cut(live.known);
        Ok(())
    }

    fn release(&mut self) -> Result<(), String> {
        self.pick().map_or(Ok(()), |index| self.release_at(index))
    }

    fn release_at(&mut self, index: usize) -> Result<(), String> {
        let mut live = self.live.swap_remove(index);
        self.ledger.release(&[live.slot]).map_err(|error| format!("release: {error}"))?;
        live.cut(0);
        if !live.late.is_empty() {
            self.orphans.push((live.slot, live.late));
        }
        Ok(())
    }

    fn fork(&mut self) -> Result<(), String> {
        let Some(index) = self.pick() else { return Ok(()) };
        if self.live.len() == MOST_LIVE {
            return Ok(());
        }
        let parent = &mut self.live[index];
        let slot = self.ledger.fork(parent.slot).map_err(|error| format!("fork: {error}"))?;
        parent.forked = true;
        let child = Live {
            slot,
            log: parent.log[..parent.known].to_vec(),
            kv: parent.kv[..parent.known].to_vec(),
            planned: false,
            forked: false,
            out: VecDeque::new(),
            late: VecDeque::new(),
            ..*parent
        };
        self.live.push(child);
        Ok(())
    }

    fn start_copy(&mut self) -> Result<(), String> {
        let Some(index) = self.pick() else { return Ok(()) };
        let live = &self.live[index];
        let held = self.ledger.pages(live.slot, GroupId::FIRST).map_err(|error| error.to_string())?.len();
        if held == 0 || self.ledger.config().groups[0].kind != GroupKind::Full {
            return Ok(());
        }
        let first = self.random.below(held);
        let count = 1 + self.random.below(held - first);
        let job = self
            .ledger
            .start_copy(live.slot, first, count)
            .map_err(|error| format!("start_copy: {error}"))?;
        let position = self.launched_tokens(index);
        let page_size = self.ledger.config().page_size as usize;
        let (start, end) = (first * page_size, (first + count) * page_size);
        let expected = &self.live[index].kv[start.min(position)..end.min(position)];
        self.mover.ask(job, expected.to_vec());
        Ok(())
    }

    /// Tokens of a request whose KV comes from forwards launched until now. What later ones write is not
    /// part of a copy asked for now.
    fn launched_tokens(&self, index: usize) -> usize {
        let live = &self.live[index];
        let processed = self.ledger.position(live.slot).map_or(0, |position| position.processed as usize);
        live.out.iter().map(|out| out.end).fold(processed, usize::max)
    }

    fn finish_copy(&mut self) -> Result<(), String> {
        let Some(id) = self.mover.end_one(&self.device, |n| self.random.below(n))? else { return Ok(()) };
        // A step is launched before the next begins.
        let (_, open) = self.ledger.newest_step();
        let told = if open || self.random.one_in(2) {
            finish_copies(&mut self.ledger, &[id]).map(drop)
        } else {
            self.ledger.begin_step(None, &[(id, CopyEnd::Done)]).map(drop)
        };
        told.map_err(|error| format!("finish_copies: {error}"))
    }

    /// Everything in flight ends and every request goes: no page may be held then.
    fn drain(&mut self) -> Result<(), String> {
        self.launch()?;
        while self.device.has_work() {
            self.device.run_one()?;
        }
        while !self.live.is_empty() {
            self.release_at(0)?;
        }
        for _ in 0..self.mover.len() {
            self.mover.begin_one(&self.device, |n| self.random.below(n))?;
        }
        for _ in 0..self.mover.len() {
            self.finish_copy()?;
        }
        self.ledger.verify().map_err(|fault| fault.to_string())?;
        let pools = self.ledger.pools();
        let is_whole = |group| pools.available(group) == pools[group].total();
        if pools.groups().all(is_whole) { Ok(()) } else { Err("pages are lost at the end".into()) }
    }

    fn check_logs(&self) -> Result<(), String> {
        for live in &self.live {
            if self.ledger.tokens(live.slot).ok() != Some(&live.log[..live.known]) {
                return Err(format!("slot {} lost its tokens", live.slot.0));
            }
        }
        Ok(())
    }

    fn pick(&mut self) -> Option<usize> {
        (!self.live.is_empty()).then(|| self.random.below(self.live.len()))
    }
}
