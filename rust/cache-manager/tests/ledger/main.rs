//! The ledger through its public calls: sharing, room, refusals, and copies beside a late device.

mod common;
mod device;
mod driver;
mod fences;
mod findings;
