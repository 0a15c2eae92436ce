//! Requests let go of their pages and come back.

use crate::engine::Engine;
use crate::live::{Aside, Live, Stage};
use crate::world::World;
use cache_manager::{BegunCopy, Ledger, LedgerError, PrivateTier, SlotId};

type Call = fn(&mut Ledger, &mut dyn PrivateTier, &[SlotId]) -> Result<Vec<BegunCopy>, LedgerError>;

impl<W: World> Engine<W> {
    /// Sets requests aside; now and then some that cannot be.
    pub(crate) fn suspend(&mut self) -> Result<(), String> {
        let stood = self.live.iter().map(|live| self.stands(live.slot)).collect::<Result<Vec<_>, _>>()?;
        let computed = |live: &&Live| live.is_idle() && self.stands(live.slot).is_ok_and(|stands| stands > 0);
        let computed: Vec<SlotId> = self.live.iter().filter(computed).map(|live| live.slot).collect();
        for BegunCopy { slot, job, completion } in
            self.call_for_some(Ledger::suspend, |live| computed.contains(&live.slot))?
        {
            let index = self.find(slot);
            self.leaving.push(job.clone());
            let processed = stood[index];
            self.live[index].aside = Some(Aside { stage: Stage::Leaving, copy: job, completion, processed });
        }
        Ok(())
    }

    /// Brings requests back; now and then some that are not away.
    pub(crate) fn resume(&mut self) -> Result<(), String> {
        let is_away = |live: &Live| live.aside.as_ref().is_some_and(|aside| aside.stage == Stage::Away);
        for BegunCopy { slot, job, completion } in self.call_for_some(Ledger::resume, is_away)? {
            let index = self.find(slot);
            let Some(aside) = &mut self.live[index].aside else {
                return Err(format!("slot {} comes back and was not away", slot.0));
            };
            *aside = Aside { stage: Stage::Returning, copy: job, completion, ..*aside };
        }
        Ok(())
    }

    /// Makes the call for one request or two. What is refused changes nothing.
    fn call_for_some(&mut self, call: Call, may: impl Fn(&Live) -> bool) -> Result<Vec<BegunCopy>, String> {
        let any = self.random.one_in(12);
        let live = self.live.iter().filter(|live| any || may(live));
        let mut batch: Vec<SlotId> = live.map(|live| live.slot).collect();
        self.random.shuffle(&mut batch);
        batch.truncate(1 + self.random.below(2));
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let before = (self.ledger.fingerprint(), self.world.private_units());
        let outcome = call(&mut self.ledger, &mut self.world, &batch);
        self.note(|| {
            let begun = |begun: &Vec<BegunCopy>| {
                let jobs: Vec<_> = begun.iter().map(|begun| (begun.slot.0, &begun.job)).collect();
                format!("{jobs:?}")
            };
            let slots: Vec<u32> = batch.iter().map(|slot| slot.0).collect();
            format!(
                "set aside or bring back {slots:?}: {}",
                outcome.as_ref().map_or_else(ToString::to_string, begun)
            )
        });
        match outcome {
            Ok(begun) => Ok(begun),
            Err(error) if (self.ledger.fingerprint(), self.world.private_units()) != before => {
                Err(format!("a refused call changed the ledger or the tier: {error}"))
            }
            Err(
                LedgerError::Leaving { .. }
                | LedgerError::Suspended { .. }
                | LedgerError::NotSuspended { .. }
                | LedgerError::Loading { .. }
                | LedgerError::StepOut { .. }
                | LedgerError::NothingToSuspend { .. }
                | LedgerError::PageCopyPlanned { .. }
                | LedgerError::NoTier(_)
                | LedgerError::InsufficientUnits { .. }
                | LedgerError::InsufficientBlocks { .. },
            ) => Ok(Vec::new()),
            Err(error) => Err(format!("suspend or resume: {error}")),
        }
    }
}
