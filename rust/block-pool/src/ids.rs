//! Small types that keep page ids, priorities and step numbers apart.

use std::fmt;
use thiserror::Error;

/// Index of a page in its pool. Page 0 is the null page, which is never handed out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageId(pub u32);

impl PageId {
    /// The null page: unused table cells point at it.
    pub const NULL: PageId = PageId(0);

    /// The id as an array index.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {}", self.0)
    }
}

/// A group of layers whose KV is kept in the same way; its pages have ids of their own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GroupId(pub u8);

impl GroupId {
    /// The only group of most models.
    pub const FIRST: GroupId = GroupId(0);

    /// The number as an array index.
    #[inline]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// What a cached page stands for; the pool stores it and gives it back, and never looks inside.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NodeLink(pub u32);

/// Number of a scheduler step, counted from 1 by the ledger; 0 is "before the first step".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Step(pub u32);

/// Retention priority of a cached page: 0 is evicted first, 100 last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Priority(u8);

/// A number that is no retention priority.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("priority {0}: must be 0 (evicted first) to 100 (evicted last)")]
pub struct PriorityError(pub i64);

impl Priority {
    /// Levels there are.
    pub const LEVELS: usize = 101;
    /// Evicted first.
    pub const LOWEST: Priority = Priority(0);
    /// Evicted last.
    pub const HIGHEST: Priority = Priority(100);
    /// What a page gets when nobody says otherwise.
    pub const DEFAULT: Priority = Priority(35);

    /// Checks that `level` is 0 to 100.
    ///
    /// # Errors
    /// [`PriorityError`] for any other number.
    pub fn new(level: i64) -> Result<Priority, PriorityError> {
        match u8::try_from(level) {
            Ok(level) if usize::from(level) < Self::LEVELS => Ok(Priority(level)),
            _ => Err(PriorityError(level)),
        }
    }

    /// The level, 0 to 100.
    #[inline]
    pub fn level(self) -> u8 {
        self.0
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self::DEFAULT
    }
}
