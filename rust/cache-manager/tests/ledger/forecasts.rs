//! What is forecast for schedulers, against what `alloc` takes.

use crate::common::{PAGE, claim, config, drafting, prompt};
use crate::driver::Random;
use block_hash::Token;
use block_pool::{GroupId, PageId, PageState};
use cache_manager::{
    Group, GroupKind, Ledger, LedgerConfig, LedgerError, NewSequence, OnDuplicate, Outlook, Reserve, SlotId,
};

/// More than any of these tests holds.
const PLENTY: u32 = 4000;

const KINDS: [&[GroupKind]; 8] = [
    &[GroupKind::Full],
    &[GroupKind::Window { window: 9, sinks: 0 }],
    &[GroupKind::Window { window: 6, sinks: 5 }],
    &[GroupKind::Chunked { chunk: 8 }],
    &[GroupKind::Chunked { chunk: 6 }],
    &[GroupKind::Full, GroupKind::Window { window: 7, sinks: 0 }],
    &[GroupKind::Window { window: 1, sinks: 0 }, GroupKind::Full],
    &[GroupKind::Full, GroupKind::Window { window: 13, sinks: 2 }, GroupKind::Chunked { chunk: 16 }],
];

/// A few requests in some state, and the way in which they are served. Equal for equal seeds.
struct Scene {
    random: Random,
    ledger: Ledger,
    running: Vec<Running>,
    chunk: u32,
    two_steps: bool,
    next: Token,
}

struct Running {
    slot: SlotId,
    drafts: u32,
    prompt: u32,
    /// Most tokens that it will have.
    limit: u32,
    /// Forwards whose results are not known.
    out: u32,
}

impl Scene {
    fn new(seed: u64, shared: bool, pages: u32) -> Scene {
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
            max_seq_len: Some(90),
            ..LedgerConfig::new(PAGE, pages)
        };
        let chunk = [1, 3, 4, 8, 11, 200][random.below(6)];
        let two_steps = random.below(2) == 0;
        Scene { ledger: Ledger::new(config), random, running: Vec::new(), chunk, two_steps, next: 1000 }
    }

    /// Claims a request, most of which share a prefix; some of them are one token longer than a block.
    fn arrive(&mut self) {
        let random = &mut self.random;
        let shared = random.below(34) as Token;
        let own = 100 + 10 * random.below(4) as Token;
        let tokens: Vec<Token> = (0..shared).chain(own..=own + random.below(9) as Token).collect();
        let drafts = [0, 0, 0, 1, 3][random.below(5)];
        let output = 1 + random.below(30) as u32;
        let new = NewSequence { max_new_tokens: Some(output), ..drafting(&tokens, drafts) };
        let slot = claim(&mut self.ledger, new);
        let prompt = tokens.len() as u32;
        self.running.push(Running {
            slot,
            drafts,
            prompt,
            limit: (tokens.len() as u32 + output).min(90),
            out: 0,
        });
    }

    fn fork(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let parent = self.random.below(self.running.len());
        let Running { slot, drafts, prompt, limit, .. } = self.running[parent];
        let slot = self.ledger.fork(slot).expect("it can be forked");
        self.running.push(Running { slot, drafts, prompt, limit, out: 0 });
        let at = self.ledger.position(slot).expect("it is claimed");
        if at.processed == at.known && at.known < limit {
            self.ledger.update(slot, self.next).expect("it has room");
            self.next += 1;
        }
    }

    /// Whether all its tokens have KV or are on the way.
    fn is_planned(&mut self, index: usize) -> bool {
        let slot = self.running[index].slot;
        self.ledger.reuse_adjusted_compute(&[slot], &[]).expect("it is claimed") == [0]
    }

    fn computes_prompt(&self, index: usize) -> bool {
        let at = self.ledger.position(self.running[index].slot).expect("it is claimed");
        at.processed + at.active < self.running[index].prompt
    }

    fn is_done(&mut self, index: usize) -> bool {
        self.running[index].out == 0 && self.is_planned(index)
    }

    fn outlook<'a>(&self, chunk: &'a u32) -> Outlook<'a> {
        Outlook { num_tokens: std::slice::from_ref(chunk), two_steps: self.two_steps }
    }

    /// The requests that a forward may be planned for.
    fn plannable(&mut self) -> Vec<usize> {
        let most = 1 + u32::from(self.two_steps);
        (0..self.running.len())
            .filter(|&index| self.running[index].out < most && !self.is_planned(index))
            .collect()
    }

    /// Plans a forward for each of these requests, of at most as many tokens as there may be.
    fn alloc(&mut self, batch: &[usize], exactly: bool) -> Result<(), LedgerError> {
        let slots: Vec<SlotId> = batch.iter().map(|&index| self.running[index].slot).collect();
        let chunk = if exactly { self.chunk } else { 1 + self.random.below(self.chunk as usize) as u32 };
        self.ledger.alloc(&slots, &[chunk])?;
        for &index in batch {
            self.running[index].out += 1;
        }
        Ok(())
    }

    /// The forward that was planned begins: pages are copied.
    fn launch(&mut self) {
        self.ledger.close_step();
        let groups: Vec<GroupId> = self.ledger.pools().groups().collect();
        for group in groups {
            self.ledger.take_page_copies(group);
        }
    }

    /// Delivers the oldest forward of a request, with as many tokens as may come and the request may have.
    fn deliver(&mut self, index: usize) {
        let Running { slot, drafts, prompt, limit, out } = &mut self.running[index];
        *out -= 1;
        let at = self.ledger.position(*slot).expect("it is claimed");
        let right = if at.processed < *prompt { 0 } else { self.random.below(*drafts as usize + 1) as u32 };
        let most = (*limit - at.known).min(1 + right);
        for count in (0..=most).rev() {
            let tokens: Vec<Token> = (self.next..).take(count as usize).collect();
            if self.ledger.step(&[*slot], &tokens, Some(&[count])).is_ok() {
                self.next += count as Token;
                return;
            }
        }
        panic!("a result without a token can be delivered");
    }

    fn end(&mut self, index: usize) {
        let slot = self.running.remove(index).slot;
        self.ledger.release(&[slot]).expect("it is claimed");
    }

    /// Something that happens in a life.
    fn act(&mut self) -> Result<(), LedgerError> {
        let index = self.random.below(self.running.len().max(1));
        match self.random.below(10) {
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
            _ => {}
        }
        Ok(())
    }

    /// Pages that are held in each group.
    fn held(&self) -> Vec<u32> {
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

    fn needed(&mut self, batch: &[usize]) -> Vec<u32> {
        let slots: Vec<SlotId> = batch.iter().map(|&index| self.running[index].slot).collect();
        let chunk = self.chunk;
        let outlook = Outlook { two_steps: false, ..self.outlook(&chunk) };
        let needs = self.ledger.needed_blocks_one_step(&slots, outlook).expect("they are claimed");
        self.sums(&needs)
    }

    fn remaining(&mut self, batch: &[usize]) -> Vec<u32> {
        let slots: Vec<SlotId> = batch.iter().map(|&index| self.running[index].slot).collect();
        let chunk = self.chunk;
        let outlook = self.outlook(&chunk);
        let needs = self.ledger.remaining_blocks_to_completion(&slots, outlook).expect("they are claimed");
        self.sums(&needs)
    }

    /// Over the requests, for each group.
    fn sums(&self, needs: &[u32]) -> Vec<u32> {
        let groups = self.ledger.config().groups.len();
        (0..groups).map(|group| needs.iter().skip(group).step_by(groups).sum()).collect()
    }
}

#[test]
fn what_one_step_needs_is_what_alloc_takes() {
    let mut taken = 0;
    for seed in 0..3000 {
        let mut scene = Scene::new(seed, seed % 3 == 0, PLENTY);
        for _ in 0..scene.random.below(40) {
            scene.act().expect("there is plenty of room");
        }
        let mut batch = scene.plannable();
        if seed % 2 == 0 {
            batch.truncate(1);
        }
        let before = scene.ledger.fingerprint();
        let (needs, held) = (scene.needed(&batch), scene.held());
        assert_eq!(scene.ledger.fingerprint(), before, "seed {seed}");
        scene.alloc(&batch, true).expect("there is plenty of room");
        for (group, (&need, (before, after))) in needs.iter().zip(held.iter().zip(scene.held())).enumerate() {
            let took = after.saturating_sub(*before);
            taken += took;
            // A hit may give back more than it takes, which is told to nobody.
            let exactly = batch.len() == 1 || need <= took;
            assert!(
                need == took || !exactly && need > took,
                "seed {seed}, group {group}: {need} said, {took} taken"
            );
        }
        scene.ledger.verify().unwrap();
    }
    assert!(taken > 5000, "{taken} pages taken: more must be tried");
}

#[test]
fn a_request_alone_takes_what_remained_and_at_most_a_page_of_a_group_less() {
    for seed in 0..2000 {
        let mut scene = Scene::new(seed, false, PLENTY);
        for _ in 0..scene.random.below(40) {
            scene.act().expect("there is plenty of room");
        }
        for index in 0..scene.running.len() {
            while scene.running[index].out > 0 {
                scene.deliver(index);
            }
        }
        scene.arrive();
        let index = scene.random.below(scene.running.len());
        let (remaining, held) = (scene.remaining(&[index]), scene.held());
        let mut most = vec![0; held.len()];
        while !scene.is_done(index) {
            if scene.plannable().contains(&index) {
                scene.alloc(&[index], true).expect("there is plenty of room");
                scene.launch();
            } else {
                scene.deliver(index);
            }
            for ((most, now), before) in most.iter_mut().zip(scene.held()).zip(&held) {
                *most = (*most).max(now.saturating_sub(*before));
            }
        }
        for (group, (&remaining, &most)) in remaining.iter().zip(&most).enumerate() {
            assert!(most <= remaining, "seed {seed}, group {group}: {remaining} said, {most} taken");
            let kind = scene.ledger.config().groups[group].kind;
            // Where forwards start depends on which drafts are right, and, in a chunk, on how long they are.
            let spare = match kind {
                GroupKind::Chunked { chunk } => 1 + chunk.div_ceil(PAGE),
                _ => 1 + u32::from(scene.running[index].drafts > 0),
            };
            assert!(
                remaining <= most + spare,
                "seed {seed}, group {group} {kind:?}: {remaining} said, {most} taken"
            );
        }
    }
}

#[test]
fn a_scheduler_that_trusts_the_numbers_never_runs_out() {
    let (mut admitted, mut waited) = (0, 0);
    for seed in 0..120 {
        let pages = 30 + (seed % 30) as u32;
        let mut scene = Scene::new(seed, false, pages);
        for _ in 0..80 {
            if scene.random.below(3) == 0 {
                scene.arrive();
                if scene.random.below(3) == 0 {
                    scene.fork_if_planned();
                }
                let all: Vec<usize> = (0..scene.running.len()).collect();
                let remaining = scene.remaining(&all);
                if scene.ledger.can_satisfy(&remaining, false).unwrap() {
                    admitted += 1;
                } else {
                    waited += 1;
                    scene.end(scene.running.len() - 1);
                }
            }
            // What is found is counted on for this batch, and not for a later one.
            let mut batch = scene.plannable();
            batch.retain(|&index| scene.computes_prompt(index) || scene.random.below(4) > 0);
            scene.alloc(&batch, false).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            scene.launch();
            for index in (0..scene.running.len()).rev() {
                if scene.running[index].out > 0 && scene.random.below(3) > 0 {
                    scene.deliver(index);
                }
                if scene.is_done(index) {
                    scene.end(index);
                }
            }
        }
        scene.ledger.verify().unwrap();
    }
    assert!(admitted > 500 && waited > 500, "{admitted} were admitted, {waited} waited: both must be tried");
}

impl Scene {
    /// The newest request is replaced by a fork of another, which is admitted like it.
    fn fork_if_planned(&mut self) {
        if self.running.len() > 1 {
            self.end(self.running.len() - 1);
            self.fork();
        }
    }
}

#[test]
fn a_new_prompt_needs_the_blocks_that_nobody_holds() {
    let mut ledger = Ledger::new(config(20));
    let tokens: Vec<Token> = (0..12).collect();
    let first = claim(&mut ledger, prompt(&tokens));
    assert_eq!(ledger.needed_blocks_one_step(&[first], Outlook::default()).unwrap(), [3]);
    ledger.alloc(&[first], &[]).unwrap();
    ledger.close_step();
    ledger.step(&[first], &[], None).unwrap();
    // Blocks 0 and 1 are stored and held, the last one holds the last token of the prompt.
    let second = claim(&mut ledger, prompt(&tokens));
    assert_eq!(ledger.needed_blocks_one_step(&[second], Outlook::default()).unwrap(), [1]);
    ledger.release(&[first]).unwrap();
    assert_eq!(ledger.needed_blocks_one_step(&[second], Outlook::default()).unwrap(), [3]);
    assert_eq!(ledger.reusable_tokens(&[second]).unwrap(), [8]);
    assert_eq!(ledger.reuse_adjusted_compute(&[second], &[]).unwrap(), [4]);
    assert_eq!(ledger.reuse_adjusted_compute(&[second], &[7]).unwrap(), [7]);
}
