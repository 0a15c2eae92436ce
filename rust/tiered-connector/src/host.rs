//! The host tier: blocks in memory of this machine.

pub mod limits;
pub mod sizing;
