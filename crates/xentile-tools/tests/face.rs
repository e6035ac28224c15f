//! The face of the tools: flags, keys of configs and of JSON, names of metrics and of custom calls. They
//! are a promise to configs, dashboards and exported programs, whatever the code behind them is called.
//!
//! `face.txt` is what was recorded; a run with `XENTILE_RECORD_FACE=1` writes it anew.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const GRADCHECK: &str = env!("CARGO_BIN_EXE_gradcheck");
const MICROBENCH: &str = env!("CARGO_BIN_EXE_microbench");
const XENTILE: &str = env!("CARGO_BIN_EXE_xentile");

const LOGITS: &str = "\
op: cross_entropy
backend: cpu
shape: {batch: 2, seq_len: 9, vocab: 103}
dtype: bf16
";
const HIDDEN: &str = "\
op: linear_cross_entropy
backend: xla:cpu
shape: {batch: 2, seq_len: 9, vocab: 300}
hidden: 16
bias: true
dtype: bf16
";

/// Every key of gradcheck's configs, but those of what only `xla:` backends have.
const LOGITS_KEYS: &str = "\
op: cross_entropy
backend: cpu
impl: kernel
shape: {batch: 2, seq_len: 9, vocab: 103}
hidden: null
bias: false
vocab_axis: null
max_scratch_bytes: null
dtype: bf16
tile: {time_block: 3, block_size: 64}
threads: 1
isa: null
plugin: null
program: null
cache: null
options: {ignore_index: -1, label_smoothing: 0.1, z_loss: 1.0e-4, softcap: 30, reduction: sum, weights: random, factor: 3, factor_form: argument}
cotangent: -2.5
input: {synthetic: {distribution: peaked, std: 1, share: 0.5, height: 3, seed: 4, ignored: 0.1}}
tolerances: {forward_rel: 1.0e-5, dlogits_ulp: 1, dlogits_cotangent: 1.0e-7, dlogits_equal: 0.9, sum_roundings: null, gradient_roundings: null}
";

const CELL_KEYS: &str = "\
op: cross_entropy
backend: cpu
impl: kernel
time: 5
vocab: 103
hidden: null
bias: false
vocab_axis: null
max_scratch_bytes: null
dtype: bf16
tile: {time_block: 3, block_size: 64}
iters: 2
warmup: 0
in_flight: null
threads: 1
isa: null
plugin: null
topology: null
program: null
cache: null
options: {ignore_index: -1, label_smoothing: 0.1, z_loss: 1.0e-4, softcap: 30, reduction: sum, weights: random}
logits: random
input: {distribution: normal, std: 1, seed: 4, ignored: 0.1}
inputs: []
shapes: []
";

struct Fixture(TempDir);

impl Fixture {
    fn new(config: &str) -> Self {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("config.yaml"), config).unwrap();
        Self(folder)
    }

    fn run(&self, binary: &str, arguments: &[&str]) -> Output {
        Command::new(binary)
            .current_dir(&self.0)
            .args(["--config", "config.yaml"])
            .args(arguments)
            .env("XENTILE_CACHE", self.0.path())
            .env("XENTILE_PYTHON", "python")
            .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/../../pallas_bridge/src"))
            .output()
            .expect("the binary starts")
    }

    /// The JSON of a run that passes.
    fn json(&self, binary: &str, sets: &[&str]) -> Value {
        let mut arguments = vec!["--json", "out.json"];
        if !sets.is_empty() {
            arguments.push("--set");
            arguments.extend(sets);
        }
        let output = self.run(binary, &arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{sets:?}: {stderr}");
        let text = std::fs::read_to_string(self.0.path().join("out.json")).unwrap();
        std::fs::remove_file(self.0.path().join("out.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }
}

/// The paths of all that is in it, in order; an array counts as one value.
fn keys(value: &Value, path: &str, found: &mut Vec<String>) {
    match value.as_object() {
        Some(map) if !map.is_empty() => {
            for (key, value) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                keys(value, &path, found);
            }
        }
        _ => found.push(path.to_owned()),
    }
}

fn list(names: impl IntoIterator<Item = String>) -> String {
    names.into_iter().collect::<Vec<_>>().join("\n  ")
}

/// Metrics in the order that they are reported in, then times, limits and where metrics are worst.
fn metrics(face: &mut String, name: &str, report: &Value) {
    let names = |key: &str| report[key].as_object().unwrap().keys().cloned();
    let (times, metrics): (Vec<_>, Vec<_>) =
        names("figures").partition(|name| name.starts_with("time/"));
    _ = writeln!(face, "gradcheck metrics, {name}:\n  {}", list(metrics));
    _ = writeln!(face, " times:\n  {}", list(times.into_iter().collect::<BTreeSet<_>>()));
    let limits = report["limits"].as_object().unwrap().iter();
    let limits = limits.map(|(name, limit)| {
        format!("{name} {}", list(limit.as_object().unwrap().keys().cloned()))
    });
    _ = writeln!(face, " limits:\n  {}", list(limits));
    let not_given = report["not_given"].as_array().unwrap().iter().map(ToString::to_string);
    _ = writeln!(face, " not given:\n  {}", list(not_given));
}

/// The keys of a report but those of metrics.
fn report_keys(face: &mut String, name: &str, mut report: Value) {
    for key in ["figures", "limits", "worst"] {
        if let Some(value) = report.get_mut(key) {
            *value = Value::Null;
        }
    }
    let mut found = Vec::new();
    keys(&report, "", &mut found);
    _ = writeln!(face, "{name}, keys of JSON:\n  {}", list(found));
}

fn flags(face: &mut String, name: &str, binary: &str, arguments: &[&str]) {
    let output = Command::new(binary).args(arguments).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let flags: Vec<_> = help
        .lines()
        .map(str::trim_start)
        .filter(|line| line.starts_with("--") || line.starts_with("-h,"))
        .map(|line| line.split("  ").next().unwrap().to_owned())
        .collect();
    _ = writeln!(face, "{name}, flags:\n  {}", list(flags));
}

/// Holds `found` against the part of the recorded face called `name`.
fn hold(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/face").join(format!("{name}.txt"));
    if std::env::var_os("XENTILE_RECORD_FACE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, found).unwrap();
    }
    let recorded = std::fs::read_to_string(&path).unwrap();
    for (line, (recorded, found)) in recorded.lines().zip(found.lines()).enumerate() {
        assert_eq!(found, recorded, "{name}.txt, line {}", line + 1);
    }
    assert_eq!(found.lines().count(), recorded.lines().count(), "{name}.txt: {found}");
}

#[test]
fn flags_are_as_recorded() {
    let mut face = String::new();
    flags(&mut face, "gradcheck", GRADCHECK, &[]);
    flags(&mut face, "microbench", MICROBENCH, &[]);
    flags(&mut face, "microbench sweep", MICROBENCH, &["sweep"]);
    flags(&mut face, "xentile plugins", XENTILE, &["plugins"]);
    hold("flags", &face);
}

#[test]
fn cross_entropy_is_as_recorded() {
    let mut face = String::new();
    let fixture = Fixture::new(LOGITS);
    for reduction in ["mean", "sum", "none"] {
        let report = fixture.json(GRADCHECK, &[&format!("options.reduction={reduction}")]);
        metrics(&mut face, reduction, &report);
        for name in ["dlogits_max_abs", "fwd/loss_max_abs"] {
            let axes = report["worst"][name].as_object().unwrap();
            _ = writeln!(face, " worst {name}: {}", list(axes.keys().cloned()));
        }
    }
    report_keys(&mut face, "gradcheck", fixture.json(GRADCHECK, &["backend=cpu"]));
    // Every key is taken.
    let report = Fixture::new(LOGITS_KEYS).json(GRADCHECK, &[]);
    assert_eq!(report["config"]["cotangent"], -2.5);
    assert_eq!(report["tile"], serde_json::json!({"time_block": 3, "block_size": 64}));
    let report = Fixture::new(CELL_KEYS).json(MICROBENCH, &[]);
    assert_eq!(report["config"]["options"]["softcap"], 30.0);
    report_keys(&mut face, "microbench", report);
    let report =
        Fixture::new(CELL_KEYS).json(MICROBENCH, &["options={reduction: none}", "impl=reference"]);
    report_keys(&mut face, "microbench, dense", report);
    let fixture = Fixture::new(
        "{time_blocks: [1, 2], block_sizes: [64], out: out, cell: {time: 5, vocab: 103, iters: 2}}",
    );
    let output = Command::new(MICROBENCH)
        .current_dir(&fixture.0)
        .args(["sweep", "--config", "config.yaml"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let read =
        |name: &str| std::fs::read_to_string(fixture.0.path().join("out").join(name)).unwrap();
    _ = writeln!(face, "sweep.csv:\n  {}", read("sweep.csv").lines().next().unwrap());
    let heads = read("sweep.md");
    _ = writeln!(
        face,
        "sweep.md:\n  {}",
        heads.lines().find(|line| line.starts_with('|')).unwrap()
    );
    let sweep: Value = serde_json::from_str(&read("sweep.json")).unwrap();
    let mut found = Vec::new();
    keys(&sweep["config"], "config", &mut found);
    keys(&sweep["best"], "best", &mut found);
    keys(&sweep["rows"][0], "row", &mut found);
    _ = writeln!(face, "sweep.json:\n  {}", list(found));
    hold("cross_entropy", &face);
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, a library, and a python with JAX"]
fn linear_cross_entropy_is_as_recorded() {
    let mut face = String::new();
    let fixture = Fixture::new(HIDDEN);
    for reduction in ["mean", "none"] {
        let report = fixture.json(GRADCHECK, &[&format!("options.reduction={reduction}")]);
        metrics(&mut face, reduction, &report);
        for name in ["dhidden_max_abs", "dweight/excess", "dbias/excess"] {
            let axes = report["worst"][name].as_object().unwrap();
            _ = writeln!(face, " worst {name}: {}", list(axes.keys().cloned()));
        }
        _ = writeln!(face, " shape: {}", report["shape"]);
    }
    report_keys(&mut face, "gradcheck", fixture.json(GRADCHECK, &["bias=false"]));
    // What pallas_bridge is asked to export.
    let files = std::fs::read_dir(fixture.0.path()).unwrap().map(|file| file.unwrap().path());
    let asked = files.into_iter().find(|path| path.extension().is_some_and(|end| end == "config"));
    let asked: Value =
        serde_json::from_slice(&std::fs::read(asked.expect("a config")).unwrap()).unwrap();
    let mut found = Vec::new();
    keys(&asked, "", &mut found);
    _ = writeln!(face, "asked of pallas_bridge:\n  {}", list(found));
    let cell = "{op: linear_cross_entropy, backend: xla:cpu, time: 300, vocab: 103, hidden: 16, iters: 2, max_scratch_bytes: 4000000}";
    report_keys(&mut face, "microbench", Fixture::new(cell).json(MICROBENCH, &[]));
    hold("linear_cross_entropy", &face);
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU"]
fn programs_of_cross_entropy_are_as_recorded() {
    let mut face = String::new();
    let fixture = Fixture::new(LOGITS);
    for implementation in ["kernel", "reference"] {
        for reduction in ["mean", "none"] {
            let sets = [
                "backend=xla:cpu",
                &format!("impl={implementation}"),
                &format!("options.reduction={reduction}"),
            ];
            metrics(
                &mut face,
                &format!("{implementation}, {reduction}"),
                &fixture.json(GRADCHECK, &sets),
            );
        }
    }
    let cell = Fixture::new(CELL_KEYS);
    report_keys(&mut face, "microbench", cell.json(MICROBENCH, &["backend=xla:cpu", "threads=0"]));
    hold("programs", &face);
}

/// A program that was exported by a build of the first release, with all that its manifest tells.
#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU"]
fn a_program_exported_before_still_runs() {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/face/linear.json");
    let set = format!("program={}", program.display());
    let report =
        Fixture::new("{shape: {batch: 2, seq_len: 9, vocab: 300}}").json(GRADCHECK, &[&set]);
    assert_eq!(report["config"]["op"], "linear_cross_entropy");
    assert_eq!(report["config"]["max_scratch_bytes"], 40_000);
    assert!(report["exported"]["plan"].as_str().unwrap().starts_with("library: 16 tokens"));
}

/// Programs that were exported before call these.
#[test]
fn custom_calls_are_as_recorded() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/face/targets.txt");
    let found: BTreeSet<_> = xentile_xla::targets()
        .iter()
        .filter(|row| row.platform() == "Host")
        .map(|row| row.target().to_owned())
        .collect();
    if std::env::var_os("XENTILE_RECORD_FACE").is_some() {
        std::fs::write(&path, list(found.clone()) + "\n").unwrap();
    }
    let recorded = std::fs::read_to_string(&path).unwrap();
    for target in recorded.split_whitespace() {
        assert!(found.contains(target), "no {target} among {found:?}");
    }
}
