//! Blocks on disk that survive their process: slots of one size in one file, and beside them a dense file of entries.
//!
//! A slot holds the bytes of one block. Its [`Entry`](entry::Entry) says which block that is, carries a checksum of
//! the bytes that is bound to block and slot, and one of its own; so whatever a crash leaves behind, what is read is
//! the block that was asked for, or is refused. Opening a [`Store`](store::Store) reads the entries alone.
//!
//! The store decides nothing: which block goes into which slot is the caller's. Its calls take memory and a function
//! that is told of the end, and do not wait; an [`Engine`](engine::Engine) moves the bytes, with a ring of the
//! kernel's or with threads, and a thread of the store's own syncs and writes entries.

mod commits;
pub mod directory;
pub mod engine;
pub mod entry;
pub mod file;
pub mod inspect;
pub mod manifest;
mod operation;
mod recovery;
mod slots;
pub mod store;
