//! The pools of a replica, one a group, and the slabs that they lie in.

use crate::ids::{GroupId, PageId, Priority};
use crate::pool::Pool;
use crate::room::{GroupRoom, Room, huge_needed};
use crate::slab::{ShapeError, Slab, SlabShape};
use crate::verify::{GroupFault, PageFault};
use std::hash::{Hash, Hasher};
use std::ops::{Index, IndexMut};

/// Every group's pages.
///
/// Groups may share a slab. It is cut into huge pages, and each of these is cut into pages of the one group that has
/// claimed it. A group keeps what it has claimed until another takes it away, which can be while none of its pages is
/// in use; what is cached there stays usable until then.
pub struct Pools {
    groups: Vec<Pool>,
    slabs: Vec<Slab>,
    /// The slab of each group.
    homes: Vec<usize>,
}

impl Pools {
    /// Pools of groups that share no memory, in the order of their groups.
    pub fn apart(pools: Vec<Pool>) -> Pools {
        let slab = |(group, pool): (usize, &Pool)| Slab {
            groups: vec![GroupId(group as u8)],
            huge_pages: pool.total(),
            claimed: 0,
        };
        let slabs = pools.iter().enumerate().map(slab).collect();
        Pools { homes: (0..pools.len()).collect(), slabs, groups: pools }
    }

    /// Pools in slabs. Pages whose retention ends fall back to `default_priority`.
    ///
    /// # Errors
    /// [`ShapeError`] for groups that are not 0, 1, 2 …, each in one slab; for a ratio of 0; for page ids over an
    /// int32.
    pub fn new(shapes: &[SlabShape], default_priority: Priority) -> Result<Pools, ShapeError> {
        SlabShape::check_all(shapes)?;
        let mut pools = Vec::new();
        let mut slabs = Vec::new();
        for (at, shape) in shapes.iter().enumerate() {
            let mut huge_pages = shape.huge_pages;
            for &member in &shape.members {
                let pool = if shape.members.len() == 1 {
                    huge_pages *= member.ratio;
                    Pool::new(huge_pages, member.policy, default_priority)
                } else {
                    Pool::shared(huge_pages, member.ratio, member.policy, default_priority)
                };
                pools.push((member.group, at, pool));
            }
            let groups = shape.members.iter().map(|member| member.group).collect();
            slabs.push(Slab { groups, huge_pages, claimed: 0 });
        }
        pools.sort_by_key(|&(group, ..)| group);
        let (homes, groups) = pools.into_iter().map(|(_, slab, pool)| (slab, pool)).unzip();
        Ok(Pools { groups, slabs, homes })
    }

    /// The groups, in order.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = GroupId> + use<> {
        (0..self.groups.len()).map(|group| GroupId(group as u8))
    }

    /// The slabs, in the order in which they were given.
    pub fn slabs(&self) -> &[Slab] {
        &self.slabs
    }

    /// The slab that the pages of `group` lie in.
    pub fn slab_of(&self, group: GroupId) -> &Slab {
        &self.slabs[self.homes[usize::from(group.0)]]
    }

    pub(crate) fn slab_of_mut(&mut self, group: GroupId) -> &mut Slab {
        &mut self.slabs[self.homes[usize::from(group.0)]]
    }

    /// Huge pages of `slab` that any of its groups can have: never claimed, or without a page in use, cached or
    /// not. Of a group that is alone, its available pages.
    pub fn free_huge_pages(&self, slab: &Slab) -> u32 {
        match slab.groups[..] {
            [group] => self[group].available(),
            _ => self.open_to_all(slab),
        }
    }

    /// Huge pages of `slab` that no group ever claimed; of a group that is alone, its pages never handed out.
    pub fn pristine_huge_pages(&self, slab: &Slab) -> u32 {
        match slab.groups[..] {
            [group] => self[group].pristine(),
            _ => slab.huge_pages - slab.claimed,
        }
    }

    /// Huge pages of `slab` that any of its groups can have; none of a slab that nobody shares.
    pub(crate) fn open_to_all(&self, slab: &Slab) -> u32 {
        if !slab.is_shared() {
            return 0;
        }
        let parked: u32 = slab.groups.iter().map(|&group| self[group].parked()).sum();
        slab.huge_pages - slab.claimed + parked
    }

    /// Pages that `group` can have if no other takes any.
    pub fn available(&self, group: GroupId) -> u32 {
        let pool = &self[group];
        pool.own_room() + self.open_to_all(self.slab_of(group)) * pool.ratio()
    }

    /// Whether `demand[g]` pages of each group `g` can be had together, by taking from the slabs what nobody uses,
    /// cached or not. Exact: [`Pools::take_many`] then hands them out. A group that `demand` does not name demands
    /// none.
    pub fn can_satisfy(&self, demand: &[u32]) -> bool {
        let needed = |slab: &Slab| -> u64 {
            let demanded = |group: &GroupId| demand.get(usize::from(group.0)).map(|&demand| (*group, demand));
            let needed = |(group, demand): (GroupId, u32)| {
                huge_needed(demand.into(), self[group].own_room(), self[group].ratio())
            };
            slab.groups.iter().filter_map(demanded).map(needed).sum()
        };
        self.slabs.iter().all(|slab| needed(slab) <= self.open_to_all(slab).into())
    }

    /// The room that there is, to plan with.
    pub fn room(&self) -> Room {
        self.room_of(Pool::own_room, |slab| self.open_to_all(slab))
    }

    /// The room that there is when nothing is in use.
    pub fn capacity(&self) -> Room {
        let own = |pool: &Pool| if pool.is_shared() { 0 } else { pool.total() };
        self.room_of(own, |slab| if slab.is_shared() { slab.huge_pages } else { 0 })
    }

    fn room_of(&self, own: impl Fn(&Pool) -> u32, huge: impl Fn(&Slab) -> u32) -> Room {
        let group = |(pool, &slab): (&Pool, &usize)| GroupRoom { slab, ratio: pool.ratio(), own: own(pool) };
        Room::new(
            self.groups.iter().zip(&self.homes).map(group).collect(),
            self.slabs.iter().map(huge).collect(),
        )
    }

    /// Checks every pool, and that each huge page of a shared slab is one group's, or nobody's.
    ///
    /// # Errors
    /// The first page that breaks the books.
    pub fn verify(&self) -> Result<(), GroupFault> {
        for group in self.groups() {
            self[group].verify().map_err(|fault| GroupFault { group, fault })?;
        }
        for slab in self.slabs.iter().filter(|slab| slab.is_shared()) {
            let known = slab.groups.iter().filter_map(|&group| self[group].book.as_ref());
            let last = known.map(|book| book.last().0).fold(slab.claimed, u32::max);
            for huge in (0..=last).map(PageId) {
                let owners = slab.groups.iter().filter(|&&group| self[group].owns(huge));
                let expected = usize::from(huge != PageId::NULL && huge.0 <= slab.claimed);
                if owners.clone().count() != expected {
                    let owners: Vec<u8> = owners.map(|group| group.0).collect();
                    let what = format!("huge page {} is claimed by the groups {owners:?}", huge.0);
                    let group = slab.groups[0];
                    let page = PageId(huge.0 * self[group].ratio());
                    return Err(GroupFault { group, fault: PageFault::new(page, what) });
                }
            }
        }
        Ok(())
    }

    /// Feeds the whole state, list orders included, to `hasher`; planning marks are left out.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        self.groups.iter().for_each(|pool| pool.fingerprint(hasher));
        for slab in &self.slabs {
            (slab.claimed, self.clock(slab)).hash(hasher);
        }
    }

    /// A pool that will stamp nothing.
    pub(crate) fn pool_mut(&mut self, group: GroupId) -> &mut Pool {
        &mut self.groups[usize::from(group.0)]
    }

    /// Newest stamp in a slab.
    fn clock(&self, slab: &Slab) -> u64 {
        slab.groups.iter().map(|&group| self[group].queues.clock()).max().unwrap_or(0)
    }
}

impl Index<GroupId> for Pools {
    type Output = Pool;

    #[inline]
    fn index(&self, group: GroupId) -> &Pool {
        &self.groups[group.index()]
    }
}

impl IndexMut<GroupId> for Pools {
    /// A group that shares its slab goes on with the clock of whichever group's is latest: what it stamps is newer
    /// than what any other group of the slab stamped before.
    #[inline]
    fn index_mut(&mut self, group: GroupId) -> &mut Pool {
        if self[group].is_shared() {
            let clock = self.clock(self.slab_of(group));
            self.groups[group.index()].queues.advance(clock);
        }
        &mut self.groups[group.index()]
    }
}
