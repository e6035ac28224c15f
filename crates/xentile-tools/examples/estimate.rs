//! What a program that libtpu dumped the schedule of would take, part by part, as JSON.
//!
//!     estimate TOPOLOGY FOLDER [NAME=BYTES[,STEPS]]...
//!
//! FOLDER is that of `--xla_jf_dump_to`; BYTES is what a part moves between HBM and VMEM, where its
//! name is known and what the compiler's listing tells of its copies is not enough, and STEPS how many
//! its pipeline has, where it makes that itself.

use std::env::args;
use std::path::Path;

use anyhow::{Context, Result};
use xentile_tools::estimate::Traffic;
use xentile_tools::{estimate, schedule};

fn main() -> Result<()> {
    let mut arguments = args().skip(1);
    let mut next = || arguments.next().context("needs TOPOLOGY and FOLDER");
    let (topology, folder) = (next()?, next()?);
    let known = arguments
        .map(|argument| {
            let (name, counts) = argument
                .split_once('=')
                .with_context(|| format!("{argument:?} is no NAME=BYTES"))?;
            let number = |text: &str| {
                text.parse().with_context(|| format!("{text:?} in {argument:?} is no number"))
            };
            let (bytes, steps) = match counts.split_once(',') {
                Some((bytes, steps)) => (bytes, Some(number(steps)?)),
                None => (counts, None),
            };
            Ok(Traffic { name: name.to_owned(), bytes: number(bytes)?, steps })
        })
        .collect::<Result<Vec<_>>>()?;
    let schedule = schedule::read_folder(Path::new(&folder))?;
    let parts = estimate::parts(&topology, &schedule, &known)
        .with_context(|| format!("{folder} tells too little of a program for {topology}"))?;
    println!("{}", serde_json::to_string(&parts)?);
    Ok(())
}
