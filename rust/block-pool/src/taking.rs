//! Pages for a group, where groups share a slab.
//!
//! They are taken in this order: the group's own blank pages; pristine huge pages; another group's parked huge page
//! without cached pages; then whatever goes first, the group's own victim or another group's parked huge page,
//! which goes when the best page inside would.
//!
//! A page in a parked or pristine huge page *opens* it: other groups cannot have it any more. A batch that was told
//! that its demand fits takes pages for one group after another, and none may open a huge page that another will
//! need. Opening one takes nothing from the others while the group needs it itself for what it will take. So when
//! it has enough in its open ones and nothing is to spare, it takes from these alone.

use crate::huge::Rank;
use crate::ids::{GroupId, NodeLink, PageId, Priority, Step};
use crate::pool::Taken;
use crate::pools::Pools;
use crate::room::huge_needed;

/// A cached page that another group's claim took away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Evicted {
    /// The group that lost it.
    pub group: GroupId,
    /// The page it was, which is not the group's any more.
    pub page: PageId,
    /// What it stood for: the caller must drop this record.
    pub node: NodeLink,
}

/// What the slab has to give, besides own blank pages and pristine huge pages.
enum Victim {
    /// Own cached pages that go before this, or all.
    Own(Option<Rank>),
    /// A parked huge page of that group.
    Parked(GroupId, PageId),
}

impl Pools {
    /// Hands out `count` pages of `group` and appends them to `taken`; what other groups lose by it is appended to
    /// `lost`. `left[g]` pages of each group `g` are what the caller will take afterwards: there is room for them
    /// then. False, and nothing is changed, when all this cannot be had from the group's slab
    /// ([`Pools::can_satisfy`]).
    pub fn take_many(
        &mut self,
        group: GroupId,
        count: u32,
        priority: Priority,
        left: &[u32],
        taken: &mut Vec<Taken>,
        lost: &mut Vec<Evicted>,
    ) -> bool {
        let reserved = self.reserved(group, left);
        let needed = self.huge_needed(group, count, left);
        if needed + reserved > self.open_to_all(self.slab_of(group)).into() {
            return false;
        }
        if !self[group].is_shared() {
            return self[group].take_many(count, priority, taken);
        }
        let end = taken.len() + count as usize;
        while taken.len() < end {
            let short = (end - taken.len()) as u32;
            let needed = self.huge_needed(group, short, left);
            let spare = u64::from(self.open_to_all(self.slab_of(group))) - needed - reserved;
            if needed + spare == 0 {
                self[group].take_in_use(short, priority, taken);
                continue;
            }
            // Each page opens one huge page at most.
            let safe = if reserved == 0 || spare >= u64::from(short) { short } else { 1 };
            self.take_some(group, safe, priority, taken, lost);
        }
        true
    }

    /// Huge pages that the other groups of the slab need for what is `left` to take.
    fn reserved(&self, group: GroupId, left: &[u32]) -> u64 {
        let others = self.slab_of(group).groups.iter().filter(|&&other| other != group);
        others.map(|&other| self.huge_needed(other, 0, left)).sum()
    }

    /// Huge pages that `group` needs beside those it has open.
    fn huge_needed(&self, group: GroupId, count: u32, left: &[u32]) -> u64 {
        let left = left.get(usize::from(group.0)).copied().unwrap_or(0);
        let pool = &self[group];
        huge_needed(u64::from(count) + u64::from(left), pool.own_room(), pool.ratio())
    }

    /// Takes up to `count` pages that come in one way.
    fn take_some(
        &mut self,
        group: GroupId,
        count: u32,
        priority: Priority,
        taken: &mut Vec<Taken>,
        lost: &mut Vec<Evicted>,
    ) {
        if self[group].queues.has_uncached() {
            return self[group].take_blank(count, priority, taken);
        }
        let slab = self.slab_of_mut(group);
        if slab.claimed < slab.huge_pages {
            slab.claimed += 1;
            let huge = PageId(slab.claimed);
            return self[group].claim_huge(huge, (Step(0), true), count, priority, taken);
        }
        match self.victim(group) {
            Victim::Own(before) => self[group].take_before(before, count, priority, taken),
            Victim::Parked(from, huge) => {
                let note = |page, node| lost.push(Evicted { group: from, page, node });
                let last_use = self.pool_mut(from).give_up_huge(huge, note);
                self[group].claim_huge(huge, (last_use, false), count, priority, taken);
            }
        }
    }

    /// What goes first, own or another group's.
    fn victim(&mut self, group: GroupId) -> Victim {
        let pool = &self[group];
        let own = pool.queues.first(&pool.pages).map(|page| &pool.pages[page.index()]);
        let own = own.map(|record| (record.priority, record.stamp));
        let mut best: Option<(Rank, GroupId, PageId)> = None;
        for at in 0..self.slab_of(group).groups.len() {
            let other = self.slab_of(group).groups[at];
            if other == group {
                continue;
            }
            let least = best.map(|(rank, ..)| rank);
            match self.pool_mut(other).first_parked() {
                Some((huge, None)) => return Victim::Parked(other, huge),
                Some((huge, Some(rank))) if least.is_none_or(|least| rank < least) => {
                    best = Some((rank, other, huge));
                }
                _ => {}
            }
        }
        match best {
            Some((rank, other, huge)) if own.is_none_or(|own| rank < own) => Victim::Parked(other, huge),
            best => Victim::Own(best.map(|(rank, ..)| rank)),
        }
    }
}
