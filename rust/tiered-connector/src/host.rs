//! Host memory: how much of it the tier may have, the arena that units lie in, where it lies and what keeps it there.

mod arena;
pub mod limits;
pub mod pin;
pub mod sizing;
pub mod topology;
#[cfg(test)]
mod tree;

pub use arena::{Arena, NoAddressSpace};
