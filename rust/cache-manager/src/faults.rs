//! Panics on purpose, for tests of what a panic leaves behind. Only with the feature `faults`, which no
//! build for users has.

use crate::ledger::Ledger;
use block_pool::GroupId;

/// Where a forced panic strikes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Before anything is changed.
    AtOnce,
    /// In a reset, between the pool and the tree: blocks of the tree have pages that stand for nothing.
    HalfReset,
    /// In a release, between the pool and a request: a request has a page that it does not hold.
    HalfRelease,
}

impl Ledger {
    /// Fails as an error of the ledger's own would.
    ///
    /// # Panics
    /// Always.
    pub fn force_panic(&mut self, fault: Fault) -> ! {
        match fault {
            Fault::AtOnce => {}
            Fault::HalfReset => self.pools[GroupId::FIRST].forget_all(),
            Fault::HalfRelease => {
                if let Some(sequence) = self.slots.iter_mut().find(|sequence| !sequence.holds_no_page()) {
                    let page = sequence.row(GroupId::FIRST).pages[0];
                    self.pools[GroupId::FIRST].release(page, sequence.last_step);
                }
            }
        }
        panic!("forced: {fault:?}")
    }
}
