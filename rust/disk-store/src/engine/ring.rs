//! The kernel's ring: one thread keeps many reads and writes on their way.

use super::{Engine, Operation, Queue, carry_out, places};
use crate::file::{BlockFile, is_refusal};
use crate::operation::Io;
use crate::store::Failure;
use io_uring::{IoUring, opcode, types};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFlags, eventfd};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// What names the read of the bell among the operations.
const BELL: u64 = u64::MAX;
/// The kernel is given operations when so many bytes of them are ready; together they cost less.
const TOGETHER: usize = 128 << 10;

/// A ring, and its thread.
pub struct Ring {
    queue: Arc<Queue>,
    /// Rung when there is something in the queue, for a thread that waits for the kernel.
    bell: Arc<OwnedFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Ring {
    /// Starts a ring of up to `depth` reads, or writes, and a quarter more of both together.
    ///
    /// # Errors
    /// The kernel has no rings, or they may not be used here; the file is none of the system's.
    pub fn start(file: Arc<dyn BlockFile>, depth: usize) -> io::Result<Ring> {
        if file.descriptor(0, 0).is_none() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let places = places(depth);
        let ring = IoUring::new((places + 1).next_power_of_two().max(2) as u32)?;
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let queue = Queue::new(depth);
        let on_its_way = (0..places).map(|_| None).collect();
        let mut lane = Lane {
            ring,
            file,
            bell: Arc::clone(&bell),
            free: (0..places).collect(),
            on_its_way,
            ended: VecDeque::new(),
            queue: Arc::clone(&queue),
        };
        let thread = std::thread::Builder::new().name("pk-disk-0".into()).spawn(move || lane.work())?;
        Ok(Ring { queue, bell, thread: Mutex::new(Some(thread)) })
    }
}

impl Engine for Ring {
    fn submit(&self, operation: Operation) {
        self.queue.push(operation);
        _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }

    fn writes(&self) -> usize {
        self.queue.writes()
    }

    fn wait(&self, deadline: Option<Instant>) -> bool {
        self.queue.wait(deadline)
    }

    fn stop(&self, deadline: Option<Instant>) {
        let idle = self.queue.close(deadline);
        if let Some(thread) = self.thread.lock().take()
            && idle
        {
            _ = thread.join(); // it catches its panics
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.stop(Some(Instant::now()));
    }
}

/// What the thread has.
struct Lane {
    ring: IoUring,
    file: Arc<dyn BlockFile>,
    bell: Arc<OwnedFd>,
    /// Places in `on_its_way` that are free.
    free: Vec<usize>,
    on_its_way: Vec<Option<(Operation, Io)>>,
    /// What the kernel is done with, and what it says.
    ended: VecDeque<(Operation, Io, i32)>,
    queue: Arc<Queue>,
}

impl Lane {
    fn work(&mut self) {
        self.listen();
        loop {
            self.take_ends();
            // The kernel first has something to do while checksums are made here.
            let begun = self.begin_some();
            if let Some((operation, io, result)) = self.ended.pop_front() {
                self.end(operation, || Ok(self.moved(&io, result)?));
            } else if !begun && self.free.len() == self.on_its_way.len() {
                match self.queue.next() {
                    Some(operation) => _ = self.begin(operation),
                    None => return, // there will be none
                }
            } else if !begun && self.ring.submit_and_wait(1).is_err() {
                std::thread::yield_now(); // a signal, or the kernel has too much to do
            }
        }
    }

    /// Begins some of what has a place. Gives whether there was any.
    fn begin_some(&mut self) -> bool {
        let (mut begun, mut bytes) = (false, 0);
        while bytes < TOGETHER && !self.free.is_empty() {
            let Some(operation) = self.queue.try_next() else { break };
            bytes += self.begin(operation);
            begun = true;
        }
        if bytes > 0 {
            _ = self.ring.submit(); // what it does not take now it takes the next time
        }
        begun
    }

    /// Asks the kernel to end its wait when the bell is rung.
    fn listen(&mut self) {
        let bell = opcode::PollAdd::new(types::Fd(self.bell.as_raw_fd()), PollFlags::IN.bits().into());
        // SAFETY: the bell lives as long as the ring, and no memory is asked for. There is room: see `ask`.
        _ = unsafe { self.ring.submission().push(&bell.build().user_data(BELL)) };
    }

    /// Begins an operation. Gives its bytes.
    fn begin(&mut self, mut operation: Operation) -> usize {
        let begun = catch_unwind(AssertUnwindSafe(|| operation.begin()));
        match begun.unwrap_or_else(|_| Err(Failure::Io("the copy panicked".into()))) {
            Err(failure) => {
                self.end(operation, || Err(failure));
                0
            }
            Ok(io) => match (self.file.descriptor(io.start.as_ptr().addr(), io.len), self.free.pop()) {
                (Some(file), Some(place)) => {
                    let len = io.len;
                    self.ask(file, place, &io);
                    self.on_its_way[place] = Some((operation, io));
                    len
                }
                (_, place) => {
                    self.free.extend(place);
                    self.end(operation, || Ok(carry_out(&*self.file, &io, 0)?));
                    0
                }
            },
        }
    }

    /// Asks the kernel to read or write.
    fn ask(&mut self, file: RawFd, place: usize, io: &Io) {
        let (file, len) = (types::Fd(file), io.len as u32);
        let entry = if io.write {
            opcode::Write::new(file, io.start.as_ptr(), len).offset(io.offset).build()
        } else {
            opcode::Read::new(file, io.start.as_ptr(), len).offset(io.offset).build()
        };
        // SAFETY: the operation's memory, which is its own until it has ended, and it stands in `on_its_way` until the
        // kernel is done with it. There is room: an entry for each place, and one for the bell.
        _ = unsafe { self.ring.submission().push(&entry.user_data(place as u64)) };
    }

    /// Frees the places of what the kernel is done with.
    fn take_ends(&mut self) {
        let ends: Vec<(u64, i32)> =
            self.ring.completion().map(|end| (end.user_data(), end.result())).collect();
        for (name, result) in ends {
            if name == BELL {
                _ = rustix::io::read(&*self.bell, &mut [0; 8]);
                self.listen();
                continue;
            }
            let place = name as usize;
            let Some((operation, io)) = self.on_its_way[place].take() else { continue };
            self.free.push(place);
            self.ended.push_back((operation, io, result));
        }
    }

    /// What became of an operation of which the kernel says `result`. Does here what it left.
    fn moved(&self, io: &Io, result: i32) -> io::Result<()> {
        match usize::try_from(result) {
            Ok(moved) if moved == io.len => Ok(()),
            Ok(moved) => carry_out(&*self.file, io, moved),
            Err(_) => {
                let error = io::Error::from_raw_os_error(-result);
                if is_refusal(&error) {
                    self.file.give_up_direct();
                }
                let transient =
                    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
                if transient || is_refusal(&error) { carry_out(&*self.file, io, 0) } else { Err(error) }
            }
        }
    }

    /// Ends an operation. Where a file panics it is given up.
    fn end(&self, operation: Operation, moved: impl FnOnce() -> Result<(), Failure>) {
        let write = operation.write;
        _ = catch_unwind(AssertUnwindSafe(|| operation.end(moved())));
        self.queue.ended(write);
    }
}

// SAFETY: addresses of operations, which may be carried out by any thread.
unsafe impl Send for Lane {}
