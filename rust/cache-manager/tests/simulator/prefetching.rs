//! Blocks of a prompt are loaded before a request needs them: by one that comes for that alone.

use crate::broken::Broken;
use crate::engine::{Engine, MOST_LIVE};
use crate::kv::request;
use crate::live::{Live, Loading};
use crate::world::World;
use cache_manager::{CopyEnd, LedgerError, LoadJob, SlotId};

impl<W: World> Engine<W> {
    pub(crate) fn prefetch(&mut self) -> Result<(), String> {
        if self.live.len() == MOST_LIVE {
            return Ok(());
        }
        let (tokens, salt) = self.prompt();
        let new = request(&tokens, salt, self.ledger.config().page_size);
        let slot = self.ledger.claim(new).map_err(|refused| format!("claim: {}", refused.error))?;
        self.note(|| format!("claim {tokens:?} {salt:?} for its load: slot {}", slot.0));
        let live = Live { prefetches: true, ..Live::new(slot, salt, tokens, self.weights) };
        self.live.push(live);
        self.learn(self.live.len() - 1);
        if !self.begin_prefetch(slot)? {
            self.live.pop();
            self.note(|| format!("unclaim slot {}", slot.0));
            self.ledger.unclaim(slot).map_err(|error| format!("unclaim: {error}"))?;
        }
        Ok(())
    }

    /// Begins to load what the tier has of the request. False when nothing is on its way.
    fn begin_prefetch(&mut self, slot: SlotId) -> Result<bool, String> {
        let wanted = self.ledger.wanted(slot).map_err(|error| format!("wanted: {error}"))?;
        let Some(wanted) = wanted else { return Ok(false) };
        let missing = &wanted.keys[wanted.on_device..];
        let found = self.world.leading(&mut missing.iter().copied());
        if found == 0 {
            return Ok(false);
        }
        // The block with the last token is never loaded: one token more than what is.
        let len = (wanted.on_device + found) * self.ledger.config().page_size as usize + 1;
        self.ledger.truncate(slot, len as u32).map_err(|error| format!("truncate: {error}"))?;
        let index = self.find(slot);
        self.live[index].cut(len);
        let jobs = match self.ledger.alloc_with_loads(&[slot], &[], &[found as u32]) {
            Err(LedgerError::InsufficientBlocks { .. } | LedgerError::RequestTooLarge { .. }) => {
                return Ok(false);
            }
            outcome => outcome.map_err(|error| format!("alloc with loads: {error}"))?,
        };
        let [LoadJob { blocks, copy, .. }] = &jobs[..] else {
            return Err(format!("{} loads begin, not one", jobs.len()));
        };
        let mut keys = wanted.keys[blocks[0]..blocks[0] + found].to_vec();
        if self.broken == Some(Broken::MixesPrefetchedBlocks) {
            keys.rotate_left(1);
        }
        self.note(|| format!("load {found} blocks for slot {}: {copy:?}", slot.0));
        let Some(completion) = self.world.load(&keys, copy) else {
            let refused = self.ledger.end_copies(&[(copy.id.0, CopyEnd::Refused)]);
            return refused.map(|_| false).map_err(|error| format!("end copies: {error}"));
        };
        self.live[index].loading = Some(Loading { copy: copy.id.0, pages: copy.pages.clone(), completion });
        Ok(true)
    }
}
