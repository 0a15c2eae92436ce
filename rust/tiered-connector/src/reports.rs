//! Which blocks the tiers get and lose, told in order to whoever keeps account of where each lies.

use block_pool::GroupId;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The host's number among the tiers, counted from the device's 0.
pub const HOST: u8 = 1;
/// The number of the tier below the host.
pub const BELOW: u8 = 2;

/// What a tier has got or lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// The block of this hash is on its way; [`What::Got`] or [`What::Lost`] follows.
    Coming(u64),
    /// It can be found.
    Got(u64),
    /// It is here no more, nor on its way.
    Lost(u64),
    /// Nothing is here any more, nor on its way.
    LostAll,
}

/// One entry of [`Reports`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Report {
    /// The group of layers whose tier it is.
    pub group: GroupId,
    /// The number of the tier.
    pub tier: u8,
    /// Reports that a call of the connector caused have the same number.
    pub call: u64,
    /// What happened.
    pub what: What,
}

/// What nobody has taken account of yet, oldest first.
#[derive(Default)]
pub struct Reports {
    list: Mutex<Vec<Report>>,
    any: AtomicBool,
    call: AtomicU64,
}

impl Reports {
    /// What is told from here on is of another call of the connector's.
    pub fn begin_call(&self) {
        self.call.fetch_add(1, Ordering::Relaxed);
    }

    /// A tier of a group has got or lost something.
    pub fn tell(&self, group: GroupId, tier: u8, what: What) {
        self.list.lock().push(Report { group, tier, call: self.call.load(Ordering::Relaxed), what });
        self.any.store(true, Ordering::Release);
    }

    /// Takes what was reported since the last time.
    pub fn take(&self) -> Vec<Report> {
        if !self.any.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut *self.list.lock())
    }
}

/// Reports of one tier of one group.
#[derive(Clone)]
pub(crate) struct Reporter {
    pub(crate) to: Arc<Reports>,
    pub(crate) group: GroupId,
    pub(crate) tier: u8,
}

impl Reporter {
    pub(crate) fn tell(&self, what: What) {
        self.to.tell(self.group, self.tier, what);
    }
}
