//! Requests in some state, as an engine brings them there: for what schedulers are told of them.

use crate::common::{PAGE, claim, drafting, prompt, query};
use crate::driver::Random;
use crate::shelf::Shelf;
use block_hash::Token;
use block_pool::{GroupId, PageId, PageState};
use cache_manager::{
    CopyEnd, CopyId, CopyJob, Group, GroupKind, Ledger, LedgerConfig, LedgerError, NewSequence, OnDuplicate,
    Outlook, PrefixWalk, Reserve, SlotId, Snapshots,
};

/// More than any of these tests holds.
pub(crate) const PLENTY: u32 = 4000;

/// Most tokens of a request.
const LONGEST: u32 = 90;

const KINDS: [&[GroupKind]; 10] = [
    &[GroupKind::Full],
    &[GroupKind::Window { window: 9, sinks: 0 }],
    &[GroupKind::Window { window: 6, sinks: 5 }],
    &[GroupKind::Chunked { chunk: 8 }],
    &[GroupKind::Chunked { chunk: 6 }],
    &[GroupKind::Full, GroupKind::Window { window: 7, sinks: 0 }],
    &[GroupKind::Window { window: 1, sinks: 0 }, GroupKind::Full],
    &[GroupKind::Full, GroupKind::Window { window: 13, sinks: 2 }, GroupKind::Chunked { chunk: 16 }],
    &[GroupKind::Full, GroupKind::Recurrent(Snapshots { interval: 8, last: true })],
    &[GroupKind::Recurrent(Snapshots { interval: 0, last: false }), GroupKind::Full, GroupKind::Scratch],
];

/// A few requests, and the way in which they are served. Equal for equal seeds.
pub(crate) struct Scene {
    pub(crate) random: Random,
    pub(crate) ledger: Ledger,
    pub(crate) running: Vec<Running>,
    pub(crate) chunk: u32,
    pub(crate) two_steps: bool,
    shelf: Shelf,
    /// Copies in flight to the shelf and back.
    copies: Vec<CopyJob>,
    next: Token,
}

pub(crate) struct Running {
    pub(crate) slot: SlotId,
    pub(crate) drafts: u32,
    /// Tokens behind which it is limited to so many more.
    prompt: u32,
    output: u32,
    /// Tokens that are computed without drafts.
    prompt_end: u32,
    /// Forwards whose results are not known.
    pub(crate) out: u32,
    /// Forwards whose results will come and are of no use any more.
    late: u32,
    pub(crate) place: Place,
    /// Whether the scheduler has admitted it: others wait.
    pub(crate) admitted: bool,
    /// What the cache once said of its prompt.
    walk: Option<PrefixWalk>,
}

/// Where the KV of a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Here,
    Leaving(CopyId),
    Away,
    Returning(CopyId),
}

impl Running {
    /// Most tokens that it will have.
    fn limit(&self) -> u32 {
        (self.prompt + self.output).min(LONGEST)
    }
}

impl Scene {
    pub(crate) fn new(seed: u64, shared: bool, pages: u32) -> Scene {
        let mut random = Random(seed);
        let kinds = KINDS[random.below(KINDS.len())];
        let reserve = if random.below(3) == 0 { Reserve::Prompt } else { Reserve::Chunk };
        let on_duplicate = if random.below(3) == 0 { OnDuplicate::Private } else { OnDuplicate::Adopt };
        let shared = shared && kinds.len() > 1;
        let groups = kinds.iter().enumerate();
        let groups =
            groups.map(|(index, &kind)| Group { kind, pages: if shared { 1 + index as u32 } else { pages } });
        let config = LedgerConfig {
            groups: groups.collect(),
            huge_pages: shared.then_some(pages),
            reserve,
            on_duplicate,
            max_seq_len: Some(LONGEST),
            ..LedgerConfig::new(PAGE, pages)
        };
        let chunk = [1, 3, 4, 8, 11, 200][random.below(6)];
        let two_steps = random.below(2) == 0;
        Scene {
            ledger: Ledger::new(config),
            random,
            running: Vec::new(),
            chunk,
            two_steps,
            shelf: Shelf::new(PLENTY),
            copies: Vec::new(),
            next: 1000,
        }
    }

    fn has_states(&self) -> bool {
        self.ledger.config().groups.iter().any(|group| group.kind.is_recurrent())
    }

    /// Claims a request, most of which share a prefix; some of them are one token longer than a block.
    pub(crate) fn arrive(&mut self) {
        let has_states = self.has_states();
        let random = &mut self.random;
        let shared = random.below(34) as Token;
        let own = 100 + 10 * random.below(4) as Token;
        let tokens: Vec<Token> = (0..shared).chain(own..=own + random.below(9) as Token).collect();
        let drafts = [0, 0, 0, 1, 3][random.below(5)];
        let drafts = if has_states { 0 } else { drafts };
        let output = 1 + random.below(30) as u32;
        let new = NewSequence { max_new_tokens: Some(output), ..drafting(&tokens, drafts) };
        let slot = claim(&mut self.ledger, new);
        let prompt = tokens.len() as u32;
        self.running.push(Running {
            slot,
            drafts,
            prompt,
            output,
            prompt_end: prompt,
            out: 0,
            late: 0,
            place: Place::Here,
            admitted: false,
            walk: None,
        });
    }

    pub(crate) fn fork(&mut self) {
        let here: Vec<usize> = self.all().into_iter().filter(|&index| self.is_here(index)).collect();
        if here.is_empty() {
            return;
        }
        let parent = &self.running[here[self.random.below(here.len())]];
        let slot = self.ledger.fork(parent.slot).expect("it can be forked");
        let at = self.ledger.position(slot).expect("it is claimed");
        let prompt_end = if at.processed == 0 { at.known } else { parent.prompt_end };
        self.running.push(Running {
            slot,
            prompt_end,
            out: 0,
            late: 0,
            place: Place::Here,
            admitted: false,
            walk: None,
            ..*parent
        });
        self.give_a_token(self.running.len() - 1);
    }

    /// Where all tokens have KV, the next one is needed to go on: the first that is not of a forward that was
    /// dropped.
    fn give_a_token(&mut self, index: usize) {
        let one = &self.running[index];
        let lacks_one = |ledger: &Ledger| {
            let at = ledger.position(one.slot).expect("it is claimed");
            at.processed == at.known && at.known < one.limit()
        };
        while lacks_one(&self.ledger) {
            self.ledger.update(one.slot, self.next).expect("it has room");
            self.next += 1;
        }
    }

    /// The request gives its pages up, in the middle of a forward perhaps.
    pub(crate) fn preempt(&mut self, index: usize) {
        let one = &mut self.running[index];
        self.ledger.preempt(&[one.slot]).expect("it is claimed");
        self.ledger.free_units(&mut self.shelf);
        one.late += std::mem::take(&mut one.out);
        one.prompt_end = self.ledger.position(one.slot).expect("it is claimed").known;
        one.place = Place::Here;
        one.admitted = false;
    }

    /// Its last tokens are dropped, as in a session that somebody edits.
    pub(crate) fn truncate(&mut self, index: usize) {
        let one = &mut self.running[index];
        let known = self.ledger.position(one.slot).expect("it is claimed").known;
        let len = 1 + self.random.below(known as usize) as u32;
        if self.ledger.truncate(one.slot, len).is_err() {
            return; // it is suspended
        }
        let at = self.ledger.position(one.slot).expect("it is claimed");
        if at.active == 0 {
            one.late += std::mem::take(&mut one.out);
        }
        one.prompt = one.prompt.min(len);
        one.prompt_end = if at.processed == 0 { len } else { one.prompt_end.min(len) };
        self.give_a_token(index);
    }

    /// Its KV goes to the shelf, if it has any and no forward is out.
    pub(crate) fn suspend(&mut self, index: usize) {
        let one = &mut self.running[index];
        let Ok(begun) = self.ledger.suspend(&mut self.shelf, &[one.slot]) else { return };
        let job = begun.into_iter().next().expect("one copy").job;
        one.place = Place::Leaving(job.id);
        one.admitted = false;
        self.copies.push(job);
    }

    /// Its KV comes back from the shelf, for which there is room.
    pub(crate) fn resume(&mut self, index: usize) -> Result<(), LedgerError> {
        let one = &mut self.running[index];
        let begun = self.ledger.resume(&mut self.shelf, &[one.slot])?;
        let job = begun.into_iter().next().expect("one copy").job;
        one.place = Place::Returning(job.id);
        self.copies.push(job);
        Ok(())
    }

    /// A copy ends; few fail.
    pub(crate) fn end_a_copy(&mut self) {
        if self.copies.is_empty() {
            return;
        }
        let copy = self.copies.swap_remove(self.random.below(self.copies.len()));
        let end = if self.random.below(6) == 0 { CopyEnd::Failed } else { CopyEnd::Done };
        self.shelf.end(&copy, end);
        self.ledger.end_copies(&[(copy.id.0, end)]).expect("it is in flight");
        self.ledger.free_units(&mut self.shelf);
        for one in &mut self.running {
            let leaves = one.place == Place::Leaving(copy.id);
            if !leaves && one.place != Place::Returning(copy.id) {
                continue;
            }
            one.place = if leaves && end == CopyEnd::Done { Place::Away } else { Place::Here };
            if end != CopyEnd::Done {
                one.prompt_end = self.ledger.position(one.slot).expect("it is claimed").known;
            }
        }
    }

    pub(crate) fn end_all_copies(&mut self) {
        while !self.copies.is_empty() {
            self.end_a_copy();
        }
    }

    pub(crate) fn all(&self) -> Vec<usize> {
        (0..self.running.len()).collect()
    }

    pub(crate) fn admitted(&self) -> Vec<usize> {
        self.all().into_iter().filter(|&index| self.running[index].admitted).collect()
    }

    pub(crate) fn is_here(&self, index: usize) -> bool {
        self.running[index].place == Place::Here
    }

    /// Whether all its tokens have KV or are on the way.
    fn is_planned(&mut self, index: usize) -> bool {
        let slot = self.running[index].slot;
        self.ledger.reuse_adjusted_compute(&[slot], &[]).expect("it is claimed") == [0]
    }

    pub(crate) fn computes_prompt(&self, index: usize) -> bool {
        let at = self.ledger.position(self.running[index].slot).expect("it is claimed");
        at.processed + at.active < self.running[index].prompt_end
    }

    pub(crate) fn is_done(&mut self, index: usize) -> bool {
        self.is_here(index) && self.running[index].out == 0 && self.is_planned(index)
    }

    /// The requests that a forward may be planned for.
    pub(crate) fn plannable(&mut self) -> Vec<usize> {
        let most = 1 + u32::from(self.two_steps);
        let all = self.all().into_iter();
        all.filter(|&index| self.is_here(index) && self.running[index].out < most && !self.is_planned(index))
            .collect()
    }

    fn slots(&self, batch: &[usize]) -> Vec<SlotId> {
        batch.iter().map(|&index| self.running[index].slot).collect()
    }

    /// Plans a forward for each of these requests, of at most as many tokens as there may be.
    pub(crate) fn alloc(&mut self, batch: &[usize], exactly: bool) -> Result<(), LedgerError> {
        let slots = self.slots(batch);
        let chunk = if exactly { self.chunk } else { 1 + self.random.below(self.chunk as usize) as u32 };
        self.ledger.alloc(&slots, &[chunk])?;
        for &index in batch {
            self.running[index].out += 1;
        }
        Ok(())
    }

    /// The forward that was planned begins: pages are copied.
    pub(crate) fn launch(&mut self) {
        self.ledger.close_step();
        let groups: Vec<GroupId> = self.ledger.pools().groups().collect();
        for group in groups {
            self.ledger.take_page_copies(group);
            self.ledger.take_page_fills(group);
        }
    }

    /// Delivers the oldest forward of a request, with as many tokens as may come and the request may have.
    pub(crate) fn deliver(&mut self, index: usize) {
        let one = &mut self.running[index];
        if let Some(late) = one.late.checked_sub(1) {
            one.late = late;
            return self.ledger.step(&[one.slot], &[], Some(&[0])).expect("it is dropped");
        }
        one.out -= 1;
        let at = self.ledger.position(one.slot).expect("it is claimed");
        let right =
            if at.processed < one.prompt_end { 0 } else { self.random.below(one.drafts as usize + 1) as u32 };
        let most = (one.limit() - at.known).min(1 + right);
        for count in (0..=most).rev() {
            let tokens: Vec<Token> = (self.next..).take(count as usize).collect();
            if self.ledger.step(&[one.slot], &tokens, Some(&[count])).is_ok() {
                self.next += count as Token;
                return;
            }
        }
        panic!("a result without a token can be delivered");
    }

    pub(crate) fn end(&mut self, index: usize) {
        let slot = self.running.remove(index).slot;
        self.ledger.release(&[slot]).expect("it is claimed");
        self.ledger.free_units(&mut self.shelf);
    }

    /// Something that happens in a life.
    pub(crate) fn act(&mut self) -> Result<(), LedgerError> {
        let index = self.random.below(self.running.len().max(1));
        match self.random.below(14) {
            0 => self.arrive(),
            1 => self.fork(),
            2..6 => {
                let mut batch = self.plannable();
                batch.retain(|_| self.random.below(3) > 0);
                self.alloc(&batch, false)?;
                self.launch();
            }
            _ if self.running.is_empty() => self.arrive(),
            6..9 if self.running[index].out > 0 => self.deliver(index),
            9 if self.random.below(3) == 0 => self.end(index),
            10 if self.random.below(2) == 0 => self.preempt(index),
            11 if self.random.below(2) == 0 => self.truncate(index),
            12 => match self.running[index].place {
                Place::Here => self.suspend(index),
                Place::Away => self.resume(index)?,
                Place::Leaving(_) | Place::Returning(_) => self.end_a_copy(),
            },
            13 if self.random.below(8) == 0 => self.ledger.reset_prefix_cache(),
            _ => {}
        }
        Ok(())
    }

    /// Pages that are held in each group.
    pub(crate) fn held(&self) -> Vec<u32> {
        let pools = self.ledger.pools();
        let held = |group: GroupId| {
            let pool = &pools[group];
            let pages = (1..=pool.used()).map(PageId);
            pages
                .filter(|&page| matches!(pool.state(page), PageState::Referenced | PageState::InFlight))
                .count() as u32
        };
        pools.groups().map(held).collect()
    }

    /// What the next forwards take.
    pub(crate) fn needed(&mut self, batch: &[usize]) -> Vec<u32> {
        self.forecast(batch, false, Ledger::needed_blocks_one_step)
    }

    /// What all forwards to come take.
    pub(crate) fn remaining(&mut self, batch: &[usize]) -> Vec<u32> {
        self.forecast(batch, self.two_steps, Ledger::remaining_blocks_to_completion)
    }

    /// The sums over the requests, for each group. What was once seen of prompts changes nothing.
    fn forecast(
        &mut self,
        batch: &[usize],
        two_steps: bool,
        ask: impl Fn(&mut Ledger, &[SlotId], Outlook<'_>) -> Result<Vec<u32>, LedgerError>,
    ) -> Vec<u32> {
        let (slots, chunk) = (self.slots(batch), [self.chunk]);
        let outlook = Outlook { num_tokens: &chunk, two_steps, walks: &[] };
        let needs = ask(&mut self.ledger, &slots, outlook).expect("they are claimed");
        let walks: Vec<_> = batch.iter().map(|&index| self.running[index].walk.as_ref()).collect();
        let outlook = Outlook { walks: &walks, ..outlook };
        assert_eq!(ask(&mut self.ledger, &slots, outlook).expect("they are claimed"), needs);
        for &index in batch {
            if self.random.below(2) == 0 {
                continue;
            }
            // Some look for what another request has.
            let seen = self.running[self.random.below(self.running.len())].slot;
            let slot = if self.random.below(4) == 0 { seen } else { self.running[index].slot };
            let tokens = self.ledger.tokens(slot).expect("it is claimed").to_vec();
            self.running[index].walk = Some(self.ledger.probe(&query(prompt(&tokens))).walk);
        }
        let groups = self.ledger.config().groups.len();
        (0..groups).map(|group| needs.iter().skip(group).step_by(groups).sum()).collect()
    }
}
