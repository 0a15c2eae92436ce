//! Tiers beyond the device: blocks in host memory.

pub mod host;
