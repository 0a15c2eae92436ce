//! What a scheduler and its workers say to each other, as bytes.
//!
//! A message is a frame: the length of what follows (4 bytes), what it is (1 byte), and its fields. Numbers are
//! little-endian and of fixed width. Both sides begin with a [`Hello`].

use crate::connector::JOB_BLOCKS;
use crate::job::{Direction, Job, JobId, Outcome, UnitId};
use block_pool::{PageId, Step};
use thiserror::Error;

mod stream;
pub use stream::LinkError;
pub(crate) use stream::{Deadline, Frames, greet, now, send};

#[cfg(test)]
mod tests;

const MAGIC: [u8; 8] = *b"PKMOVER\0";
/// Of the messages below.
pub const VERSION: u32 = 1;
/// Most bytes of a frame behind its length: a job of the most blocks.
const MOST_BYTES: usize = 32 + 8 * JOB_BLOCKS;
/// Most bytes of the reason why a job failed; the rest is cut off.
const MOST_WHY: usize = 1024;
/// Most words of one part of an inventory: 64 units each.
pub(crate) const INVENTORY_WORDS: usize = 8192;

/// What both sides of a connection must agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Which shard the worker has, from 0.
    pub shard: u32,
    /// Units of the tier.
    pub units: u32,
    /// Bytes of a unit on this shard.
    pub unit_bytes: u64,
    /// Pages of the device pool, the null page counted.
    pub pages: u32,
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// The first of both sides: the version, and what is to be agreed on.
    Hello(u32, Hello),
    /// From a worker: these units hold what was last stored in them. A word has 64 units, the lowest bit first.
    Inventory {
        /// The first unit, a multiple of 64.
        first: u32,
        /// At most 8192 words.
        words: Vec<u64>,
    },
    /// From a worker: the inventory is complete.
    Ready,
    /// To a worker: do this.
    Job(Job),
    /// To a worker: give this job up.
    Cancel(JobId),
    /// From a worker: this job has ended.
    Ended(JobId, Outcome),
    /// To a worker: copy until this time of the machine's monotonic clock, in nanoseconds, unless told anew.
    Ping {
        /// Whoever has not been told anew by then is taken for dead.
        until: u64,
    },
    /// From a worker: a ping arrived.
    Pong,
    /// To a worker: give everything up, say so, and hang up.
    Shutdown,
}

/// Bytes that are no message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum WireError {
    /// A frame that is longer than any message.
    #[error("a frame of {0} bytes: must be 1 to {MOST_BYTES}")]
    Length(usize),
    /// A kind that there is not.
    #[error("a message of kind {0}, which there is not")]
    Kind(u8),
    /// Fields that the kind does not have.
    #[error("a message of kind {0} whose fields are wrong")]
    Fields(u8),
    /// Somebody who speaks something else.
    #[error("the other side is no mover or scheduler of this kind")]
    Magic,
}

impl Message {
    /// Appends the frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; 4]);
        match self {
            Message::Hello(version, hello) => {
                out.push(1);
                out.extend(MAGIC);
                for field in [*version, hello.shard, hello.units, hello.pages] {
                    out.extend(field.to_le_bytes());
                }
                out.extend(hello.unit_bytes.to_le_bytes());
            }
            Message::Inventory { first, words } => {
                out.push(2);
                out.extend(first.to_le_bytes());
                out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
            }
            Message::Ready => out.push(3),
            Message::Job(job) => {
                out.push(4);
                out.extend(job.id.0.to_le_bytes());
                out.extend(job.after.0.to_le_bytes());
                out.push(u8::from(job.direction == Direction::Load));
                for (unit, page) in job.units.iter().zip(&job.pages) {
                    out.extend(unit.0.to_le_bytes());
                    out.extend(page.0.to_le_bytes());
                }
            }
            Message::Cancel(id) => {
                out.push(5);
                out.extend(id.0.to_le_bytes());
            }
            Message::Ended(id, outcome) => {
                out.push(6);
                out.extend(id.0.to_le_bytes());
                match outcome {
                    Outcome::Done => out.push(0),
                    Outcome::Cancelled => out.push(1),
                    Outcome::Failed(why) => {
                        out.push(2);
                        out.extend(&why.as_bytes()[..why.floor_char_boundary(MOST_WHY)]);
                    }
                }
            }
            Message::Ping { until } => {
                out.push(7);
                out.extend(until.to_le_bytes());
            }
            Message::Pong => out.push(8),
            Message::Shutdown => out.push(9),
        }
        let length = (out.len() - start - 4) as u32;
        out[start..start + 4].copy_from_slice(&length.to_le_bytes());
    }

    /// The message of a frame, without its length.
    ///
    /// # Errors
    /// Bytes that [`Message::encode`] does not write.
    pub fn decode(frame: &[u8]) -> Result<Message, WireError> {
        let (&kind, rest) = frame.split_first().ok_or(WireError::Length(0))?;
        let mut fields = Fields(rest);
        let message = match kind {
            1 if rest.starts_with(&MAGIC) => fields.hello(),
            1 => return Err(WireError::Magic),
            2 => fields.inventory(),
            3 => Some(Message::Ready),
            4 => fields.job().map(Message::Job),
            5 => fields.u64().map(|id| Message::Cancel(JobId(id))),
            6 => fields.ended(),
            7 => fields.u64().map(|until| Message::Ping { until }),
            8 => Some(Message::Pong),
            9 => Some(Message::Shutdown),
            _ => return Err(WireError::Kind(kind)),
        };
        message.filter(|_| fields.0.is_empty()).ok_or(WireError::Fields(kind))
    }

    /// The first frame of `bytes` and how long it is there; `None` when it is not all there.
    pub(crate) fn first(bytes: &[u8]) -> Result<Option<(Message, usize)>, WireError> {
        let Some(length) = bytes.first_chunk().map(|length| u32::from_le_bytes(*length) as usize) else {
            return Ok(None);
        };
        if length == 0 || length > MOST_BYTES {
            return Err(WireError::Length(length));
        }
        let Some(frame) = bytes.get(4..4 + length) else { return Ok(None) };
        Message::decode(frame).map(|message| Some((message, 4 + length)))
    }
}

/// Fields that were not read yet.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn u8(&mut self) -> Option<u8> {
        self.bytes().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn hello(&mut self) -> Option<Message> {
        self.bytes::<8>()?;
        let version = self.u32()?;
        let (shard, units, pages) = (self.u32()?, self.u32()?, self.u32()?);
        let hello = Hello { shard, units, unit_bytes: self.u64()?, pages };
        if version != VERSION {
            self.0 = &[]; // another version may have more fields
        }
        Some(Message::Hello(version, hello))
    }

    fn inventory(&mut self) -> Option<Message> {
        let first = self.u32().filter(|first| first.is_multiple_of(64))?;
        let (words, rest) = self.0.as_chunks();
        let fits = rest.is_empty() && words.len() <= INVENTORY_WORDS;
        let words = fits.then(|| words.iter().copied().map(u64::from_le_bytes).collect())?;
        self.0 = &[];
        Some(Message::Inventory { first, words })
    }

    fn job(&mut self) -> Option<Job> {
        let (id, after) = (JobId(self.u64()?), Step(self.u32()?));
        let direction = match self.u8()? {
            0 => Direction::Store,
            1 => Direction::Load,
            _ => return None,
        };
        let (blocks, rest) = self.0.as_chunks::<8>();
        if !rest.is_empty() || blocks.len() > JOB_BLOCKS {
            return None;
        }
        self.0 = &[];
        let (mut units, mut pages) = (Vec::with_capacity(blocks.len()), Vec::with_capacity(blocks.len()));
        for block in blocks {
            let mut fields = Fields(block);
            units.push(UnitId(fields.u32()?));
            pages.push(PageId(fields.u32()?));
        }
        Some(Job { id, direction, units, pages, after })
    }

    fn ended(&mut self) -> Option<Message> {
        let id = JobId(self.u64()?);
        let outcome = match self.u8()? {
            0 => Outcome::Done,
            1 => Outcome::Cancelled,
            2 if self.0.len() <= MOST_WHY => {
                Outcome::Failed(std::str::from_utf8(std::mem::take(&mut self.0)).ok()?.to_owned())
            }
            _ => return None,
        };
        Some(Message::Ended(id, outcome))
    }
}
