//! `microbench suite`, as a user runs it.

use std::process::{Command, Output};

use serde_json::Value;

const CONFIG: &str = "\
cell: {backend: cpu, dtype: f32, iters: 2, warmup: 0}
cells:
  - {op: cross_entropy, options: {reduction: mean}, shapes: [{time: 3, vocab: 70}, {time: 5, vocab: 90}]}
  # It has no plain program on this backend.
  - {op: rms_norm, time: 4, hidden: 16}
";

fn suite(folder: &std::path::Path, sets: &[&str]) -> Output {
    std::fs::write(folder.join("all.yaml"), CONFIG).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_microbench"));
    command.current_dir(folder).args(["suite", "--config", "all.yaml"]);
    for set in sets {
        command.args(["--set", set]);
    }
    command.output().expect("microbench starts")
}

#[test]
fn a_failed_measurement_is_reported_and_the_rest_run() {
    let folder = tempfile::tempdir().unwrap();
    let output = suite(folder.path(), &[]);
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("[6/6]") && stderr.contains("1 of 6 measurements failed"), "{stderr}");
    assert_eq!(stdout.matches("\n| cross_entropy").count(), 2, "{stdout}");

    let out = folder.path().join("target/suite/all");
    let mut names: Vec<_> = std::fs::read_dir(&out)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["suite.json", "suite.md", "suite.svg"]);
    let read = |name| std::fs::read_to_string(out.join(name)).unwrap();
    let found: Value = serde_json::from_str(&read("suite.json")).unwrap();
    let rows = found["rows"].as_array().unwrap();
    let failed: Vec<_> = rows.iter().map(|row| !row["reference"]["error"].is_null()).collect();
    assert_eq!(failed, [false, false, true]);
    for row in rows {
        assert!(row["kernel"]["report"]["median_step_ms"].as_f64().unwrap() > 0.0);
        assert_eq!(row["speedup"].is_null(), !row["reference"]["error"].is_null());
    }
    assert!(read("suite.md").contains("rms_norm has no dense program on backend cpu"));
    assert!(read("suite.svg").contains("cross_entropy f32"));
}

#[test]
fn bad_input_names_the_cell() {
    let folder = tempfile::tempdir().unwrap();
    for (set, message) in [
        ("cells=[{op: rms_norm, widht: 3}]", "cells[0]"),
        ("cells=[]", "cells is empty"),
        ("cell.impl=kernel", "impl is set"),
        ("reference={backend: gpu}", "reference of cells[0]"),
        ("outt=x", "outt"),
    ] {
        let output = suite(folder.path(), &[set]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{set}: {stderr}");
        assert!(stderr.contains(message), "{set}: {stderr}");
    }
    assert!(!folder.path().join("target").exists());
}
