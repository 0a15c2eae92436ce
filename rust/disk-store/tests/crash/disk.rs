//! A disk in memory that remembers all that was asked of it, so that what a power cut leaves can be made up.

use crate::random::Random;
use disk_store::file::BlockFile;
use std::io;
use std::sync::{Arc, Mutex};

/// A disk writes so many bytes whole or not at all.
const SECTOR: usize = 512;

/// The two files of a store, in the order of [`disk_store::store::Files`].
pub(crate) type Image = [Vec<u8>; 2];

/// What was asked of a file. A change may be on the disk from the moment it is asked for; it surely is after a sync
/// that began when the change had ended, and that has ended itself.
enum Event {
    Change {
        file: usize,
        change: Change,
    },
    /// The change at this place in the log has ended.
    Ended(usize),
    SyncBegan {
        file: usize,
    },
    /// The sync that began at this place has ended.
    SyncEnded(usize),
}

#[derive(Clone)]
enum Change {
    Write { offset: usize, bytes: Vec<u8> },
    Reserve { to: usize },
    SetLen { len: usize },
}

impl Change {
    fn apply(&self, file: &mut Vec<u8>) {
        match self {
            Change::Write { offset, bytes } => {
                file.resize(file.len().max(offset + bytes.len()), 0);
                file[*offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            Change::Reserve { to } => file.resize(file.len().max(*to), 0),
            Change::SetLen { len } => file.resize(*len, 0),
        }
    }

    /// Applies what a power cut may leave of it.
    fn apply_torn(&self, file: &mut Vec<u8>, random: &mut Random) {
        let Change::Write { offset, bytes } = self else { return self.apply(file) };
        let mut from = 0;
        while from < bytes.len() {
            // Sectors are counted from the file's beginning.
            let to = (from + SECTOR - (offset + from) % SECTOR).min(bytes.len());
            if random.chance(50) {
                Change::Write { offset: offset + from, bytes: bytes[from..to].to_vec() }.apply(file);
            }
            from = to;
        }
    }
}

/// Which syncs do nothing and say that they did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Liar {
    None,
    Data,
    Entries,
}

/// A disk with both files of a store.
pub(crate) struct Disk {
    base: Image,
    liar: Liar,
    state: Mutex<State>,
}

struct State {
    now: Image,
    log: Vec<Event>,
}

impl Disk {
    pub(crate) fn new(base: Image, liar: Liar) -> Arc<Disk> {
        let state = Mutex::new(State { now: base.clone(), log: Vec::new() });
        Arc::new(Disk { base, liar, state })
    }

    /// How much has been asked until now.
    pub(crate) fn time(&self) -> usize {
        self.state.lock().unwrap().log.len()
    }

    /// What is there now, if the power stays on.
    pub(crate) fn now(&self) -> Image {
        self.state.lock().unwrap().now.clone()
    }

    pub(crate) fn file(self: &Arc<Disk>, file: usize) -> Arc<dyn BlockFile> {
        Arc::new(RecordedFile { disk: Arc::clone(self), file })
    }

    /// What a power cut at this time may leave: all that was synced, and of each later change all, parts or nothing, in
    /// any order.
    pub(crate) fn image(&self, time: usize, random: &mut Random) -> Image {
        let state = self.state.lock().unwrap();
        let log = &state.log[..time];
        let mut ended_at = vec![usize::MAX; time];
        let mut last_sync = [0, 0];
        for (at, event) in log.iter().enumerate() {
            match event {
                Event::Ended(change) => ended_at[*change] = at,
                Event::SyncEnded(began) => {
                    let Event::SyncBegan { file } = log[*began] else { continue };
                    last_sync[file] = last_sync[file].max(*began);
                }
                _ => {}
            }
        }
        let mut image = self.base.clone();
        let mut unsure = Vec::new();
        for (at, event) in log.iter().enumerate() {
            let Event::Change { file, change } = event else { continue };
            if ended_at[at] < last_sync[*file] {
                change.apply(&mut image[*file]);
            } else {
                unsure.push((*file, change));
            }
        }
        // Mostly nearly all of it is there, or nearly nothing.
        let kept = [5, 50, 95][random.below(3)];
        if random.chance(70) {
            random.shuffle(&mut unsure);
        }
        for (file, change) in unsure {
            if random.chance(20) {
                change.apply_torn(&mut image[file], random);
            } else if random.chance(kept) {
                change.apply(&mut image[file]);
            }
        }
        image
    }
}

struct RecordedFile {
    disk: Arc<Disk>,
    file: usize,
}

impl RecordedFile {
    fn change(&self, change: Change) {
        let at = {
            let mut state = self.disk.state.lock().unwrap();
            change.apply(&mut state.now[self.file]);
            state.log.push(Event::Change { file: self.file, change });
            state.log.len() - 1
        };
        std::thread::yield_now(); // others go on while it is under way
        self.disk.state.lock().unwrap().log.push(Event::Ended(at));
    }
}

impl BlockFile for RecordedFile {
    fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let state = self.disk.state.lock().unwrap();
        let offset = offset as usize;
        let there = state.now[self.file].get(offset..offset + bytes.len());
        bytes.copy_from_slice(there.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.change(Change::Write { offset: offset as usize, bytes: bytes.to_vec() });
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        if self.disk.liar == [Liar::Data, Liar::Entries][self.file] {
            return Ok(());
        }
        let began = {
            let mut state = self.disk.state.lock().unwrap();
            state.log.push(Event::SyncBegan { file: self.file });
            state.log.len() - 1
        };
        std::thread::yield_now();
        self.disk.state.lock().unwrap().log.push(Event::SyncEnded(began));
        Ok(())
    }

    fn reserve(&self, _from: u64, to: u64) -> io::Result<()> {
        self.change(Change::Reserve { to: to as usize });
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(Change::SetLen { len: len as usize });
        Ok(())
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.disk.state.lock().unwrap().now[self.file].len() as u64)
    }
}
