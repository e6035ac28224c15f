//! The gradcheck binary as a user meets it: verdicts, exit codes, messages, files.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Output};

use half::bf16;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use tempfile::TempDir;

const SMALL: &str = "\
op: cross_entropy
backend: cpu
shape: {batch: 2, seq_len: 9, vocab: 1003}
dtype: bf16
";

/// A folder with a config in it.
struct Fixture {
    folder: TempDir,
}

impl Fixture {
    fn new(config: &str) -> Self {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("config.yaml"), config).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_gradcheck"))
            .current_dir(&self.folder)
            .args(["--config", "config.yaml"])
            .args(arguments)
            .output()
            .unwrap()
    }

    /// The JSON report of a run that must pass.
    fn passes(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json", "out/report.json"]].concat());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
        assert!(text.ends_with("PASSED: within tolerance of the float64 reference\n"), "{text}");
        let json = std::fs::read_to_string(self.path("out/report.json")).unwrap();
        serde_json::from_str(&json).unwrap()
    }

    /// The one line on standard error of a run that must refuse its input and write nothing.
    fn refuses(&self, arguments: &[&str]) -> String {
        let output = self.run(&[arguments, &["--json", "out/report.json"]].concat());
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(output.stdout.is_empty());
        assert!(!self.path("out").exists());
        let line = stderr(&output);
        assert_eq!(line.lines().count(), 1, "{line}");
        line.trim_end().strip_prefix("error: ").expect("an error line").to_owned()
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_dense_program_passes_as_well() {
    for reduction in ["mean", "sum", "none"] {
        let reduction = format!("options.reduction={reduction}");
        let sets = ["--set", "options.z_loss=1e-3", "options.softcap=20", &reduction];
        let report = Fixture::new(SMALL).passes(&[&["--impl", "reference"], &sets[..]].concat());
        assert_eq!(report["config"]["impl"], "reference");
        assert!(report["tile"].is_null(), "it has none");
    }
    let report = Fixture::new(&format!("{SMALL}impl: reference\n")).passes(&["--impl", "kernel"]);
    assert_eq!(report["config"]["impl"], "kernel");
    let line = Fixture::new(SMALL).refuses(&["--set", "impl=kernl"]);
    assert!(line.contains("unknown value `kernl` for `impl`; did you mean `kernel`?"), "{line}");
}

#[test]
fn reports_the_promised_names() {
    let report = Fixture::new(SMALL).passes(&[]);
    let figures = report["figures"].as_object().unwrap();
    let names = [
        "abs_diff_loss",
        "fwd/logp_max_abs",
        "fwd/loss_max_abs",
        "dlogits_max_abs",
        "dlogits_max_rel",
        "time/forward_s",
        "time/ref_grad_s",
        "time/kernel_grad_s",
    ];
    for name in names {
        let value = figures[name].as_f64().unwrap_or_else(|| panic!("{name} is missing"));
        assert!(value.is_finite() && value >= 0.0, "{name} is {value}");
    }
    for name in ["fwd/loss_max_abs", "dlogits_max_abs"] {
        assert!(report["worst"][name]["token"].as_u64().unwrap() < 16, "{name}");
    }
    assert!(report["worst"]["dlogits_max_abs"]["column"].as_u64().unwrap() < 1003);
    for key in ["processor", "commit", "rustc", "xentile"] {
        assert!(!report["machine"][key].as_str().unwrap().is_empty(), "{key}");
    }
    assert_eq!(report["config"]["shape"]["vocab"], 1003);
}

#[test]
fn every_dtype_schedule_and_instruction_set_passes() {
    let fixture = Fixture::new(SMALL);
    for dtype in ["f32", "bf16", "f16"] {
        for reduction in ["none", "mean", "sum"] {
            for isa in xentile_cpu::Isa::available() {
                let sets = [
                    format!("dtype={dtype}"),
                    format!("options.reduction={reduction}"),
                    format!("isa={isa}"),
                ];
                let report = fixture.passes(&["--set", &sets[0], &sets[1], &sets[2]]);
                assert_eq!(report["isa"], isa.name());
            }
        }
    }
}

#[test]
fn outside_tolerance_is_exit_1() {
    // No f32 sum of 1003 exponentials is exact to 1e-30.
    let fixture = Fixture::new(SMALL);
    let output = fixture.run(&["--set", "tolerances.forward_rel=1e-30", "--json", "r.json"]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("FAILED: outside tolerance in fwd/loss_max_rel"), "{text}");
    let report = std::fs::read_to_string(fixture.path("r.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&report).unwrap()["passed"], false);
}

#[test]
fn bad_configs_are_one_line() {
    let fixture = Fixture::new(SMALL);
    let refuses = |set: &str| fixture.refuses(&["--set", set]);
    assert_eq!(
        refuses("tile.blok_size=64"),
        "config config.yaml: unknown key `tile.blok_size`; did you mean `block_size`?"
    );
    assert_eq!(refuses("tile.time_block=0"), "tile time_block is 0; it must be at least 1");
    assert!(refuses("tile.block_size=-3").contains("`tile.block_size`"));
    assert!(
        refuses("dtype=fp8").contains("dtype `fp8` is unknown; it must be one of f32, bf16, f16")
    );
    assert!(refuses("backend=gpu").contains("unknown value `gpu` for `backend`"));
    assert_eq!(
        refuses("options.softcap=0"),
        "options: softcap is 0; it must be finite and above 0, or absent"
    );
    assert!(
        refuses("options.label_smoothing=2").contains("label_smoothing is 2; it must be in [0, 1]")
    );
    assert!(refuses("shape.seq_len=1").contains("shape.seq_len is 1; it must be at least 2"));
    assert!(refuses("shape.vocab=0").contains("shape.vocab is 0"));
    assert!(refuses("isa=sse9").contains("isa `sse9` is unknown"));
    assert!(refuses("input.synthetic.distribution=normall").contains("did you mean `normal`?"));
    assert!(refuses("input.synthetic.std=-1").contains("input.synthetic: std is -1"));
    assert!(
        refuses("input.synthetic.scale=1")
            .contains("unknown key `input.synthetic.scale`; it is called `std` now")
    );
    assert!(refuses("input.synthetic.heigth=1").contains("did you mean `height`?"));
    for (distribution, key, error) in [
        ("normal", "height: 3", "height is set; distribution normal has none, peaked has"),
        ("uniform", "share: 0.1", "share is set; distribution uniform has none, peaked has"),
        ("trained", "std: 2", "std is set; distribution trained has its own"),
        ("peaked", "share: 1.5", "share is 1.5; it must be in [0, 1]"),
        ("peaked", "height: -.inf", "height is -inf; it must be finite and above 0"),
    ] {
        let set = format!("input={{synthetic: {{distribution: {distribution}, {key}}}}}");
        let found = refuses(&set);
        assert!(found.contains(&format!("input.synthetic: {error}")), "{found}");
    }
    assert!(refuses("tolerances.dlogits_ulp=-1").contains("tolerances.dlogits_ulp is -1"));
    assert!(refuses("shape.seq_len=400000000").contains("is available; lower shape.batch"));
    assert!(refuses("shape.seq_len=18446744073709551615").contains("lower shape.batch"));
    assert!(refuses("input={file: no.safetensors}").contains("cannot open no.safetensors"));

    let output = Command::new(env!("CARGO_BIN_EXE_gradcheck"))
        .args(["--config", "/nonexistent/config.yaml"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("cannot read config /nonexistent/config.yaml"));
}

/// Tensors to be written to a file.
#[derive(Default)]
struct Tensors(Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>);

impl Tensors {
    fn bf16(mut self, name: &'static str, shape: &[usize], scale: f32) -> Self {
        let count = shape.iter().product::<usize>() as u32;
        // A low-discrepancy sequence is varied enough for logits.
        let value = |i: u32| bf16::from_f32(scale * ((i as f32 * 0.618_034).fract() - 0.5));
        let bytes = (0..count).flat_map(|i| value(i).to_le_bytes()).collect();
        self.0.push((name, Dtype::BF16, shape.to_vec(), bytes));
        self
    }

    fn ids(mut self, shape: &[usize], ids: &[i32]) -> Self {
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.0.push(("input_ids", Dtype::I32, shape.to_vec(), bytes));
        self
    }

    fn write(&self, path: &Path) {
        let views: HashMap<_, _> = self
            .0
            .iter()
            .map(|(name, dtype, shape, bytes)| {
                (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
            })
            .collect();
        safetensors::serialize_to_file(&views, None, path).unwrap();
    }
}

const FILE: &str = "\
op: cross_entropy
backend: cpu
dtype: bf16
input: {file: in.safetensors}
";

#[test]
fn files_of_logits_and_of_hidden_states_pass() {
    let fixture = Fixture::new(FILE);
    for batch in [1, 3] {
        let ids: Vec<i32> = (0..batch as i32 * 4).map(|i| i * 7 % 501).collect();
        let ids_of = |tensors: Tensors| tensors.ids(&[batch, 4], &ids);
        ids_of(Tensors::default().bf16("logits", &[batch, 4, 501], 20.0))
            .write(&fixture.path("in.safetensors"));
        let report = fixture.passes(&[]);
        assert_eq!(report["shape"], format!("[{batch}, 4, 501]"));

        ids_of(Tensors::default().bf16("hidden", &[batch, 4, 24], 2.0).bf16(
            "weight",
            &[501, 24],
            2.0,
        ))
        .write(&fixture.path("in.safetensors"));
        for dtype in ["bf16", "f32"] {
            fixture.passes(&["--set", &format!("dtype={dtype}")]);
        }
    }
}

/// The logits that gradcheck sees must be those of the file, row for row: the loss of a file whose
/// rows are known is known.
#[test]
fn a_file_is_read_in_order() {
    let fixture = Fixture::new(FILE);
    // Row (b, s) is 0 but for 3.0 in the column that comes next; the last row of each sequence
    // would be wrong, and is not to be looked at.
    let (batch, seq_len, vocab) = (2, 3, 5);
    let ids = [4, 1, 2, 0, 3, 1];
    let mut bytes = Vec::new();
    for row in 0..batch * seq_len {
        let next = if row % seq_len == seq_len - 1 { -1 } else { ids[row + 1] };
        for column in 0..vocab {
            let z = if column == next {
                3.0
            } else if next == -1 {
                100.0
            } else {
                0.0
            };
            bytes.extend(bf16::from_f32(z).to_le_bytes());
        }
    }
    let mut tensors = Tensors::default().ids(&[batch, seq_len], &ids);
    tensors.0.push(("logits", Dtype::BF16, vec![batch, seq_len, vocab as usize], bytes));
    tensors.write(&fixture.path("in.safetensors"));
    let report = fixture.passes(&[]);
    let expected = (3f64.exp() + 4.0).ln() - 3.0;
    let loss = report["figures"]["loss"].as_f64().unwrap();
    assert!((loss - expected).abs() < 1e-6, "{loss}, expected {expected}");
}

#[test]
fn bad_files_are_one_line() {
    let fixture = Fixture::new(FILE);
    let path = fixture.path("in.safetensors");
    let refuses = |tensors: Tensors, arguments: &[&str]| {
        tensors.write(&path);
        fixture.refuses(arguments)
    };
    let good = || Tensors::default().bf16("logits", &[1, 3, 50], 4.0).ids(&[1, 3], &[1, 2, 3]);

    let message = refuses(good(), &["--set", "shape={batch: 1, seq_len: 3, vocab: 51}"]);
    assert!(
        message.contains("it holds [1, 3, 50] and the config asks for [1, 3, 51]"),
        "{message}"
    );
    let message = refuses(good(), &["--set", "dtype=f32"]);
    assert!(
        message.contains("`logits` is bf16 and the config asks for f32; set dtype=bf16"),
        "{message}"
    );
    let bad_label = Tensors::default().bf16("logits", &[1, 3, 50], 4.0).ids(&[1, 3], &[1, 2, 50]);
    let message = refuses(bad_label, &[]);
    assert!(message.contains("label 50 of token 1 is outside [0, 50)"), "{message}");
    let message = refuses(Tensors::default().bf16("logits", &[1, 3, 50], 4.0), &[]);
    assert!(message.contains("no tensor `input_ids` among [logits]"), "{message}");
    let message = refuses(Tensors::default().ids(&[1, 3], &[1, 2, 3]), &[]);
    assert!(message.contains("no tensor `hidden` among [input_ids]"), "{message}");
    let flat = Tensors::default().bf16("logits", &[3, 50], 4.0).ids(&[1, 3], &[1, 2, 3]);
    assert!(refuses(flat, &[]).contains("`logits` has shape [3, 50]; it must be [B, S, V]"));
    let apart = Tensors::default().bf16("logits", &[1, 4, 50], 4.0).ids(&[1, 3], &[1, 2, 3]);
    assert!(refuses(apart, &[]).contains("`logits` starts with [1, 4] and `input_ids` is [1, 3]"));
    let widths = Tensors::default()
        .bf16("hidden", &[1, 3, 8], 1.0)
        .bf16("weight", &[50, 9], 1.0)
        .ids(&[1, 3], &[1, 2, 3]);
    assert!(refuses(widths, &[]).contains("`hidden` has D = 8 and `weight` has D = 9"));

    let empty = Tensors::default()
        .bf16("hidden", &[1, 3, 0], 1.0)
        .bf16("weight", &[50, 0], 1.0)
        .ids(&[1, 3], &[1, 2, 3]);
    assert!(refuses(empty, &[]).contains("`hidden` has shape [1, 3, 0]; every extent must be"));

    good().write(&path);
    let bytes = std::fs::read(&path).unwrap();
    for length in [0, 5, 40, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let message = fixture.refuses(&[]);
        assert!(message.contains("input file in.safetensors"), "{length} bytes: {message}");
    }
}
