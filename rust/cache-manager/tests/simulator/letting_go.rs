//! Ways to give pages back, and to forget what is stored.

use crate::engine::Engine;
use crate::kv::request;
use crate::live::Live;
use crate::world::World;
use block_hash::ExtraKeys;
use block_pool::GroupId;
use cache_manager::{NewSequence, PrefixQuery, SlotId};

impl<W: World> Engine<W> {
    pub(crate) fn truncate(&mut self) -> Result<(), String> {
        let Some(index) = self.pick_present() else { return Ok(()) };
        let live = &mut self.live[index];
        let len = self.random.below(live.known + 1);
        self.ledger.truncate(live.slot, len as u32).map_err(|error| format!("truncate: {error}"))?;
        // At its full length nothing is dropped, unless a token was on the way.
        let dropped = self.ledger.position(live.slot).is_ok_and(|position| position.active == 0);
        if len < live.known {
            live.loading = None;
        }
        if len < live.known || dropped {
            live.cut(len);
        }
        self.note(|| format!("truncate request {index} to {len}"));
        Ok(())
    }

    pub(crate) fn preempt(&mut self) -> Result<(), String> {
        self.pick().map_or(Ok(()), |index| self.preempt_at(index))
    }

    pub(crate) fn preempt_at(&mut self, index: usize) -> Result<(), String> {
        let live = &mut self.live[index];
        let slot = live.slot;
        live.cut(live.known);
        live.loading = None;
        live.aside = None;
        self.note(|| format!("preempt slot {}", slot.0));
        self.ledger.preempt(&[slot]).map_err(|error| format!("preempt: {error}"))
    }

    /// Spares most requests that are set aside: they are to come back.
    pub(crate) fn release(&mut self) -> Result<(), String> {
        let picked = if self.random.one_in(4) { self.pick() } else { self.pick_present() };
        picked.map_or(Ok(()), |index| self.release_slot(self.live[index].slot))
    }

    pub(crate) fn release_slot(&mut self, slot: SlotId) -> Result<(), String> {
        self.note(|| format!("release slot {}", slot.0));
        let index = self.find(slot);
        let mut live = self.live.swap_remove(index);
        self.ledger.release(&[slot]).map_err(|error| format!("release: {error}"))?;
        live.cut(0);
        if !live.late.is_empty() {
            self.orphans.push((slot, live.late));
        }
        Ok(())
    }

    pub(crate) fn pin(&mut self) -> Result<(), String> {
        if let Some(pin) = self.pins.pop() {
            self.note(|| "unpin".into());
            return self.ledger.unpin(pin).map_err(|error| format!("unpin: {error}"));
        }
        let Some(index) = self.pick_present() else { return Ok(()) };
        self.note(|| format!("pin request {index}"));
        self.pins.push(self.ledger.pin(self.live[index].slot).map_err(|error| format!("pin: {error}"))?);
        Ok(())
    }

    /// The device forgets what nobody uses, now and then after all that hold pages have gone; the tier keeps it.
    pub(crate) fn forget(&mut self) -> Result<(), String> {
        if self.random.one_in(3) {
            let present = self.live.iter().filter(|live| live.aside.is_none());
            let slots: Vec<SlotId> = present.map(|live| live.slot).collect();
            slots.into_iter().try_for_each(|slot| self.release_slot(slot))?;
        }
        let NewSequence { namespace, chain, .. } = request(&[], "", self.ledger.config().page_size);
        let query = PrefixQuery { namespace, tokens: Vec::new(), extras: ExtraKeys::default(), chain };
        let forgotten = self.ledger.truncate_prefix(&query);
        self.note(|| format!("forget {forgotten} blocks on the device"));
        Ok(())
    }

    /// Other weights: nothing that was stored before is right.
    pub(crate) fn reset(&mut self) {
        self.note(|| "reset".into());
        self.world.reset();
        self.ledger.reset_prefix_cache();
        self.weights += 1;
        self.live.iter_mut().for_each(|live| live.learned = 0);
        (0..self.live.len()).for_each(|index| self.learn(index));
    }

    /// Requests that hold nothing take part in what is shared now.
    pub(crate) fn start_over(&mut self) {
        let weights = self.weights;
        let stale = |live: &&mut Live| live.weights != weights && live.is_present();
        for live in self.live.iter_mut().filter(stale) {
            if self.ledger.pages(live.slot, GroupId::FIRST).is_ok_and(<[_]>::is_empty) {
                live.start_over(self.weights);
            }
        }
    }

    pub(crate) fn unpin_all(&mut self) -> Result<(), String> {
        let pins = std::mem::take(&mut self.pins);
        pins.into_iter().try_for_each(|pin| self.ledger.unpin(pin)).map_err(|error| format!("unpin: {error}"))
    }
}
