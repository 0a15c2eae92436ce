//! A store's life at random, and what is known of it: which blocks have to be there when, and which must not.

use crate::disk::Disk;
use crate::random::Random;
use crate::scene::{NUMBER, block, key, payload, reset};
use disk_store::engine::Workers;
use disk_store::entry::Entry;
use disk_store::file::Pages;
use disk_store::store::{Failure, Files, Layout, Memory, Store, Sync};
use std::ptr::NonNull;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Slots are a page, blocks are less, and neither ends where a sector does.
pub(crate) const LAYOUT: Layout = Layout { block_bytes: 2900, content_bytes: 32, slots: 10 };
const KEYS: usize = 25;
const STEPS: usize = 90;
const LONG: Duration = Duration::from_secs(20);

/// A block in a slot. Times are those of the disk.
pub(crate) struct Copy {
    pub(crate) slot: u32,
    pub(crate) key: u64,
    /// From when on it surely is on the disk.
    pub(crate) durable: Option<usize>,
    /// From when on it may be gone: it was forgotten, written over, written again elsewhere, or there was a reset.
    pub(crate) let_go: Option<usize>,
}

/// What was forgotten when.
pub(crate) struct Reset {
    pub(crate) began: usize,
    pub(crate) returned: usize,
    /// The generation of the blocks that are written after it.
    pub(crate) generation: u64,
}

/// All that is known of a life.
#[derive(Default)]
pub(crate) struct Life {
    pub(crate) copies: Vec<Copy>,
    /// In their order. The first one stands for the beginning.
    pub(crate) resets: Vec<Reset>,
}

/// The bytes of a block: others in each generation, as they would be with other weights.
pub(crate) fn bytes_of(key: u64, generation: u64) -> Vec<u8> {
    payload(key + 1000 * generation, LAYOUT.block_bytes)
}

pub(crate) fn open(disk: &Arc<Disk>, sync: Sync) -> Result<(Store, Vec<Entry>), String> {
    let files = Files { data: disk.file(0), entries: disk.file(1), directory: None };
    let opened = Store::open(files, NUMBER, LAYOUT, sync, |file| Ok(Box::new(Workers::start(&file, 3)?)));
    opened.map_err(|error| format!("the store does not open: {error}"))
}

/// Reads a block, and waits for it.
pub(crate) fn read(store: &Store, slot: u32, of: u64) -> Result<Vec<u8>, Failure> {
    let mut pages = Pages::zeros(LAYOUT.slot_bytes());
    let (sent, ended) = mpsc::channel();
    store.read(slot, key(of), memory(&mut pages), Box::new(move |end| _ = sent.send(end)));
    ended.recv_timeout(LONG).expect("a read ends")?;
    Ok(pages.bytes()[..LAYOUT.block_bytes].to_vec())
}

fn memory(pages: &mut Pages) -> Memory {
    let start = NonNull::from(pages.bytes_mut()).cast();
    // SAFETY: the pages are kept until the operation has ended.
    unsafe { Memory::new(start, LAYOUT.slot_bytes()) }
}

/// A write that has ended: which copy, how, and when.
type End = (usize, Result<(), Failure>, usize);

struct Living<'a> {
    disk: &'a Arc<Disk>,
    store: Store,
    sync: Sync,
    /// No generation before this life has this number or a higher one.
    fresh: u64,
    life: Life,
    /// The copy that was written last to each slot.
    slots: Vec<Option<usize>>,
    /// What is on its way, and its memory.
    writes: Vec<(usize, Pages)>,
    /// What has ended well and is durable after the next flush.
    written: Vec<usize>,
    sender: mpsc::Sender<End>,
    ends: mpsc::Receiver<End>,
}

/// Lives on a disk that holds blocks of this generation in these slots. Generations from `fresh` on are new.
pub(crate) fn live(
    disk: &Arc<Disk>,
    sync: Sync,
    held: &[(u32, u64)],
    generation: u64,
    fresh: u64,
    random: &mut Random,
) -> Result<Life, String> {
    let (store, found) = open(disk, sync)?;
    if found.len() != held.len() {
        return Err(format!("{} blocks are held and {} found", held.len(), found.len()));
    }
    let (sender, ends) = mpsc::channel();
    let life = Life {
        copies: held.iter().map(|&(slot, key)| Copy { slot, key, durable: Some(0), let_go: None }).collect(),
        resets: vec![Reset { began: 0, returned: 0, generation }],
    };
    let mut slots = vec![None; LAYOUT.slots as usize];
    for (copy, &(slot, _)) in held.iter().enumerate() {
        slots[slot as usize] = Some(copy);
    }
    let mut living =
        Living { disk, store, sync, fresh, life, slots, writes: vec![], written: vec![], sender, ends };
    for _ in 0..STEPS {
        living.step(random)?;
    }
    if random.chance(50) {
        living.store.stop(LONG);
    }
    living.wait_until(0)?;
    Ok(living.life)
}

impl Living<'_> {
    fn step(&mut self, random: &mut Random) -> Result<(), String> {
        let slot = random.below(self.slots.len()) as u32;
        match random.below(100) {
            0..60 => self.write(slot, random.below(KEYS) as u64),
            60..75 => self.read(slot)?,
            75..83 => {
                self.let_go(slot);
                self.store.forget(slot);
            }
            83..86 => self.reset()?,
            86..92 => self.flush()?,
            _ => self.wait_until(0)?,
        }
        self.wait_until(4)
    }

    fn generation(&self) -> u64 {
        self.life.resets.last().map_or(0, |reset| reset.generation)
    }

    fn is_on_its_way(&self, copy: usize) -> bool {
        self.writes.iter().any(|(it, _)| *it == copy)
    }

    /// From now on the slot's block may be gone.
    fn let_go(&mut self, slot: u32) {
        if let Some(copy) = self.slots[slot as usize].take() {
            self.life.copies[copy].let_go.get_or_insert(self.disk.time());
        }
    }

    fn write(&mut self, slot: u32, of: u64) {
        // One write at a time in a slot, also where the first is not wanted any more.
        if self.writes.iter().any(|(copy, _)| self.life.copies[*copy].slot == slot) {
            return;
        }
        self.let_go(slot);
        let now = self.disk.time();
        for copy in &mut self.life.copies {
            if copy.key == of {
                copy.let_go.get_or_insert(now);
            }
        }
        let copy = self.life.copies.len();
        self.life.copies.push(Copy { slot, key: of, durable: None, let_go: None });
        self.slots[slot as usize] = Some(copy);
        let mut pages = Pages::zeros(LAYOUT.slot_bytes());
        pages.bytes_mut()[..LAYOUT.block_bytes].copy_from_slice(&bytes_of(of, self.generation()));
        let (sender, disk) = (self.sender.clone(), Arc::clone(self.disk));
        let done = Box::new(move |end| _ = sender.send((copy, end, disk.time())));
        self.store.write(block(slot, of), memory(&mut pages), done);
        self.writes.push((copy, pages));
    }

    fn read(&mut self, slot: u32) -> Result<(), String> {
        let Some(copy) = self.slots[slot as usize] else { return Ok(()) };
        if self.is_on_its_way(copy) {
            return Ok(());
        }
        let of = self.life.copies[copy].key;
        match read(&self.store, slot, of) {
            Ok(bytes) if bytes == bytes_of(of, self.generation()) => Ok(()),
            other => Err(format!("block {of} is read from slot {slot}, and it is not: {:?}", other.err())),
        }
    }

    fn reset(&mut self) -> Result<(), String> {
        (0..LAYOUT.slots).for_each(|slot| self.let_go(slot));
        let (began, generation) = (self.disk.time(), self.fresh + self.life.resets.len() as u64);
        reset(&self.store).map_err(|error| error.to_string())?;
        self.life.resets.push(Reset { began, returned: self.disk.time(), generation });
        Ok(())
    }

    fn flush(&mut self) -> Result<(), String> {
        self.wait_until(0)?; // so that the flush is of all that has been written
        if !self.store.flush(LONG) {
            return Err("a flush does not end".into());
        }
        if self.sync == Sync::Batch {
            for copy in std::mem::take(&mut self.written) {
                self.life.copies[copy].durable = Some(self.disk.time());
            }
        }
        Ok(())
    }

    /// Waits until so few writes are on their way.
    fn wait_until(&mut self, few: usize) -> Result<(), String> {
        while self.writes.len() > few {
            let (copy, end, time) = self.ends.recv_timeout(LONG).map_err(|_| "a write does not end")?;
            self.writes.retain(|(it, _)| *it != copy);
            let let_go = self.life.copies[copy].let_go.is_some();
            match end {
                Ok(()) if self.sync == Sync::Always => self.life.copies[copy].durable = Some(time),
                Ok(()) => self.written.push(copy),
                Err(Failure::GivenUp) if let_go => {}
                Err(failure) => return Err(format!("a write fails: {failure}")),
            }
        }
        Ok(())
    }
}
