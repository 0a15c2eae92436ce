//! A random engine: it makes legal calls in any order beside a device and a tier that run late, and checks the
//! books and the bytes after each.

use crate::broken::Broken;
use crate::kv::{keys, kv_of, request, root};
use crate::live::{Live, Loading};
use crate::random::Random;
use crate::world::World;
use block_hash::Token;
use block_pool::{EvictionPolicy, Priority, Step};
use cache_manager::{
    BegunLoad, BlockRetention, CopyJob, Ledger, LedgerConfig, LedgerError, OnDuplicate, Reserve, SlotId,
    TokenRange, WritePolicy,
};
use std::collections::VecDeque;
use std::sync::Arc;

pub(crate) const MOST_LIVE: usize = 5;
const CALLS: usize = 200;
/// Calls shown of a run that fails.
const SHOWN: usize = 30;

type Call<W> = fn(&mut Engine<W>) -> Result<(), String>;

pub(crate) struct Engine<W> {
    pub(crate) random: Random,
    pub(crate) ledger: Ledger,
    pub(crate) world: W,
    pub(crate) broken: Option<Broken>,
    pub(crate) live: Vec<Live>,
    /// Results due for requests that were released.
    pub(crate) orphans: Vec<(SlotId, VecDeque<Vec<Token>>)>,
    pub(crate) pins: Vec<u64>,
    /// Resets: what KV is computed with changes with each.
    pub(crate) weights: u32,
    /// Copies of what requests had that let go of it.
    pub(crate) leaving: Vec<CopyJob>,
    /// Blocks loaded ahead of their request.
    pub(crate) prefetched: u64,
    /// Seconds.
    clock: f64,
    /// Whether prompt chunks are delivered when they are launched, not when they have run.
    eager: bool,
    /// Calls made; the newest.
    made: usize,
    calls: VecDeque<String>,
}

impl<W: World> Engine<W> {
    /// An engine whose choices `seed` draws, in the world that `make` makes for it.
    pub(crate) fn new(
        seed: u64,
        broken: Option<Broken>,
        make: impl FnOnce(&LedgerConfig, &mut Random) -> W,
    ) -> Engine<W> {
        let mut random = Random(seed);
        let policies = [EvictionPolicy::PriorityLru, EvictionPolicy::PrioritySlru];
        let write_policy = write_policy(&mut random);
        // Few of the pages that may be evicted are copied ahead of that.
        let least = if matches!(write_policy, WritePolicy::OnEvict { .. }) { 20 } else { 8 };
        let config = LedgerConfig {
            on_duplicate: if random.one_in(2) { OnDuplicate::Private } else { OnDuplicate::Adopt },
            reserve: if random.one_in(4) { Reserve::Prompt } else { Reserve::Chunk },
            policy: policies[random.below(2)],
            write_policy,
            ..LedgerConfig::new(2 + random.below(3) as u32, least + random.below(17) as u32)
        };
        Engine {
            world: make(&config, &mut random),
            ledger: Ledger::new(config),
            broken,
            live: Vec::new(),
            orphans: Vec::new(),
            pins: Vec::new(),
            weights: 0,
            leaving: Vec::new(),
            prefetched: 0,
            clock: 0.0,
            eager: random.one_in(2),
            made: 0,
            calls: VecDeque::new(),
            random,
        }
    }

    /// Makes random calls, then lets everything end. What went wrong is told with the calls before it.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        let shuts_down = if self.random.one_in(8) { self.random.below(CALLS) } else { CALLS };
        let calls = (0..CALLS).try_for_each(|number| {
            if number == shuts_down {
                self.note(|| "shut down".into());
                self.world.shut_down();
            }
            self.checked(Self::call)
        });
        calls.and_then(|()| self.wind_up()).map_err(|fault| self.explain(&fault))
    }

    /// A fault, with the calls before it.
    pub(crate) fn explain(&self, fault: &str) -> String {
        let calls: Vec<&str> = self.calls.iter().map(String::as_str).collect();
        format!("{fault}\nthe last calls, each after its time:\n  {}", calls.join("\n  "))
    }

    fn checked(&mut self, call: Call<W>) -> Result<(), String> {
        let before = self.made;
        call(self)?;
        if self.made == before { Ok(()) } else { self.check() }
    }

    fn call(&mut self) -> Result<(), String> {
        self.world.pass(self.random.below(6) as u64)?;
        match self.random.below(65) {
            0..=7 => self.claim(),
            8..=10 => self.alloc(),
            11..=21 => self.serve(),
            22..=24 => self.launch(),
            25 | 26 => self.pass_time(),
            27..=31 => self.deliver(),
            32..=35 => self.settle(),
            36 => self.offload(),
            37..=39 => self.forget(),
            40 => self.release(),
            41 | 42 => self.append(),
            43 => self.truncate(),
            44 => self.preempt(),
            45..=48 => self.fork(),
            49 => {
                self.cancel();
                Ok(())
            }
            50 => self.commit(),
            51 => self.pin(),
            52 => self.begin_step(),
            53..=55 => self.suspend(),
            56..=58 => self.resume(),
            59..=63 => self.prefetch(),
            _ => {
                if self.random.one_in(10) {
                    self.reset();
                }
                Ok(())
            }
        }
    }

    fn claim(&mut self) -> Result<(), String> {
        if self.live.len() == MOST_LIVE {
            return Ok(());
        }
        let (tokens, salt) = self.prompt();
        let page_size = self.ledger.config().page_size;
        let mut new = request(&tokens, salt, page_size);
        new.no_read = self.random.one_in(20);
        new.no_store = self.random.one_in(20);
        new.retention = self.retention(tokens.len());
        new.drafts = if self.random.one_in(6) { 1 + self.random.below(2) as u32 } else { 0 };
        let drafts = new.drafts as usize;
        let slot = self.ledger.claim(new).map_err(|refused| format!("claim: {}", refused.error))?;
        self.note(|| format!("claim {tokens:?} {salt:?} with {drafts} drafts: slot {}", slot.0));
        self.live.push(Live { drafts, ..Live::new(slot, salt, tokens, self.weights) });
        self.learn(self.live.len() - 1);
        Ok(())
    }

    /// Few prompts, so that most share a prefix with another.
    pub(crate) fn prompt(&mut self) -> (Vec<Token>, &'static str) {
        let (family, own) = (self.random.below(2), self.random.below(2));
        let most = if self.random.one_in(6) { 12 } else { 5 };
        let shared = self.random.below(most * self.ledger.config().page_size as usize);
        let tokens = (0..shared)
            .map(|i| (family * 100 + i) as Token)
            .chain((0..=self.random.below(4)).map(|i| (200 + own * 10 + i) as Token))
            .collect();
        (tokens, if self.random.one_in(6) { "other" } else { "" })
    }

    /// Some requests say how long their blocks are kept.
    fn retention(&mut self, tokens: usize) -> Option<Arc<BlockRetention>> {
        if !self.random.one_in(4) {
            return None;
        }
        let [prompt, rest] = [(); 2].map(|()| priority(&mut self.random));
        let range = TokenRange { start: 0, end: None, retention: prompt.into() };
        Some(Arc::new(BlockRetention::new(vec![range], rest.into(), tokens as u32).expect("it is one range")))
    }

    fn alloc(&mut self) -> Result<(), String> {
        let may_refuse = self.random.one_in(8);
        let plannable =
            |live: &&Live| may_refuse || (!live.planned && live.out.len() < 2 && live.is_present());
        let mut batch: Vec<SlotId> = self.live.iter().filter(plannable).map(|live| live.slot).collect();
        self.random.shuffle(&mut batch);
        batch.truncate(1 + self.random.below(3));
        if batch.is_empty() {
            return Ok(());
        }
        let bounds: Vec<u32> = batch.iter().map(|_| 1 + self.random.below(12) as u32).collect();
        let bounds = if self.random.one_in(3) { bounds } else { Vec::new() };
        let before = self.ledger.fingerprint();
        let outcome = self.ledger.alloc_from(&mut self.world, &batch, &bounds, false);
        self.note(|| {
            let begun = |begun: &Vec<BegunLoad>| format!("{:?}", loads_of(begun));
            let outcome = outcome.as_ref().map_or_else(ToString::to_string, begun);
            format!(
                "alloc {:?} up to {bounds:?}: {outcome}",
                batch.iter().map(|slot| slot.0).collect::<Vec<_>>()
            )
        });
        let begun = match outcome {
            Ok(begun) => begun,
            Err(error) => {
                if self.ledger.fingerprint() != before {
                    return Err(format!("a refused alloc changed the ledger: {error}"));
                }
                return self.refused(&error);
            }
        };
        for live in self.live.iter_mut().filter(|live| batch.contains(&live.slot)) {
            let load = begun.iter().find(|begun| begun.slot == live.slot);
            live.planned = load.is_none();
            live.loading = load.map(|BegunLoad { copy, completion, .. }| Loading {
                copy: copy.id.0,
                pages: copy.pages.clone(),
                completion: completion.clone(),
            });
            if live.load_failed && load.is_some() {
                return Err("a request loads again after a load of it failed".into());
            }
        }
        Ok(())
    }

    fn refused(&mut self, error: &LedgerError) -> Result<(), String> {
        match error {
            LedgerError::NothingToCompute { slot } if self.random.one_in(3) => self.append_to(*slot),
            LedgerError::NothingToCompute { slot } | LedgerError::RequestTooLarge { slot, .. } => {
                self.release_slot(*slot)
            }
            LedgerError::InsufficientBlocks { .. } if self.random.one_in(4) => self.preempt(),
            LedgerError::InsufficientBlocks { .. } if self.random.one_in(2) => self.release(),
            LedgerError::InsufficientBlocks { .. }
            | LedgerError::AlreadyPlanned { .. }
            | LedgerError::Loading { .. }
            | LedgerError::Leaving { .. }
            | LedgerError::Suspended { .. }
            | LedgerError::TwoStepsOut { .. } => Ok(()),
            error => Err(format!("alloc: {error}")),
        }
    }

    /// An iteration of an engine that waits for its forward.
    fn serve(&mut self) -> Result<(), String> {
        let calls: [Call<W>; _] = [Self::settle, Self::alloc, Self::launch, Self::pass_time, Self::deliver];
        calls.into_iter().try_for_each(|call| self.checked(call))
    }

    fn pass_time(&mut self) -> Result<(), String> {
        self.world.pass(1 + self.random.below(25) as u64)
    }

    /// Delivers the oldest result of some requests; of a released one, now and then.
    fn deliver(&mut self) -> Result<(), String> {
        let (mut batch, mut results) = (Vec::new(), Vec::new());
        if !self.orphans.is_empty() && self.random.one_in(2) {
            let index = self.random.below(self.orphans.len());
            let (slot, due) = &mut self.orphans[index];
            batch.push(*slot);
            results.push(due.pop_front().unwrap_or_default());
            if due.is_empty() {
                self.orphans.swap_remove(index);
            }
        } else {
            let device = self.world.device();
            for live in self.live.iter_mut().filter(|_| !self.random.one_in(6)) {
                let due = |step: u32| device.has_run(Step(step));
                if let Some(tokens) = live.late.pop_front() {
                    batch.push(live.slot);
                    results.push(tokens);
                } else if let Some(out) =
                    live.out.pop_front_if(|out| due(out.step) || (self.eager && out.sampled.is_empty()))
                {
                    live.known += out.sampled.len();
                    batch.push(live.slot);
                    results.push(out.sampled);
                }
            }
        }
        if batch.is_empty() {
            return Ok(());
        }
        let tokens: Vec<Token> = results.iter().flatten().copied().collect();
        let counts: Vec<u32> = results.iter().map(|tokens| tokens.len() as u32).collect();
        self.note(|| format!("step {batch:?}: {results:?}"));
        self.ledger.step(&batch, &tokens, Some(&counts)).map_err(|error| format!("step: {error}"))?;
        (0..self.live.len()).for_each(|index| self.learn(index));
        if self.random.one_in(4) { Ok(()) } else { self.offload() }
    }

    pub(crate) fn offload(&mut self) -> Result<(), String> {
        self.note(|| "offload".into());
        self.ledger.offload_to(&mut self.world).map_err(|error| format!("offload: {error}"))
    }

    fn append(&mut self) -> Result<(), String> {
        self.pick().map_or(Ok(()), |index| self.append_to(self.live[index].slot))
    }

    /// The next turn of a request, if it waits for nothing.
    fn append_to(&mut self, slot: SlotId) -> Result<(), String> {
        let index = self.find(slot);
        let live = &mut self.live[index];
        if live.planned || !live.out.is_empty() || !live.late.is_empty() {
            return Ok(());
        }
        for _ in 0..=self.random.below(5) {
            let token = (200 + self.random.below(3)) as Token;
            self.ledger.update(slot, token).map_err(|error| format!("update: {error}"))?;
            live.push(token);
            live.known += 1;
        }
        self.note(|| format!("append to slot {}", slot.0));
        self.learn(index);
        Ok(())
    }

    fn fork(&mut self) -> Result<(), String> {
        let Some(index) = self.pick_present().filter(|_| self.live.len() < MOST_LIVE) else { return Ok(()) };
        let parent = &self.live[index];
        let slot = self.ledger.fork(parent.slot).map_err(|error| format!("fork: {error}"))?;
        let child = parent.fork(slot);
        self.note(|| format!("fork request {index}: slot {}", slot.0));
        self.live.push(child);
        Ok(())
    }

    /// Asks that a copy which a request waits for be given up: it ends when the mover says so.
    fn cancel(&mut self) {
        let mut copies = self.live.iter().filter_map(Live::awaited);
        let cancelled = copies.next().map(|(copy, completion)| (copy, completion.cancel()));
        if let Some((copy, _)) = cancelled {
            self.note(|| format!("cancel copy {copy}"));
        }
    }

    fn commit(&mut self) -> Result<(), String> {
        let Some(index) = self.pick() else { return Ok(()) };
        self.note(|| format!("commit request {index}"));
        self.ledger.commit(self.live[index].slot).map_err(|error| format!("commit: {error}"))?;
        self.offload()
    }

    fn begin_step(&mut self) -> Result<(), String> {
        self.launch()?;
        self.clock += 1.0;
        self.note(|| "begin_step".into());
        self.ledger.begin_step(Some(self.clock), &[]).map_err(|error| format!("begin_step: {error}"))?;
        Ok(())
    }

    /// What the full blocks of a request must hold.
    pub(crate) fn learn(&mut self, index: usize) {
        let page_size = self.ledger.config().page_size;
        let Live { log, known, salt, learned, .. } = &mut self.live[index];
        if std::mem::replace(learned, *known / page_size as usize) >= *known / page_size as usize {
            return;
        }
        let kv = kv_of(root(salt, self.weights), &log[..*known]);
        let keys = keys(&log[..*known], salt, page_size).into_iter();
        keys.zip(kv.chunks_exact(page_size as usize)).for_each(|(key, block)| self.world.learn(key, block));
    }

    pub(crate) fn note(&mut self, call: impl FnOnce() -> String) {
        self.made += 1;
        self.calls.push_back(format!("{}: {}", self.world.now(), call()));
        if self.calls.len() > SHOWN {
            self.calls.pop_front();
        }
    }

    pub(crate) fn find(&self, slot: SlotId) -> usize {
        self.live.iter().position(|live| live.slot == slot).expect("it is claimed")
    }

    /// A request that is not suspended.
    pub(crate) fn pick_present(&mut self) -> Option<usize> {
        self.pick().filter(|&index| self.live[index].aside.is_none())
    }

    pub(crate) fn pick(&mut self) -> Option<usize> {
        (!self.live.is_empty()).then(|| self.random.below(self.live.len()))
    }
}

fn write_policy(random: &mut Random) -> WritePolicy {
    match random.below(4) {
        0 | 1 => WritePolicy::WriteThrough,
        2 => WritePolicy::Selective {
            min_hits: 1 + random.below(2) as u32,
            min_priority: random.one_in(2).then(|| priority(random)),
        },
        _ => WritePolicy::OnEvict {
            min_priority: if random.one_in(3) { priority(random) } else { Priority::LOWEST },
        },
    }
}

/// Around the one that most blocks have.
fn priority(random: &mut Random) -> Priority {
    Priority::new(34 + random.below(3) as i64).expect("it is in range")
}

/// Slot, copy and pages of loads.
fn loads_of(begun: &[BegunLoad]) -> Vec<(u32, u64, Vec<u32>)> {
    let pages = |begun: &BegunLoad| begun.copy.pages.iter().map(|page| page.0).collect();
    begun.iter().map(|begun| (begun.slot.0, begun.copy.id.0, pages(begun))).collect()
}
