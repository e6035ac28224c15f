//! Every operation by the tools, as a user runs them: what `xentile::operations` lists is served, and what
//! an operation does not have is said.

use std::num::NonZero;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;
use tempfile::TempDir;
use xentile::operation::{DimSpec, Kind, Operation, Pass, Section, Value as OptionValue};
use xentile::{DType, operations};

const GRADCHECK: &str = env!("CARGO_BIN_EXE_gradcheck");
const MICROBENCH: &str = env!("CARGO_BIN_EXE_microbench");
const XENTILE: &str = env!("CARGO_BIN_EXE_xentile");

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn run(binary: &str, arguments: &[String]) -> Output {
    Command::new(binary).args(arguments).output().expect("the binary starts")
}

/// Operations whose kernels are called directly.
fn native() -> impl Iterator<Item = &'static dyn Operation> {
    operations().iter().copied().filter(|of| xentile_cpu::kernels(of.name()).is_some())
}

fn is_beside(dim: &&DimSpec) -> bool {
    !dim.in_shape && dim.letter != "T"
}

/// A small config of gradcheck, odd in every extent.
fn config(of: &dyn Operation) -> String {
    let mut shape = "batch: 2, seq_len: 9".to_owned();
    for dim in of.dims().iter().filter(|dim| dim.in_shape) {
        shape += &format!(", {}: 103", dim.key);
    }
    let mut config = format!("op: {}\nbackend: cpu\nshape: {{{shape}}}\ndtype: bf16\n", of.name());
    for dim in of.dims().iter().filter(is_beside) {
        config += &format!("{}: 37\n", dim.key);
    }
    config
}

/// What `--set` has in each run of an operation: nothing, and any other value than the default of an option
/// of a few values, with what that asks of others.
fn variants(of: &dyn Operation) -> Vec<Vec<String>> {
    let mut all = vec![Vec::new()];
    for option in of.options() {
        let path = match option.section {
            Section::Options => format!("options.{}", option.name),
            Section::Top => option.name.to_owned(),
        };
        let values: Vec<(OptionValue, String)> = match option.kind {
            Kind::Bool => [false, true].map(|x| (OptionValue::Bool(x), x.to_string())).into(),
            Kind::Word(words) => {
                words.iter().map(|word| (OptionValue::Word(word), (*word).to_owned())).collect()
            }
            _ => Vec::new(),
        };
        for (_, value) in values.into_iter().filter(|(value, _)| *value != option.default) {
            let mut sets = vec![format!("{path}={value}")];
            if path == "options.distribution" {
                sets.push("options.reduction=none".to_owned());
            }
            all.push(sets);
        }
    }
    all
}

/// The report of a gradcheck of `config` that passes.
fn passes(config: &str, sets: &[String]) -> Value {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("config.yaml"), config).unwrap();
    let mut arguments = vec!["--config".into(), path("config.yaml")];
    arguments.extend(["--json".into(), path("out.json")]);
    arguments.push("--set".into());
    arguments.extend(sets.iter().cloned());
    let output = Command::new(GRADCHECK)
        .args(&arguments)
        .env("XENTILE_CACHE", folder.path())
        .env("XENTILE_PYTHON", "python")
        .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/../../pallas_bridge/src"))
        .output()
        .expect("the binary starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{config}{sets:?}: {text}{}", stderr(&output));
    serde_json::from_str(&std::fs::read_to_string(path("out.json")).unwrap()).unwrap()
}

/// The error of a gradcheck of `config` that must refuse it.
fn refuses(config: &str, set: &str) -> String {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("config.yaml");
    std::fs::write(&path, config).unwrap();
    let path = path.to_str().unwrap().to_owned();
    let output = run(GRADCHECK, &["--config".into(), path, "--set".into(), set.into()]);
    assert_eq!(output.status.code(), Some(2), "{set}: {}", stderr(&output));
    stderr(&output)
}

#[test]
fn every_option_passes_gradcheck_in_every_dtype() {
    for of in native() {
        for sets in variants(of) {
            for dtype in DType::ALL {
                let sets = [&[format!("dtype={dtype}")], &sets[..]].concat();
                let report = passes(&config(of), &sets);
                assert_eq!(report["config"]["op"], of.name());
                assert_eq!(report["config"]["dtype"], dtype.name());
            }
        }
    }
}

/// Numbers that JSON lacks are written as words, which are read again.
#[test]
fn factors_that_are_not_finite_are_written_and_read() {
    let of = xentile::operation("cross_entropy").unwrap();
    for (yaml, word) in [(".inf", "inf"), ("-.inf", "-inf"), (".nan", "nan")] {
        for given in [yaml, word] {
            for form in ["constant", "argument"] {
                let sets = [format!("options={{factor: {given}, factor_form: {form}}}")];
                let report = passes(&config(of), &sets);
                assert_eq!(report["config"]["options"]["factor"], word);
                assert_eq!(report["figures"]["dlogits/strays"], 0.0);
            }
        }
    }
}

#[test]
fn every_distribution_and_instruction_set_passes_gradcheck() {
    for of in native() {
        for distribution in of.facts().distributions {
            let set = format!("input.synthetic.distribution={}", distribution.name());
            passes(&config(of), &[set]);
        }
        for isa in xentile_cpu::Isa::available() {
            let report = passes(&config(of), &[format!("isa={isa}")]);
            assert_eq!(report["isa"], isa.name());
        }
    }
}

/// Every input that has a gradient has metrics of it, or shares another's.
#[test]
fn results_have_metrics() {
    for of in native() {
        let report = passes(&config(of), &["threads=1".to_owned()]);
        let metrics = report["figures"].as_object().unwrap();
        for option in of.options() {
            let options = match option.section {
                Section::Options => &report["config"]["options"],
                Section::Top => &report["config"],
            };
            assert!(options.get(option.name).is_some(), "{}", option.name);
        }
        let mut times = vec!["time/forward_s", "time/total_s"];
        if of.passes() != [Pass::Forward] {
            times.extend(["time/kernel_grad_s", "time/ref_grad_s"]);
        }
        for name in times {
            assert!(metrics[name].as_f64().unwrap() >= 0.0, "{name} of {}", of.name());
        }
        assert!(!report["limits"].as_object().unwrap().is_empty());
    }
}

#[test]
fn every_operation_is_measured() {
    for of in native() {
        let mut arguments: Vec<String> = vec!["--op".into(), of.name().into()];
        arguments.extend(["--iters", "3", "--warmup", "0"].map(Into::into));
        arguments.extend(["--json".into(), "-".into()]);
        for dim in of.dims() {
            let extent = if dim.letter == "T" { "19" } else { "205" };
            arguments.extend([format!("--{}", dim.key.replace('_', "-")), extent.to_owned()]);
        }
        let output = run(MICROBENCH, &arguments);
        assert!(output.status.success(), "{}: {}", of.name(), stderr(&output));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["op"], of.name());
        for dim in of.dims() {
            assert!(report[dim.key].as_u64().unwrap() > 0, "{}", dim.key);
        }
        // Products are what some take their time for, and moving bytes what others do.
        let metrics: &[_] = match report["gflop_per_s"].is_null() {
            true => &["median_step_ms", "copy_ms", "ratio_to_copy", "gb_per_s"],
            false => &["median_step_ms", "gflop_per_s"],
        };
        for name in metrics {
            assert!(report[name].as_f64().unwrap() > 0.0, "{name} of {}", of.name());
        }
        assert!(report["loss"].as_f64().unwrap().is_finite());
    }
}

#[test]
fn an_option_of_another_operation_names_its_owner() {
    let norm = xentile::operation("rms_norm").unwrap();
    let logits = xentile::operation("cross_entropy").unwrap();
    let attention = xentile::operation("flash_attention").unwrap();
    for (of, set, expected) in [
        (
            norm,
            "options.z_loss=1",
            "options.z_loss is set; op rms_norm has none, cross_entropy has",
        ),
        (norm, "vocab_axis=1", "vocab_axis is set; op rms_norm has none, linear_cross_entropy has"),
        (norm, "shape.vocab=7", "shape.vocab is set; op rms_norm has no such extent"),
        (norm, "tile.block_size=7", "tile.block_size is set; op rms_norm has no such extent"),
        (norm, "tolerances.dlogits_ulp=1", "tolerances.dlogits_ulp is set; op rms_norm has none"),
        (norm, "hidden=null", "op rms_norm needs hidden: the number of columns of hidden states"),
        (norm, "keys=7", "keys is set; op rms_norm has none, flash_attention has"),
        (attention, "keys=0", "keys is 0; it must be at least 1"),
        (attention, "kyes=7", "unknown key `kyes`; did you mean `keys`?"),
        (attention, "segments=19", "segments is 19; it must be from 1 to the tokens, which are 18"),
        (norm, "options.eps=-1", "options: eps is -1; it must be finite and at least 0"),
        (norm, "options.epss=1", "unknown key `options.epss`; did you mean `eps`?"),
        (norm, "hiden=1", "unknown key `hiden`; did you mean `hidden`?"),
        (norm, "residual=7", "`residual`: invalid type"),
        (norm, "weight_dtype=f61", "unknown value `f61` for `weight_dtype`; did you mean `f16`?"),
        (
            norm,
            "input.synthetic.ignored=0.5",
            "ignored is 0.5; op rms_norm has no labels to ignore",
        ),
        (norm, "input.synthetic.distribution=masked", "rows are normal, uniform or offset"),
        (norm, "input={file: x.safetensors}", "cannot open x.safetensors"),
        (
            norm,
            "impl=reference",
            "impl is reference; op rms_norm has no dense program on backend cpu",
        ),
        (norm, "op=rms_nrom", "unknown value `rms_nrom` for `op`; did you mean `rms_norm`?"),
        (
            logits,
            "input.synthetic.distribution=nonfinite",
            "logits are normal, uniform, peaked, trained, offset or masked",
        ),
        (logits, "options.eps=1", "options.eps is set; op cross_entropy has none, rms_norm has"),
        (
            logits,
            "options={reduction: none, factor: 2}",
            "options.factor is 2, a constant; reduction none has no part for it, as each loss has",
        ),
        (
            logits,
            "options={reduction: none, factor_form: argument}",
            "options.factor is 1, an argument; reduction none has no part for it",
        ),
        (
            logits,
            "options.distribution=true",
            "options.distribution is true with reduction mean, whose cotangents are of the loss alone",
        ),
        (
            logits,
            "options.columns=3",
            "options.columns is 3 with reduction mean, whose cotangents are of the loss alone",
        ),
        (
            logits,
            "options={reduction: none, columns: 129}",
            "options.columns is 129; it must be in [1, 128]",
        ),
        (logits, "options.columns=0", "options.columns is 0; it must be in [1, 128]"),
        (
            logits,
            "options={reduction: none, columns: 3}",
            "options.columns is 3; columns are picked beside kernels, by programs from JAX: set backend",
        ),
        (logits, "options.factor=infinite", "`options.factor`: invalid type"),
        (logits, "options=7", "`options`: it must be a mapping of keys to values"),
        (
            logits,
            "shape={batch: 1, seq_len: 3}",
            "op cross_entropy needs shape.vocab: the number of",
        ),
    ] {
        let error = refuses(&config(of), set);
        assert!(error.contains(expected), "{set}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn operations_are_listed() {
    let list = run(XENTILE, &["ops".into()]);
    let list = String::from_utf8(list.stdout).unwrap();
    for of in operations() {
        assert!(list.contains(of.facts().about), "{list}");
        let output = run(XENTILE, &["ops".into(), of.name().into()]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        for option in of.options() {
            assert!(text.contains(option.about), "{} is not in {text}", option.name);
        }
        for dim in of.dims() {
            assert!(text.contains(dim.key), "{} is not in {text}", dim.key);
        }
        assert!(text.contains("xla:cpu"));
    }
    let output = run(XENTILE, &["ops".into(), "corss_entropy".into()]);
    assert_eq!(output.status.code(), Some(2));
    let expected = "error: unknown operation `corss_entropy`; did you mean `cross_entropy`?\n";
    assert_eq!(stderr(&output), expected);
}

/// On XLA, by this build's programs or by those that `pallas_bridge` has of the operation.
#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, a library, and a python with JAX"]
fn every_operation_passes_gradcheck_on_xla() {
    pass_on_xla("kernel", 1);
    pass_on_xla("reference", 1);
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, a library, and a python with JAX"]
fn every_variant_passes_gradcheck_on_xla() {
    pass_on_xla("kernel", usize::MAX);
    pass_on_xla("reference", usize::MAX);
}

/// Runs gradcheck on XLA's CPU with the first `count` variants of each operation.
fn pass_on_xla(implementation: &str, count: usize) {
    let source = "../../pallas_bridge/src/pallas_bridge/_src";
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let exported = std::fs::read_to_string(source.join("exported.py")).unwrap();
    let mut runs = Vec::new();
    for of in operations().iter().copied() {
        let is_exported = exported.contains(&format!("    \"{}\": ", of.name()))
            || source.join(of.name()).join("exported.py").exists();
        if xentile_programs::programs(of.name()).is_none() && !is_exported {
            continue;
        }
        // XLA's programs add rows up as they come.
        let has_sums = of.facts().tolerances.iter().any(|of| of.name == "sum_roundings");
        let sums = has_sums.then(|| "tolerances.sum_roundings=1".to_owned());
        for more in variants(of).into_iter().take(count) {
            let mut sets = vec!["backend=xla:cpu".to_owned(), format!("impl={implementation}")];
            sets.extend(sums.iter().cloned().chain(more));
            runs.push((config(of), sets));
        }
    }
    assert!(!runs.is_empty());
    // A run is mostly Python that exports, by one thread.
    let next = AtomicUsize::new(0);
    let run_next = || {
        while let Some((config, sets)) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
            passes(config, sets);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(run_next);
        }
    });
}

/// No operation's name is in the sources of the tools but in tests: what is declared is served.
#[test]
fn tools_know_no_operation_by_name() {
    fn read(folder: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                read(&path, found);
            } else if path.file_name().is_none_or(|name| name != "tests.rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                // Tests end a file.
                let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
                let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line));
                for (at, line) in lines {
                    if operations().iter().any(|of| line.contains(of.name())) {
                        found.push(format!("{}:{at}: {}", path.display(), line.trim()));
                    }
                }
            }
        }
    }
    let mut found = Vec::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn functions_are_operations_with_options_set() {
    let functions: Vec<_> = operations().iter().flat_map(|of| of.facts().functions).collect();
    assert!(functions.iter().any(|function| function.name == "swiglu"));
    for function in functions {
        let small = ["--mlp", "64", "--time", "8", "--iters", "2", "--json", "-"].map(Into::into);
        let arguments = [&["--op".into(), function.name.into()][..], &small].concat();
        let output = run(MICROBENCH, &arguments);
        assert!(output.status.success(), "{}: {}", function.name, stderr(&output));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        for (name, value) in function.options {
            let config = &report["config"];
            let found = config["options"].get(name).unwrap_or(&config[name]);
            assert_eq!(*found, value.to_string(), "{name} of {}", function.name);
        }
    }
    let config = "op: swiglu\nbackend: cpu\nmlp: 64\n";
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("config.yaml").to_str().unwrap().to_owned();
    std::fs::write(&path, config).unwrap();
    let output = run(GRADCHECK, &["--config".into(), path]);
    assert_eq!(output.status.code(), Some(2));
    let expected =
        "swiglu is a function: write op: activation with options.kind=silu layout=halves";
    assert!(stderr(&output).contains(expected), "{}", stderr(&output));
}
