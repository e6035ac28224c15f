//! gradcheck and microbench of programs that JAX exports, as a user runs them. Some need XLA's CPU plug-in,
//! the library of custom calls and a `python` with JAX of the version in scripts/requirements-jax.txt:
//!
//! ```text
//! XENTILE_PJRT_CPU=FILE XENTILE_XLA_LIBRARY=FILE \
//!     cargo test -p xentile-tools --test linear -- --include-ignored
//! ```

use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Output};
use std::time::SystemTime;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use tempfile::TempDir;

const GRADCHECK: &str = env!("CARGO_BIN_EXE_gradcheck");
const MICROBENCH: &str = env!("CARGO_BIN_EXE_microbench");

const SMALL: &str = "\
op: linear_cross_entropy
backend: xla:cpu
shape: {batch: 2, seq_len: 9, vocab: 300}
hidden: 16
dtype: bf16
";

/// What microbench is asked for.
const CELL: [&str; 12] = [
    "--op",
    "linear_cross_entropy",
    "--backend",
    "xla:cpu",
    "--time",
    "300",
    "--vocab",
    "1003",
    "--iters",
    "2",
    "--warmup",
    "0",
];

/// A folder with a config in it, and programs that are exported there.
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
            .args(arguments)
            .env("XENTILE_CACHE", self.0.path())
            .env("XENTILE_PYTHON", "python")
            .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/../../pallas_bridge/src"))
            .output()
            .expect("the binary starts")
    }

    fn gradcheck(&self, arguments: &[&str]) -> Output {
        self.run(GRADCHECK, &[&["--config", "config.yaml"], arguments].concat())
    }

    /// The report of a run that must pass.
    fn passes(&self, arguments: &[&str]) -> Value {
        let output = self.gradcheck(&[arguments, &["--json", "report.json"]].concat());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
        let json = std::fs::read_to_string(self.0.path().join("report.json")).unwrap();
        serde_json::from_str(&json).unwrap()
    }

    /// The last line on standard error of a gradcheck that must refuse its input.
    fn refuses(&self, arguments: &[&str]) -> String {
        refused(&self.gradcheck(arguments))
    }

    fn measure(&self, arguments: &[&str]) -> Value {
        let output = self.run(MICROBENCH, &[&CELL, arguments, &["--json", "-"]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn refused(output: &Output) -> String {
    let stderr = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    // Plug-ins have words of their own.
    let last = stderr.lines().last().unwrap_or_default();
    last.strip_prefix("error: ").expect("an error line").to_owned()
}

#[test]
fn bad_configs_are_one_line() {
    let fixture = Fixture::new(SMALL);
    let refuses = |set: &str| fixture.refuses(&["--set", set]);
    assert_eq!(
        refuses("max_scratch_byte=1"),
        "config config.yaml: unknown key `max_scratch_byte`; did you mean `max_scratch_bytes`?"
    );
    assert_eq!(
        refuses("op=linear_crossentropy"),
        "config config.yaml: unknown value `linear_crossentropy` for `op`; did you mean \
         `linear_cross_entropy`?"
    );
    assert_eq!(
        refuses("backend=cpu"),
        "backend is cpu; linear_cross_entropy has programs for backends of XLA alone: set backend \
         to xla:cpu"
    );
    assert!(refuses("hidden=null").starts_with("op linear_cross_entropy needs hidden"));
    assert_eq!(refuses("hidden=0"), "hidden is 0; it must be at least 1");
    assert_eq!(refuses("vocab_axis=2"), "vocab_axis is 2; it must be 0 for [V, D] or 1 for [D, V]");
    assert!(refuses("hidden=4000000000000").contains("lower shape.batch, shape.seq_len"));
    assert_eq!(
        refuses("tolerances.dlogits_equal=1"),
        "tolerances.dlogits_equal is set; op linear_cross_entropy has none, cross_entropy has"
    );
    assert_eq!(
        refuses("input.synthetic.distribution=masked"),
        "input.synthetic: distribution is masked; hidden states are normal, uniform, peaked or \
         trained"
    );
    for set in ["hidden=16", "bias=true", "vocab_axis=0", "max_scratch_bytes=1"] {
        let name = set.split('=').next().unwrap();
        let logits = Fixture::new(
            "{op: cross_entropy, backend: cpu, shape: {batch: 1, seq_len: 3, vocab: 9}, dtype: f32}",
        );
        assert_eq!(
            logits.refuses(&["--set", set]),
            format!("{name} is set; op cross_entropy has none, linear_cross_entropy has")
        );
    }
}

#[test]
fn microbench_says_what_it_needs() {
    let fixture = Fixture::new("{}");
    let refuses = |more: &[&str]| refused(&fixture.run(MICROBENCH, &[&CELL, more].concat()));
    assert!(refuses(&[]).starts_with("op linear_cross_entropy needs hidden"));
    let hidden = ["--set", "hidden=16"];
    assert_eq!(
        refuses(&[&hidden[..], &["--logits", "zeros"]].concat()),
        "logits is zeros; op linear_cross_entropy makes random ones"
    );
    let cpu = ["--op", "linear_cross_entropy", "--set", "hidden=16"];
    assert!(refused(&fixture.run(MICROBENCH, &cpu)).starts_with("backend is cpu; "));
}

/// Checks what a sweep of `config` says where a key is set to a value that it cannot have.
fn sweep_refuses(config: &str, cases: &[(&str, &str)]) {
    let fixture = Fixture::new(config);
    for (set, expected) in cases {
        let sweep = ["sweep", "--config", "config.yaml", "--set", set];
        let error = refused(&fixture.run(MICROBENCH, &sweep));
        assert!(error.starts_with(&format!("config config.yaml: {expected}")), "{error}");
    }
    assert!(!fixture.0.path().join("out").exists());
}

/// Budgets of the sweep's cells: of all columns at a time, of few, of none, and the operation's own.
const SWEEP: &str = "\
max_scratch_bytes: [2000000, 400000, 10, null]
out: out
cell:
  op: linear_cross_entropy
  backend: xla:cpu
  time: 300
  vocab: 1003
  hidden: 64
  iters: 2
  warmup: 0
";

#[test]
fn a_sweep_of_budgets_says_what_it_cannot_vary() {
    sweep_refuses(
        SWEEP,
        &[
            (
                "time_blocks=[1]",
                "max_scratch_bytes is set; a sweep of linear_cross_entropy varies time_blocks and \
                 block_sizes, or max_scratch_bytes alone",
            ),
            ("max_scratch_bytes=[]", "max_scratch_bytes is empty; list at least one value"),
            ("max_scratch_bytes=[null, 1, null]", "max_scratch_bytes lists null twice; remove one"),
            (
                "cell.max_scratch_bytes=1",
                "cell.max_scratch_bytes is what the sweep varies; remove it",
            ),
            (
                "cell.impl=reference",
                "cell.impl is reference, which has no max_scratch_bytes; set it to kernel",
            ),
            (
                "cell.program=x.json",
                "cell.program is set, which is of one budget; remove it, and each cell exports its own",
            ),
            (
                "update_tuned=true",
                "update_tuned is true; a sweep of max_scratch_bytes has no tile to tune: set update_tuned \
                 to false",
            ),
            ("cell.backend=cpu", "cell: backend is cpu; linear_cross_entropy has programs for"),
        ],
    );
}

/// Tiles of the sweep's cells, the last of which has no room.
const TILES: &str = "\
time_blocks: [32, 128]
block_sizes: [256, 1003]
out: out
update_tuned: true
tuned_dir: tuned
cell:
  op: linear_cross_entropy
  backend: xla:cpu
  time: 300
  vocab: 1003
  hidden: 64
  max_scratch_bytes: 1000000
  iters: 2
  warmup: 0
";

#[test]
fn a_sweep_of_tiles_says_what_it_cannot_vary() {
    sweep_refuses(
        TILES,
        &[
            ("block_sizes=[]", "block_sizes is empty; list at least one value"),
            ("cell.tile.time_block=1", "cell.tile is what the sweep varies; remove it"),
            ("cell.impl=reference", "cell.impl is reference, which has no tile; set it to kernel"),
            (
                "cell.program=x.json",
                "cell.program is set, which is of one tile; remove it, and each cell exports its own",
            ),
            (
                "cell.backend=xla:cuda",
                "update_tuned is true, and cell.backend is xla:cuda; linear_cross_entropy has tuned \
                 tiles on xla:cpu alone: set update_tuned to false",
            ),
            ("tuned_dir=no/such", "tuned_dir no/such is not a directory; "),
        ],
    );
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, a library, and a python with JAX"]
fn a_sweep_of_tiles_gives_the_default_tile() {
    let fixture = Fixture::new(TILES);
    std::fs::create_dir(fixture.0.path().join("tuned")).unwrap();
    let output = fixture.run(MICROBENCH, &["sweep", "--config", "config.yaml"]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.ends_with("2 of 4 cells failed\n"), "{text}");

    let read = |name: &str| std::fs::read_to_string(fixture.0.path().join(name)).unwrap();
    let found: Value = serde_json::from_str(&read("out/sweep.json")).unwrap();
    for row in found["rows"].as_array().unwrap() {
        if row["block_size"] == 1003 {
            let error = row["error"].as_str().unwrap();
            let expected =
                "tile.block_size is 1003, for which there is no room; the plan is library";
            assert!(error.starts_with(expected), "{error}");
            continue;
        }
        let report = &row["report"];
        assert_eq!(report["time_block"], row["time_block"]);
        assert_eq!(report["block_size"], row["block_size"]);
        let plan = report["exported"]["plan"].as_str().unwrap();
        assert!(plan.contains(&format!("x {} columns at a time", row["block_size"])), "{plan}");
    }
    let svg = read("out/sweep.svg");
    for text in ["time_block (tokens a tile)", "block_size", "temporaries (MiB)"] {
        assert!(svg.contains(text), "the plot does not say {text}");
    }
    let tuned = read("tuned/linear_cross_entropy.cpu.yaml");
    let tiles: Vec<xentile::TunedTile> = serde_yaml::from_str(&tuned).expect("tuned tiles");
    let [tile] = &tiles[..] else { panic!("not one tile: {tuned}") };
    assert_eq!((tile.dtype.as_str(), tile.vocab), ("bf16", 1003));
    assert_eq!(Some(tile.time_block as u64), found["best"]["time_block"].as_u64());
    assert_eq!(Some(tile.block_size as u64), found["best"]["block_size"].as_u64());
}

/// Writes f32 tensors of ones, and as many ids as hidden states or logits have.
fn write(path: &Path, tensors: &[(&str, &[usize])], ids: [usize; 2]) {
    let bytes = |count: usize, one: &[u8]| one.repeat(count);
    let mut all: Vec<_> = tensors
        .iter()
        .map(|&(name, shape)| {
            let ones = bytes(shape.iter().product(), &1f32.to_le_bytes());
            (name, Dtype::F32, shape.to_vec(), ones)
        })
        .collect();
    let ones = bytes(ids.iter().product(), &1i32.to_le_bytes());
    all.push(("input_ids", Dtype::I32, ids.to_vec(), ones));
    let views: HashMap<_, _> = all
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        })
        .collect();
    safetensors::serialize_to_file(&views, None, path).unwrap();
}

const FILE: &str = "\
op: linear_cross_entropy
backend: xla:cpu
dtype: f32
input: {file: in.safetensors}
";

#[test]
fn bad_files_are_one_line() {
    let fixture = Fixture::new(FILE);
    let path = fixture.0.path().join("in.safetensors");
    write(&path, &[("logits", &[1, 4, 9])], [1, 4]);
    let error = fixture.refuses(&["--set", "hidden=3"]);
    assert!(error.contains("it holds `logits`; linear_cross_entropy takes"), "{error}");
    write(&path, &[("hidden", &[1, 4, 5]), ("weight", &[9, 5])], [1, 4]);
    let error = fixture.refuses(&["--set", "hidden=3"]);
    assert!(
        error.ends_with(
            "it has hidden states of 5 columns and the config asks for 3; drop `hidden` or mend it"
        ),
        "{error}"
    );
    let error = fixture.refuses(&["--set", "shape={batch: 1, seq_len: 4, vocab: 8}"]);
    assert!(error.contains("it holds [1, 4, 9] and the config asks for [1, 4, 8]"), "{error}");
    write(&path, &[("hidden", &[1, 4, 5]), ("weight", &[9, 6])], [1, 4]);
    let error = fixture.refuses(&[]);
    assert!(error.contains("`hidden` has D = 5 and `weight` has D = 6"), "{error}");
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, a library, and a python with JAX"]
fn every_dtype_reduction_and_plan_passes() {
    let fixture = Fixture::new(SMALL);
    for (dtype, more) in [
        ("f32", &["options.reduction=none", "bias=true", "hidden=300", "vocab_axis=1"][..]),
        ("f32", &["max_scratch_bytes=300000", "options.z_loss=1e-3", "shape.seq_len=150"]),
        ("bf16", &["options.weights=random", "input.synthetic.distribution=peaked"]),
        ("f16", &["options.reduction=sum", "bias=true", "input.synthetic.ignored=0.3"]),
        ("f32", &["tile.block_size=100", "tile.time_block=3", "shape.vocab=1003"]),
        (
            "bf16",
            &["options.reduction=none", "input.synthetic.std=64", "max_scratch_bytes=2000000"],
        ),
        ("f16", &["options.softcap=30", "input.synthetic.std=8", "max_scratch_bytes=2000000"]),
    ] {
        let dtype = format!("dtype={dtype}");
        for implementation in ["kernel", "reference"] {
            let sets = [&["--impl", implementation, "--set", &dtype], more].concat();
            let report = fixture.passes(&sets);
            let plan = &report["exported"]["plan"];
            assert_eq!(plan.is_string(), implementation == "kernel", "{plan}");
            let figures = report["figures"].as_object().unwrap();
            assert_eq!(figures.contains_key("dbias/excess"), more.contains(&"bias=true"));
            assert_eq!(figures.contains_key("fwd/lse_excess"), more[0].ends_with("none"));
        }
    }
    let error = fixture.refuses(&["--set", "max_scratch_bytes=10"]);
    assert!(error.starts_with("max_scratch_bytes is 10; the least for 16 tokens"), "{error}");
    let output = fixture.gradcheck(&["--set", "tolerances.gradient_roundings=1e-3"]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("FAILED: outside tolerance in dhidden/relative, dweight/relative"));
    assert!(text.contains("plan: library: 16 tokens x 64 columns at a time, 3 products"), "{text}");
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, a library, and a python with JAX"]
fn microbench_reports_the_plan_and_what_it_takes() {
    let fixture = Fixture::new("{}");
    let hidden = ["--set", "hidden=64"];
    let dense = fixture.measure(&[&hidden[..], &["--impl", "reference"]].concat());
    let roomy = fixture.measure(&hidden);
    let tight = fixture.measure(&["--set", "hidden=64", "max_scratch_bytes=400000"]);
    let temporaries = |report: &Value| report["compiled"]["temporary_bytes"].as_u64().unwrap();
    assert!(temporaries(&tight) < temporaries(&roomy));
    assert!(temporaries(&roomy) < temporaries(&dense));
    assert!(dense["exported"]["plan"].is_null());
    for (report, expected) in [(&roomy, "x 768 columns"), (&tight, "x 128 columns")] {
        let plan = report["exported"]["plan"].as_str().unwrap();
        assert!(plan.contains(expected), "{plan}");
        assert_eq!(report["hidden"], 64);
        assert!(report["gflop_per_s"].as_f64().unwrap() > 0.0);
        // There are no logits to copy.
        for name in ["copy_ms", "ratio_to_copy", "gb_per_s", "copy_gb_per_s"] {
            assert!(report.get(name).is_some_and(Value::is_null), "{name}");
        }
        let (a, b) = (report["loss"].as_f64().unwrap(), dense["loss"].as_f64().unwrap());
        assert!((a - b).abs() < 1e-4 * b, "{a} is not the dense program's {b}");
    }
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, a library, and a python with JAX"]
fn a_sweep_of_budgets_has_a_plan_a_row_and_goes_on_past_what_does_not_fit() {
    let fixture = Fixture::new(SWEEP);
    let output = fixture.run(MICROBENCH, &["sweep", "--config", "config.yaml"]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("[4/4] max_scratch_bytes null: "), "{text}");
    assert!(text.ends_with("1 of 4 cells failed\n"), "{text}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("best: max_scratch_bytes ") && !stdout.contains("copies"), "{stdout}");

    let read = |name: &str| std::fs::read_to_string(fixture.0.path().join(name)).unwrap();
    let found: Value = serde_json::from_str(&read("out/sweep.json")).unwrap();
    let rows = found["rows"].as_array().unwrap();
    let budgets: Vec<_> = rows.iter().map(|row| row["max_scratch_bytes"].as_u64()).collect();
    assert_eq!(budgets, [Some(2_000_000), Some(400_000), Some(10), None]);
    let least = "max_scratch_bytes is 10; the least for 300 tokens";
    assert!(rows[2]["error"].as_str().unwrap().starts_with(least), "{}", rows[2]);
    let plan = |row: &Value| row["report"]["exported"]["plan"].as_str().unwrap().to_owned();
    for (row, expected) in [(0, "x 768 columns"), (1, "x 128 columns"), (3, "x 768 columns")] {
        assert!(plan(&rows[row]).contains(expected), "{}", rows[row]);
    }
    let temporaries = |row: &Value| row["report"]["compiled"]["temporary_bytes"].as_u64().unwrap();
    assert!(temporaries(&rows[1]) < temporaries(&rows[3]));

    let csv = read("out/sweep.csv");
    let lines: Vec<_> = csv.lines().collect();
    assert!(lines[0].starts_with("max_scratch_bytes,status,median_step_ms,"), "{csv}");
    assert!(lines[0].ends_with(",plan,error") && !lines[0].contains("copy"), "{csv}");
    assert!(lines[2].ends_with(&format!(",\"{}\",", plan(&rows[1]))), "{csv}");
    let empty = ",".repeat(lines[0].split(',').count() - 2);
    assert!(lines[3].starts_with(&format!("10,failed{empty}\"{least}")), "{csv}");
    assert!(lines[4].starts_with("null,ok,"), "{csv}");
    let markdown = read("out/sweep.md");
    assert!(markdown.contains("on xla:cpu, 300 x 64 x 1003 bf16"), "{markdown}");
    assert!(markdown.contains(&format!("| {} |\n", plan(&rows[0]))), "{markdown}");
    assert!(
        markdown.contains("| 10 | failed | | | | | | | | max_scratch_bytes is 10"),
        "{markdown}"
    );
    let svg = read("out/sweep.svg");
    for text in ["1.9 MiB", "temporaries (MiB)", "arguments, results, temporaries (MiB)"] {
        assert!(svg.contains(text), "the plot does not say {text}");
    }
    assert!(!svg.contains("0.0 MiB"), "a budget that nothing fits in has no place in the plot");
    assert_eq!(svg.matches("without a budget: ").count(), 3, "one a panel");
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, a library, and a python with JAX"]
fn the_shipped_sweeps_are_valid() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/sweep");
    // Budgets are for their shape, which takes a while: two of them, which change from run to run.
    let file = std::fs::read_to_string(format!("{folder}/linear_cross_entropy_cpu.yaml")).unwrap();
    let listed = file.lines().find_map(|line| line.strip_prefix("max_scratch_bytes: ["));
    let budgets: Vec<_> = listed.unwrap().trim_end_matches(']').split(", ").collect();
    assert!(budgets.len() > 2, "{budgets:?}");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let first = now.subsec_nanos() as usize % budgets.len();
    let two = [budgets[first], budgets[(first + 1) % budgets.len()]];
    let budgets = format!("max_scratch_bytes=[{}, {}]", two[0], two[1]);
    println!("{budgets}");
    let quick = ["cell.iters=1", "cell.warmup=0", "rounds=1"];
    let small = [
        "cell.time=64",
        "cell.vocab=6007",
        "cell.hidden=64",
        "cell.max_scratch_bytes=10000000",
        // A program is exported for each tile.
        "time_blocks=[64]",
        "block_sizes=[512, 1024]",
        "out=out",
        "tuned_dir=.",
    ];
    for (name, more) in [("cpu", &[&*budgets][..]), ("tile_cpu", &small)] {
        let config = format!("{folder}/linear_cross_entropy_{name}.yaml");
        let sweep = ["sweep", "--config", &config, "--set"];
        let output = Fixture::new("{}").run(MICROBENCH, &[&sweep[..], &quick, more].concat());
        assert_eq!(output.status.code(), Some(0), "{name}: {}", stderr(&output));
    }
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, a library, and a python with JAX"]
fn the_shipped_config_of_microbench_is_valid() {
    let config = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../configs/microbench/linear_cross_entropy_cpu.yaml"
    );
    let report = Fixture::new("{}").measure(&["--config", config]);
    assert_eq!((&report["hidden"], &report["dtype"]), (&768.into(), &"f32".into()));
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, a library, and a python with JAX"]
fn a_program_is_for_what_it_was_exported_for() {
    let fixture = Fixture::new("{shape: {batch: 4, seq_len: 76, vocab: 1003}}");
    fixture.measure(&["--set", "hidden=64", "bias=true", "max_scratch_bytes=400000"]);
    let files = std::fs::read_dir(fixture.0.path()).unwrap();
    let mut names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let program = names.find(|name| name.starts_with("linear_") && name.ends_with(".json"));
    let program = program.expect("a manifest");
    // All that the config leaves out is the program's.
    let report = fixture.passes(&["--program", &program]);
    assert_eq!(report["config"]["max_scratch_bytes"], 400_000);
    assert_eq!(report["shape"], "[300, 64] x [1003, 64]");
    let refuses = |set| fixture.refuses(&["--program", &program, "--set", set]);
    let error = refuses("max_scratch_bytes=500000");
    assert!(error.contains("\"max_scratch_bytes\":400000"), "{error}");
    assert!(error.contains("the config's is of {\"hidden\":64"), "{error}");
    let error = refuses("hidden=32");
    assert!(error.contains("its arguments are tensor<300x64xbf16>"), "{error}");
    let error = refuses("options.z_loss=1");
    assert!(error.contains("its options are"), "{error}");
}

/// config.json of a small decoder.
const DECODER: &str = r#"{"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 500,
    "tie_word_embeddings": true}"#;

#[test]
fn a_decoder_that_is_no_good_is_one_line() {
    let fixture = Fixture::new(SMALL);
    let refuses = |arguments: &[&str]| {
        refused(
            &fixture.run(MICROBENCH, &[&["decode", "--model", "config.yaml"], arguments].concat()),
        )
    };
    assert!(refuses(&[]).starts_with("config.yaml is no JSON: "));
    assert_eq!(refuses(&["--backend", "cpu"]), "backend is cpu; it must be xla:cpu or xla:cuda");
    assert_eq!(refuses(&["--steps", "0"]), "steps is 0; it must be at least 1");
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, a library, and a python with JAX"]
fn steps_of_a_decoder_are_beside_reads() {
    let fixture = Fixture::new(SMALL);
    std::fs::write(fixture.0.path().join("model.json"), DECODER).unwrap();
    let arguments = "decode --model model.json --batch 2 --position 100 --temperature 0.8 --steps 512 --iters 3 \
                     --json steps.json";
    let output = fixture.run(MICROBENCH, &arguments.split(' ').collect::<Vec<_>>());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", stderr(&output));
    let line = std::fs::read_to_string(fixture.0.path().join("steps.json")).unwrap();
    let found: Value = serde_json::from_str(&line).unwrap();
    let number = |name: &str| found[name].as_f64().unwrap();
    let layer = (6 + 2) * 16 * 64 + 4 * 16 * 64 + 3 * 96 * 64 + 2 * 64 + 2 * 16;
    assert_eq!(found["bytes"], 2 * (500 * 64 + 64 + 2 * layer + 2 * 2 * 100 * 2 * 32));
    let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
    assert!(near(number("tokens_per_s") * number("step_ms"), 2e3));
    assert!(near(number("share_of_read_rate") * number("read_gb_per_s"), number("gb_per_s")));
    assert!(text.contains("share of reads") && found["is_one_kernel"] == false, "{text}{found}");
    // Beside XLA's program.
    let suite = "decode: [{model: model.json, position: 100, steps: 512, iters: 1}]";
    std::fs::write(fixture.0.path().join("suite.yaml"), suite).unwrap();
    let output = fixture.run(MICROBENCH, &["suite", "--config", "suite.yaml", "--set", "out=out"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = std::fs::read_to_string(fixture.0.path().join("out/suite.json")).unwrap();
    let found: Value = serde_json::from_str(&text).unwrap();
    let row = &found["rows"][0];
    assert_eq!((&row["op"], &row["shape"]), (&"decode".into(), &"model, [1] at 100".into()));
    assert!(row["speedup"].as_f64().unwrap() > 0.0 && row["reference"]["error"].is_null(), "{row}");
}
