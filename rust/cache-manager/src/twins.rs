//! Pages that requests take until they end, less those that they give back because others hold the same blocks.

use crate::blocks::Prefix;
use crate::config::OnDuplicate;
use crate::groups::GroupKind;
use crate::hits::Found;
use crate::ledger::{Ledger, parent_after};
use crate::needs::Next;
use block_pool::{GroupId, PageId};

impl Ledger {
    /// What is left of the `needed` pages of a group that keeps everything, since a request gives back pages of blocks
    /// that others hold, once it has computed them. (It does where another group lacks what a hit needs.) If these
    /// others end before, their pages are free instead.
    pub(crate) fn less_twins(
        &mut self,
        next: &Next,
        found: &Found,
        group: GroupId,
        two_steps: bool,
        needed: u32,
    ) -> u32 {
        let covered_next = self.covered_next(next, group, two_steps);
        let (Some(sequence), Some(forward)) = (self.slots.get(next.slot), next.forward) else {
            return needed;
        };
        let page_size = self.config.page_size;
        // Who is set aside has no nodes: the walk is from the root.
        let nodes = if next.hit.is_empty() { &sequence.nodes[..] } else { found.nodes(&next.hit) };
        let parent = parent_after(sequence, nodes);
        let from = (sequence.nodes.len() as u32).max(next.hit_end);
        let arrival = next.back.as_ref().map_or_else(|| sequence.arrival(page_size), |back| back.processed);
        let first = if sequence.is_here() { from } else { arrival / page_size };
        let end = sequence.known() / page_size;
        // In a shared slab it adopts no page that opens a huge one.
        let adopts = self.config.on_duplicate == OnDuplicate::Adopt
            && self.config.huge_pages.is_none()
            && self.publishes(sequence);
        if first >= end || next.part.is_some() || !adopts {
            return needed;
        }
        if let Some(sequence) = self.slots.get_mut(next.slot) {
            sequence.hash_known(page_size as usize);
        }
        let Some(sequence) = self.slots.get(next.slot) else { return needed };
        let prefix = Prefix {
            log: &sequence.tokens,
            keys: sequence.chain.keys(),
            extras: &sequence.extras,
            page_size: page_size as usize,
        };
        let mut stored = Vec::new();
        let blocks = from as usize..end as usize;
        prefix.walk_nodes(&self.tree, parent, blocks, &mut self.reader, &mut stored);

        let beams = |tokens| sequence.for_other_beams(GroupKind::Full, forward.start, tokens, page_size);
        let pages = |tokens: u32| i64::from(tokens.div_ceil(page_size)) + i64::from(beams(tokens));
        let at_end = pages(self.covered_at_end(next, two_steps));
        // Most tokens of forwards that are out at one time, with their drafts.
        let drafts = 3 * sequence.drafts;
        let out = next.most.saturating_mul(1 + u32::from(two_steps)).saturating_add(drafts);
        let given = sequence.prompt_end.max(sequence.len()) + 1 + drafts;
        // So much is computed when the next forward is planned.
        let steps = 1 + usize::from(two_steps);
        let delivered = sequence.steps_out.len().checked_sub(steps);
        let computed = delivered.map_or(0, |last| sequence.steps_out[last].end);
        let (mut twins, mut most) = (0, i64::MIN);
        for (block, &node) in (from..).zip(&stored).filter(|&(block, _)| block >= first) {
            // When the blocks before this one are computed.
            let reach = ((block + 1) * page_size - 1).saturating_add(out).min(given);
            let reach = if block * page_size <= forward.start { reach.max(covered_next) } else { reach };
            let covered = pages(self.config.covered(GroupKind::Full, sequence, reach));
            if (block + 1) * page_size > computed {
                most = most.max(i64::from(needed) - (at_end - covered).max(0) - twins);
            }
            let (page, stored) = (sequence.row(group).page(block as usize), self.tree.page(node, group));
            let Some(stored) = stored.filter(|&stored| page != Some(stored)) else { continue };
            // One that it has with others is not free when it lets go of it, and one that nobody holds is taken.
            let pool = &self.pools[group];
            let alone = |page: PageId| pool.refs(page) == 1 && pool.pins(page) == 0;
            twins += i64::from(page.is_none_or(alone)) - i64::from(pool.refs(stored) == 0);
        }
        u32::try_from(most.max(i64::from(needed) - twins)).unwrap_or(0)
    }
}
