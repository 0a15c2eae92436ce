//! Large arrays and tables: where they lie, and what the processor is told of them. Nothing but the time of
//! an access depends on it.

mod array;
mod prefetch;
mod region;
mod rows;
mod table;

pub use array::Array;
pub use prefetch::{AHEAD, prefetch};
pub use rows::Rows;
pub use table::KeyTable;
