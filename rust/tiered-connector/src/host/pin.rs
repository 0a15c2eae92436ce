//! Pinning: memory of the arena that stays where it is, taken chunk by chunk while the arena is in use.

use super::Arena;
use super::limits;
use parking_lot::{Mutex, MutexGuard};
use rustix::mm::{MlockFlags, mlock_with, munlock};
use std::cell::UnsafeCell;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use thiserror::Error;

#[cfg(test)]
mod tests;

/// What pins memory: the kernel, or the driver of a device that reads and writes it.
pub trait Pin: Send + Sync {
    /// Pins memory, which is whole pages of the system's: all of it, or nothing.
    ///
    /// # Errors
    /// Why it was refused.
    fn pin(&self, memory: &[UnsafeCell<u8>]) -> Result<(), PinRefused>;

    /// Unpins what one call of `pin` has pinned.
    fn unpin(&self, memory: &[UnsafeCell<u8>]);

    /// Is called after each refusal, in its thread: a driver that keeps its last error forgets it, so that no other
    /// call of anybody's is told of it.
    fn clear_error(&self) {}
}

/// Why memory was not pinned.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{0}")]
pub struct PinRefused(pub String);

/// The kernel's page lock: what was written stays in memory and never goes to swap. A page is locked when it is first
/// touched, so the arena still takes its memory as it is used.
#[derive(Clone, Copy, Default, Debug)]
pub struct PageLock;

impl Pin for PageLock {
    fn pin(&self, memory: &[UnsafeCell<u8>]) -> Result<(), PinRefused> {
        let start = memory.as_ptr().cast_mut().cast();
        // SAFETY: the memory is there as long as it is borrowed, and the lock changes no byte.
        let locked = unsafe { mlock_with(start, memory.len(), MlockFlags::ONFAULT) };
        locked.map_err(|error| {
            self.unpin(memory); // a part may have been locked
            let limit = limits::locked(Path::new("/"));
            let limit = limit.map_or(String::new(), |limit| format!("; {limit}"));
            PinRefused(format!("mlock2 of {} bytes: {error}{limit}", memory.len()))
        })
    }

    fn unpin(&self, memory: &[UnsafeCell<u8>]) {
        // SAFETY: as above.
        _ = unsafe { munlock(memory.as_ptr().cast_mut().cast(), memory.len()) };
    }
}

/// How far pinning is, in bytes. What is neither pinned nor refused is still to come.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Progress {
    /// Bytes to be pinned.
    pub asked: u64,
    /// Bytes that are pinned.
    pub pinned: u64,
    /// Bytes that stay unpinned, because pinning was refused.
    pub refused: u64,
}

/// A thread that pins an arena, and what it has pinned. What a chunk is refused for, a smaller one may not be: it is
/// halved, down to a unit. When one unit is refused, the rest stays as it is, and is as good but for the pinning.
pub struct Pinning {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Where the thread is. In a forked process its lock may be held by it for ever, and nothing is pinned.
    process: u32,
}

struct Shared {
    arena: Arc<Arena>,
    by: Box<dyn Pin>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What each call that was not refused has pinned.
    chunks: Vec<Range<u32>>,
    /// Bytes of it.
    pinned: usize,
    /// Why the rest is not; until somebody asks.
    refused: Option<PinRefused>,
    given_up: bool,
    stopped: bool,
}

impl Pinning {
    /// Most bytes of a chunk, unless a unit has more. While a chunk is taken a stop has to wait, and so may a lane that
    /// touches memory for the first time; and drivers refuse what is very large.
    pub const CHUNK_BYTES: usize = 256 << 20;

    /// Begins to pin all of `arena`, in chunks of at most `chunk_bytes` bytes.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn start(arena: Arc<Arena>, by: Box<dyn Pin>, chunk_bytes: usize) -> std::io::Result<Pinning> {
        let most = (chunk_bytes / arena.unit_bytes().max(1)).clamp(1, u32::MAX as usize) as u32;
        let shared = Arc::new(Shared { arena, by, state: Mutex::default() });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("pk-pin".into()).spawn(move || of_thread.run(most))?;
        Ok(Pinning { shared, thread: Mutex::new(Some(thread)), process: std::process::id() })
    }

    /// How far it is; nothing in a forked process.
    pub fn progress(&self) -> Progress {
        let Some(state) = self.enter() else { return Progress::default() };
        let (asked, pinned) = (self.shared.bytes(), state.pinned as u64);
        Progress { asked, pinned, refused: if state.given_up { asked - pinned } else { 0 } }
    }

    /// What to tell the user, once, if memory stays unpinned. It is asked once a step: it waits for nothing, and the
    /// next call tells what this one could not see.
    pub fn take_warning(&self) -> Option<String> {
        let mut state = self.shared.state.try_lock()?;
        let refused = state.refused.take()?;
        let (asked, pinned) = (self.shared.bytes(), state.pinned);
        Some(format!(
            "{pinned} of {asked} bytes of host memory are pinned, the rest is used unpinned: {refused}"
        ))
    }

    /// Ends the thread, at the latest when the chunk that it takes is taken, and unpins all. Calling it again does
    /// nothing.
    pub fn stop(&self) {
        let Some(mut state) = self.enter() else { return };
        state.stopped = true;
        drop(state);
        if let Some(thread) = self.thread.lock().take() {
            _ = thread.join(); // what it had pinned is known, even if a driver panicked
        }
        let mut state = self.shared.state.lock();
        state.pinned = 0;
        let chunks = std::mem::take(&mut state.chunks);
        drop(state);
        for chunk in chunks {
            self.shared.by.unpin(self.shared.arena.pages_of(chunk));
        }
    }

    fn enter(&self) -> Option<MutexGuard<'_, State>> {
        (self.process == std::process::id()).then(|| self.shared.state.lock())
    }
}

impl Drop for Pinning {
    /// Before the arena goes, of which this has a share.
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn bytes(&self) -> u64 {
        self.arena.pages_of(0..self.arena.units()).len() as u64
    }

    /// The thread's life: chunks of at most `most` units.
    fn run(&self, mut most: u32) {
        let units = self.arena.units();
        let mut first = 0;
        while first < units && !self.state.lock().stopped {
            let chunk = first..units.min(first.saturating_add(most));
            match self.pin(chunk.clone()) {
                Ok(()) => first = chunk.end,
                Err(_) if chunk.len() > 1 => most = chunk.len() as u32 / 2,
                Err(refused) => {
                    let mut state = self.state.lock();
                    (state.refused, state.given_up) = (Some(refused), true);
                    return;
                }
            }
        }
    }

    fn pin(&self, chunk: Range<u32>) -> Result<(), PinRefused> {
        let memory = self.arena.pages_of(chunk.clone());
        if memory.is_empty() {
            return Ok(()); // its page is an earlier unit's
        }
        self.by.pin(memory).inspect_err(|_| self.by.clear_error())?;
        let mut state = self.state.lock();
        state.chunks.push(chunk);
        state.pinned += memory.len();
        Ok(())
    }
}
