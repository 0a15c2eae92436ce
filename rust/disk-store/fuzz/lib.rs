//! What the fuzzers and the tests of the store check of any bytes.

#[path = "../tests/fuzz/checks.rs"]
pub mod checks;
#[allow(dead_code, reason = "no power is cut here")]
#[path = "../tests/crash/disk.rs"]
mod disk;
#[allow(dead_code, reason = "the fuzzers draw")]
#[path = "../tests/crash/random.rs"]
mod random;
#[path = "../tests/scene/mod.rs"]
mod scene;
