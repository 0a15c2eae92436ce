//! Pages of device memory: who references them, and which goes next.
//!
//! A [`Pool`] is the pages of one group, [`Pools`] those of all, which may lie in one slab; [`Geometry`] says how large
//! its parts must be then. Pools know page ids, reference counts, transfer pins and eviction order; never bytes, tokens
//! or sequences. What a cached page stands for is an opaque [`NodeLink`], handed back when the page is evicted so that
//! the caller can drop its own record.
//!
//! A page is in exactly one [`PageState`] at any time:
//!
//! ```text
//! pristine ──take──▶ referenced ──last release──▶ evictable ──take──▶ referenced
//!                      ▲   │                        ▲   │
//!                      │   └─release while pinned─▶ in flight ──last unpin─▶ evictable
//!                      └────────acquire (a prefix hit)──┘
//! ```
#![forbid(unsafe_code)]

mod geometry;
mod huge;
mod ids;
mod page;
mod policy;
mod pool;
mod pools;
mod queue;
mod retention;
mod room;
mod runs;
mod sharing;
mod slab;
mod taking;
mod verify;

pub use geometry::{Geometry, GeometryError, GeometryLimits, PageShape, SlabFit, Tiling};
pub use ids::{GroupId, NodeLink, PageId, Priority, PriorityError, Step};
pub use policy::{EvictionPolicy, PolicyError};
pub use pool::{Next, PageState, Pool, Taken};
pub use pools::Pools;
pub use retention::{Lapsed, Retention, RetentionError};
pub use room::Room;
pub use slab::{Member, ShapeError, Slab, SlabShape};
pub use taking::Evicted;
pub use verify::{GroupFault, PageFault};
