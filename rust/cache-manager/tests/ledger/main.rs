//! The ledger through its public calls: sharing, room, refusals, and copies beside a late device.

mod common;
mod copies;
mod device;
mod driver;
mod events;
mod fences;
mod identity;
mod misses;
mod refusals;
mod room;
mod twins;
