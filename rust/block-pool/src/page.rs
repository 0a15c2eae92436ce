//! What is known of one page, in half a cache line.

use crate::ids::{PageId, Priority, Step};
use crate::queue::QueueId;

/// Stands for nothing.
pub(crate) const NO_NODE: u32 = u32::MAX;

/// Everything that taking, acquiring, publishing and releasing a page look at: one memory access a page,
/// and neighbouring pages are neighbours in memory.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(crate) struct Page {
    /// When the page was queued last, or published since, on the queues' clock.
    pub(crate) stamp: u64,
    /// What the page stands for in the prefix tree, unless that was forgotten after `stamp`.
    pub(crate) node: u32,
    /// Sequences (and user pins) that hold the page.
    pub(crate) refs: u32,
    /// Last step whose forward may read or write the page, as far as its former holders knew.
    pub(crate) last_use: Step,
    /// Neighbours in the page's list; the null page at its ends.
    pub(crate) prev: PageId,
    pub(crate) next: PageId,
    /// The list that the page was put into, [`QueueId::NONE`] while it is in none.
    pub(crate) queue: QueueId,
    pub(crate) priority: Priority,
    pub(crate) flags: Flags,
}

const _: () = assert!(size_of::<Page>() == 32);

impl Page {
    /// A page that nobody holds and that stands for nothing.
    pub(crate) fn new(priority: Priority) -> Page {
        Page {
            stamp: 0,
            node: NO_NODE,
            refs: 0,
            last_use: Step(0),
            prev: PageId::NULL,
            next: PageId::NULL,
            queue: QueueId::NONE,
            priority,
            flags: Flags::default(),
        }
    }

    /// A page that was handed out: referenced once, and standing for nothing.
    #[inline]
    pub(crate) fn hand_out(&mut self, priority: Priority) {
        self.refs = 1;
        self.forget();
        self.priority = priority;
        self.flags = Flags::default();
    }

    /// It stands for nothing any more, whatever stamp it gets: a newer one must not revive what was forgotten.
    #[inline]
    pub(crate) fn forget(&mut self) {
        self.node = NO_NODE;
    }
}

/// Facts of a page that are a bit each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Flags(pub(crate) u8);

impl Flags {
    /// A transfer touches the page.
    pub(crate) const PINNED: Flags = Flags(1);
    /// The priority ends some time.
    pub(crate) const TIMED: Flags = Flags(2);
    /// A request hit the page while it stood for its node.
    pub(crate) const REUSED: Flags = Flags(4);
    /// The block was offered to another tier.
    pub(crate) const OFFERED: Flags = Flags(8);
    /// The page lies in a huge page that was pristine, and was not handed out since.
    pub(crate) const FRESH: Flags = Flags(16);

    #[inline]
    pub(crate) fn has(self, flag: Flags) -> bool {
        self.0 & flag.0 != 0
    }

    /// Whether it has one of the two, or both.
    #[inline]
    pub(crate) fn any(self, one: Flags, other: Flags) -> bool {
        self.has(Flags(one.0 | other.0))
    }

    #[inline]
    pub(crate) fn set(&mut self, flag: Flags, on: bool) {
        self.0 = if on { self.0 | flag.0 } else { self.0 & !flag.0 };
    }
}

/// What planning passes and transfers look at.
#[derive(Clone, Copy, Default)]
pub(crate) struct ColdPage {
    /// Transfers that touch the page.
    pub(crate) pins: u32,
    /// Scratch of a planning pass, see [`Pool::mark`](crate::Pool::mark).
    pub(crate) mark: u32,
    /// Step whose forward wrote the block that was published last.
    pub(crate) published: Step,
    /// Hits that were counted since, see [`Pool::count_hit`](crate::Pool::count_hit).
    pub(crate) hits: u32,
}
