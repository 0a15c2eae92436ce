//! Pages that requests take until they end, less those that they give back because others hold the same blocks.

use crate::blocks::Prefix;
use crate::config::OnDuplicate;
use crate::groups::GroupKind;
use crate::hits::Found;
use crate::ledger::{Ledger, parent_after};
use crate::needs::Next;
use crate::sequence::Sequence;
use block_pool::{GroupId, PageId};
use radix_tree::NodeId;
use smallvec::SmallVec;

/// Blocks that others have stored and that a request will compute all the same, since another group lacks what a hit
/// needs.
#[derive(Default)]
pub(crate) struct Twins(Vec<(u32, NodeId)>);

impl Twins {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Ledger {
    /// The twins of the blocks of a request that it has not stored, of the tokens that are known.
    pub(crate) fn twins_of(&mut self, next: &Next, found: &Found) -> Twins {
        let Some(sequence) = self.slots.get(next.slot) else { return Twins::default() };
        let page_size = self.config.page_size;
        // Who is set aside has no nodes: the walk is from the root.
        let nodes = if next.hit.is_empty() { &sequence.nodes[..] } else { found.nodes(&next.hit) };
        let parent = parent_after(sequence, nodes);
        let from = (sequence.nodes.len() as u32).max(next.hit_end);
        let arrival = next.back.as_ref().map_or_else(|| sequence.arrival(page_size), |back| back.processed);
        let first = if sequence.is_here() { from } else { arrival / page_size };
        let end = sequence.known() / page_size;
        let adopts = self.config.on_duplicate == OnDuplicate::Adopt && self.publishes(sequence);
        if first >= end || next.part.is_some() || next.forward.is_none() || !adopts {
            return Twins::default();
        }
        if let Some(sequence) = self.slots.get_mut(next.slot) {
            sequence.hash_known(page_size as usize);
        }
        let Some(sequence) = self.slots.get(next.slot) else { return Twins::default() };
        let prefix = Prefix {
            log: &sequence.tokens,
            keys: sequence.chain.keys(),
            extras: &sequence.extras,
            page_size: page_size as usize,
        };
        let mut stored = Vec::new();
        let blocks = from as usize..end as usize;
        prefix.walk_nodes(&self.tree, parent, blocks, &mut self.reader, &mut stored);
        Twins((from..).zip(stored).filter(|&(block, _)| block >= first).collect())
    }

    /// The blocks of a group that a request has a page of its own for until it is given back for the twin's, with that.
    pub(crate) fn adoptions<'a>(
        &'a self,
        sequence: &'a Sequence,
        twins: &'a Twins,
        group: GroupId,
    ) -> impl Iterator<Item = (u32, PageId)> + 'a {
        let pool = &self.pools[group];
        twins.0.iter().filter_map(move |&(block, node)| {
            let own = sequence.row(group).page(block as usize);
            let stored = self.tree.page(node, group).filter(|&stored| own != Some(stored))?;
            let shared = own.is_some_and(|own| !pool.is_unshared(own));
            (!shared || pool.refs(stored) > 0).then_some((block, stored))
        })
    }

    /// What is left of the pages that requests need in a group that keeps everything, once they have given back those of
    /// blocks that others hold. (If these others end before, their pages are free instead.)
    pub(crate) fn less_twins(
        &self,
        nexts: &[Next],
        twins: &[Twins],
        group: GroupId,
        two_steps: bool,
        mut needs: SmallVec<[u32; 4]>,
    ) -> SmallVec<[u32; 4]> {
        if twins.iter().all(Twins::is_empty) {
            return needs;
        }
        let idle = |(next, twins): (&Next, &Twins)| -> Vec<PageId> {
            let Some(sequence) = self.slots.get(next.slot) else { return Vec::new() };
            let stored = self.adoptions(sequence, twins, group).map(|(_, stored)| stored);
            stored.filter(|&stored| !self.is_held_then(group, stored)).collect()
        };
        // Pages that nobody holds are taken by the first who adopts them, and given back for by those who follow: as if
        // whoever saves the most by them were the first.
        let idle: SmallVec<[Vec<PageId>; 4]> = nexts.iter().zip(twins).map(idle).collect();
        let longest = idle.iter().max_by_key(|pages| pages.len());
        let common = |pages: &[PageId]| longest.map_or(0, |longest| shared_len(pages, longest));
        let mut most_saved = (0, 0);
        for (index, (next, twins)) in nexts.iter().zip(twins).enumerate() {
            let alone = self.less_held(next, twins, group, two_steps, needs[index], 0);
            let together = self.less_held(next, twins, group, two_steps, needs[index], common(&idle[index]));
            needs[index] = together;
            most_saved = most_saved.max((alone - together, index));
        }
        needs[most_saved.1] += most_saved.0;
        needs
    }

    /// Whether somebody holds a page, or a request of the batch will that is counted for it.
    fn is_held_then(&self, group: GroupId, page: PageId) -> bool {
        let pool = &self.pools[group];
        pool.refs(page) > 0 || pool.is_marked(page)
    }

    /// [`Ledger::less_twins`] of one request, where somebody else adopts the first so many of the pages that nobody holds.
    fn less_held(
        &self,
        next: &Next,
        twins: &Twins,
        group: GroupId,
        two_steps: bool,
        needed: u32,
        mut adopted_by_others: usize,
    ) -> u32 {
        let (Some(sequence), Some(forward)) = (self.slots.get(next.slot), next.forward) else {
            return needed;
        };
        let page_size = self.config.page_size;
        let beams = |tokens| sequence.for_other_beams(GroupKind::Full, forward.start, tokens, page_size);
        let pages = |tokens: u32| i64::from(tokens.div_ceil(page_size)) + i64::from(beams(tokens));
        let covered_next = self.covered_next(next, group, two_steps);
        let at_end = pages(self.covered_at_end(next, two_steps));
        // Most tokens of forwards that are out at one time, with their drafts.
        let drafts = 3 * sequence.drafts;
        let out = next.most.saturating_mul(1 + u32::from(two_steps)).saturating_add(drafts);
        let given = sequence.prompt_end.max(sequence.len()) + 1 + drafts;
        let computed = sequence.computed_then(two_steps);
        let (mut given_back, mut most) = (0, i64::MIN);
        for (block, stored) in self.adoptions(sequence, twins, group) {
            // When the blocks before this one are computed.
            let reach = ((block + 1) * page_size - 1).saturating_add(out).min(given);
            let reach = if block * page_size <= forward.start { reach.max(covered_next) } else { reach };
            let covered = pages(self.config.covered(GroupKind::Full, sequence, reach));
            if (block + 1) * page_size > computed {
                most = most.max(i64::from(needed) - (at_end - covered).max(0) - given_back);
            }
            // One that it has with others is not free when it lets go of it, and one that nobody holds is taken.
            let pool = &self.pools[group];
            let own = sequence.row(group).page(block as usize);
            let mut is_held = self.is_held_then(group, stored);
            if !is_held && adopted_by_others > 0 {
                (is_held, adopted_by_others) = (true, adopted_by_others - 1);
            }
            given_back += i64::from(is_held && own.is_none_or(|own| pool.is_unshared(own)));
        }
        u32::try_from(most.max(i64::from(needed) - given_back)).unwrap_or(0)
    }
}

/// How many pages are the same from the first on.
fn shared_len(one: &[PageId], other: &[PageId]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}
