//! Host memory: the arena that units lie in.

mod arena;

pub use arena::Arena;
