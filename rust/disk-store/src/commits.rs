//! Commits: entries on their way to the disk, behind the bytes that they speak of.

use crate::entry::Entry;
use crate::operation::Told;
use crate::recovery;
use crate::store::{Core, Failure};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// When what was written is synced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sync {
    /// Soon, many blocks at a time.
    Batch,
    /// Whenever the system does.
    None,
    /// Before a write has ended.
    Always,
}

/// How long the first entry of a batch waits for others.
const GATHER: Duration = Duration::from_millis(20);

/// What becomes of a slot's entry.
pub(crate) enum Change {
    /// A block was written.
    Put(Box<Put>),
    /// The slot holds nothing.
    Clear,
}

/// A block that was written.
pub(crate) struct Put {
    pub(crate) entry: Entry,
    /// Syncs of the data that had failed before.
    pub(crate) failed_syncs: u64,
    /// Who waits until it is durable.
    pub(crate) told: Option<Told>,
}

/// What is to be committed.
#[derive(Default)]
pub(crate) struct Commits {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    /// The last change of each slot.
    changes: BTreeMap<u32, Change>,
    /// Whether some are being committed.
    busy: bool,
    /// Somebody waits for a commit.
    hurry: bool,
    closed: bool,
}

impl Commits {
    /// Takes a change. Gives back what will not be committed: the one before it, or, once closed, this one.
    pub(crate) fn push(&self, slot: u32, change: Change) -> Option<Change> {
        let mut queue = self.queue.lock();
        if queue.closed {
            return Some(change);
        }
        let before = queue.changes.insert(slot, change);
        drop(queue);
        self.changed.notify_all();
        before
    }

    /// Waits until all is committed; false when `deadline` passes first.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> bool {
        let mut queue = self.queue.lock();
        while queue.busy || !queue.changes.is_empty() {
            queue.hurry = true;
            self.changed.notify_all();
            match deadline {
                None => self.changed.wait(&mut queue),
                Some(deadline) => {
                    if self.changed.wait_until(&mut queue, deadline).timed_out() {
                        return !queue.busy && queue.changes.is_empty();
                    }
                }
            }
        }
        true
    }

    /// Takes no more, commits what is there, and ends the thread.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_all();
    }

    /// Lets nobody wait any longer for what is not being committed yet.
    pub(crate) fn give_up(&self) {
        let waiting: Vec<Told> = {
            let mut queue = self.queue.lock();
            let puts = queue.changes.values_mut().filter_map(|change| match change {
                Change::Put(put) => put.told.take(),
                Change::Clear => None,
            });
            puts.collect()
        };
        drop(waiting); // they are told
    }

    /// The life of the thread that commits.
    pub(crate) fn run(&self, core: &Core) {
        while let Some(changes) = self.next(core.sync == Sync::Batch) {
            core.commit(changes);
            self.queue.lock().busy = false;
            self.changed.notify_all();
        }
    }

    /// The changes to commit next, none when there will be no more.
    fn next(&self, gather: bool) -> Option<BTreeMap<u32, Change>> {
        let mut queue = self.queue.lock();
        while queue.changes.is_empty() && !queue.closed {
            self.changed.wait(&mut queue);
        }
        let deadline = Instant::now() + GATHER;
        while gather && !queue.closed && !queue.hurry {
            if self.changed.wait_until(&mut queue, deadline).timed_out() {
                break;
            }
        }
        queue.hurry = false;
        let changes = std::mem::take(&mut queue.changes);
        queue.busy = !changes.is_empty();
        (!changes.is_empty()).then_some(changes)
    }
}

impl Core {
    /// Writes entries behind the bytes that they speak of, and says so to those who wait.
    fn commit(&self, changes: BTreeMap<u32, Change>) {
        let puts = changes.values().any(|change| matches!(change, Change::Put(_)));
        let synced = if puts && self.sync != Sync::None { self.data.sync() } else { Ok(()) };
        if synced.is_err() {
            self.failed_syncs.fetch_add(1, Ordering::AcqRel);
        }
        let written = self.write_entries(&changes);
        for change in changes.into_values() {
            let Change::Put(put) = change else { continue };
            let end = match (&synced, &written, self.lost(&put)) {
                (Err(error), ..) | (_, Err(error), _) => Err(Failure::Io(error.to_string())),
                (.., Some(failure)) => Err(failure),
                _ => Ok(()),
            };
            let count = if end.is_ok() { &self.counters.durable } else { &self.counters.undurable };
            count.fetch_add(1, Ordering::Relaxed);
            if let Some(told) = put.told {
                told.tell(end);
            }
        }
    }

    /// Why a block will not be there, whatever its entry says.
    fn lost(&self, put: &Put) -> Option<Failure> {
        if put.failed_syncs != self.failed_syncs.load(Ordering::Acquire) {
            return Some(Failure::Io("an earlier sync failed".into()));
        }
        (put.entry.epoch != self.slots.lock().epoch()).then_some(Failure::GivenUp)
    }

    fn write_entries(&self, changes: &BTreeMap<u32, Change>) -> io::Result<()> {
        let mut header = self.header.lock();
        let epoch = self.slots.lock().epoch();
        if *header != Some(epoch) {
            recovery::write_epoch(&*self.entries, self.number, epoch)?;
        }
        let mut bytes = vec![0; self.layout.entry_bytes()];
        for (slot, change) in changes {
            match change {
                Change::Put(put) if self.lost(put).is_none() => put.entry.encode(self.number, &mut bytes),
                _ => bytes.fill(0),
            }
            self.entries.write(&bytes, self.layout.entry_at(*slot))?;
        }
        if self.sync != Sync::None {
            self.entries.sync()?;
        }
        *header = Some(epoch);
        Ok(())
    }
}
