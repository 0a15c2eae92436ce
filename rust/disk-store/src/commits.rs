//! Commits: entries on their way to the disk, behind the bytes that they speak of.

use crate::entry::Entry;
use crate::store::{Core, Done, Failure};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
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

/// A change of an entry.
pub(crate) enum Change {
    /// A block was written. With a function, the write ends when the entry is durable.
    Put(Box<Entry>, Option<Done>),
    /// A slot holds nothing.
    Clear(u32),
}

/// What is to be committed.
#[derive(Default)]
pub(crate) struct Commits {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    changes: Vec<Change>,
    /// Whether some are being committed.
    busy: bool,
    /// Somebody waits for a commit.
    hurry: bool,
    closed: bool,
}

impl Commits {
    pub(crate) fn push(&self, change: Change) {
        self.queue.lock().changes.push(change);
        self.changed.notify_all();
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
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Commits what is there, and ends the thread.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_all();
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
    fn next(&self, gather: bool) -> Option<Vec<Change>> {
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
    fn commit(&self, changes: Vec<Change>) {
        let written = self.write_entries(&changes);
        for change in changes {
            let Change::Put(_, done) = change else { continue };
            let durable = if written.is_ok() { &self.counters.durable } else { &self.counters.undurable };
            durable.fetch_add(1, Ordering::Relaxed);
            if let Some(done) = done {
                done(written.as_ref().copied().map_err(|error| Failure::Io(error.to_string())));
            }
        }
    }

    fn write_entries(&self, changes: &[Change]) -> io::Result<()> {
        let puts = changes.iter().any(|change| matches!(change, Change::Put(..)));
        if puts && self.sync != Sync::None {
            self.data.sync()?;
        }
        // Of several changes of a slot the last holds.
        let mut last: HashMap<u32, Option<&Entry>> = HashMap::with_capacity(changes.len());
        for change in changes {
            match change {
                Change::Put(entry, _) => last.insert(entry.slot, Some(entry)),
                Change::Clear(slot) => last.insert(*slot, None),
            };
        }
        let mut bytes = vec![0; self.layout.entry_bytes()];
        for (slot, entry) in last {
            match entry {
                Some(entry) => entry.encode(self.number, &mut bytes),
                None => bytes.fill(0),
            }
            self.entries.write(&bytes, self.layout.entry_at(slot))?;
        }
        if self.sync == Sync::None { Ok(()) } else { self.entries.sync() }
    }
}
