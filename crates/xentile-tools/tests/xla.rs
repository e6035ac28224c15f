//! The tools on the backend `xla:cpu`, as a user runs them. Most need XLA's CPU plug-in:
//!
//! ```text
//! XENTILE_PJRT_CPU=FILE cargo test -p xentile-tools --test xla -- --include-ignored
//! ```

use std::process::{Command, Output};

use serde_json::Value;

fn run(binary: &str, arguments: &[&str]) -> Output {
    Command::new(binary)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .args(arguments)
        .output()
        .expect("the binary starts")
}

const GRADCHECK: &str = env!("CARGO_BIN_EXE_gradcheck");
const MICROBENCH: &str = env!("CARGO_BIN_EXE_microbench");
const XENTILE: &str = env!("CARGO_BIN_EXE_xentile");

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The error of a run that must end with 2.
fn refuse(binary: &str, arguments: &[&str]) -> String {
    let output = run(binary, arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
    stderr(&output)
}

fn measure(arguments: &[&str]) -> Value {
    let small = ["--backend", "xla:cpu", "--time", "64", "--vocab", "5003", "--iters", "3"];
    let output = run(MICROBENCH, &[&small, arguments, &["--json", "-"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU"]
fn gradcheck_passes_for_every_config() {
    // All but those whose logits come from a file or take a real vocabulary's time.
    let configs =
        std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/gradcheck"));
    let mut checked = 0;
    for config in configs.unwrap() {
        let path = config.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        if text.contains("file:") || text.contains("isa:") {
            continue;
        }
        let path = path.to_str().unwrap();
        let sets = ["backend=xla:cpu", "shape.seq_len=40"];
        let arguments = [&["--config", path, "--set"], &sets[..]].concat();
        let output = run(GRADCHECK, &arguments);
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{path}: {printed}{}", stderr(&output));
        assert!(printed.contains("on xla:cpu") && printed.contains("PASSED"));
        checked += 1;
    }
    assert!(checked >= 10, "only {checked} configs were checked");
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU"]
fn microbench_reports_every_field() {
    let native =
        run(MICROBENCH, &["--time", "64", "--vocab", "5003", "--iters", "3", "--json", "-"]);
    let native: Value = serde_json::from_slice(&native.stdout).unwrap();
    for implementation in ["kernel", "reference"] {
        for reduction in ["mean", "sum", "none"] {
            let report = measure(&["--impl", implementation, "--reduction", reduction]);
            assert_eq!(report["backend"], "xla:cpu");
            let (compile, first) = (&report["compile_s"], &report["first_run_s"]);
            let (compile, first) = (compile.as_f64().unwrap(), first.as_f64().unwrap());
            assert!((report["first_call_s"].as_f64().unwrap() - compile - first).abs() < 1e-9);
            assert!(report["plugin"].as_str().unwrap().contains("PJRT 0."));
            // What this plug-in does not tell is null, and never 0.
            for (place, names) in [
                ("mem_after_alloc", &["bytes_in_use"][..]),
                (
                    "mem_after_run",
                    &[
                        "bytes_in_use",
                        "peak_bytes_in_use",
                        "bytes_reserved",
                        "pool_bytes",
                        "peak_pool_bytes",
                    ],
                ),
            ] {
                for name in names {
                    assert!(report[place].get(name).is_some_and(Value::is_null), "{place}.{name}");
                }
            }
            let compiled = &report["compiled"];
            let logits = 64 * 5003 * 2;
            assert!(compiled["argument_bytes"].as_u64().unwrap() >= 2 * logits);
            assert!(compiled["alias_bytes"].as_u64().unwrap() >= logits);
            let temporaries = compiled["temporary_bytes"].as_u64().unwrap();
            if implementation == "kernel" {
                assert!(temporaries < 16 * 1024, "{temporaries} bytes of temporaries");
            }
            if reduction == "mean" {
                let (a, b) = (report["loss"].as_f64().unwrap(), native["loss"].as_f64().unwrap());
                assert!((a - b).abs() < 1e-5 * b, "{a} is not the native kernel's {b}");
            }
        }
    }
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU"]
fn plugins_are_listed() {
    let output = run(XENTILE, &["plugins"]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}");
    for piece in ["xla:cpu", "PJRT        0.", "Ffi", "stablehlo_current_version", "device 0"] {
        assert!(printed.contains(piece), "no {piece} in {printed}");
    }
}

#[test]
fn a_missing_plugin_says_where_it_was_looked_for() {
    for (binary, arguments) in [
        (MICROBENCH, &["--backend", "xla:cpu", "--plugin", "/nowhere/plugin.so"][..]),
        (
            GRADCHECK,
            &[
                "--config",
                "configs/gradcheck/z_loss.yaml",
                "--set",
                "backend=xla:cpu",
                "plugin=/nowhere/plugin.so",
            ],
        ),
    ] {
        let error = refuse(binary, arguments);
        assert!(error.contains("/nowhere/plugin.so"), "{error}");
    }
}

#[test]
fn a_file_that_is_no_plugin() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, "no plug-in").unwrap();
    let path = file.path().to_str().unwrap();
    let error = refuse(MICROBENCH, &["--backend", "xla:cpu", "--plugin", path]);
    assert!(error.contains("cannot open the PJRT plug-in"), "{error}");
    let output = run(XENTILE, &["plugins", "--plugin", path]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn what_is_not_the_users_to_choose() {
    for (arguments, message) in [
        (&["--backend", "xla:cpu", "--isa", "portable"][..], "isa is set; on xla:cpu"),
        (&["--backend", "xla:cpu", "--threads", "2"], "threads is set; on xla:cpu"),
        (&["--backend", "cpu", "--plugin", "x.so"], "plugin is set; backend cpu needs none"),
    ] {
        let error = refuse(MICROBENCH, arguments);
        assert!(error.contains(message), "{error}");
    }
}
