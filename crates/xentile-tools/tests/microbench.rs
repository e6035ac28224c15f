//! The binary `microbench`, as a user runs it.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const SMALL: [&str; 8] = ["--time", "5", "--vocab", "1001", "--iters", "3", "--warmup", "1"];

fn microbench(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_microbench");
    Command::new(program).args(arguments).output().expect("microbench starts")
}

fn measure(arguments: &[&str]) -> Value {
    let output = microbench(&[&SMALL, arguments, &["--json", "-"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {stderr}");
    let stdout = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(stdout.lines().count(), 1, "one line and nothing else:\n{stdout}");
    serde_json::from_str(&stdout).expect("JSON")
}

/// The error of a run that must end with 2 and say so in one line.
fn refuse(arguments: &[&str]) -> String {
    let output = microbench(&[&SMALL, arguments].concat());
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{arguments:?} printed a result");
    stderr
}

fn number(report: &Value, field: &str) -> f64 {
    let number = report.pointer(field).and_then(Value::as_f64);
    number.unwrap_or_else(|| panic!("{field} is not a number in {report}"))
}

fn close(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() <= tolerance * a.abs().max(1.0)
}

#[test]
fn every_dtype_and_implementation_reports_every_field() {
    for dtype in ["f32", "bf16", "f16"] {
        let reports = ["reference", "kernel"].map(|implementation| {
            let report = measure(&["--dtype", dtype, "--impl", implementation]);
            assert_eq!(report["op"], "cross_entropy");
            assert_eq!(report["backend"], "cpu");
            assert_eq!(report["impl"], implementation);
            assert_eq!(report["dtype"], dtype);
            assert_eq!(report["reduction"], "mean");
            let integers = [("time", 5), ("vocab", 1001), ("iters", 3), ("warmup", 1)];
            for (field, expected) in integers {
                assert_eq!(report[field], expected, "{field}");
                assert_eq!(report["config"][field], expected, "{field}");
            }
            let positive = [
                "/threads",
                "/first_call_s",
                "/avg_step_ms",
                "/median_step_ms",
                "/min_step_ms",
                "/copy_ms",
                "/ratio_to_copy",
                "/gb_per_s",
                "/copy_gb_per_s",
                "/loss",
                "/machine/unix_time",
                "/machine/cores",
            ];
            for field in positive {
                let number = number(&report, field);
                assert!(number > 0.0 && number.is_finite(), "{field} is {number}");
            }
            assert!(number(&report, "/std_step_ms") >= 0.0);
            assert!(number(&report, "/min_step_ms") <= number(&report, "/median_step_ms"));
            let ratio = number(&report, "/median_step_ms") / number(&report, "/copy_ms");
            assert!(close(number(&report, "/ratio_to_copy"), ratio, 1e-9));
            for field in ["processor", "isa", "platform", "xentile", "commit", "rustc"] {
                assert!(report["machine"][field].is_string(), "{field}");
            }
            for part in ["tile", "options", "input"] {
                assert!(report["config"][part].is_object(), "{part}");
            }
            report
        });
        let [reference, kernel] = reports;
        assert!(reference["time_block"].is_null() && reference["block_size"].is_null());
        assert!(number(&kernel, "/time_block") >= 1.0 && number(&kernel, "/block_size") >= 1.0);
        let losses = [&reference, &kernel].map(|report| number(report, "/loss"));
        assert!(close(losses[0], losses[1], 1e-5), "{dtype}: {losses:?}");
    }
}

#[test]
fn both_implementations_agree_under_every_reduction_and_option() {
    let options = "options={label_smoothing: 0.1, z_loss: 1.0e-4, softcap: 30.0}";
    let cases: [&[&str]; 5] = [
        &["--reduction", "mean", "--set", "input.ignored=0.4"],
        &["--reduction", "sum", "--set", "options.weights=random"],
        &["--reduction", "none"],
        &["--reduction", "none", "--set", options, "--dtype", "f32"],
        &["--set", options, "--set", "input.distribution=peaked"],
    ];
    for case in cases {
        let losses = ["reference", "kernel"]
            .map(|name| number(&measure(&[case, &["--impl", name]].concat()), "/loss"));
        assert!(close(losses[0], losses[1], 1e-5), "{case:?}: {losses:?}");
    }
    let [mean, sum] = ["mean", "sum"].map(|name| number(&measure(&["--reduction", name]), "/loss"));
    assert!(close(5.0 * mean, sum, 1e-9), "{mean} {sum}");
}

#[test]
fn zero_logits_have_the_loss_log_v() {
    let report = measure(&["--logits", "zeros"]);
    assert!(close(number(&report, "/loss"), 1001_f64.ln(), 1e-6));
}

#[test]
fn flags_go_before_sets_and_sets_before_the_config() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("cell.yaml");
    std::fs::write(&config, "{tile: {time_block: 7, block_size: 70}, isa: portable}").unwrap();
    let config = config.to_str().unwrap();
    let sets = ["--set", "tile.block_size=71", "--set", "tile.time_block=8", "--set", "threads=2"];
    let flags = ["--config", config, "--time-block", "9", "--threads", "1"];
    let report = measure(&[&sets[..], &flags].concat());
    assert_eq!(report["time_block"], 9);
    assert_eq!(report["block_size"], 71);
    assert_eq!(report["threads"], 1);
    assert_eq!(report["isa"], "portable");
    assert_eq!(report["config"]["tile"]["time_block"], 9);
}

#[cfg(target_os = "linux")]
#[test]
fn memory_is_what_was_used() {
    // Large enough to stand out from the process itself.
    let shape = ["--time", "64", "--vocab", "100003", "--dtype", "f32", "--logits", "zeros"];
    let matrix = 64.0 * 100_003.0 * 4.0;
    // A flag given twice is refused, so not `measure`.
    for (implementation, matrices) in [("kernel", 1.0), ("reference", 2.0)] {
        let flags = ["--impl", implementation, "--iters", "2", "--json", "-"];
        let output = microbench(&[&shape[..], &flags].concat());
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let used = number(&report, "/mem_peak_over_alloc_bytes");
        let allowed = (matrices * matrix * 0.9)..(matrices * matrix + 16e6);
        assert!(allowed.contains(&used), "{implementation} used {used}, allowed {allowed:?}");
        let peak = number(&report, "/mem_after_run/peak_resident_bytes");
        assert!(peak >= (matrices + 1.0) * matrix * 0.9);
        assert!(number(&report, "/mem_after_run/resident_bytes") <= peak);
        assert!(number(&report, "/mem_after_alloc/resident_bytes") <= peak);
    }
}

#[test]
fn the_json_file_gains_a_line_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("runs.jsonl");
    for run in 1..=2 {
        let output = microbench(&[&SMALL[..], &["--json", file.to_str().unwrap()]].concat());
        assert!(output.status.success());
        assert!(String::from_utf8_lossy(&output.stdout).contains("throughput"));
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(text.lines().count(), run);
        for line in text.lines() {
            assert!(serde_json::from_str::<Value>(line).is_ok());
        }
    }
}

#[test]
fn bad_input_is_named_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("runs.jsonl");
    let json = ["--json", file.to_str().unwrap()];
    let cases: [(&[&str], &str); 17] = [
        (&["--impl", "kernl"], "possible values: reference, kernel"),
        (&["--dtype", "f64"], "possible values: f32, bf16, f16"),
        (&["--reduction", "avg"], "possible values: mean, sum, none"),
        (&["--op", "attention"], "possible values: cross_entropy"),
        (&["--backend", "tpu"], "possible values: cpu"),
        (
            &["--hidden", "64"],
            "--hidden is set, and op cross_entropy has no such dim: its dims are time, vocab",
        ),
        (&["--head-dim=-1"], "invalid value '-1' for '--head-dim <HEAD_DIM>'"),
        (
            &["--isa", "sse"],
            "error: isa `sse` is unknown; it must be one of those of this processor",
        ),
        (&["--threads", "99999"], "error: threads is 99999; the most is 4096, and 0 is one a core"),
        (&["--time-block", "0"], "error: tile time_block is 0; it must be at least 1"),
        (&["--block-size", "0"], "error: tile block_size is 0; it must be at least 1"),
        (
            &["--set", "options.z_loss=-1"],
            "error: options: z_loss is -1; it must be finite and at least 0",
        ),
        (
            &["--set", "tile.blck_size=1"],
            "error: unknown key `tile.blck_size`; did you mean `block_size`?",
        ),
        (&["--set", "input.ignored=2"], "error: input: ignored is 2; it must be in [0, 1]"),
        (&["--set", "input.std=.inf"], "error: input: std is inf; it must be finite"),
        (
            &["--set", "options={reduction: none, weights: random}"],
            "set options.weights to none or options.reduction to mean or sum",
        ),
        (&["--config", "no/such.yaml"], "error: cannot read config no/such.yaml: "),
    ];
    for (case, expected) in cases {
        let stderr = refuse(&[case, &json].concat());
        assert!(stderr.contains(expected), "{case:?}: {stderr}");
        assert!(!file.exists(), "{case:?} wrote a result");
    }
    for field in ["time", "vocab", "iters"] {
        let output = microbench(&[&format!("--{field}"), "0", json[0], json[1]]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(stderr, format!("error: {field} is 0; it must be at least 1\n"));
    }
    let output = microbench(&["--time", "1000000000", json[0], json[1]]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.starts_with("error: this needs 564914."), "{stderr}");
    assert!(stderr.ends_with(" is available; lower time or vocab\n"), "{stderr}");
    assert!(!file.exists());

    let folder = folder.path().to_str().unwrap();
    let stderr = refuse(&["--json", folder]);
    assert!(stderr.ends_with("is a directory; name a file in it\n"), "{stderr}");
    let stderr = refuse(&["--json", &format!("{folder}/no/runs.jsonl")]);
    assert!(stderr.ends_with("/no is not a directory; make it\n"), "{stderr}");
}

#[test]
fn lists_are_measured_each_in_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let config =
        "{iters: 2, warmup: 0, inputs: [{distribution: masked, std: 3}, {distribution: trained}],
        shapes: [{time: 3, vocab: 2}, {vocab: 700}], time: 4, options: {factor: 2}}";
    std::fs::write(path("list.yaml"), config).unwrap();
    let run = |more: &[&str]| {
        let config = path("list.yaml");
        let output = microbench(&[&["--config", &config][..], more].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), stderr.into_owned())
    };
    let (code, printed, stderr) = run(&["--json", &path("runs.jsonl")]);
    assert_eq!(code, Some(0), "{stderr}");
    let lines: Vec<_> = printed.lines().collect();
    assert!(lines[0].starts_with("time ") && lines[0].contains("distribution"), "{printed}");
    let runs = std::fs::read_to_string(path("runs.jsonl")).unwrap();
    let reports: Vec<Value> =
        runs.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((lines.len(), reports.len()), (5, 4), "{printed}");
    let expected = [(3, 2, "masked, std 3"), (3, 2, "trained"), (4, 700, "masked, std 3")];
    for ((line, report), (time, vocab, distribution)) in
        lines[1..].iter().zip(&reports).zip(expected)
    {
        assert_eq!((&report["time"], &report["vocab"]), (&time.into(), &vocab.into()));
        assert_eq!(report["distribution"], distribution);
        assert_eq!(report["config"]["options"]["factor"], 2.0);
        assert!(report["config"].get("inputs").is_none(), "each is of one");
        assert!(line.contains(distribution) && line.starts_with(&time.to_string()), "{line}");
    }
    for (more, message) in [
        (&["--vocab", "9"][..], "--vocab is set, and shapes have vocab too; leave one out"),
        (&["--set", "shapes=[{vocb: 3}]"], "unknown key `shapes[0].vocb`; the extents of op"),
        (&["--set", "shapes=[{vocab: 0}]"], "measurement 1: vocab is 0; it must be at least 1"),
        (&["--set", "inputs=[{distribution: normal}, {std: -1}]"], "std is -1; it must be finite"),
    ] {
        let (code, printed, stderr) = run(more);
        assert_eq!((code, printed.as_str()), (Some(2), ""), "{more:?}");
        assert!(stderr.contains(message), "{stderr}");
    }
}

#[test]
fn shipped_configs_are_valid() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/microbench");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.to_str().unwrap().contains("linear") {
            continue; // its program comes from JAX: tests/linear.rs
        }
        // Lists of inputs are measured, each of one small shape.
        let here = ["--backend", "cpu", "--set", "topology=null", "shapes=[]"];
        let config = [&["--config", path.to_str().unwrap()][..], &here].concat();
        // Of a small shape, in what extents it has.
        let text = std::fs::read_to_string(&path).unwrap();
        let small = if text.contains("vocab") { &SMALL[..] } else { &SMALL[..2] };
        let output = microbench(&[small, &config].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {stderr}", path.display());
        count += 1;
    }
    assert!(count > 0);
}
