#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| disk_store_fuzz::checks::store(input));
