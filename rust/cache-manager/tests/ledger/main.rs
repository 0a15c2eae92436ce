//! The ledger through its public calls: sharing, room, refusals, and copies beside a late device.

mod collisions;
mod common;
mod copies;
mod device;
mod driver;
mod fences;
mod identity;
mod refusals;
mod room;
mod twins;
