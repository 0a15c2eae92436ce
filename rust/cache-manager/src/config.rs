//! What a ledger is told at the start.

use crate::drafts::slack;
use crate::groups::{Group, GroupKind};
use crate::write_policy::WritePolicy;
use block_hash::Algo;
use block_pool::{EvictionPolicy, GroupId, Member, Pool, Pools, Priority, Room, ShapeError, SlabShape};
use smallvec::SmallVec;

#[cfg(test)]
mod tests;

/// What happens when a sequence publishes a block that another sequence published before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnDuplicate {
    /// The sequence takes over the stored page and gives up its own; its row changes.
    Adopt,
    /// The sequence keeps its own page, unpublished: publishing never changes its row.
    Private,
}

/// How many pages the first chunk of a prompt takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reserve {
    /// What the chunk needs.
    Chunk,
    /// What the whole prompt needs.
    Prompt,
}

/// Settings of a [`Ledger`](crate::Ledger).
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent settings")]
pub struct LedgerConfig {
    /// Tokens a page.
    pub page_size: u32,
    /// How each group of layers keeps its KV, and in how many pages; at least one.
    pub groups: Vec<Group>,
    /// Usable huge pages of the slab that all groups share; `None` if each has pages of its own.
    pub huge_pages: Option<u32>,
    /// Requests that the shared slab was planned for.
    pub expected: Expected,
    /// Whether blocks are hashed, published and found.
    pub prefix_caching: bool,
    /// Whether a request may go on from the tokens at the start of a block that its prompt has too, where it has not
    /// all of them.
    pub partial_reuse: bool,
    /// Whether such a block is copied; if not, its page is taken over where nobody uses the block.
    pub copy_on_partial_reuse: bool,
    /// Whether the block that a request has not filled is stored when the request gives its pages back.
    pub store_partial_tails: bool,
    /// Block hash.
    pub algo: Algo,
    /// 32 bytes that separate the hashes of installations.
    pub seed: Option<[u8; 32]>,
    /// What happens to twins.
    pub on_duplicate: OnDuplicate,
    /// How much the first chunk of a prompt takes.
    pub reserve: Reserve,
    /// Which cached page of a priority goes first.
    pub policy: EvictionPolicy,
    /// Retention priority of every page.
    pub priority: Priority,
    /// Most tokens a request may have, prompt and output; `None`: as many as the pool holds.
    pub max_seq_len: Option<u32>,
    /// Most tokens of one request that one forward computes; `None`: no limit.
    pub max_num_input_tokens: Option<u32>,
    /// Which blocks are copied to other tiers, and when.
    pub write_policy: WritePolicy,
    /// Most events kept for whoever reads them; 0 records none.
    pub event_buffer_max_size: u32,
}

/// Equal requests, of which so many are to fit at any time.
#[derive(Clone, Default, Debug)]
pub struct Expected {
    /// As many as this, or as there is room for.
    pub requests: u32,
    /// Pages of each group that one holds at most; empty if no request is expected.
    pub pages: Vec<u32>,
}

impl Expected {
    /// How many have room in a slab of this `capacity` with nothing in use.
    pub(crate) fn that_fit(&self, capacity: &Room) -> u32 {
        most_that_fit(self.requests, |requests| {
            let pages = self.pages.iter().map(|pages| pages.saturating_mul(requests));
            capacity.can_satisfy(&pages.collect::<SmallVec<[u32; 4]>>())
        })
    }
}

impl LedgerConfig {
    /// What most want: one group of full attention, prefixes shared by `ahash64` without a seed, LRU, no limits but
    /// the pool's, no events.
    pub fn new(page_size: u32, pages: u32) -> LedgerConfig {
        LedgerConfig {
            page_size,
            groups: vec![Group { kind: GroupKind::Full, pages }],
            huge_pages: None,
            expected: Expected::default(),
            prefix_caching: true,
            partial_reuse: true,
            copy_on_partial_reuse: true,
            store_partial_tails: true,
            algo: Algo::AHash64,
            seed: None,
            on_duplicate: OnDuplicate::Adopt,
            reserve: Reserve::Chunk,
            policy: EvictionPolicy::PriorityLru,
            priority: Priority::DEFAULT,
            max_seq_len: None,
            max_num_input_tokens: None,
            write_policy: WritePolicy::WriteThrough,
            event_buffer_max_size: 0,
        }
    }

    /// Whether parts of blocks are found: not beside states, which are those of the end of a block alone.
    #[inline]
    pub(crate) fn reuses_partly(&self) -> bool {
        self.prefix_caching && self.partial_reuse && !self.has_recurrent()
    }

    /// The groups whose pages are blocks.
    #[inline]
    pub(crate) fn of_blocks(&self) -> impl DoubleEndedIterator<Item = GroupId> + '_ {
        self.group_ids().filter(|&group| self.kind(group).has_blocks())
    }

    /// The first of them, by which parts of blocks are found.
    pub(crate) fn first_of_blocks(&self) -> GroupId {
        self.of_blocks().next().unwrap_or(GroupId::FIRST)
    }

    /// Most blocks that one request may have whose decode steps verify so many drafts.
    pub fn max_blocks_per_request(&self, drafts: u32) -> u32 {
        let whole = self.groups.iter().filter(|group| !group.kind.forgets());
        let huge_pages = self.huge_pages.unwrap_or(1);
        let room = whole.map(|group| huge_pages * group.pages).min().unwrap_or(Pool::MAX_PAGES);
        let asked =
            self.max_seq_len.map(|tokens| tokens.saturating_add(slack(drafts)).div_ceil(self.page_size));
        asked.map_or(room, |blocks| blocks.min(room))
    }

    /// Most blocks of a request that is alone and plain, where groups share a slab of this `capacity`: each
    /// group then has what it needs while two tokens are computed.
    pub(crate) fn most_blocks_alone(&self, capacity: &Room) -> u32 {
        let page_size = self.page_size;
        most_that_fit(self.max_blocks_per_request(0), |blocks| {
            let tokens = blocks.saturating_mul(page_size);
            let held = |group: &Group| match group.kind {
                GroupKind::Full => blocks,
                GroupKind::Recurrent(_) => group.kind.most_states(),
                GroupKind::Scratch | GroupKind::Cross => 1,
                kind @ (GroupKind::Window { .. } | GroupKind::Chunked { .. }) => {
                    let mut most = kind.held(tokens - 1, tokens, page_size);
                    kind.fullest(0, tokens.saturating_sub(2), page_size, |start| {
                        most = most.max(kind.held(start, tokens.min(start + 2), page_size));
                    });
                    most
                }
            };
            capacity.can_satisfy(&self.groups.iter().map(held).collect::<SmallVec<[u32; 4]>>())
        })
    }

    /// Whether the groups' pages can be numbered.
    ///
    /// # Errors
    /// Page ids over an int32.
    pub fn check_pools(&self) -> Result<(), ShapeError> {
        match self.huge_pages {
            Some(huge_pages) => self.slab(huge_pages).check(),
            None => Ok(()), // as `Group::pages` says
        }
    }

    fn slab(&self, huge_pages: u32) -> SlabShape {
        let member = |(group, ratio)| Member { group, ratio, policy: self.policy };
        let ratios = self.groups.iter().map(|group| group.pages);
        SlabShape { huge_pages, members: self.group_ids().zip(ratios).map(member).collect() }
    }

    /// The pools of the groups.
    ///
    /// # Errors
    /// Page ids over an int32.
    pub(crate) fn pools(&self) -> Result<Pools, ShapeError> {
        let Some(huge_pages) = self.huge_pages else {
            let pool = |group: &Group| Pool::new(group.pages, self.policy, self.priority);
            return Ok(Pools::apart(self.groups.iter().map(pool).collect()));
        };
        Pools::new(&[self.slab(huge_pages)], self.priority)
    }

    /// The groups' numbers.
    pub(crate) fn group_ids(&self) -> impl DoubleEndedIterator<Item = GroupId> + use<> {
        (0..self.groups.len()).map(|group| GroupId(group as u8))
    }

    /// Which blocks each group needs.
    pub(crate) fn kinds(&self) -> SmallVec<[GroupKind; 4]> {
        self.groups.iter().map(|group| group.kind).collect()
    }

    /// Which blocks a group needs.
    #[inline]
    pub(crate) fn kind(&self, group: GroupId) -> GroupKind {
        self.groups[group.index()].kind
    }

    /// Whether a group keeps states, of which nothing but a snapshot can be gone on from.
    pub fn has_recurrent(&self) -> bool {
        self.groups.iter().any(|group| group.kind.is_recurrent())
    }

    /// Whether a group reads what an encoder made.
    pub(crate) fn has_cross(&self) -> bool {
        self.groups.iter().any(|group| group.kind == GroupKind::Cross)
    }

    /// Tokens at whose multiples every group with states keeps a snapshot; 0 without such groups, or if one keeps none
    /// on the way.
    pub fn chunk_alignment(&self) -> u32 {
        let interval = |group: &Group| match group.kind {
            GroupKind::Recurrent(snapshots) => Some(snapshots.interval),
            _ => None,
        };
        self.groups.iter().filter_map(interval).reduce(common_multiple).unwrap_or(0)
    }

    /// The only group, if it keeps everything: most ledgers have one like this.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.groups.len() == 1 && !self.groups[0].kind.forgets()
    }

    /// The group whose blocks stand for the cache's when others are told of it: the first that keeps everything, or
    /// else the first with blocks.
    pub(crate) fn lead(&self) -> GroupId {
        let kinds = || self.groups.iter().map(|group| group.kind);
        let lead =
            kinds().position(|kind| !kind.forgets()).or_else(|| kinds().position(|kind| !kind.lasts()));
        GroupId(lead.unwrap_or(0) as u8)
    }
}

/// The largest number up to `most` that fits, if all smaller ones fit; 0 if none does.
fn most_that_fit(most: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut fit, mut do_not) = (0, most.saturating_add(1));
    while fit + 1 < do_not {
        let middle = fit.midpoint(do_not);
        *(if fits(middle) { &mut fit } else { &mut do_not }) = middle;
    }
    fit
}

/// The least common multiple of two numbers; 0 if one of them is 0 or it is over a u32.
fn common_multiple(a: u32, b: u32) -> u32 {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a.checked_div(divisor).and_then(|part| part.checked_mul(b)).unwrap_or(0)
}
