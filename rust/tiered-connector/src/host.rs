//! Host memory: how much of it the tier may have, and the arena that units lie in.

mod arena;
pub mod limits;
pub mod sizing;

pub use arena::{Arena, NoAddressSpace};
