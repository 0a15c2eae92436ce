//! The pools of a replica, one a group.

use crate::ids::GroupId;
use crate::pool::Pool;
use std::ops::{Index, IndexMut};

/// Every group's pages.
pub struct Pools {
    pools: Vec<Pool>,
}

impl Pools {
    /// Pools of groups that share no memory, in the order of their groups.
    pub fn apart(pools: Vec<Pool>) -> Pools {
        Pools { pools }
    }

    /// The groups, in order.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = GroupId> + use<> {
        (0..self.pools.len()).map(|group| GroupId(group as u8))
    }
}

impl Index<GroupId> for Pools {
    type Output = Pool;

    #[inline]
    fn index(&self, group: GroupId) -> &Pool {
        &self.pools[group.index()]
    }
}

impl IndexMut<GroupId> for Pools {
    #[inline]
    fn index_mut(&mut self, group: GroupId) -> &mut Pool {
        &mut self.pools[group.index()]
    }
}
