//! Messages over a connected stream.

use super::{Hello, Message, VERSION, WireError};
use rustix::time::{ClockId, clock_gettime};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Why there is no connection, or none any more.
#[derive(Debug, Error)]
pub enum LinkError {
    /// The stream's own.
    #[error("the connection failed: {0}")]
    Io(#[from] std::io::Error),
    /// It hung up, or its process ended.
    #[error("the other side hung up")]
    Closed,
    /// Nothing came for this long.
    #[error("nothing was heard of the other side for {0:?}")]
    Silent(Duration),
    /// Bytes that are no message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A message that has no place here.
    #[error("a message that has no place here: {0}")]
    Unexpected(String),
    /// The two sides are not of one tier.
    #[error("{field}: this side has {own}, the other {other}; both must be the same")]
    Mismatch {
        /// What they disagree on.
        field: &'static str,
        /// This side's.
        own: u64,
        /// The other side's.
        other: u64,
    },
    /// The shard has a worker.
    #[error("shard {0} has a worker already")]
    Taken(u32),
    /// The mover was stopped.
    #[error("the mover was stopped")]
    Stopped,
}

/// The machine's monotonic clock in nanoseconds: the same in all of its processes.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Writes one message.
pub(crate) fn send(mut stream: &UnixStream, message: &Message) -> std::io::Result<()> {
    let mut frame = Vec::new();
    message.encode(&mut frame);
    stream.write_all(&frame)
}

/// Bytes that came in and were not asked for yet.
#[derive(Default)]
pub(crate) struct Frames {
    bytes: Vec<u8>,
    /// Where the first frame begins.
    start: usize,
}

impl Frames {
    /// Bytes read at once.
    const CHUNK: usize = 64 << 10;

    /// The next message; `None` when it is not all there after one read, or the stream's own time-out passes first.
    pub(crate) fn next(&mut self, mut stream: &UnixStream) -> Result<Option<Message>, LinkError> {
        if let Some(message) = self.take()? {
            return Ok(Some(message));
        }
        self.bytes.drain(..self.start);
        self.start = 0;
        let old = self.bytes.len();
        self.bytes.resize(old + Self::CHUNK, 0);
        let read = stream.read(&mut self.bytes[old..]);
        self.bytes.truncate(old + *read.as_ref().unwrap_or(&0));
        match read {
            Ok(0) => Err(LinkError::Closed),
            Ok(_) => self.take(),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(None),
                ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Err(LinkError::Closed),
                _ => Err(error.into()),
            },
        }
    }

    fn take(&mut self) -> Result<Option<Message>, LinkError> {
        let first = Message::first(&self.bytes[self.start..])?;
        Ok(first.map(|(message, bytes)| {
            self.start += bytes;
            message
        }))
    }

    /// The next message; an error when `deadline` passes first. The stream's time-out says how exactly.
    pub(crate) fn expect(&mut self, stream: &UnixStream, deadline: Deadline) -> Result<Message, LinkError> {
        loop {
            if let Some(message) = self.next(stream)? {
                return Ok(message);
            }
            if Instant::now() >= deadline.at {
                return Err(LinkError::Silent(deadline.after));
            }
        }
    }
}

/// When patience ends.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    after: Duration,
    at: Instant,
}

impl Deadline {
    pub(crate) fn after(after: Duration) -> Deadline {
        Deadline { after, at: Instant::now() + after }
    }
}

/// Says hello and hears it, which must agree with `own`.
pub(crate) fn greet(stream: &UnixStream, own: &Hello, deadline: Deadline) -> Result<Frames, LinkError> {
    stream.set_read_timeout(Some((deadline.after / 8).max(Duration::from_millis(1))))?;
    send(stream, &Message::Hello(VERSION, *own))?;
    let mut frames = Frames::default();
    let (version, other) = match frames.expect(stream, deadline)? {
        Message::Hello(version, other) => (version, other),
        other => return Err(LinkError::Unexpected(format!("{other:?} before a hello"))),
    };
    let fields = [
        ("version of the messages", VERSION.into(), version.into()),
        ("shard", own.shard.into(), other.shard.into()),
        ("units", own.units.into(), other.units.into()),
        ("bytes of a unit", own.unit_bytes, other.unit_bytes),
        ("pages", own.pages.into(), other.pages.into()),
    ];
    match fields.into_iter().find(|(_, own, other)| own != other) {
        Some((field, own, other)) => Err(LinkError::Mismatch { field, own, other }),
        None => Ok(frames),
    }
}
