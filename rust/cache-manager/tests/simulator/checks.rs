//! What must hold after every call, when copies end, and at the end of a run.

use crate::engine::Engine;
use crate::live::Live;
use cache_manager::{CopyEnd, LedgerError, SlotId};

impl Engine {
    /// The books of ledger and index, the bytes in the tier, and pages that are being copied.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        if let Some(fault) = self.tier.fault.take() {
            return Err(fault);
        }
        self.start_over();
        self.ledger.verify().map_err(|fault| format!("ledger: {fault}"))?;
        self.tier.check(&self.ledger)?;
        for live in &self.live {
            if self.ledger.tokens(live.slot).ok() != Some(&live.log[..live.known]) {
                return Err(format!("slot {} lost its tokens", live.slot.0));
            }
            let row = self.ledger.pages(live.slot).map_err(|error| error.to_string())?;
            let loads = self.tier.mover.loads();
            if let Some(page) = loads.flat_map(|job| &job.pages).find(|page| row.contains(page)) {
                return Err(format!("{page} is in the row of slot {} while a load writes it", live.slot.0));
            }
            if live.loading.as_ref().is_some_and(|load| !self.ledger.is_copying(load.copy)) {
                return Err(format!("slot {} waits for a load that is over", live.slot.0));
            }
        }
        Ok(())
    }

    /// Tells the ledger what has ended. Exactly those who waited for it go on: where the load brought them, or where
    /// they were.
    pub(crate) fn settle(&mut self) -> Result<(), String> {
        let settled = self.ledger.settle_from(&mut self.tier);
        let told = std::mem::take(&mut self.tier.told);
        self.note(|| format!("settle {told:?}: {settled:?}"));
        let ready = settled.map_err(|error| format!("settle: {error}"))?;
        let mut expected = Vec::new();
        for &(copy, end) in &told {
            let waits = |live: &&mut Live| live.loading.as_ref().is_some_and(|it| it.copy == copy);
            let Some(live) = self.live.iter_mut().find(waits) else { continue };
            expected.push(live.slot);
            let Some(load) = live.loading.take() else { continue };
            if !load.completion.is_complete() {
                return Err(format!("copy {copy} has ended, and its handle does not say so"));
            }
            if end != CopyEnd::Done {
                live.load_failed = true;
                continue;
            }
            let page_size = self.ledger.config().page_size as usize;
            let position = self.ledger.position(live.slot).map_err(|error| error.to_string())?;
            let (end, len) = (position.processed as usize, load.pages.len() * page_size);
            let Some(right) = end.checked_sub(len).and_then(|start| live.kv.get(start..end)) else {
                return Err(format!("slot {} stands at {end} after a load of {len} tokens", live.slot.0));
            };
            let loaded = load.pages.iter().flat_map(|&page| self.tier.device.page(page));
            if loaded.ne(right) {
                return Err(format!("copy {copy} loaded other bytes than its blocks'"));
            }
        }
        if ready == expected { Ok(()) } else { Err(format!("{ready:?} are ready, not {expected:?}")) }
    }

    /// Everything in flight ends or is cancelled, every request is finished by itself, and all go. Then no page
    /// is held, no copy is in flight, and what was counted adds up.
    pub(crate) fn wind_up(&mut self) -> Result<(), String> {
        self.launch()?;
        self.offload()?;
        let time = if self.random.one_in(3) { self.random.below(200) as u64 } else { u64::MAX };
        self.tier.pass(time)?;
        self.note(|| "shut down".into());
        self.tier.shut_down();
        self.settle()?;
        self.tier.pass(u64::MAX)?;
        self.check()?;
        self.unpin_all()?;
        if self.ledger.copies_in_flight() > 0 || self.tier.index.in_flight() > 0 {
            return Err("copies are in flight after the shutdown".into());
        }
        for index in 0..self.live.len() {
            self.preempt_at(index)?;
        }
        self.start_over();
        while let Some(slot) = self.live.first().map(|live| live.slot) {
            self.finish(slot)?;
            self.check()?;
            self.release_slot(slot)?;
        }
        self.check()?;
        let slab = self.ledger.slab();
        if slab.available() != slab.total() || slab.in_flight() > 0 || self.ledger.pins() > 0 {
            return Err("pages are lost at the end".into());
        }
        self.add_up()
    }

    /// Computes what a request has left: with the pool to itself it needs nobody.
    fn finish(&mut self, slot: SlotId) -> Result<(), String> {
        let late = self.live[0].late.drain(..).count();
        for _ in 0..late {
            self.ledger.step(&[slot], &[], Some(&[0])).map_err(|error| format!("step: {error}"))?;
        }
        match self.ledger.alloc_from(&mut self.tier, &[slot], &[]) {
            Ok(begun) if begun.is_empty() => {}
            Ok(_) => return Err("a load begins after the shutdown".into()),
            // An empty request, or one that grew over the pool.
            Err(LedgerError::NothingToCompute { .. } | LedgerError::RequestTooLarge { .. }) => return Ok(()),
            Err(error) => return Err(format!("a request that has the pool to itself: {error}")),
        }
        self.live[0].planned = true;
        self.launch()?;
        self.tier.pass(u64::MAX)?;
        let live = &mut self.live[0];
        let Some(out) = live.out.pop_front() else { return Err("nothing was launched".into()) };
        live.known += out.sampled.len();
        let count = out.sampled.len() as u32;
        self.ledger
            .step(&[slot], &out.sampled, Some(&[count]))
            .and_then(|()| self.ledger.offload_to(&mut self.tier))
            .map_err(|error| format!("step: {error}"))
    }

    fn add_up(&self) -> Result<(), String> {
        let counters = self.ledger.counters();
        let ended = counters.copies_finished + counters.copies_failed + counters.copies_refused;
        if counters.copies_started != ended {
            return Err(format!("{} copies were started, {ended} have ended", counters.copies_started));
        }
        let index = self.tier.index.counters();
        let counted = (index.stored + index.unstored, index.loaded + index.unloaded);
        if counted != self.tier.blocks_begun {
            return Err(format!("{counted:?} blocks were counted, of {:?}", self.tier.blocks_begun));
        }
        Ok(())
    }
}
