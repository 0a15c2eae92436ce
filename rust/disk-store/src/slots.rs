//! What a store knows of its slots while it is open.

use crate::entry::Entry;

/// What was written last to a slot.
#[derive(Clone, Copy, Default)]
struct Stamp {
    /// When it was written; 0 if nothing is known.
    serial: u64,
    /// `None` while it is on its way.
    checksum: Option<u128>,
}

/// The slots of a store, the epoch that it is in, and what its next block is numbered.
pub(crate) struct Slots {
    epoch: u64,
    next: u64,
    stamps: Vec<Stamp>,
}

impl Slots {
    /// Slots that hold these blocks, all of them of this epoch.
    pub(crate) fn new(slots: u32, epoch: u64, next: u64, blocks: &[Entry]) -> Slots {
        let mut stamps = vec![Stamp::default(); slots as usize];
        for entry in blocks {
            stamps[entry.slot as usize] = Stamp { serial: entry.serial, checksum: Some(entry.checksum) };
        }
        Slots { epoch, next, stamps }
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Forgets all that was written or is on its way, in a new epoch.
    pub(crate) fn begin_epoch(&mut self) {
        self.epoch += 1;
        self.stamps.fill(Stamp::default());
    }

    /// A block is on its way into a slot: from now on nobody knows what is there. Gives its serial number.
    pub(crate) fn claim(&mut self, slot: u32) -> u64 {
        let serial = self.next;
        self.next += 1;
        self.stamps[slot as usize] = Stamp { serial, checksum: None };
        serial
    }

    /// Whether a block that was on its way into a slot is still wanted.
    pub(crate) fn is_wanted(&self, slot: u32, serial: u64) -> bool {
        self.stamps[slot as usize].serial == serial
    }

    /// A block that is wanted has arrived.
    pub(crate) fn arrived(&mut self, slot: u32, serial: u64, checksum: u128) {
        self.stamps[slot as usize] = Stamp { serial, checksum: Some(checksum) };
    }

    /// The serial number and the checksum of the block in a slot, if one has arrived.
    pub(crate) fn get(&self, slot: u32) -> Option<(u64, u128)> {
        let Stamp { serial, checksum } = self.stamps[slot as usize];
        Some((serial, checksum?))
    }

    /// A slot holds nothing that is wanted.
    pub(crate) fn forget(&mut self, slot: u32) {
        self.stamps[slot as usize] = Stamp::default();
    }
}
