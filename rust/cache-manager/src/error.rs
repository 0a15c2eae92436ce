//! Why a call was refused. A refused call has changed nothing.

use crate::slots::SlotId;
use thiserror::Error;

/// The pool at the moment when a request did not fit, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoRoom {
    /// Pages that the request needs beyond what it holds.
    pub needed: u32,
    /// Pages that could be handed out: never used, or evictable.
    pub free: u32,
    /// Of these, pages that had to be evicted; pages that the batch hits are not among them.
    pub evictable: u32,
    /// Pages that sequences or transfers hold.
    pub pinned: u32,
    /// All pages.
    pub total: u32,
}

/// A refused call.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum LedgerError {
    /// The slot is of no claimed request: never claimed, or released since.
    #[error("slot {}: no request is claimed under it (it was released, or never claimed)", .0)]
    UnknownSlot(SlotId),
    /// One request is twice in one batch.
    #[error("slot {}: the request is in this batch twice", .0)]
    TwiceInBatch(SlotId),
    /// All tokens have KV or are on the way, and no step out will bring another.
    #[error("slot {}: no token is left to compute (append one with update() or step(new_tokens=...) first)", .slot)]
    NothingToCompute {
        /// The request.
        slot: SlotId,
    },
    /// The request is in the open step already.
    #[error(
        "slot {}: the request is planned in step {step} already (deliver it with step(), or close the step with runtime_inputs() or begin_step())",
        .slot
    )]
    AlreadyPlanned {
        /// The request.
        slot: SlotId,
        /// The open step.
        step: u32,
    },
    /// The request has two steps out.
    #[error("slot {}: two steps of the request are out already; deliver the older one with step() first", .slot)]
    TwoStepsOut {
        /// The request.
        slot: SlotId,
    },
    /// The request waits for blocks from another tier.
    #[error("slot {}: waits for a load; poll_transfers() tells when it is ready", .slot)]
    Loading {
        /// The request.
        slot: SlotId,
    },
    /// The request is suspended.
    #[error("slot {}: is suspended; resume() brings it back", .slot)]
    Suspended {
        /// The request.
        slot: SlotId,
    },
    /// The request is suspended, and the copy of its pages is in flight.
    #[error(
        "slot {}: is being suspended; once poll_transfers() has settled that copy, resume() brings it back",
        .slot
    )]
    Leaving {
        /// The request.
        slot: SlotId,
    },
    /// The request is not suspended.
    #[error("slot {}: is not suspended (resumed already, never suspended, or lost: then it computes again)", .slot)]
    NotSuspended {
        /// The request.
        slot: SlotId,
    },
    /// The request cannot be suspended while a forward may write to its pages.
    #[error("slot {}: has a step out; deliver it with step() first", .slot)]
    StepOut {
        /// The request.
        slot: SlotId,
    },
    /// The request has no KV.
    #[error("slot {}: no token has KV, so there is nothing to suspend", .slot)]
    NothingToSuspend {
        /// The request.
        slot: SlotId,
    },
    /// A page of the request gets its bytes by a page copy that was not carried out yet.
    #[error("slot {}: a page copy for it is planned; carry it out with take_page_copies() first", .slot)]
    PageCopyPlanned {
        /// The request.
        slot: SlotId,
    },
    /// The result of a forward cannot be right that read pages before they were copied.
    #[error(
        "slot {}: page copies that go before this forward were never taken; carry out what runtime_inputs() gives or take_page_copies() before each forward",
        .slot
    )]
    PageCopiesLeft {
        /// The first request of the batch whose result this is.
        slot: SlotId,
    },
    /// There is no tier that suspended requests could be in.
    #[error("suspend, resume: {0}")]
    NoTier(String),
    /// There is no room for the request in the tier now.
    #[error(
        "slot {}: needs {} units of host memory; {} of {} are free ({} of them evictable), {} are held",
        .slot, .room.needed, .room.free, .room.total, .room.evictable, .room.pinned
    )]
    InsufficientUnits {
        /// The first request of the batch that did not fit.
        slot: SlotId,
        /// The tier as this request found it, in units.
        room: NoRoom,
    },
    /// The cache has no memory.
    #[error("the cache is asleep; wake() it first")]
    Asleep,
    /// The cache has memory.
    #[error("the cache is awake; sleep() it first")]
    Awake,
    /// Pages are held.
    #[error(
        "sleep: {pages} pages are held, by requests ({requests}), pins ({pins}) and copies ({copies}); suspend, preempt or release the requests, unpin the pins, and settle the copies with poll_transfers() first"
    )]
    InUse {
        /// Pages held.
        pages: u32,
        /// Requests that hold pages.
        requests: usize,
        /// Pins.
        pins: usize,
        /// Copies, planned page copies among them.
        copies: usize,
    },
    /// The request has no step out.
    #[error("slot {}: the request has no step out; alloc() it first", .slot)]
    NotPlanned {
        /// The request.
        slot: SlotId,
    },
    /// A padding request has no pages: there is nothing to look up.
    #[error("slot {0}: a padding request has no pages and no hashes")]
    Padding(SlotId),
    /// Only a request that was never planned can become a padding request.
    #[error("slot {0}: was planned before, so it cannot become a padding request")]
    PlannedBefore(SlotId),
    /// Time that goes back.
    #[error("now={now}: must be finite, and not before {latest}, the time told last")]
    TimeGoesBack {
        /// What was told, in seconds.
        now: f64,
        /// The latest time told before.
        latest: f64,
    },
    /// There is no room for the request now.
    #[error(
        "slot {}: needs {} more pages; {} of {} are free ({} of them evictable), {} are held",
        .slot, .room.needed, .room.free, .room.total, .room.evictable, .room.pinned
    )]
    InsufficientBlocks {
        /// The first request of the batch that did not fit.
        slot: SlotId,
        /// The pool as this request found it.
        room: NoRoom,
    },
    /// There will never be room for the request.
    #[error("slot {}: {tokens} tokens need {} pages, a request may hold {limit}", .slot, .room.needed)]
    RequestTooLarge {
        /// The request.
        slot: SlotId,
        /// Its tokens.
        tokens: u64,
        /// Most pages that one request may hold.
        limit: u32,
        /// The pool; `needed` counts every page of the request.
        room: NoRoom,
    },
    /// More tokens than the request or the manager allows.
    #[error("{}{tokens} tokens: over the limit of {limit} ({what})", .slot.map_or_else(String::new, |slot| format!("slot {slot}: ")))]
    TooLong {
        /// The request, once it is claimed.
        slot: Option<SlotId>,
        /// What the tokens would be.
        tokens: u64,
        /// The limit.
        limit: u64,
        /// Which limit.
        what: &'static str,
    },
    /// A number of tokens that the result of a step cannot bring.
    #[error("slot {slot}: {what}")]
    BadCount {
        /// The request.
        slot: SlotId,
        /// What came, and what is allowed.
        what: String,
    },
    /// More blocks to load than the request may reuse.
    #[error("slot {slot}: loads={given}: must be at most {most} blocks")]
    BadLoad {
        /// The request.
        slot: SlotId,
        /// What was given.
        given: u32,
        /// What is allowed.
        most: u32,
    },
    /// A number that is out of range.
    #[error("{name}={given}: must be {allowed}")]
    OutOfRange {
        /// The argument.
        name: &'static str,
        /// What was given.
        given: i128,
        /// What is allowed.
        allowed: String,
    },
    /// A forward that cannot be made shorter.
    #[error("slot {slot}: {what}")]
    NotShortened {
        /// The request.
        slot: SlotId,
        /// Why.
        what: String,
    },
    /// No scheduling pass is open.
    #[error("no scheduling pass is open; call start_scheduling() first")]
    NoPass,
    /// Arrays of one call that do not fit together.
    #[error("{0}")]
    Mismatch(String),
    /// A copy that is not in flight.
    #[error("transfer {0}: not in flight (finished already, or never started)")]
    UnknownCopy(u64),
    /// A pin that ended before.
    #[error("pin {0}: unknown (ended already, or never made)")]
    UnknownPin(u64),
    /// All slots are taken.
    #[error("{0} requests are claimed, no slot is left")]
    NoSlot(usize),
}
