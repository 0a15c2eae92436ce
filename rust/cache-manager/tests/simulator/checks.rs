//! What must hold after every call and at the end of a run.

use crate::engine::Engine;
use crate::live::{Aside, Live, Stage};
use crate::world::World;
use block_pool::{GroupId, PageId};
use cache_manager::{LedgerError, SlotId};
use tiered_connector::job::Direction;

impl<W: World> Engine<W> {
    /// The books of ledger and tier, the bytes in the tier, and pages that are being copied.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        self.start_over();
        self.ledger.free_units(&mut self.world);
        self.ledger.verify().map_err(|fault| format!("ledger: {fault}"))?;
        self.world.check(&self.ledger)?;
        let (units, held) = (self.world.private_units(), self.ledger.units_held());
        let held: Vec<_> = held.into_iter().map(|(_, unit)| unit).collect();
        if units != held {
            return Err(format!("private units are {units:?}, requests hold {held:?}"));
        }
        let copied = self.world.copied_pages();
        self.live.iter().try_for_each(|live| self.check_one(live, &copied))
    }

    fn check_one(&self, live: &Live, copied: &[(Direction, PageId)]) -> Result<(), String> {
        let slot = live.slot;
        if self.ledger.tokens(slot).ok() != Some(&live.log[..live.known]) {
            return Err(format!("slot {} lost its tokens", slot.0));
        }
        let row = self.ledger.pages(slot, GroupId::FIRST).map_err(|error| error.to_string())?;
        if let Some((_, page)) =
            copied.iter().find(|(way, page)| *way == Direction::Load && row.contains(page))
        {
            return Err(format!("{page} is in the row of slot {} while a load writes it", slot.0));
        }
        if live.awaited().is_some_and(|(copy, _)| !self.ledger.is_copying(copy)) {
            return Err(format!("slot {} waits for a copy that is over", slot.0));
        }
        match &live.aside {
            Some(Aside { stage: Stage::Away, copy, processed, .. }) => {
                self.world.check_away(copy.id.0, &live.kv[..*processed])
            }
            _ => Ok(()),
        }
    }

    /// Everything in flight ends or is cancelled, every request is finished by itself, and all go. Then no page
    /// is held, no copy is in flight, and what was counted adds up.
    pub(crate) fn wind_up(&mut self) -> Result<(), String> {
        self.launch()?;
        self.offload()?;
        let time = if self.random.one_in(3) { self.random.below(200) as u64 } else { u64::MAX };
        self.world.pass(time)?;
        self.note(|| "shut down".into());
        self.world.shut_down();
        self.settle()?;
        self.world.pass(u64::MAX)?;
        self.check()?;
        self.unpin_all()?;
        if self.ledger.copies_in_flight() > 0 {
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
        let pool = self.ledger.pool();
        if pool.available() != pool.total() || pool.in_flight() > 0 || self.ledger.pins() > 0 {
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
        match self.ledger.alloc_from(&mut self.world, &[slot], &[], false) {
            Ok(begun) if begun.is_empty() => {}
            Ok(_) => return Err("a load begins after the shutdown".into()),
            // An empty request, or one that grew over the pool.
            Err(LedgerError::NothingToCompute { .. } | LedgerError::RequestTooLarge { .. }) => return Ok(()),
            Err(error) => return Err(format!("a request that has the pool to itself: {error}")),
        }
        self.live[0].planned = true;
        self.launch()?;
        self.world.pass(u64::MAX)?;
        let live = &mut self.live[0];
        let Some(out) = live.out.pop_front() else { return Err("nothing was launched".into()) };
        live.known += out.sampled.len();
        let count = out.sampled.len() as u32;
        self.ledger
            .step(&[slot], &out.sampled, Some(&[count]))
            .and_then(|()| self.ledger.offload_to(&mut self.world))
            .map_err(|error| format!("step: {error}"))
    }

    fn add_up(&self) -> Result<(), String> {
        let counters = self.ledger.counters();
        let ended = counters.copies_finished + counters.copies_failed + counters.copies_refused;
        if counters.copies_started != ended {
            return Err(format!("{} copies were started, {ended} have ended", counters.copies_started));
        }
        self.world.check_end()
    }
}
