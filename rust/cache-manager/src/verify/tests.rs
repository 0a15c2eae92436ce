//! Each test damages one field and asks which page, node or request is named.

use crate::config::{LedgerConfig, OnDuplicate};
use crate::copies::{Copy, CopyPages};
use crate::events::{EventLog, Stored, Tier};
use crate::ledger::Ledger;
use crate::page_copies::PageCopy;
use crate::sequence::{NewSequence, Sequence, StepOut};
use crate::slots::SlotId;
use crate::suspension::{Shape, Shelved, Stage, Suspension};
use crate::verify::LedgerFault;
use block_hash::{Algo, Chain, Token};
use block_pool::{GroupId, PageFault, PageId, Priority, Step};
use radix_tree::{Insertion, NamespaceKey, NodeId, ParentId, TreeFault};
use smallvec::smallvec;
use tiered_connector::job::UnitId;

/// Nine tokens, computed, on pages 1 to 3; the first two blocks are stored.
const OWNER: SlotId = SlotId(0);
/// The same nine tokens on pages 4 to 6; both full blocks are private twins of the owner's.
const TWIN: SlotId = SlotId(1);
/// Blocks of a request that was released, evictable from the tail; their pages are 7 to 9.
const CACHED: [NodeId; 3] = [NodeId(2), NodeId(3), NodeId(4)];

fn request(tokens: std::ops::Range<Token>) -> NewSequence {
    let namespace = NamespaceKey::default();
    let chain = Chain::new(Algo::AHash64, &namespace.root(None));
    let mut request = NewSequence::new(tokens.collect(), 100, namespace, chain);
    request.hash_prompt(4);
    request
}

/// Claims the requests and computes them in one forward.
fn compute<const N: usize>(ledger: &mut Ledger, requests: [NewSequence; N]) -> [SlotId; N] {
    let slots = requests
        .map(|request| ledger.claim(request).map_err(|refused| refused.error).expect("a slot is free"));
    ledger.alloc(&slots, &[]).expect("there is room");
    ledger.close_step();
    ledger.step(&slots, &[], None).expect("the step is out");
    slots
}

fn sound() -> Ledger {
    let mut ledger =
        Ledger::new(LedgerConfig { on_duplicate: OnDuplicate::Private, ..LedgerConfig::new(4, 10) });
    assert_eq!(compute(&mut ledger, [request(0..9), request(0..9)]), [OWNER, TWIN]);
    let released = compute(&mut ledger, [request(50..62)]);
    ledger.release(&released).expect("the slot is claimed");
    ledger.start_copy(OWNER, 0, 1).expect("the block is there");
    ledger.verify().unwrap();
    ledger
}

fn after(damage: impl FnOnce(&mut Ledger)) -> LedgerFault {
    let mut ledger = sound();
    damage(&mut ledger);
    ledger.verify().unwrap_err()
}

/// What is found after `damage` to the request; it is named by its slot.
fn after_damage_to(request: SlotId, damage: impl FnOnce(&mut Sequence)) -> String {
    match after(|ledger| damage(ledger.slots.get_mut(request).expect("the request is claimed"))) {
        LedgerFault::Sequence { slot, what } if slot == request.0 => what,
        other => panic!("{other}"),
    }
}

fn page(page: u32, what: &str) -> LedgerFault {
    PageFault::new(PageId(page), what).into()
}

// Pages

#[test]
fn a_reference_that_no_request_holds_is_found() {
    let found = after(|ledger| ledger.pools[GroupId::FIRST].acquire(PageId(1)));
    assert_eq!(found, page(1, "counts 2 references, requests hold 1"));
}

#[test]
fn a_reference_that_a_request_gave_up_too_early_is_found() {
    let found = after(|ledger| ledger.pools[GroupId::FIRST].release(PageId(3), Step(1)));
    assert_eq!(found, page(3, "counts 0 references, requests hold 1"));
}

#[test]
fn a_pin_that_no_copy_holds_is_found() {
    let found = after(|ledger| ledger.copies.in_flight.clear());
    assert_eq!(found, page(1, "counts 1 pins, copies hold 0"));
}

#[test]
fn a_copy_of_a_page_that_is_not_pinned_is_found() {
    let found = after(|ledger| {
        assert_eq!(
            ledger.copies.in_flight.insert(
                9,
                Copy {
                    pages: CopyPages::of(GroupId::FIRST, 1, vec![PageId(2)], 0),
                    waiter: None,
                    demotion: false
                }
            ),
            None
        );
    });
    assert_eq!(found, page(2, "counts 0 pins, copies hold 1"));
}

#[test]
fn a_page_whose_node_has_gone_is_found() {
    let found = after(|ledger| ledger.tree.clear_page(CACHED[2], GroupId::FIRST));
    assert_eq!(found, page(9, "its node 4 does not lead back to it"));
}

#[test]
fn a_block_that_would_be_evicted_before_one_below_it_is_found() {
    let found = after(|ledger| ledger.pools[GroupId::FIRST].refresh(PageId(9)));
    assert_eq!(found, page(8, "would be evicted before page 9, a block below it"));
}

#[test]
fn a_fault_within_the_pool_is_found() {
    let found = after(|ledger| {
        ledger.pools[GroupId::FIRST].take(Priority::DEFAULT);
    });
    assert_eq!(found, page(10, "counts 1 references, requests hold 0"));
}

// Events

#[test]
fn an_event_without_blocks_is_found() {
    let found = after(|ledger| {
        let created = ledger.event_snapshot().events.remove(0);
        ledger.events = EventLog::new(4, [created]);
        ledger.events.stored(GroupId::FIRST, || Stored {
            parent: None,
            first: 0,
            keys: Vec::new(),
            tokens: Vec::new(),
            extra_keys: Vec::new(),
            priority: Priority::DEFAULT,
            tier: Tier::DEVICE,
            adapter: None,
        });
    });
    assert_eq!(found.to_string(), "event 1: does not add up");
}

// Nodes

#[test]
fn a_node_on_a_page_that_does_not_stand_for_it_is_found() {
    let node = NodeId(5);
    let found = after(|ledger| {
        let inserted = ledger.tree.insert(ParentId::Node(CACHED[2]), 1, &[1, 2, 3, 4], &[]);
        assert_eq!(inserted, Insertion::New(node));
        ledger.tree.set_page(node, GroupId::FIRST, PageId(10));
    });
    assert_eq!(found, TreeFault { node, what: "its page 10 does not lead back to it".into() }.into());
}

#[test]
fn an_anchor_that_no_request_holds_is_found() {
    let found = after(|ledger| ledger.tree.anchor(CACHED[2]));
    let what = "counts 1 anchors, sequences hold 0".into();
    assert_eq!(found, TreeFault { node: CACHED[2], what }.into());
}

#[test]
fn a_namespace_that_more_requests_hold_than_there_are_is_found() {
    let found = after(|ledger| {
        ledger.tree.acquire_namespace(&NamespaceKey::default());
    });
    assert_eq!(found.to_string(), "node 4294967295: NamespaceId(0) counts 3 holders, 2 hold it");
}

// Requests

#[test]
fn a_third_step_out_is_found() {
    let what = after_damage_to(OWNER, |sequence| {
        for end in [1, 2, 3] {
            sequence.steps_out.push(StepOut { step: Step(end), start: end - 1, end, drafts: 0 });
        }
    });
    assert_eq!(what, "3 steps are out");
}

#[test]
fn steps_out_that_overlap_are_found() {
    let what = after_damage_to(OWNER, |sequence| {
        sequence.steps_out.push(StepOut { step: Step(1), start: 0, end: 5, drafts: 0 });
        sequence.steps_out.push(StepOut { step: Step(2), start: 4, end: 9, drafts: 0 });
    });
    assert_eq!(what, "a step out computes 4 to 9 after 5");
}

#[test]
fn a_position_that_no_step_leads_to_is_found() {
    let what = after_damage_to(OWNER, |sequence| sequence.position -= 1);
    assert_eq!(what, "of 9 tokens, 9 are processed, its steps end at 9, not at 8");
}

#[test]
fn a_request_without_a_page_for_its_last_token_is_found() {
    let what = after_damage_to(TWIN, |sequence| sequence.rows[0].pages.truncate(2));
    assert_eq!(what, "2 pages do not hold 9 tokens");
}

#[test]
fn a_published_block_that_is_not_computed_is_found() {
    let what = after_damage_to(OWNER, |sequence| sequence.nodes.push(CACHED[0]));
    assert_eq!(what, "3 blocks are published, 9 tokens processed");
}

#[test]
fn a_step_that_verifies_drafts_which_the_request_has_not_is_found() {
    let what = after_damage_to(OWNER, |sequence| {
        sequence.steps_out.push(StepOut { step: Step(3), start: 9, end: 10, drafts: 2 });
    });
    assert_eq!(what, "a step out from token 9 verifies 2 drafts; the request has 0 from token 9 on");
}

#[test]
fn a_step_without_pages_for_its_drafts_is_found() {
    let what = after_damage_to(OWNER, |sequence| {
        sequence.drafts = 2;
        sequence.tokens.push(7);
        sequence.position = 10;
        sequence.steps_out.push(StepOut { step: Step(3), start: 9, end: 10, drafts: 2 });
    });
    assert_eq!(what, "3 pages do not hold 14 tokens");
}

#[test]
fn a_step_that_writes_to_a_page_of_the_tree_is_found() {
    let found = after(|ledger| {
        let twin = ledger.slots.get_mut(TWIN).expect("the request is claimed");
        twin.steps_out.push(StepOut { step: Step(3), start: 8, end: 9, drafts: 0 });
        twin.rows[0].pages[2] = PageId(1);
    });
    assert_eq!(found, page(1, "slot 1 writes to it, and others read it"));
}

#[test]
fn a_tail_that_others_hold_and_its_request_does_not_know_of_is_found() {
    let found = after(|ledger| {
        ledger.pools[GroupId::FIRST].pin(PageId(6));
        ledger.copies.in_flight.insert(
            9,
            Copy {
                pages: CopyPages::of(GroupId::FIRST, 1, vec![PageId(6)], 0),
                waiter: None,
                demotion: false,
            },
        );
    });
    let what = "page 6, which it writes to next, is held by others, and it does not know";
    assert_eq!(found.to_string(), format!("slot 1: {what}"));
}

#[test]
fn two_requests_that_write_to_one_page_are_found() {
    let found = after(|ledger| {
        for slot in [OWNER, TWIN] {
            let sequence = ledger.slots.get_mut(slot).expect("the request is claimed");
            sequence.steps_out.push(StepOut { step: Step(3), start: 8, end: 9, drafts: 0 });
            sequence.rows[0].pages[2] = PageId(3);
        }
    });
    assert_eq!(found, page(3, "slot 1 writes to it, and others read it"));
}

#[test]
fn a_planned_copy_that_does_not_pin_is_found() {
    let found = after(|ledger| {
        ledger.page_copies.push(PageCopy {
            group: GroupId::FIRST,
            source: PageId(2),
            destination: PageId(3),
            before: Step(1),
        });
    });
    assert_eq!(found, page(2, "counts 0 pins, copies hold 1"));
}

#[test]
fn a_hash_of_tokens_that_are_not_known_is_found() {
    let what = after_damage_to(OWNER, |sequence| sequence.unknown = 2);
    assert_eq!(what, "2 hashes for 7 known tokens");
}

#[test]
fn a_published_block_below_another_than_the_one_before_it_is_found() {
    let what = after_damage_to(OWNER, |sequence| sequence.nodes.swap(0, 1));
    assert_eq!(what, "block 0 does not follow the block before it in the tree");
}

#[test]
fn a_published_block_on_another_page_than_the_tree_has_is_found() {
    let what = after_damage_to(OWNER, |sequence| sequence.rows[0].pages.swap(1, 2));
    assert_eq!(what, "block 1 is on another page in the tree");
}

#[test]
fn a_private_twin_that_is_not_anchored_is_found() {
    let what = after_damage_to(TWIN, |sequence| sequence.anchored.truncate(1));
    assert_eq!(what, "block 1 is on another page in the tree");
}

#[test]
fn anchored_blocks_out_of_order_are_found() {
    let what = after_damage_to(TWIN, |sequence| sequence.anchored.swap(0, 1));
    assert_eq!(what, "blocks [1, 0] of 2 are anchored");
}

#[test]
fn an_anchored_block_that_is_not_published_is_found() {
    let what = after_damage_to(TWIN, |sequence| sequence.anchored.push(2));
    assert_eq!(what, "blocks [0, 1, 2] of 2 are anchored");
}

#[test]
fn a_padding_request_with_pages_is_found() {
    let what = after_damage_to(TWIN, |sequence| sequence.dummy = true);
    assert_eq!(what, "a padding request holds pages");
}

#[test]
fn results_that_are_due_for_a_slot_that_is_claimed_are_found() {
    let found = after(|ledger| assert_eq!(ledger.orphans.insert(TWIN, (Step(1), 1)), None));
    assert_eq!(found.to_string(), "slot 1: 1 results are due for the request that was released");
}

fn away(unit: u32) -> Suspension {
    let rows =
        smallvec![Shelved { units: vec![UnitId(unit)], shape: Shape { sinks: 1, from: 1, blocks: 1 } }];
    Suspension { processed: 4, rows, stage: Stage::Away }
}

#[test]
fn a_suspended_request_that_holds_pages_is_found() {
    let found = after_damage_to(OWNER, |owner| owner.suspension = Some(Box::new(away(0))));
    assert_eq!(found, "is suspended and holds pages, nodes, steps or a position");
}

#[test]
fn a_unit_that_two_suspended_requests_hold_is_found() {
    let found = after(|ledger| {
        for _ in 0..2 {
            let slot = ledger.claim(request(0..9)).map_err(|refused| refused.error).expect("a slot is free");
            ledger.slots.get_mut(slot).expect("just claimed").suspension = Some(Box::new(away(5)));
        }
    });
    assert_eq!(found, LedgerFault::Unit(5));
}
