//! Suspension: what a request has on its way out, away, and on its way back; losses; sleep.

use crate::common::{PAGE, claim, computed, config, forward, hit, private, prompt, row};
use crate::shelf::Shelf;
use block_hash::Token;
use block_pool::{GroupId, PageId, Step};
use cache_manager::{BegunCopy, CopyEnd, CopyJob, Ledger, LedgerError, NewSequence, PageCopy, SlotId};

/// A ledger and its tier.
struct Scene {
    ledger: Ledger,
    shelf: Shelf,
}

const TOKENS: [Token; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];

impl Scene {
    fn new(pages: u32, units: u32) -> Scene {
        Scene { ledger: Ledger::new(config(pages)), shelf: Shelf::new(units) }
    }

    fn suspend(&mut self, slot: SlotId) -> CopyJob {
        let begun = self.ledger.suspend(&mut self.shelf, &[slot]).unwrap();
        self.verify();
        only(begun, slot)
    }

    fn resume(&mut self, slot: SlotId) -> CopyJob {
        let begun = self.ledger.resume(&mut self.shelf, &[slot]).unwrap();
        self.verify();
        only(begun, slot)
    }

    /// A copy ends in the tier and in the ledger. Who can be planned now.
    fn end(&mut self, copy: &CopyJob, end: CopyEnd) -> Vec<SlotId> {
        self.shelf.end(copy, end);
        let ready = self.ledger.end_copies(&[(copy.id.0, end)]).unwrap();
        self.verify();
        ready
    }

    /// The books, and those of the tier.
    fn verify(&mut self) {
        self.ledger.free_units(&mut self.shelf);
        self.ledger.verify().unwrap();
        self.shelf.index.verify().unwrap();
        let private = self.shelf.index.private_units();
        let mut private: Vec<_> = private.map(|unit| (GroupId::FIRST, unit)).collect();
        private.sort_unstable();
        assert_eq!(private, self.ledger.units_held());
    }

    /// A request of ten tokens that is away.
    fn away(&mut self) -> SlotId {
        let slot = computed(&mut self.ledger, &TOKENS);
        let copy = self.suspend(slot);
        assert_eq!(self.end(&copy, CopyEnd::Done), []);
        slot
    }

    /// What a refused call says; it has changed nothing.
    fn refused<R>(
        &mut self,
        call: impl FnOnce(&mut Ledger, &mut Shelf) -> Result<R, LedgerError>,
    ) -> LedgerError {
        let (before, private) = (self.ledger.fingerprint(), self.shelf.private());
        let error = call(&mut self.ledger, &mut self.shelf).map(drop).expect_err("the call is refused");
        assert_eq!((self.ledger.fingerprint(), self.shelf.private()), (before, private));
        self.verify();
        error
    }
}

fn only(begun: Vec<BegunCopy>, slot: SlotId) -> CopyJob {
    let [BegunCopy { slot: given, job, .. }] = <[BegunCopy; 1]>::try_from(begun).ok().expect("one copy");
    assert_eq!(given, slot);
    job
}

#[test]
fn pages_are_in_flight_until_the_copy_has_ended_and_free_then() {
    let mut scene = Scene::new(8, 8);
    let slot = computed(&mut scene.ledger, &TOKENS);
    let pages = scene.ledger.pages(slot, GroupId::FIRST).unwrap().to_vec();
    let copy = scene.suspend(slot);
    assert_eq!((copy.pages.clone(), copy.after), (pages, Step(1)));
    assert_eq!((scene.ledger.pool().in_flight(), scene.ledger.pool().available()), (3, 5));
    assert_eq!((row(&scene.ledger, slot), scene.ledger.position(slot).unwrap().processed), (vec![], 0));
    assert_eq!(scene.end(&copy, CopyEnd::Done), []);
    assert_eq!((scene.ledger.pool().available(), scene.shelf.private()), (8, 3));
    assert_eq!(scene.ledger.cached_blocks(), 2, "what it stored stays");
}

#[test]
fn a_request_comes_back_with_its_position_and_is_ready_when_its_copy_lands() {
    let mut scene = Scene::new(8, 8);
    let slot = scene.away();
    let before = scene.ledger.position(slot).unwrap();
    let copy = scene.resume(slot);
    // Two blocks are stored: it has them at once.
    assert_eq!((copy.pages.len(), scene.ledger.position(slot).unwrap()), (1, before));
    assert_eq!((scene.ledger.pool().available(), scene.ledger.cached_blocks()), (5, 2));
    assert_eq!(scene.refused(|ledger, _| ledger.alloc(&[slot], &[])), LedgerError::Loading { slot });
    assert_eq!(scene.end(&copy, CopyEnd::Done), [slot]);
    assert_eq!(scene.ledger.position(slot).unwrap().processed, 10);
    assert_eq!(scene.shelf.private(), 0);
    scene.ledger.update(slot, 11).unwrap();
    forward(&mut scene.ledger, slot);
    scene.verify();
}

#[test]
fn pages_that_were_kept_for_later_are_kept_again_and_not_copied() {
    let mut scene = Scene::new(8, 8);
    let slot = claim(&mut scene.ledger, NewSequence { drafts: 3, ..prompt(&TOKENS) });
    forward(&mut scene.ledger, slot); // pages for 10 tokens and 2 × 3 drafts
    assert_eq!(row(&scene.ledger, slot).len(), 4);
    let copy = scene.suspend(slot);
    assert_eq!((copy.pages.len(), scene.shelf.private()), (3, 3));
    scene.end(&copy, CopyEnd::Done);
    let copy = scene.resume(slot);
    assert_eq!((copy.pages.len(), scene.ledger.pool().available()), (1, 4));
    scene.end(&copy, CopyEnd::Done);
    assert_eq!(row(&scene.ledger, slot).len(), 4);
}

#[test]
fn blocks_that_were_forgotten_are_stored_anew() {
    let mut scene = Scene::new(8, 8);
    let slot = scene.away();
    let others: Vec<Token> = (100..133).collect();
    let other = claim(&mut scene.ledger, prompt(&others[..31]));
    forward(&mut scene.ledger, other); // takes all eight pages
    scene.ledger.release(&[other]).unwrap();
    assert_eq!(hit(&mut scene.ledger, prompt(&TOKENS)), 0);
    let copy = scene.resume(slot);
    scene.end(&copy, CopyEnd::Done);
    assert_eq!(hit(&mut scene.ledger, prompt(&TOKENS)), 8);
    assert!(scene.ledger.take_offloads().is_empty());
    scene.verify();
}

#[test]
fn a_stored_twin_is_adopted_or_anchored_as_for_any_block() {
    for (config, adopted) in [(config(8), 2), (private(8), 0)] {
        let mut scene = Scene { ledger: Ledger::new(config), shelf: Shelf::new(8) };
        let slot = scene.away();
        let copy = scene.resume(slot);
        scene.end(&copy, CopyEnd::Done);
        let counters = scene.ledger.counters();
        assert_eq!((counters.adopted_blocks, counters.private_blocks), (adopted, 2 - adopted));
        scene.ledger.release(&[slot]).unwrap();
        scene.verify();
        assert_eq!(scene.ledger.pool().available(), 8);
    }
}

#[test]
fn a_copy_that_fails_loses_the_kv_and_the_request_starts_over() {
    let mut scene = Scene::new(8, 8);
    let slot = computed(&mut scene.ledger, &TOKENS);
    let copy = scene.suspend(slot);
    assert_eq!(scene.end(&copy, CopyEnd::Failed), [slot]);
    scene.ledger.alloc(&[slot], &[]).unwrap();
    assert_eq!(scene.ledger.position(slot).unwrap().cached, 8, "what is stored is found");
    scene.ledger.close_step();
    scene.ledger.step(&[slot], &[], None).unwrap();

    let copy = scene.suspend(slot);
    scene.end(&copy, CopyEnd::Done);
    let copy = scene.resume(slot);
    assert_eq!(scene.end(&copy, CopyEnd::Failed), [slot]);
    let counters = scene.ledger.counters();
    assert_eq!((counters.suspensions, counters.resumptions, counters.suspensions_lost), (2, 0, 2));
    assert_eq!((scene.ledger.pool().available(), scene.shelf.private()), (8, 0));
}

#[test]
fn a_token_that_is_due_when_the_kv_is_lost_is_appended_when_it_comes() {
    let mut scene = Scene::new(8, 8);
    let slot = computed(&mut scene.ledger, &TOKENS);
    scene.ledger.update(slot, 11).unwrap();
    for _ in 0..2 {
        scene.ledger.alloc(&[slot], &[]).unwrap(); // the second computes a token that nobody knows
        scene.ledger.close_step();
    }
    scene.ledger.step(&[slot], &[], None).unwrap();
    scene.ledger.step(&[slot], &[], None).unwrap();
    assert_eq!(scene.ledger.position(slot).unwrap().processed, 12);
    let copy = scene.suspend(slot);
    scene.end(&copy, CopyEnd::Failed);
    scene.ledger.update(slot, 12).unwrap();
    forward(&mut scene.ledger, slot);
    assert_eq!(scene.ledger.position(slot).unwrap().processed, 12);
    assert_eq!(scene.ledger.tokens(slot).unwrap()[10..], [11, 12]);
    scene.verify();
}

#[test]
fn units_of_a_request_that_ends_are_free_once_no_copy_uses_them() {
    for release in [true, false] {
        for stage in 0..3 {
            let mut scene = Scene::new(8, 4);
            let slot = computed(&mut scene.ledger, &TOKENS);
            let mut copies = vec![scene.suspend(slot)];
            if stage > 0 {
                scene.end(&copies.pop().unwrap(), CopyEnd::Done);
            }
            if stage > 1 {
                copies.push(scene.resume(slot));
            }
            if release {
                scene.ledger.release(&[slot]).unwrap();
            } else {
                scene.ledger.preempt(&[slot]).unwrap();
            }
            scene.verify();
            assert_eq!(scene.shelf.private(), 0);
            assert_eq!(scene.shelf.index.reserve(4).is_err(), stage != 1, "a copy uses them still");
            if let Some(copy) = copies.pop() {
                assert_eq!(scene.end(&copy, CopyEnd::Done), [], "nobody waits for it");
            }
            assert_eq!(scene.ledger.pool().available(), 8);
        }
    }
}

#[test]
fn nothing_is_suspended_or_resumed_without_room() {
    let mut scene = Scene::new(6, 5);
    let slots = [computed(&mut scene.ledger, &TOKENS), computed(&mut scene.ledger, &[20; 10])];
    let refused = scene.refused(|ledger, shelf| ledger.suspend(shelf, &slots));
    let LedgerError::InsufficientUnits { slot, room } = refused else { panic!("{refused}") };
    assert_eq!((slot, room.needed, room.free, room.pinned, room.total), (slots[1], 3, 2, 0, 5));

    let copy = scene.suspend(slots[0]);
    scene.end(&copy, CopyEnd::Done);
    let other = computed(&mut scene.ledger, &[30; 3]);
    let refused = scene.refused(|ledger, shelf| ledger.resume(shelf, &[slots[0]]));
    let LedgerError::InsufficientBlocks { slot, room } = refused else { panic!("{refused}") };
    assert_eq!((slot, room.needed, room.free, room.pinned), (slots[0], 3, 2, 4));
    scene.ledger.release(&[other]).unwrap();
    scene.resume(slots[0]);
}

#[test]
fn what_cannot_be_is_refused() {
    let mut scene = Scene::new(8, 8);
    let slot = claim(&mut scene.ledger, prompt(&TOKENS));
    let suspend = |ledger: &mut Ledger, shelf: &mut Shelf| ledger.suspend(shelf, &[slot]);
    let resume = |ledger: &mut Ledger, shelf: &mut Shelf| ledger.resume(shelf, &[slot]);
    assert_eq!(scene.refused(suspend), LedgerError::NothingToSuspend { slot });
    assert_eq!(scene.refused(resume), LedgerError::NotSuspended { slot });
    scene.ledger.alloc(&[slot], &[]).unwrap();
    assert_eq!(scene.refused(suspend), LedgerError::StepOut { slot });
    scene.ledger.step(&[slot], &[], None).unwrap();
    assert_eq!(
        scene.refused(|ledger, shelf| ledger.suspend(shelf, &[slot, slot])),
        LedgerError::TwiceInBatch(slot)
    );
    scene.shelf.closed = true;
    assert!(matches!(scene.refused(suspend), LedgerError::NoTier(_)));
    scene.shelf.closed = false;
    let copy = scene.suspend(slot);
    assert_eq!(scene.refused(suspend), LedgerError::Leaving { slot });
    assert_eq!(scene.refused(resume), LedgerError::Leaving { slot });
    scene.end(&copy, CopyEnd::Done);
    assert_eq!(scene.refused(suspend), LedgerError::Suspended { slot });
    scene.shelf.closed = true;
    assert!(matches!(scene.refused(resume), LedgerError::NoTier(_)));
    let padding = claim(&mut scene.ledger, prompt(&[1]));
    scene.ledger.alloc_dummy(padding).unwrap();
    let refused = scene.refused(|ledger, shelf| ledger.suspend(shelf, &[padding]));
    assert_eq!(refused, LedgerError::Padding(padding));
}

#[test]
fn results_of_a_step_that_was_dropped_may_come_while_the_request_is_away() {
    let mut scene = Scene::new(8, 8);
    let slot = computed(&mut scene.ledger, &TOKENS);
    scene.ledger.update(slot, 11).unwrap();
    scene.ledger.alloc(&[slot], &[]).unwrap();
    scene.ledger.close_step();
    scene.ledger.truncate(slot, 9).unwrap();
    let copy = scene.suspend(slot);
    assert_eq!(copy.after, Step(2), "its forward may write still");
    scene.ledger.step(&[slot], &[77], None).unwrap();
    scene.end(&copy, CopyEnd::Done);
    assert_eq!(scene.ledger.tokens(slot).unwrap(), &TOKENS[..9]);
}

#[test]
fn after_a_reset_what_comes_back_is_not_shared_and_after_a_sleep_it_is() {
    for (sleeps, shared) in [(false, 0), (true, 8)] {
        let mut scene = Scene::new(8, 8);
        let slot = scene.away();
        if sleeps {
            scene.ledger.sleep().unwrap();
            assert_eq!(scene.refused(|ledger, shelf| ledger.resume(shelf, &[slot])), LedgerError::Asleep);
            assert_eq!(scene.ledger.cached_blocks(), 0);
            scene.ledger.wake().unwrap();
        } else {
            scene.ledger.reset_prefix_cache();
        }
        scene.verify();
        let copy = scene.resume(slot);
        scene.end(&copy, CopyEnd::Done);
        assert_eq!(hit(&mut scene.ledger, prompt(&TOKENS)), shared);
        scene.ledger.preempt(&[slot]).unwrap();
        scene.verify();
    }
}

#[test]
fn what_was_suspended_before_a_reset_is_not_shared_after_a_sleep_either() {
    let mut scene = Scene::new(8, 8);
    let slot = scene.away();
    scene.ledger.reset_prefix_cache();
    scene.ledger.sleep().unwrap();
    scene.ledger.wake().unwrap();
    let copy = scene.resume(slot);
    scene.end(&copy, CopyEnd::Done);
    assert_eq!(hit(&mut scene.ledger, prompt(&TOKENS)), 0);
}

#[test]
fn nobody_sleeps_on_pages_that_are_held() {
    let mut scene = Scene::new(8, 8);
    let slot = computed(&mut scene.ledger, &TOKENS);
    let in_use = |pages, requests, pins, copies| LedgerError::InUse { pages, requests, pins, copies };
    assert_eq!(scene.refused(|ledger, _| ledger.sleep()), in_use(3, 1, 0, 0));
    let copy = scene.suspend(slot);
    assert_eq!(scene.refused(|ledger, _| ledger.sleep()), in_use(3, 0, 0, 1));
    assert_eq!(scene.ledger.check_unused(), Ok(()), "a copy ends by itself");
    scene.end(&copy, CopyEnd::Done);
    let copy = scene.resume(slot);
    assert_eq!(scene.refused(|ledger, _| ledger.check_unused()), in_use(3, 1, 0, 1));
    scene.end(&copy, CopyEnd::Done);
    scene.ledger.release(&[slot]).unwrap();
    assert_eq!(scene.refused(|ledger, _| ledger.wake()), LedgerError::Awake);
    scene.ledger.sleep().unwrap();
    assert_eq!(scene.refused(|ledger, _| ledger.sleep()), LedgerError::Asleep);
    let slot = claim(&mut scene.ledger, prompt(&TOKENS));
    assert_eq!(scene.refused(|ledger, _| ledger.alloc(&[slot], &[])), LedgerError::Asleep);
}

#[test]
fn a_page_that_a_copy_is_planned_to_is_not_copied_out_before() {
    let mut scene = Scene::new(8, 8);
    let parent = computed(&mut scene.ledger, &TOKENS);
    let child = scene.ledger.fork(parent).unwrap();
    for token in 11..=13 {
        scene.ledger.update(child, token).unwrap();
    }
    scene.ledger.alloc(&[child], &[]).unwrap();
    scene.ledger.truncate(child, 12).unwrap();
    let refused = scene.refused(|ledger, shelf| ledger.suspend(shelf, &[child]));
    assert_eq!(refused, LedgerError::PageCopyPlanned { slot: child });
    let [PageCopy { source: from, destination: to, .. }] = scene.ledger.take_page_copies(GroupId::FIRST)[..]
    else {
        panic!("one copy")
    };
    assert_eq!((from, to), (PageId(3), PageId(4)));
    assert_eq!(scene.suspend(child).pages[2], to);
    assert_eq!(scene.suspend(parent).pages.len() as u32, 10u32.div_ceil(PAGE));
}
