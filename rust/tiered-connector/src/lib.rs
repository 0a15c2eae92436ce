//! Tiers beyond the device: which block lies where (the index decides), and the copies (the movers carry out).
//!
//! The [`TierIndex`](index::TierIndex) knows keys, units and states, never bytes, clocks or threads. It gives out
//! [`Job`](job::Job)s as plain data and is told how each ended. The [`host`] tier's arena holds the bytes, a
//! [`CopyEngine`](copy::CopyEngine) moves them, [`Lanes`](lanes::Lanes) are the threads that it runs in, and the
//! [`TieredConnector`](connector::TieredConnector) joins all of these in one process.

pub mod connector;
pub mod copy;
pub mod host;
pub mod index;
pub mod job;
pub mod lanes;
