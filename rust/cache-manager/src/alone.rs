//! A request that is alone: what it leaves cached and what it could go on from must not be what keeps it out.
//!
//! Where groups share a slab, the pages of one may be spread over so many huge pages that the others do not find room
//! beside them, though nobody uses most of these pages. No other request is going to make room then. So a request that
//! is alone does with a shorter hit, or none, rather than be refused: a hit claims pages where they lie. If it is refused
//! for what it holds, it goes on from nothing when it comes back from preemption. And when room is short, its windows go
//! on in huge pages that they have, over what they left there, rather than open new ones.

use crate::error::LedgerError;
use crate::groups::GroupKind;
use crate::ledger::Ledger;
use crate::planning::Scratch;
use crate::slots::SlotId;
use crate::tiers::Loads;
use block_pool::{GroupId, PageId};

impl Ledger {
    /// [`Ledger::plan`], where a request that is alone and does not fit goes on from less than was found.
    pub(crate) fn plan_room(
        &mut self,
        batch: &[SlotId],
        num_tokens: &[u32],
        loads: &mut Loads<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), LedgerError> {
        scratch.most_found = None;
        scratch.alone = self.config.huge_pages.is_some() && batch.len() == 1 && self.is_alone(batch[0]);
        if !scratch.alone {
            return self.plan(batch, num_tokens, loads, scratch);
        }
        let sequence = self.sequence(batch[0])?;
        if sequence.len() <= sequence.refused_alone {
            scratch.most_found = Some(sequence.nodes.len()); // it would come to where it was refused
        }
        match self.plan(batch, num_tokens, loads, scratch) {
            Err(refused @ LedgerError::InsufficientBlocks { .. }) => {
                self.plan_with_less(batch[0], num_tokens, loads, scratch, refused)
            }
            outcome => outcome,
        }
    }

    #[cold]
    fn plan_with_less(
        &mut self,
        slot: SlotId,
        num_tokens: &[u32],
        loads: &mut Loads<'_>,
        scratch: &mut Scratch,
        refused: LedgerError,
    ) -> Result<(), LedgerError> {
        while let Some(found) = scratch.plans.first().map(|plan| plan.hit.blocks()).filter(|&found| found > 0)
        {
            scratch.most_found = Some(self.sequence(slot)?.nodes.len() + found / 2);
            match self.plan(&[slot], num_tokens, loads, scratch) {
                Err(LedgerError::InsufficientBlocks { .. }) => {}
                outcome => return outcome,
            }
        }
        Err(refused)
    }

    /// A planned batch was refused for want of room: a request that is alone goes on from nothing when it comes back.
    pub(crate) fn remember_refusal(&mut self, batch: &[SlotId], scratch: &Scratch) {
        if let Some(sequence) =
            batch.first().and_then(|&slot| self.slots.get_mut(slot)).filter(|_| scratch.alone)
        {
            sequence.refused_alone = sequence.len();
        }
    }

    /// Whether nobody else holds a page.
    fn is_alone(&self, slot: SlotId) -> bool {
        self.slots.get(slot).is_some_and(|sequence| {
            let own = |group| sequence.row(group).held().count();
            self.config.group_ids().all(|group| self.pools[group].held() as usize == own(group))
        })
    }

    /// Before a window of a request that is alone takes `count` pages: if huge pages run short while the window moves on
    /// once, those that nobody uses beside the pages that it holds go first, from the newest page on.
    pub(crate) fn spare_huge_pages(&mut self, slot: SlotId, group: GroupId, count: u32) {
        let moves = matches!(self.config.kind(group), GroupKind::Window { .. } | GroupKind::Chunked { .. });
        let Some(sequence) = self.slots.get(slot).filter(|_| moves) else { return };
        let row = sequence.row(group);
        let moving = &row.pages[(row.from as usize).min(row.pages.len())..];
        let open = self.pools.free_huge_pages(self.pools.slab_of(group));
        if open as usize > moving.len() + count as usize {
            return;
        }
        for &page in moving.iter().rev().filter(|&&page| page != PageId::NULL) {
            for idle in self.pools.idle_beside(group, page) {
                if self.spare.len() < count as usize && !self.spare.contains(&idle) {
                    self.spare.push(idle);
                }
            }
        }
    }
}
