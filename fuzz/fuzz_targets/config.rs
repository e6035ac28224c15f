//! Configs of both binaries: text, then any number of `--set` overrides, each after a NUL.

#![no_main]

use libfuzzer_sys::fuzz_target;
use xentile_tools::{config, gradcheck, microbench};

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let mut parts = text.split('\0').map(str::to_owned);
    let text = parts.next().unwrap_or_default();
    let sets: Vec<_> = parts.collect();

    let _ = config::parse::<microbench::Config>(&text, &sets);
    let Ok(read) = config::parse::<gradcheck::Config>(&text, &sets) else { return };

    // What was read can be written, and what was written reads back as the same.
    let written = serde_yaml::to_string(&read).unwrap();
    let again: gradcheck::Config = config::parse(&written, &[]).unwrap();
    assert_eq!(serde_yaml::to_string(&again).unwrap(), written);
});
