//! Tiers beyond the device: which block lies where (the index decides), and the copies (the movers carry out).
//!
//! The [`TierIndex`](index::TierIndex) knows keys, units and states, never bytes, clocks or threads. It gives
//! out [`Job`](job::Job)s as plain data and is told how each ended. The [`host`] tier's arena holds the
//! bytes, a [`CopyEngine`](copy::CopyEngine) moves them. A [`Mover`](mover::Mover) carries jobs out:
//! [`Lanes`](lanes::Lanes) in threads of this process, a [`RemoteMover`](remote::RemoteMover) in a
//! [`Worker`](worker::Worker) that is another process, [`Shards`](shards::Shards) on several movers at once.
//! The [`TieredConnector`](connector::TieredConnector) joins an index and a mover; below them there may be a
//! [`Vault`](vault::Vault), with an index of its own. Groups of layers have a connector each, which are
//! called as one: [`TieredGroups`](groups::TieredGroups). [`Reports`](reports::Reports) say what each tier
//! gets and loses.

pub mod connector;
pub mod copy;
pub mod groups;
pub mod host;
pub mod index;
pub mod job;
pub mod lanes;
#[cfg(all(loom, test))]
mod models;
pub mod mover;
pub mod remote;
pub mod reports;
pub mod shards;
mod sync;
pub mod transfer;
pub mod units;
pub mod vault;
pub mod wire;
pub mod worker;
