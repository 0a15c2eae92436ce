//! What is forecast for schedulers, against what `alloc` takes.

use crate::common::{PAGE, claim, config, prompt};
use crate::scenes::{PLENTY, Place, Scene};
use block_hash::Token;
use cache_manager::{GroupKind, Ledger, Outlook};

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
            assert!(
                need == took || batch.len() > 1 && need > took,
                "seed {seed}, group {group}: {need} said, {took} taken"
            );
        }
        scene.ledger.verify().unwrap();
    }
    assert!(taken > 5000, "{taken} pages taken: more must be tried");
}

#[test]
fn a_request_alone_takes_what_remained_and_at_most_a_page_of_a_group_less() {
    for seed in 0..1600 {
        let mut scene = Scene::new(seed, false, PLENTY);
        for _ in 0..scene.random.below(40) {
            scene.act().expect("there is plenty of room");
        }
        for index in scene.all() {
            while scene.running[index].out > 0 {
                scene.deliver(index);
            }
        }
        scene.arrive();
        scene.end_all_copies();
        let index = scene.random.below(scene.running.len());
        let (remaining, held) = (scene.remaining(&[index]), scene.held());
        let mut most = vec![0; held.len()];
        while !scene.is_done(index) {
            if scene.running[index].place == Place::Away {
                scene.resume(index).expect("there is plenty of room");
                scene.end_all_copies();
            } else if scene.plannable().contains(&index) {
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
            // Where forwards start depends on which drafts are right, and, in a chunk and at states that are kept, on
            // how long they are.
            let spare = match kind {
                GroupKind::Full => 1,
                GroupKind::Window { .. } => 1 + u32::from(scene.running[index].drafts > 0),
                GroupKind::Chunked { chunk } => 1 + chunk.div_ceil(PAGE),
                GroupKind::Recurrent(_) => 1 + u32::from(scene.two_steps),
                GroupKind::Scratch | GroupKind::Cross => 0,
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
    let (mut admitted, mut waited, mut disturbed) = (0, 0, 0);
    for seed in 0..200 {
        let pages = 30 + (seed % 30) as u32;
        let shared = seed % 2 == 1;
        let mut scene = Scene::new(seed, shared, if shared { pages / 2 } else { pages });
        for _ in 0..80 {
            if scene.random.below(3) == 0 {
                scene.newcomer();
            }
            if !scene.running.is_empty() && scene.random.below(4) == 0 {
                scene.disturb();
                disturbed += 1;
            }
            match scene.admit() {
                Some(true) => admitted += 1,
                Some(false) => waited += 1,
                None => {}
            }
            // What is found is counted on for this batch, and not for a later one.
            let mut batch = scene.plannable();
            batch.retain(|&index| scene.running[index].admitted);
            batch.retain(|&index| scene.computes_prompt(index) || scene.random.below(4) > 0);
            scene.alloc(&batch, false).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            scene.launch();
            for index in scene.all().into_iter().rev() {
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
    let counts = (admitted, waited, disturbed);
    assert!(admitted > 800 && waited > 800 && disturbed > 800, "{counts:?}: each must be tried");
}

impl Scene {
    /// A request that is new, or forked, and waits.
    fn newcomer(&mut self) {
        let few = self.running.len() < 12;
        match self.random.below(3) {
            0 if few => {
                let before = self.running.len();
                self.fork();
                // The parent needs a copy of its last page now.
                if !self.fits(&self.admitted()) {
                    self.end(before);
                }
            }
            _ if few => self.arrive(),
            _ => self.end(self.running.len() - 1),
        }
    }

    /// Something that a scheduler does to requests beside serving them. They keep what they are promised, or
    /// wait.
    fn disturb(&mut self) {
        let index = self.random.below(self.running.len());
        match self.random.below(10) {
            0..3 => self.preempt(index),
            3..5 => self.suspend(index),
            5..7 => self.end_a_copy(),
            7..9 => self.truncate(index),
            _ => self.ledger.reset_prefix_cache(),
        }
        while !self.fits(&self.admitted()) {
            let newest = *self.admitted().last().expect("none needs nothing");
            self.preempt(newest);
        }
    }

    fn fits(&mut self, batch: &[usize]) -> bool {
        let remaining = self.remaining(batch);
        self.ledger.can_satisfy(&remaining, false).expect("a number for each group")
    }

    /// Whether one of those who wait was admitted beside the others; `None` where nobody waits.
    fn admit(&mut self) -> Option<bool> {
        let waits = |&index: &usize| {
            let one = &self.running[index];
            !one.admitted && matches!(one.place, Place::Here | Place::Away)
        };
        let waiting: Vec<usize> = self.all().into_iter().filter(waits).collect();
        let next = *waiting.get(self.random.below(waiting.len()))?;
        let mut batch = self.admitted();
        batch.push(next);
        if !self.fits(&batch) {
            return Some(false);
        }
        self.running[next].admitted = true;
        if self.running[next].place == Place::Away {
            self.resume(next).expect("it was promised room");
        }
        Some(true)
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
