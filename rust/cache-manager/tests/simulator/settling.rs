//! Copies end: whoever waited goes on, and the bytes are looked at.

use crate::engine::Engine;
use crate::live::{Live, Stage};
use crate::world::World;
use block_pool::PageId;
use cache_manager::{CopyEnd, SlotId};

/// What a request that waited for a copy is going to do.
enum Then {
    /// It waits on.
    Stays,
    GoesOn,
    Leaves,
}

impl<W: World> Engine<W> {
    /// Tells the ledger what has ended. Exactly those who waited for it go on: where the copy brought them, or where
    /// they were.
    pub(crate) fn settle(&mut self) -> Result<(), String> {
        let settled = self.ledger.settle_from(&mut self.world);
        let told = self.world.take_told();
        self.note(|| format!("settle {told:?}: {settled:?}"));
        let ready = settled.map_err(|error| format!("settle: {error}"))?;
        let (mut expected, mut leaving) = (Vec::new(), Vec::new());
        for &(copy, end) in &told {
            let waits = |live: &Live| live.awaited().is_some_and(|(awaited, _)| awaited == copy);
            let Some(index) = self.live.iter().position(waits) else { continue };
            if !self.live[index].awaited().is_some_and(|(_, completion)| completion.is_complete()) {
                return Err(format!("copy {copy} has ended, and its handle does not say so"));
            }
            let slot = self.live[index].slot;
            let loads = self.live[index].loading.is_some();
            match if loads { self.end_load(index, copy, end) } else { self.end_aside(index, end) }? {
                Then::Stays => {}
                Then::GoesOn => expected.push(slot),
                Then::Leaves => {
                    expected.push(slot);
                    leaving.push(slot);
                }
            }
        }
        if ready != expected {
            return Err(format!("{ready:?} are ready, not {expected:?}"));
        }
        leaving.into_iter().try_for_each(|slot| self.release_slot(slot))
    }

    fn end_load(&mut self, index: usize, copy: u64, end: CopyEnd) -> Result<Then, String> {
        let live = &mut self.live[index];
        let then = if live.prefetches { Then::Leaves } else { Then::GoesOn };
        let Some(load) = live.loading.take() else { return Ok(then) };
        if end != CopyEnd::Done {
            live.load_failed = true;
            return Ok(then);
        }
        let slot = live.slot;
        let (stands, len) = (self.stands(slot)?, load.pages.len() * self.ledger.config().page_size as usize);
        let live = &self.live[index];
        let Some(right) = stands.checked_sub(len).and_then(|start| live.kv.get(start..stands)) else {
            return Err(format!("slot {} stands at {stands} after a load of {len} tokens", slot.0));
        };
        if !self.hold(&load.pages, right) {
            return Err(format!("copy {copy} loaded other bytes than its blocks'"));
        }
        self.prefetched += if matches!(then, Then::Leaves) { load.pages.len() as u64 } else { 0 };
        Ok(then)
    }

    fn end_aside(&mut self, index: usize, end: CopyEnd) -> Result<Then, String> {
        let live = &mut self.live[index];
        let Some(mut aside) = live.aside.take() else { return Ok(Then::Stays) };
        if end != CopyEnd::Done {
            return Ok(Then::GoesOn); // from the start
        }
        if aside.stage == Stage::Leaving {
            aside.stage = Stage::Away;
            live.aside = Some(aside);
            return Ok(Then::Stays);
        }
        let (slot, right) = (live.slot, &self.live[index].kv[..aside.processed]);
        let stands = self.stands(slot)?;
        // Further where others stored more of its prompt.
        if stands < aside.processed {
            return Err(format!("slot {} comes back to {stands}, not {}", slot.0, aside.processed));
        }
        // Some blocks were stored and are not copied, and in its row may be twins, which are computed later.
        let page_size = self.ledger.config().page_size as usize;
        let mut blocks = right.chunks(page_size);
        if !aside.copy.pages.iter().all(|&page| blocks.any(|block| self.hold(&[page], block))) {
            return Err(format!("slot {} comes back with other bytes than its blocks'", slot.0));
        }
        Ok(Then::GoesOn)
    }

    /// How many tokens of the request have KV.
    pub(crate) fn stands(&self, slot: SlotId) -> Result<usize, String> {
        let position = self.ledger.position(slot).map_err(|error| error.to_string())?;
        Ok(position.processed as usize)
    }

    /// Whether pages begin with this KV.
    fn hold(&self, pages: &[PageId], kv: &[u64]) -> bool {
        let mut cells = pages.iter().flat_map(|&page| self.world.device().page(page));
        kv.iter().all(|right| cells.next() == Some(right))
    }
}
