//! What index and movers tell each other: jobs, and how they ended.

use block_pool::{PageId, Priority, Step};

/// A block as every tier knows it: its chained hash, and a second identity of 128 bits, for tiers have no tokens
/// to compare. Equal only if both are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TierKey {
    /// The first 8 bytes of the block's canonical hash, as a big-endian number.
    pub hash: u64,
    /// Must agree too: another guard under the same hash is another block.
    pub guard: [u8; 16],
}

/// A block that is offered to a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// What it is.
    pub key: TierKey,
    /// The device page that holds it.
    pub page: PageId,
    /// How long to keep it: it makes room for none of a lower priority.
    pub priority: Priority,
}

impl From<(TierKey, PageId)> for Offer {
    /// A block of the priority that most have.
    fn from((key, page): (TierKey, PageId)) -> Offer {
        Offer { key, page, priority: Priority::DEFAULT }
    }
}

pub use disk_store::entry::Origin;

/// A place for one block in a tier, counted from 0. On every shard it has the same number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct UnitId(pub u32);

/// A job; no number is used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct JobId(pub u64);

/// Where bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// From device pages into units.
    Store,
    /// From units into device pages.
    Load,
}

/// Copies that a mover carries out, all or nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Job {
    /// To be named when it has ended.
    pub id: JobId,
    /// Where the bytes go.
    pub direction: Direction,
    /// A unit for each page.
    pub units: Vec<UnitId>,
    /// The device pages.
    pub pages: Vec<PageId>,
    /// The mover waits for the fence of this step before it touches a page.
    pub after: Step,
}

/// How a job ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Every byte is where it belongs.
    Done,
    /// Nobody knows what its destinations hold now; why.
    Failed(String),
    /// It was given up; its destinations may hold anything.
    Cancelled,
}
