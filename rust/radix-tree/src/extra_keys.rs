//! Extra keys of blocks, stored once: most blocks have none, and those of one image share theirs.

use std::collections::HashMap;
use std::sync::Arc;

/// Index of an interned byte string; 0 is the empty one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct ExtraId(pub(crate) u32);

impl ExtraId {
    pub(crate) const NONE: ExtraId = ExtraId(0);
}

struct Entry {
    bytes: Arc<[u8]>,
    uses: u32,
}

/// Byte strings by id, each with the number of nodes that use it.
#[derive(Default)]
pub(crate) struct ExtraKeyStore {
    ids: HashMap<Arc<[u8]>, ExtraId>,
    /// Entry `i` belongs to id `i + 1`.
    entries: Vec<Entry>,
    free: Vec<ExtraId>,
}

impl ExtraKeyStore {
    /// Whether `id` stands for `bytes`.
    #[inline]
    pub(crate) fn equals(&self, id: ExtraId, bytes: &[u8]) -> bool {
        match id.0.checked_sub(1) {
            None => bytes.is_empty(),
            Some(index) => *self.entries[index as usize].bytes == *bytes,
        }
    }

    /// What `id` stands for.
    pub(crate) fn bytes(&self, id: ExtraId) -> &[u8] {
        id.0.checked_sub(1).map_or(&[], |index| &self.entries[index as usize].bytes)
    }

    /// The id of `bytes`, if it is in use.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<ExtraId> {
        if bytes.is_empty() { Some(ExtraId::NONE) } else { self.ids.get(bytes).copied() }
    }

    /// The id of `bytes`, used once more.
    pub(crate) fn acquire(&mut self, bytes: &[u8]) -> ExtraId {
        if bytes.is_empty() {
            return ExtraId::NONE;
        }
        if let Some(&id) = self.ids.get(bytes) {
            self.entries[id.0 as usize - 1].uses += 1;
            return id;
        }
        let entry = Entry { bytes: bytes.into(), uses: 1 };
        let key = Arc::clone(&entry.bytes);
        let id = if let Some(id) = self.free.pop() {
            self.entries[id.0 as usize - 1] = entry;
            id
        } else {
            self.entries.push(entry);
            ExtraId(self.entries.len() as u32)
        };
        self.ids.insert(key, id);
        id
    }

    /// One use of `id` less; the last one forgets the bytes.
    pub(crate) fn release(&mut self, id: ExtraId) {
        let Some(index) = id.0.checked_sub(1) else { return };
        let entry = &mut self.entries[index as usize];
        entry.uses -= 1;
        if entry.uses == 0 {
            let bytes = std::mem::replace(&mut entry.bytes, Arc::from([].as_slice()));
            self.ids.remove(&bytes);
            self.free.push(id);
        }
    }

    /// Uses counted for `id`.
    pub(crate) fn uses(&self, id: ExtraId) -> u32 {
        id.0.checked_sub(1).map_or(0, |index| self.entries[index as usize].uses)
    }

    /// The ids in use.
    pub(crate) fn live(&self) -> impl Iterator<Item = ExtraId> + '_ {
        self.ids.values().copied()
    }
}
