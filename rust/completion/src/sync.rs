//! What threads meet at: a flag, and a value that can be waited for. loom's in models (`cfg(loom)`), else
//! locks that are built with the crate, so that `ThreadSanitizer` sees them.

#[cfg(loom)]
pub(crate) mod modelled;
#[cfg(not(loom))]
mod real;

#[cfg(loom)]
pub(crate) use modelled::{Flag, Monitor};
#[cfg(not(loom))]
pub(crate) use real::{Flag, Monitor};
