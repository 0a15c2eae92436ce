//! Memory of large arrays: where it lies, and what the processor is told of it. Nothing but the time of an
//! access depends on it.

mod array;
mod prefetch;
mod region;
mod rows;

pub use array::Array;
pub use prefetch::{AHEAD, prefetch};
pub use rows::Rows;
