//! Retention on the ledger's clock.

use crate::common::{claim, config, forward, prompt};
use block_pool::{PageId, Priority, Retention};
use cache_manager::{BlockRetention, Ledger, NewSequence, TokenRange};
use std::sync::Arc;

#[test]
fn the_first_time_that_is_told_starts_what_was_released_before() {
    let brief = Retention::new(Priority::LOWEST, Some(1.0), None).unwrap();
    let first_block = TokenRange { start: 0, end: Some(4), retention: brief };
    let retention = BlockRetention::new(vec![first_block], Priority::DEFAULT.into(), 8).unwrap();
    let mut ledger = Ledger::new(config(8));
    let tokens = prompt(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let slot = claim(&mut ledger, NewSequence { retention: Some(Arc::new(retention)), ..tokens });
    forward(&mut ledger, slot);
    ledger.release(&[slot]).unwrap();
    ledger.begin_step(Some(5000.0), &[]).unwrap();
    ledger.begin_step(Some(5000.5), &[]).unwrap();
    assert_eq!(ledger.pool().priority(PageId(1)), Priority::LOWEST);
    ledger.begin_step(Some(5001.0), &[]).unwrap();
    assert_eq!(ledger.pool().priority(PageId(1)), Priority::DEFAULT);
    ledger.verify().unwrap();
}
