//! The ledger through its public calls: sharing, room, refusals, forks, drafts, and copies beside a late device.

mod collisions;
mod common;
mod copies;
mod device;
mod drafts;
mod driver;
mod events;
mod fences;
mod forecasts;
mod forks;
mod identity;
mod misses;
mod offloads;
mod partial;
mod promises;
mod refusals;
mod retention;
mod room;
mod scenes;
mod shelf;
mod suspension;
mod tails;
mod twins;
