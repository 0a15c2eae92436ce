//! Looks into a store without opening it. Nothing is locked and nothing is changed, so it may be open elsewhere.

use crate::directory::{DATA, ENTRIES, Holder, MANIFEST, OURS, holder};
use crate::entry::{Entry, entry_bytes};
use crate::file::{BlockFile, SystemFile, free_bytes, taken_bytes};
use crate::manifest::{Manifest, Mismatch};
use crate::recovery;
use crate::store::{HEADER, Layout};
use rustix::fs::{FileType, Mode, OFlags};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bytes of entries that are read at a time.
const CHUNK: usize = 1 << 20;
/// Bytes; a manifest, or an entry, that is longer is none.
const LONGEST_MANIFEST: u64 = 1 << 20;
const LONGEST_ENTRY: u64 = 16 << 20;
/// A record of the header: where each begins, and its bytes.
const RECORDS: [usize; 2] = [0, 512];
const RECORD: usize = 24;
/// How long a store that is open elsewhere has to write the entry of a block that it has written.
const PATIENCE: Duration = Duration::from_secs(2);

/// Why a store cannot be looked into.
#[derive(Debug, Error)]
pub enum Unreadable {
    /// There is none.
    #[error("there is no store")]
    NoStore,
    /// Another version made it.
    #[error("{0}")]
    Format(Mismatch),
    /// The system refuses.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// What was found.
#[derive(Default, Debug)]
pub struct Report {
    /// Who has the store open.
    pub holder: Option<Holder>,
    /// What it says of itself; `None` if that is missing or damaged, and then nothing is known of blocks.
    pub manifest: Option<Manifest>,
    /// Blocks that its files have room for.
    pub slots: u32,
    /// Resets that it has seen.
    pub epoch: u64,
    /// Blocks that it would hold if it were opened.
    pub blocks: u64,
    /// Entries of blocks that were forgotten, or that have a newer entry.
    pub old_entries: u64,
    /// Entries that are not whole.
    pub damaged_entries: u64,
    /// Blocks that were read.
    pub checked_blocks: u64,
    /// Blocks that are not what their entries say.
    pub damaged_blocks: u64,
    /// Bytes that its files take on the disk.
    pub disk_bytes: u64,
    /// Bytes that the disk has left.
    pub free_bytes: u64,
    /// Its files that are there.
    pub files: Vec<String>,
    /// What else lies in its directory.
    pub foreign: Vec<String>,
    /// What is wrong beyond single entries and blocks.
    pub problems: Vec<String>,
}

impl Report {
    /// Whether nothing is damaged, as far as it was looked at.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty() && self.damaged_entries == 0 && self.damaged_blocks == 0
    }
}

/// A store that is being looked into.
pub struct Inspection {
    directory: OwnedFd,
    report: Report,
    files: Option<Files>,
    /// Blocks that are left to be read, the next one last.
    left: Vec<Entry>,
    /// Slots in which something seems to be wrong.
    suspects: Vec<u32>,
    payload: Vec<u8>,
}

/// Files of a store whose manifest is whole.
struct Files {
    number: u64,
    layout: Layout,
    entry_bytes: usize,
    entries: SystemFile,
    data: Option<SystemFile>,
}

/// What may be wrong in a slot.
#[derive(PartialEq, Eq)]
enum Harm {
    Entry,
    Block,
}

impl Inspection {
    /// Looks at the store in a directory, at all but the bytes of its blocks; with `deep` those can be checked then.
    ///
    /// # Errors
    /// There is none; another version made it; the system refuses.
    pub fn open(path: &Path, deep: bool) -> Result<Inspection, Unreadable> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from)?;
        let mut report = Report::default();
        for entry in std::fs::read_dir(path)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if OURS.contains(&&*name) { &mut report.files } else { &mut report.foreign }.push(name);
        }
        report.files.sort_unstable();
        report.foreign.sort_unstable();
        if !report.files.iter().any(|name| [DATA, ENTRIES, MANIFEST].contains(&&**name)) {
            return Err(Unreadable::NoStore);
        }
        report.holder = holder(&directory)?;
        report.free_bytes = free_bytes(&directory)?;
        for name in OURS {
            report.disk_bytes += taken_bytes(&directory, name)?;
        }
        let (suspects, left, payload) = (Vec::new(), Vec::new(), Vec::new());
        let mut found = Inspection { directory, report, files: None, left, suspects, payload };
        found.read_manifest()?;
        found.read_entries(deep)?;
        Ok(found)
    }

    /// What was found so far.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Blocks that are left to be read.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// Reads so many blocks more, and checks them.
    pub fn check(&mut self, count: usize) {
        let blocks = self.left.split_off(self.left.len().saturating_sub(count));
        for entry in blocks.iter().rev() {
            if self.files.as_ref().is_some_and(|files| !files.holds(entry, &mut self.payload)) {
                self.suspects.push(entry.slot);
            }
            self.report.checked_blocks += 1;
        }
    }

    /// What was found in all. Where the store is open elsewhere, what seems to be wrong may be on its way: that is
    /// looked at again for a while.
    ///
    /// # Errors
    /// The system refuses.
    pub fn finish(mut self) -> io::Result<Report> {
        let Some(files) = &self.files else { return Ok(self.report) };
        self.report.holder = self.report.holder.or(holder(&self.directory)?);
        let deadline = Instant::now() + PATIENCE;
        self.suspects.sort_unstable();
        self.suspects.dedup();
        let mut harmed: Vec<(u32, Harm)> = Vec::new();
        loop {
            harmed.clear();
            for slot in self.suspects.drain(..) {
                harmed.extend(files.harm(slot, &mut self.payload)?.map(|harm| (slot, harm)));
            }
            if harmed.is_empty() || self.report.holder.is_none() || Instant::now() > deadline {
                break;
            }
            self.suspects.extend(harmed.iter().map(|(slot, _)| slot));
            std::thread::sleep(PATIENCE / 20);
        }
        let entries = harmed.iter().filter(|(_, harm)| *harm == Harm::Entry).count() as u64;
        self.report.damaged_entries += entries;
        self.report.damaged_blocks += harmed.len() as u64 - entries;
        Ok(self.report)
    }

    fn problem(&mut self, what: impl Into<String>) {
        self.report.problems.push(what.into());
    }

    fn read_manifest(&mut self) -> Result<(), Unreadable> {
        let Some(file) = self.file(MANIFEST)? else {
            self.problem(format!("{MANIFEST} is missing"));
            return Ok(());
        };
        let mut bytes = Vec::new();
        File::from(file).take(LONGEST_MANIFEST).read_to_end(&mut bytes)?;
        match Manifest::from_text(&String::from_utf8_lossy(&bytes)) {
            Ok(manifest) => {
                let entry = entry_bytes(0) as u64..=LONGEST_ENTRY;
                let possible = manifest.block_bytes > 0 && usize::try_from(manifest.block_bytes).is_ok();
                if possible && entry.contains(&manifest.entry_bytes) {
                    self.report.manifest = Some(manifest);
                } else {
                    self.problem(format!("{MANIFEST}: has impossible sizes"));
                }
                Ok(())
            }
            Err(Mismatch::Damaged(why)) => {
                self.problem(format!("{MANIFEST} is damaged: {why}"));
                Ok(())
            }
            Err(format) => Err(Unreadable::Format(format)),
        }
    }

    fn read_entries(&mut self, deep: bool) -> Result<(), Unreadable> {
        let Some(manifest) = &self.report.manifest else { return Ok(()) };
        let (number, entry_bytes) = (manifest.store, manifest.entry_bytes as usize);
        let mut layout = Layout { block_bytes: manifest.block_bytes as usize, content_bytes: 0, slots: 0 };
        let data = self.file(DATA)?.map(|file| SystemFile::new(file, false));
        let data_bytes = data.as_ref().map_or(Ok(0), BlockFile::bytes)?;
        let entries = self.file(ENTRIES)?.map(|file| SystemFile::new(file, false));
        let bytes = entries.as_ref().map_or(Ok(0), BlockFile::bytes)?;
        let Some(entries) = entries.filter(|_| bytes > 0) else {
            if data_bytes > 0 {
                self.problem(format!("{ENTRIES} is missing: nobody knows what the blocks are"));
            }
            return Ok(());
        };
        let bytes = bytes.saturating_sub(HEADER);
        layout.slots = (bytes / entry_bytes as u64).min(u64::from(u32::MAX)) as u32;
        let files = Files { number, layout, entry_bytes, entries, data };
        if bytes % entry_bytes as u64 != 0 || data_bytes > layout.slot_at(layout.slots) {
            self.problem(format!("{ENTRIES} is cut off"));
        }
        self.report.slots = layout.slots;
        let found = self.read_slots(&files)?;
        self.sort_out(&files, found, data_bytes)?;
        if !deep {
            self.left.clear();
        }
        self.files = Some(files);
        Ok(())
    }

    /// The entries that are whole; the slots of the others are suspect.
    fn read_slots(&mut self, files: &Files) -> io::Result<Vec<Entry>> {
        let size = files.entry_bytes;
        let at_once = (CHUNK / size).max(1) as u32;
        let mut bytes = vec![0; at_once as usize * size];
        let mut found = Vec::new();
        for first in (0..files.layout.slots).step_by(at_once as usize) {
            let bytes = &mut bytes[..at_once.min(files.layout.slots - first) as usize * size];
            files.entries.read(bytes, files.entry_at(first))?;
            for (slot, bytes) in (first..).zip(bytes.chunks_exact(size)) {
                match files.decode(slot, bytes) {
                    Ok(entry) => found.extend(entry),
                    Err(_) => self.suspects.push(slot),
                }
            }
        }
        Ok(found)
    }

    /// Which entries are of blocks that the store would hold.
    fn sort_out(&mut self, files: &Files, found: Vec<Entry>, data_bytes: u64) -> io::Result<()> {
        let mut header = [0; HEADER as usize];
        let whole = match files.entries.read(&mut header, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            done => {
                done.map(|()| RECORDS.iter().all(|&at| is_whole(&header[at..at + RECORD], files.number)))?
            }
        };
        let epoch = recovery::read_epoch(&files.entries, files.number)?;
        if !whole || (epoch.is_none() && !found.is_empty()) {
            let lost = if epoch.is_none() { ": all blocks are forgotten" } else { "" };
            self.problem(format!("{ENTRIES}: its header is damaged{lost}"));
        }
        let all = found.len();
        let held = found.into_iter().filter(|entry| Some(entry.epoch) == epoch).collect();
        self.left = recovery::newest(held);
        self.report.epoch = epoch.unwrap_or(0);
        self.report.blocks = self.left.len() as u64;
        self.report.old_entries = (all - self.left.len()) as u64;
        let end_of = |entry: &Entry| files.layout.slot_at(entry.slot) + files.layout.block_bytes as u64;
        let cut_off = self.left.iter().filter(|entry| end_of(entry) > data_bytes);
        self.suspects.extend(cut_off.map(|entry| entry.slot));
        // From the first slot to the last, as they lie on the disk.
        self.left.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.slot));
        if files.data.is_none() && !self.left.is_empty() {
            self.problem(format!("{DATA} is missing"));
        }
        Ok(())
    }

    /// A file of the store, to be read.
    fn file(&self, name: &str) -> io::Result<Option<OwnedFd>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.directory, name, flags, Mode::empty()) {
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            file => file?,
        };
        match FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
            FileType::RegularFile => Ok(Some(file)),
            _ => Err(io::Error::other(format!("{name} is no file"))),
        }
    }
}

impl Files {
    fn entry_at(&self, slot: u32) -> u64 {
        HEADER + u64::from(slot) * self.entry_bytes as u64
    }

    /// The entry in a slot; `None` if it is empty.
    fn decode(&self, slot: u32, bytes: &[u8]) -> Result<Option<Entry>, Harm> {
        if bytes.iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        let entry = Entry::decode(self.number, slot, bytes);
        entry.filter(|entry| entry.len == self.layout.block_bytes as u64).map(Some).ok_or(Harm::Entry)
    }

    /// Whether the bytes of a block are what its entry says.
    fn holds(&self, entry: &Entry, payload: &mut Vec<u8>) -> bool {
        let at = self.layout.slot_at(entry.slot);
        let Some(data) = &self.data else { return false };
        // Before there is memory for a block that is not there.
        if data.bytes().is_ok_and(|bytes| bytes < at + self.layout.block_bytes as u64) {
            return false;
        }
        payload.resize(self.layout.block_bytes, 0);
        data.read(payload, at).is_ok() && entry.matches(payload)
    }

    /// What is wrong in a slot now.
    fn harm(&self, slot: u32, payload: &mut Vec<u8>) -> io::Result<Option<Harm>> {
        let mut bytes = vec![0; self.entry_bytes];
        self.entries.read(&mut bytes, self.entry_at(slot))?;
        Ok(match self.decode(slot, &bytes) {
            Err(harm) => Some(harm),
            Ok(Some(entry)) if !self.holds(&entry, payload) => Some(Harm::Block),
            Ok(_) => None,
        })
    }
}

/// Whether a record of the header says something, or nothing yet.
fn is_whole(record: &[u8], number: u64) -> bool {
    let (body, sum) = record.split_at(16);
    record.iter().all(|&byte| byte == 0) || xxh3_64_with_seed(body, number).to_le_bytes() == sum
}
