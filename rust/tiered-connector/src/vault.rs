//! Vaults: what keeps blocks below the host tier, and moves them between its slots and the host's units.

use crate::host::Arena;
use crate::index::TierIndex;
use crate::job::{Origin, TierKey, UnitId};
use crate::transfer::Countdown;
use block_pool::{EvictionPolicy, Priority};
use completion::{Completion, pending};
use disk_store::engine::best;
use disk_store::entry::{Entry, Key};
use disk_store::store::{Block, Done, Failure, Files, Layout, Memory, Store, Sync as Fsync};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// A block that goes from a unit into a slot, or back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Move {
    /// The block.
    pub key: TierKey,
    /// Its slot.
    pub slot: UnitId,
    /// Its unit.
    pub unit: UnitId,
    /// How long to keep it.
    pub priority: u8,
    /// Where it comes from, if it goes down.
    pub origin: Origin,
}

/// A block that a vault had when it was opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Restored {
    /// The block.
    pub key: TierKey,
    /// How long to keep it.
    pub priority: Priority,
    /// Where it comes from.
    pub origin: Origin,
}

/// Blocks that were not moved, and why each was not.
pub type Unmoved = Vec<(UnitId, Failure)>;

/// Told, in a thread of the vault's, which slots of a list of moves could not be read or written.
pub type Moved = Box<dyn FnOnce(Unmoved) + Send>;

/// What a vault has counted; numbers never fall.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct VaultCounters {
    /// Blocks that will be there when it is opened again.
    pub durable: u64,
    /// Blocks that could not be made so.
    pub undurable: u64,
    /// Blocks that were damaged when they were read.
    pub damaged: u64,
    /// Reads that the system failed.
    pub read_errors: u64,
    /// Writes that the system failed.
    pub write_errors: u64,
    /// Whether blocks go around the system's page cache; no number.
    pub direct: bool,
}

/// Keeps blocks in slots. Units stay as they are while they are written, and are nobody else's while they are read
/// into. Only `wait`, `flush` and `stop` wait.
pub trait Vault: Send + Sync {
    /// A number that every reset changes.
    fn epoch(&self) -> u64;

    /// Copies units into slots, if there was no reset since `epoch`; gives the blocks up otherwise.
    fn write(&self, epoch: u64, moves: Vec<Move>, told: Moved);

    /// Copies slots into units, those of blocks that were not read may hold anything then.
    fn read(&self, moves: Vec<Move>, told: Moved);

    /// Forgets every block at once. That ends when none comes back however the process ends, and fails if that is not
    /// certain.
    fn reset(&self) -> Completion;

    /// Waits until nothing is on its way; false when `timeout` passes first.
    fn wait(&self, timeout: Duration) -> bool;

    /// Waits until what was written will be there when the vault is opened again; false when `timeout` passes first.
    fn flush(&self, timeout: Duration) -> bool;

    /// Takes no more, gives what is on its way `timeout`, and gives up the rest. Calling it again does nothing.
    fn stop(&self, timeout: Duration);

    /// What was counted.
    fn counters(&self) -> VaultCounters;

    /// The blocks that were there when it was opened, once.
    fn take_restored(&self) -> Vec<Restored> {
        Vec::new()
    }
}

/// A vault on disk.
pub struct DiskVault {
    store: Store,
    arena: Arc<Arena>,
    /// What was there when it was opened, until somebody asks.
    restored: Mutex<Vec<Restored>>,
    /// The user was told that blocks go through the page cache.
    told: AtomicBool,
}

impl DiskVault {
    /// Opens the store in `files`, and moves its blocks to and from units of `arena`, up to `depth` at once. Gives the
    /// index of what it holds, too.
    ///
    /// # Errors
    /// The system refuses.
    ///
    /// # Panics
    /// If a block of the store is not as large as a unit.
    pub fn open(
        files: Files,
        number: u64,
        layout: Layout,
        sync: Fsync,
        depth: usize,
        policy: EvictionPolicy,
        arena: Arc<Arena>,
    ) -> io::Result<(TierIndex, DiskVault)> {
        assert!(layout.block_bytes == arena.unit_bytes(), "a block is as large as a unit");
        let (store, found) = Store::open(files, number, layout, sync, |file| best(&file, depth))?;
        let mut index = TierIndex::new(layout.slots, policy);
        let slots: Vec<UnitId> = found.iter().map(|entry| UnitId(entry.slot)).collect();
        let restored =
            found.into_iter().map(|Entry { key: Key { hash, guard }, priority, origin, .. }| {
                let priority = Priority::new(priority.into()).unwrap_or_default();
                Restored { key: TierKey { hash, guard }, priority, origin }
            });
        let restored: Vec<Restored> = restored.collect();
        index.restore(slots.iter().zip(&restored).map(|(&slot, block)| (slot, block.key, block.priority)));
        let restored = Mutex::new(restored);
        Ok((index, DiskVault { store, arena, restored, told: AtomicBool::new(false) }))
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// What the user has to be told, once: that the system refuses to go around its page cache.
    pub fn take_warning(&self) -> Option<&'static str> {
        let is_new = !self.store.is_direct() && !self.told.swap(true, Relaxed);
        is_new.then_some(
            "the file system refuses direct I/O; blocks go through the page cache, which takes memory beside the tier's",
        )
    }

    fn each(&self, moves: Vec<Move>, told: Moved, begin: impl Fn(Move, Memory, Done)) {
        let whole = Arc::new(Whole {
            left: Countdown::from(moves.len()),
            unmoved: Mutex::default(),
            told: Mutex::new(Some(told)),
            _arena: Arc::clone(&self.arena),
        });
        for one in moves {
            let (slot, whole) = (one.slot, Arc::clone(&whole));
            let (start, room) = self.arena.unit_with_room(one.unit);
            // SAFETY: whoever asked keeps the unit as it is, or to the read alone, until `told` is; the memory
            // stays where it is as long as `whole` does.
            let memory = unsafe { Memory::new(start, room) };
            begin(one, memory, Box::new(move |end| whole.end(slot, end)));
        }
    }
}

/// Moves that end together.
struct Whole {
    left: Countdown,
    unmoved: Mutex<Unmoved>,
    told: Mutex<Option<Moved>>,
    /// Where the units lie.
    _arena: Arc<Arena>,
}

impl Whole {
    fn end(&self, slot: UnitId, end: Result<(), Failure>) {
        if let Err(failure) = end {
            self.unmoved.lock().push((slot, failure));
        }
        if self.left.end(&crate::job::Outcome::Done).is_some()
            && let Some(told) = self.told.lock().take()
        {
            told(std::mem::take(&mut *self.unmoved.lock()));
        }
    }
}

impl Vault for DiskVault {
    fn epoch(&self) -> u64 {
        self.store.epoch()
    }

    fn write(&self, epoch: u64, moves: Vec<Move>, told: Moved) {
        self.each(moves, told, |one, memory, done| {
            let Move { key: TierKey { hash, guard }, slot, priority, origin, .. } = one;
            let block = Block { slot: slot.0, key: Key { hash, guard }, priority, origin };
            self.store.write_since(epoch, block, memory, done);
        });
    }

    fn read(&self, moves: Vec<Move>, told: Moved) {
        self.each(moves, told, |one, memory, done| {
            let TierKey { hash, guard } = one.key;
            self.store.read(one.slot.0, Key { hash, guard }, memory, done);
        });
    }

    fn reset(&self) -> Completion {
        let (completer, completion) = pending();
        self.store.reset(Box::new(move |end| {
            match end {
                Ok(()) => completer.finish(),
                Err(why) => completer.fail(why.to_string()),
            };
        }));
        completion
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.store.wait(timeout)
    }

    fn flush(&self, timeout: Duration) -> bool {
        self.store.flush(timeout)
    }

    fn stop(&self, timeout: Duration) {
        self.store.stop(timeout);
    }

    fn take_restored(&self) -> Vec<Restored> {
        std::mem::take(&mut *self.restored.lock())
    }

    fn counters(&self) -> VaultCounters {
        let counters = self.store.counters();
        VaultCounters {
            durable: counters.durable.load(Relaxed),
            undurable: counters.undurable.load(Relaxed),
            damaged: counters.damaged.load(Relaxed),
            read_errors: counters.read_errors.load(Relaxed),
            write_errors: counters.write_errors.load(Relaxed),
            direct: self.store.is_direct(),
        }
    }
}
