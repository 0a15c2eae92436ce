//! The ledger of one replica: sequences, their pages, and what the prefix tree knows.
//!
//! [`Ledger`] composes the three crates below it: `block-hash` names prefixes, `block-pool` owns
//! references and eviction order, `radix-tree` owns device residency. The ledger owns what is left: the
//! sequences, the steps in flight, and the copies in flight. It reads no clock and does no I/O: the same
//! calls give the same pages and victims on every rank.
//!
//! Every call validates first, then plans on a read-only view, then commits what cannot fail: a call that
//! returns an error has changed nothing but the counter of failures.
//!
//! The modules follow the life of a request: [`claim`](Ledger::claim) (`ledger`), [`alloc`](Ledger::alloc)
//! (`planning`, `admission`), tables (`tables`), [`step`](Ledger::step) (`delivery`),
//! [`truncate`](Ledger::truncate), [`preempt`](Ledger::preempt) and [`release`](Ledger::release)
//! (`letting_go`); then [`suspend`](Ledger::suspend) and [`resume`](Ledger::resume) (`suspension`), `drafts`,
//! [`fork`](Ledger::fork), `page_copies`, `partial`, `tails`, `copies`, `loads`, `offloads`, `retention`,
//! `pins`, `probe`, `forgetting`, `verify`; and what is told outside: `events`, `whereabouts`, `snapshot`,
//! `misses`, `counters`.
#![forbid(unsafe_code)]

mod admission;
mod blocks;
mod chunks;
mod config;
mod copies;
mod counters;
mod cross;
mod delivery;
mod drafts;
mod error;
mod events;
#[cfg(feature = "faults")]
mod faults;
mod forgetting;
mod fork;
mod groups;
mod histogram;
mod hits;
mod ledger;
mod letting_go;
mod loads;
mod lookup;
mod misses;
mod needs;
mod offloads;
mod origin;
mod page_copies;
mod page_fills;
mod partial;
mod pins;
mod planning;
mod probe;
mod promise;
mod publication;
mod retention;
mod returning;
mod room;
mod row;
mod scheduling;
mod sequence;
mod shortening;
mod slots;
mod snapshot;
mod state_needs;
mod states;
mod suspension;
mod tables;
mod tails;
mod taking;
mod tiers;
mod to_completion;
mod twins;
mod verify;
mod whereabouts;
mod write_policy;

pub use config::{Expected, LedgerConfig, OnDuplicate, Reserve};
pub use copies::{CopyEnd, CopyId, CopyJob};
pub use counters::Counters;
pub use error::{LedgerError, NoRoom};
pub use events::{Change, Event, EventKind, EventLog, MOST_REMOVED, Stored, Tier};
#[cfg(feature = "faults")]
pub use faults::Fault;
pub use groups::{Group, GroupKind, Needed, Snapshots, joint_hit};
pub use histogram::Histogram;
pub use ledger::{Ledger, RefusedClaim};
pub use loads::{BlockKey, LoadJob, Presence, Wanted};
pub use misses::{Miss, MissReason};
pub use needs::Outlook;
pub use offloads::{OffloadJob, Place};
pub use origin::content_bytes;
pub use page_copies::PageCopy;
pub use probe::{PrefixQuery, PrefixReuse, PrefixWalk};
pub use retention::{BlockRetention, RangeError, SessionHint, TokenRange};
pub use sequence::{NewSequence, Position, Released};
pub use slots::SlotId;
pub use snapshot::EventSnapshot;
pub use suspension::{BegunCopy, PrivateTier};
pub use tables::{BatchShape, FlashInferTables, OffsetTable, RowMemory, VarlenTables};
pub use tiers::{BegunLoad, OuterTier};
pub use verify::LedgerFault;
pub use write_policy::WritePolicy;
