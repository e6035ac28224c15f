//! Compiling for TPUs where there is none, and programs that JAX exported, as a user does it. Most
//! need libtpu, and a `python` with JAX:
//!
//! ```text
//! XENTILE_PJRT_TPU=FILE XENTILE_PJRT_CPU=FILE \
//!     cargo test -p xentile-tools --test xla_tpu -- --include-ignored
//! ```

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use xentile_tools::estimate::Traffic;
use xentile_tools::{estimate, schedule};

const MICROBENCH: &str = env!("CARGO_BIN_EXE_microbench");
const GRADCHECK: &str = env!("CARGO_BIN_EXE_gradcheck");
const AHEAD: [&str; 4] = ["--backend", "xla:tpu", "--topology", "v6e:2x2"];

fn microbench(arguments: &[&str]) -> Output {
    Command::new(MICROBENCH)
        .args(arguments)
        .env_remove("TPU_SKIP_MDS_QUERY")
        .env("XENTILE_PYTHON", "python")
        .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/../../pallas_bridge/src"))
        .output()
        .expect("microbench starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn measure(arguments: &[&str]) -> Value {
    let output = microbench(&[arguments, &["--json", "-"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    if arguments.contains(&"--topology") {
        assert_eq!(stderr(&output), "", "libtpu's complaints are kept back");
    }
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The error of a run that must end with 2 and say why in one line.
fn refuse(arguments: &[&str]) -> String {
    let output = microbench(arguments);
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
    assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "{stderr}");
    stderr
}

/// A folder with the programs of tests/tpu/export_kernel.py for f32 logits [16, 256].
fn exported(platform: &str) -> tempfile::TempDir {
    variant(platform, &[])
}

/// Likewise, with a flag of the script.
fn variant(platform: &str, flag: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tpu/export_kernel.py");
    let output = Command::new("python")
        .arg(script)
        .arg(folder.path())
        .args([platform, "16", "256", "8", "16"])
        .args(flag)
        .env("JAX_PLATFORMS", "cpu")
        .output()
        .expect("python starts");
    assert!(output.status.success(), "{}", stderr(&output));
    folder
}

fn number(report: &Value, place: &str) -> u64 {
    let number = report.pointer(place).and_then(Value::as_u64);
    number.unwrap_or_else(|| panic!("{place} is no number in {report}"))
}

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().expect("UTF-8").to_owned()
}

/// A manifest of a program that no compiler takes.
fn write_manifest(folder: &Path, platform: &str) -> String {
    const SHA256: &str = "f20c8a1af897d0fd042cd41cd11a010812765bd09e23f6d506a6a7ed12bc4ae1";
    std::fs::write(folder.join("p.mlirbc"), b"ML\xefR").unwrap();
    let manifest = serde_json::json!({
        "manifest_version": 1,
        "op": "cross_entropy",
        "program": "value_and_grad",
        "file": "p.mlirbc",
        "sha256": SHA256,
        "arguments": [{"dtype": "f32", "shape": [16, 256]}, {"dtype": "i32", "shape": [16]}],
        "results": [{"dtype": "f32", "shape": []}, {"dtype": "f32", "shape": [16, 256]}],
        "tile": {"time_block": 8, "block_size": 256},
        "options": {"z_loss": 0.5},
        "platforms": [platform],
        "jax_version": "0.12.0",
        "calling_convention_version": 10,
    });
    let path = path(folder, "p.json");
    std::fs::write(&path, manifest.to_string()).unwrap();
    path
}

#[test]
fn a_topology_needs_the_tpu_backend() {
    for backend in ["cpu", "xla:cpu", "xla:cuda"] {
        let error = refuse(&["--backend", backend, "--topology", "v6e:2x2"]);
        let expected = format!(
            "topology is v6e:2x2; only backend xla:tpu compiles for one, and backend is {backend}"
        );
        assert!(error.contains(&expected), "{error}");
    }
    let missing = ["--impl", "reference", "--plugin", "/nowhere/libtpu.so"];
    let error = refuse(&[&AHEAD[..], &missing].concat());
    assert!(error.contains("cannot open the PJRT plug-in /nowhere/libtpu.so"), "{error}");
}

#[test]
fn running_needs_a_tpu() {
    let arguments = ["--backend", "xla:tpu", "--impl", "reference", "--vocab", "100"];
    if microbench(&arguments).status.success() {
        return; // There is one.
    }
    let error = refuse(&arguments);
    assert!(error.contains("microbench --topology v6e:2x2 compiles without"), "{error}");
}

#[test]
fn libtpu_that_is_missing_says_where_it_was_looked_for() {
    let output = Command::new(MICROBENCH)
        .args(AHEAD)
        .args(["--impl", "reference"])
        .env_remove("XENTILE_PJRT_TPU")
        .env("VIRTUAL_ENV", "/nowhere")
        .output()
        .unwrap();
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    for piece in ["looked in:", "XENTILE_PJRT_TPU", "/nowhere", "pip install libtpu"] {
        assert!(stderr.contains(piece), "no {piece} in {stderr}");
    }
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

#[test]
fn a_program_for_something_else() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = write_manifest(folder.path(), "tpu");
    let program = ["--topology", "v6e:2x2", "--program", &manifest];
    let cases: [(&[&str], &str); 10] = [
        (
            &["--time", "17"],
            "its arguments are tensor<16x256xf32>, tensor<16xi32>; the config's are",
        ),
        (&["--dtype", "bf16"], "the config's are tensor<16x256xbf16>, tensor<16xi32>"),
        (&["--time-block", "4"], "its tile.time_block is 8; the config's is 4"),
        (&["--set", "options.z_loss=0"], "its options are {\"ignore_index\":-100"),
        (
            &["--reduction", "none"],
            "its program is value_and_grad; the config's is forward_and_backward",
        ),
        (
            &["--set", "options.weights=random"],
            "tensor<16xi32>; the config's are tensor<16x256xf32>, tensor<16xi32>, tensor<16xf32>",
        ),
        (&["--impl", "reference"], "program is set, which is the kernel"),
        (&["--backend", "cpu"], "program is set; backend cpu runs no programs"),
        (&["--backend", "xla:cuda"], "topology is v6e:2x2; only backend xla:tpu"),
        (&["--program", "/nowhere/p.json"], "/nowhere/p.json: cannot read it"),
    ];
    for (arguments, message) in cases {
        let error = match arguments[0] {
            "--program" => refuse(&[&program[..2], arguments].concat()),
            _ => refuse(&[&program[..], arguments].concat()),
        };
        assert!(error.contains(message), "{error}");
    }
    let error = refuse(&["--program", &manifest, "--backend", "xla:cpu"]);
    assert!(error.contains("its platform is tpu; the config's is cpu"), "{error}");
    let error = refuse(&["--program", "p_{block_size}.json", "--backend", "xla:tpu"]);
    assert!(error.contains("has a place for block_size, which is left open"), "{error}");

    std::fs::write(folder.path().join("p.mlirbc"), b"ML\xefR changed").unwrap();
    let error = refuse(&program);
    assert!(error.contains("p.mlirbc has the sha256 "), "{error}");
    let text = std::fs::read_to_string(&manifest).unwrap().replace("z_loss", "zloss");
    std::fs::write(&manifest, text).unwrap();
    std::fs::write(folder.path().join("p.mlirbc"), b"ML\xefR").unwrap();
    let error = refuse(&program);
    assert!(error.contains("unknown key `options.zloss`; did you mean `z_loss`?"), "{error}");
}

#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU"]
fn the_dense_program_compiles_for_every_generation() {
    for topology in ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"] {
        for dtype in ["f32", "bf16"] {
            let report = measure(&[
                "--backend",
                "xla:tpu",
                "--topology",
                topology,
                "--impl",
                "reference",
                "--time",
                "64",
                "--vocab",
                "1003",
                "--dtype",
                dtype,
            ]);
            assert_eq!(report["topology"], topology);
            assert!(report["compile_s"].as_f64().unwrap() > 0.0);
            let unknown = ["first_call_s", "first_run_s", "avg_step_ms", "copy_ms", "loss"];
            for field in unknown {
                assert!(report.get(field).is_some_and(Value::is_null), "{field}");
            }
            for place in ["mem_after_alloc", "mem_after_run"] {
                let fields = report[place].as_object().unwrap();
                assert!(!fields.is_empty() && fields.values().all(Value::is_null), "{place}");
            }
            let logits = 64 * 1003 * if dtype == "f32" { 4 } else { 2 };
            assert!(number(&report, "/compiled/argument_bytes") > 2 * logits);
            assert!(number(&report, "/compiled/output_bytes") > logits);
            assert!(number(&report, "/compiled/alias_bytes") >= logits);
            assert!(number(&report, "/compiled/peak_bytes") > 2 * logits);
            assert!(number(&report, "/compiled/code_bytes") > 0);
            assert!(report["compiled"]["temporary_bytes"].is_u64());

            let schedule = &report["schedule"];
            let parts = schedule["computations"].as_array().unwrap();
            assert!(parts.iter().any(|part| part["name"] == "TLP") && parts.len() > 2);
            let sum = parts.iter().map(|part| number(part, "/bundles")).sum::<u64>();
            assert_eq!(number(schedule, "/bundles"), sum);
            for unit in
                ["matmul", "matpush", "xlu", "valu", "vpop", "eup", "vload", "vstore", "salu"]
            {
                let most = number(schedule, &format!("/slots_per_bundle/{unit}"));
                let used = number(schedule, &format!("/slots_used/{unit}"));
                assert!((1..=8).contains(&most) && used <= most * sum, "{unit}");
            }
            assert!(number(schedule, "/slots_used/eup") > 0, "exponentials");
            assert!(schedule["slots_used"]["vstore_spill"].is_u64());
        }
    }
}

#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU"]
fn the_dense_program_has_its_rows_in_order() {
    let size = ["--time", "2048", "--vocab", "1003", "--dtype", "bf16", "--impl", "reference"];
    for reduction in ["mean", "none"] {
        let report = measure(&[&AHEAD[..], &size, &["--reduction", reduction]].concat());
        // Rows are padded to 1024 columns; the transpose would be to 1008.
        let matrix = 2048 * 1024 * 2;
        let compiled = |place: &str| number(&report, &format!("/compiled/{place}_bytes"));
        assert!((2 * matrix..2 * matrix + 100_000).contains(&compiled("argument")), "{report}");
        assert!((matrix..matrix + 100_000).contains(&compiled("output")), "{report}");
        assert_eq!(compiled("alias"), matrix, "{report}");
    }
}

#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU"]
fn names_that_are_no_topology() {
    for name in ["v99:2x2", "v6e", "v6e:3x7"] {
        let error = refuse(&["--backend", "xla:tpu", "--impl", "reference", "--topology", name]);
        for piece in [name, "it knows v4:2x2x1, v5e:2x2", "INVALID_ARGUMENT"] {
            assert!(error.contains(piece), "no {piece} in {error}");
        }
    }
    // libtpu divides by what it is given.
    let error = refuse(&["--backend", "xla:tpu", "--impl", "reference", "--topology", "v6e:0x0"]);
    assert!(error.contains("libtpu crashed over topology v6e:0x0"), "{error}");
}

#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU"]
fn dumps_of_the_user_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let args = format!("--xla_jf_dump_to={} --xla_jf_dump_llo_text=true", folder.path().display());
    let output = Command::new(MICROBENCH)
        .args(AHEAD)
        .args(["--impl", "reference", "--time", "8", "--vocab", "100", "--json", "-"])
        .env("LIBTPU_INIT_ARGS", args)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(number(&report, "/schedule/bundles") > 0);
    assert!(std::fs::read_dir(folder.path()).unwrap().count() > 100);
}

#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU, and a python with JAX"]
fn a_pallas_kernel_compiles_and_is_swept() {
    let folder = exported("tpu");
    let manifest = path(folder.path(), "tpu_8.json");
    let report = measure(&["--program", &manifest, "--topology", "v6e:2x2"]);
    assert_eq!((&report["backend"], &report["impl"]), (&"xla:tpu".into(), &"kernel".into()));
    assert_eq!((number(&report, "/time"), number(&report, "/vocab")), (16, 256));
    assert_eq!((number(&report, "/time_block"), number(&report, "/block_size")), (8, 256));
    assert_eq!(report["exported"]["sha256"].as_str().unwrap().len(), 64);
    assert_eq!(number(&report, "/compiled/argument_bytes") / 1024, 16);
    let parts = report["schedule"]["computations"].as_array().unwrap();
    let kernel = parts.iter().find(|part| {
        part["name"].as_str().is_some_and(|name| name.starts_with("cross_entropy_rows"))
    });
    let kernel = kernel.unwrap_or_else(|| panic!("no kernel in {parts:?}"));
    assert!(number(kernel, "/bundles") > 10 && number(kernel, "/slots_used/eup") > 0);

    let grid = path(folder.path(), "grid.yaml");
    let config = format!(
        "time_blocks: [8, 16]\nblock_sizes: [256]\nout: {0}/out\n\
         cell: {{backend: xla:tpu, topology: 'v6e:2x2', time: 16, vocab: 256, dtype: f32, \
         program: '{0}/tpu_{{time_block}}.json'}}\n",
        folder.path().display()
    );
    std::fs::write(&grid, config).unwrap();
    let output = microbench(&["sweep", "--config", &grid]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("[2/2] time_block 16 block_size 256: compiled in "));
    let read = |name: &str| std::fs::read_to_string(folder.path().join("out").join(name)).unwrap();
    let csv = read("sweep.csv");
    let [heading, rows @ ..] = &csv.lines().collect::<Vec<_>>()[..] else { panic!("{csv}") };
    assert_eq!(
        *heading,
        "time_block,block_size,status,compile_s,code_bytes,argument_bytes,output_bytes,\
         temporary_bytes,peak_bytes,vmem_bytes,bundles,spills,fills,estimated_tile_dma_us,\
         estimated_tile_schedule_us,estimated_dma_ms,estimated_schedule_ms,binds,\
         estimated_step_ms,error"
    );
    assert_eq!(rows.len(), 2);
    for row in rows {
        let cells: Vec<_> = row.split(',').collect();
        assert_eq!((cells[2], cells.len()), ("ok", 20), "{row}");
        assert!(cells[10].parse::<u64>().unwrap() > 10 && cells[8].parse::<u64>().is_ok(), "{row}");
    }
    assert!(read("sweep.md").contains("Times are estimates"));
    assert!(read("sweep.svg").contains("compiled for v6e:2x2"));
    let output = microbench(&["sweep", "--config", &grid, "--set", "update_tuned=true"]);
    assert!(stderr(&output).contains("without step times no tile is the best"));
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, and a python with JAX"]
fn an_exported_program_runs() {
    let folder = exported("cpu");
    let manifest = path(folder.path(), "cpu_8.json");
    let same = ["--set", "input.ignored=0.3", "--iters", "2"];
    let report = measure(&[&["--program", &manifest][..], &same].concat());
    assert_eq!(report["backend"], "xla:cpu");
    let native = ["--time", "16", "--vocab", "256", "--dtype", "f32"];
    let native = measure(&[&native[..], &same].concat());
    let [found, expected] = [&report, &native].map(|report| report["loss"].as_f64().unwrap());
    assert!((found - expected).abs() < 1e-5 * expected, "{found} is not {expected}");
    assert!(report["avg_step_ms"].as_f64().unwrap() > 0.0);
}

/// gradcheck over 16 tokens and 256 columns in f32, as the programs of [`exported`] are for.
fn gradcheck(arguments: &[&str]) -> Output {
    let mut config = tempfile::NamedTempFile::new().unwrap();
    let text = "shape: {batch: 2, seq_len: 9, vocab: 256}\ninput: {synthetic: {ignored: 0.3}}\n";
    std::io::Write::write_all(&mut config, text.as_bytes()).unwrap();
    Command::new(GRADCHECK)
        .arg("--config")
        .arg(config.path())
        .args(arguments)
        .env_remove("TPU_SKIP_MDS_QUERY")
        .output()
        .expect("gradcheck starts")
}

/// What gradcheck of a program says, its exit code and its report.
fn judge(folder: &Path, more: &[&str]) -> (String, Option<i32>, Value) {
    let (manifest, json) = (path(folder, "cpu_16.json"), path(folder, "report.json"));
    let output = gradcheck(&[&["--program", &manifest, "--json", &json], more].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let report = std::fs::read_to_string(&json);
    let report = report.unwrap_or_else(|_| panic!("no report: {}", stderr(&output)));
    (text, output.status.code(), serde_json::from_str(&report).unwrap())
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, and a python with JAX"]
fn gradcheck_judges_what_a_program_gives() {
    let folder = exported("cpu");
    let (text, code, report) = judge(folder.path(), &[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("cross_entropy, program of JAX 0.") && text.contains("on xla:cpu"));
    let left_out = "not in the report: fwd/ and recompute/, which a program of value_and_grad";
    assert!(text.contains(left_out), "{text}");
    let names = |report: &Value| -> Vec<String> {
        let figures = report["figures"].as_object().unwrap();
        let mut names: Vec<_> =
            figures.keys().filter(|name| !name.starts_with("time/")).cloned().collect();
        names.sort();
        names
    };
    const GRADIENT: [&str; 6] = [
        "dlogits_max_abs",
        "dlogits_max_rel",
        "dlogits_rounded/equal",
        "dlogits_rounded/excess",
        "dlogits_rounded/max_abs",
        "dlogits_rounded/max_ulp",
    ];
    assert_eq!(names(&report), [&["abs_diff_loss"], &GRADIENT[..], &["loss"]].concat());
    assert_eq!(report["not_given"], serde_json::json!(["fwd/", "recompute/"]));
    assert_eq!(report["exported"]["sha256"].as_str().unwrap().len(), 64);
    assert_eq!(report["tile"], serde_json::json!({"time_block": 16, "block_size": 256}));
    assert_eq!(report["config"]["dtype"], "f32", "as the program has it");

    let folder = variant("cpu", &["--per-token"]);
    let (text, code, report) = judge(folder.path(), &[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(!text.contains("not in the report"), "{text}");
    let mut expected = [&["abs_diff_loss", "loss"], &GRADIENT[..]].concat();
    expected.extend(["fwd/loss_max_abs", "fwd/loss_max_rel", "fwd/logp_max_abs"]);
    expected.extend(["fwd/logp_max_rel", "fwd/lse_max_abs", "fwd/lse_max_rel"]);
    expected.sort_unstable();
    assert_eq!(names(&report), expected);
    assert_eq!(report["not_given"], serde_json::json!([]));
    let limits = report["limits"].as_object().unwrap();
    assert!(limits.contains_key("fwd/lse_max_rel") && report["figures"]["loss"].is_f64());
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU, and a python with JAX"]
fn gradcheck_finds_the_entry_that_a_program_has_wrong() {
    let folder = variant("cpu", &["--wrong"]);
    let (text, code, report) = judge(folder.path(), &["--set", "input.synthetic.ignored=0"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.ends_with("FAILED: outside tolerance in dlogits_rounded/excess\n"), "{text}");
    let worst = &report["worst"]["dlogits_rounded/excess"];
    assert_eq!((number(worst, "/token"), number(worst, "/column")), (3, 5));
}

#[test]
fn gradcheck_refuses_a_program_for_something_else() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = write_manifest(folder.path(), "cpu");
    let cases: [(&[&str], &str); 10] = [
        (&["--set", "options.z_loss=0"], "its options are {\"ignore_index\":-100"),
        (
            &["--set", "options.reduction=none"],
            "its program is value_and_grad; the config's is forward_and_backward",
        ),
        (
            &["--set", "shape.seq_len=10"],
            "its arguments are tensor<16x256xf32>, tensor<16xi32>; the config's are tensor<18x",
        ),
        (&["--set", "dtype=bf16"], "the config's are tensor<16x256xbf16>, tensor<16xi32>"),
        (&["--set", "tile.time_block=4"], "its tile.time_block is 8; the config's is 4"),
        (&["--set", "backend=xla:cuda"], "its platform is cpu; the config's is cuda"),
        (&["--set", "backend=cpu"], "program is set; backend cpu runs no programs"),
        (&["--impl", "reference"], "program is set, which is the kernel"),
        (&["--set", "cotangent=2"], "cotangent is 2; a program from JAX takes none, which is 1"),
        (&["--set", "options.zloss=1"], "unknown key `options.zloss`; did you mean `z_loss`?"),
    ];
    for (arguments, message) in cases {
        let output = gradcheck(&[&["--program", &manifest], arguments].concat());
        let stderr = stderr(&output);
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
        assert!(stderr.contains(message), "{stderr}");
    }
    // As a key of the config, with a place for the tile.
    let pattern = format!("program={}", path(folder.path(), "{time_block}.json"));
    let renamed = folder.path().join("8.json");
    std::fs::rename(&manifest, &renamed).unwrap();
    let output = gradcheck(&["--set", &pattern, "tile.time_block=8", "options.z_loss=0"]);
    assert!(stderr(&output).contains("8.json: its options are"), "{}", stderr(&output));
    let output = gradcheck(&["--set", &pattern]);
    assert!(stderr(&output).contains("which is left open; set tile.time_block"));
}

/// The line that gradcheck of our kernel ends with where there is no TPU, for which nothing may be
/// exported; none where there is one.
fn without_a_tpu(variables: &[(&str, &str)]) -> Option<String> {
    let cache = tempfile::tempdir().unwrap();
    let output = Command::new(GRADCHECK)
        .args(["--config", "configs/gradcheck/z_loss.yaml", "--set", "backend=xla:tpu"])
        .args(["shape.vocab=1003", "--cache", &path(cache.path(), "")])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .env_remove("TPU_SKIP_MDS_QUERY")
        .env("XENTILE_PYTHON", "/nowhere/python")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let stderr = stderr(&output);
    if stderr.contains("/nowhere/python") {
        return None;
    }
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
    let errors: Vec<_> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{stderr}");
    Some(errors[0].to_owned())
}

#[test]
fn gradcheck_on_a_tpu_needs_one() {
    if let Some(error) = without_a_tpu(&[]) {
        let expected = "no TPU in this machine, and running needs one; microbench --topology";
        assert!(error.contains(expected), "{error}");
        let settings = [("TPU_SKIP_MDS_QUERY", "1"), ("XENTILE_PJRT_TPU", "/nowhere/libtpu.so")];
        let error = without_a_tpu(&settings).unwrap();
        assert!(error.contains("cannot open the PJRT plug-in /nowhere/libtpu.so"), "{error}");
    }
}

#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU"]
fn libtpu_that_finds_no_tpu_is_said_before_anything_is_exported() {
    if let Some(error) = without_a_tpu(&[("TPU_SKIP_MDS_QUERY", "1")]) {
        assert!(error.contains("gives no client; running needs a TPU; microbench"), "{error}");
    }
}

#[test]
fn kernels_need_a_python_that_has_them() {
    let cache = tempfile::tempdir().unwrap();
    for python in ["/nowhere/python", "false"] {
        let output = Command::new(MICROBENCH)
            .args(AHEAD)
            .env("XENTILE_PYTHON", python)
            .env("XENTILE_CACHE", cache.path())
            .output()
            .unwrap();
        let stderr = stderr(&output);
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
        for piece in [python, "pip install ./pallas_bridge", "XENTILE_PYTHON", "--impl reference"] {
            assert!(stderr.contains(piece), "no {piece} in {stderr}");
        }
    }
}

#[test]
fn running_a_kernel_needs_a_tpu() {
    let arguments = ["--backend", "xla:tpu", "--time", "16", "--vocab", "100"];
    if microbench(&arguments).status.success() {
        return; // There is one.
    }
    let error = refuse(&arguments);
    assert!(error.contains("no TPU in this machine"), "{error}");
}

#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU, and a python with JAX"]
fn our_kernel_is_exported_for_each_tile_and_kept() {
    let cache = tempfile::tempdir().unwrap();
    let folder = path(cache.path(), "");
    let small = ["--time", "64", "--vocab", "1003", "--cache", &folder];
    let own = |more: &[&str]| measure(&[&AHEAD[..], &small, more].concat());
    for dtype in ["f32", "bf16"] {
        let report = own(&["--time-block", "32", "--block-size", "256", "--dtype", dtype]);
        assert_eq!((number(&report, "/time_block"), number(&report, "/block_size")), (32, 256));
        let parts = report["schedule"]["computations"].as_array().unwrap();
        let is_ours =
            |part: &&Value| part["name"].as_str().unwrap().contains("xentile_cross_entropy_fused");
        let kernel = parts.iter().find(is_ours).unwrap();
        assert!(number(kernel, "/run_bundles") > number(kernel, "/bundles"), "{kernel}");
        assert!(number(kernel, "/data_bundles") > 10, "loops over labels: {kernel}");
        let slot = 32 * 256 * if dtype == "f32" { 4 } else { 2 };
        assert!(number(kernel, "/vmem_bytes") > 4 * slot, "{kernel}");
        assert_eq!(number(kernel, "/grid_steps"), 2, "{kernel}");
        let estimate = &report["estimate"];
        assert_eq!(estimate["kernels"][0]["name"], "xentile_cross_entropy_fused");
        assert!(estimate["step_ms"].as_f64() > estimate["floor_ms"].as_f64(), "{estimate}");
    }
    let files = || {
        let files = std::fs::read_dir(cache.path()).unwrap().map(|file| file.unwrap());
        let mut files: Vec<_> =
            files.map(|file| (file.file_name(), file.metadata().unwrap().len())).collect();
        files.sort();
        files
    };
    let made = files();
    let program = cache.path().join(
        made.iter()
            .find_map(|(name, _)| name.to_str().filter(|name| name.ends_with(".mlirbc")))
            .unwrap(),
    );
    let when = std::fs::metadata(&program).unwrap().modified().unwrap();
    own(&["--time-block", "32", "--block-size", "256", "--dtype", "f32"]);
    own(&["--time-block", "32", "--block-size", "256", "--dtype", "bf16"]);
    assert_eq!(files(), made);
    assert_eq!(std::fs::metadata(&program).unwrap().modified().unwrap(), when, "it was kept");

    let report = own(&["--reduction", "none", "--set", "options.softcap=30"]);
    let names: Vec<_> = report["estimate"]["kernels"].as_array().unwrap().iter().collect();
    assert_eq!(names.len(), 2, "forward and backward");

    let refused = |more: &[&str]| refuse(&[&AHEAD[..], &["--cache", &folder], more].concat());
    let error = refused(&["--time-block", "12", "--dtype", "bf16"]);
    assert!(error.contains("time_block is 12; on TPU, with logits of bfloat16"), "{error}");
    let error = refused(&["--time-block", "512", "--block-size", "65536", "--time", "2048"]);
    assert!(error.contains("128 MiB of VMEM of TPU v6 lite"), "{error}");
    let largest: usize = error.split_whitespace().last().unwrap().parse().unwrap();
    assert!(largest.is_multiple_of(128) && largest > 8192, "{error}");
    let error = refused(&["--dtype", "f16"]);
    assert!(error.contains("dtype is 'f16'; on TPU it must be one of f32, bf16"), "{error}");
}

#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU, and a python with JAX"]
fn a_step_at_the_default_tile_is_bound_by_memory() {
    let cache = tempfile::tempdir().unwrap();
    let folder = path(cache.path(), "");
    let size = ["--time", "2048", "--vocab", "151643", "--dtype", "bf16", "--cache", &folder];
    let report = measure(&[&AHEAD[..], &size].concat());
    assert!(number(&report, "/compiled/temporary_bytes") <= 1 << 20, "no copy of the logits");
    let estimate = &report["estimate"];
    assert_eq!(estimate["kernels"][0]["binds"], "dma", "{estimate}");
    // At 1.6 TB/s two passes take 0.78 ms.
    assert!(estimate["step_ms"].as_f64().unwrap() <= 1.15 * 0.78, "{estimate}");
    assert!(estimate["ratio_to_floor"].as_f64().unwrap() <= 1.15, "{estimate}");
}

/// Milliseconds of a step of [1, 2048, 151643] bf16 on one core of a v6e, by time_block, with
/// block_size 2048.
const MEASURED: [(u32, f64); 7] =
    [(8, 22.54), (16, 14.37), (32, 10.10), (64, 7.81), (128, 6.60), (256, 6.15), (512, 5.95)];

/// The rows that the model's two constants are fitted on; the others are held out.
const FITTED: [u32; 4] = [8, 32, 128, 512];

/// A measured step, and what the estimate has of it.
struct Row {
    time_block: u32,
    measured: f64,
    /// Everything that no fitted constant is in.
    fixed: f64,
    /// XLA's copies that transpose, and the steps of grids, by the constants of the model.
    fitted: [f64; 2],
}

impl Row {
    /// The estimate where the model's constants are multiplied by `factors`.
    fn estimate(&self, factors: [f64; 2]) -> f64 {
        self.fixed + self.fitted[0] * factors[0] + self.fitted[1] * factors[1]
    }

    /// The error of that in percent.
    fn error(&self, factors: [f64; 2]) -> f64 {
        (self.estimate(factors) / self.measured - 1.0) * 100.0
    }
}

/// The factors of the two constants with the least squares of relative errors.
fn fit(rows: &[&Row]) -> [f64; 2] {
    let mut matrix = [[0.0; 2]; 2];
    let mut vector = [0.0; 2];
    for row in rows {
        let scaled = row.fitted.map(|ms| ms / row.measured);
        let left = 1.0 - row.fixed / row.measured;
        for (index, &one) in scaled.iter().enumerate() {
            vector[index] += one * left;
            for (other, &two) in scaled.iter().enumerate() {
                matrix[index][other] += one * two;
            }
        }
    }
    let [[a, b], [c, d]] = matrix;
    let determinant = a * d - b * c;
    [(d * vector[0] - b * vector[1]) / determinant, (a * vector[1] - c * vector[0]) / determinant]
}

/// The reports of programs of tests/tpu/old_kernel.py.
fn measure_old_kernel(time_blocks: &[u32]) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new("python")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tpu/old_kernel.py"))
        .arg(folder.path())
        .args(["2048", "151643", "2048"])
        .args(time_blocks.iter().map(ToString::to_string))
        .env("JAX_PLATFORMS", "cpu")
        .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/../../pallas_bridge/src"))
        .output()
        .expect("python starts");
    assert!(output.status.success(), "{}", stderr(&output));
    let report = |time_block| {
        let manifest = path(folder.path(), &format!("old_{time_block}.json"));
        measure(&["--program", &manifest, "--topology", "v6e:2x2"])
    };
    time_blocks.iter().map(report).collect()
}

#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU, and a python with JAX"]
fn estimates_beside_what_was_measured() {
    let reports = measure_old_kernel(&MEASURED.map(|(time_block, _)| time_block));
    let read = |((time_block, measured), report): ((u32, f64), &Value)| {
        let estimate = &report["estimate"];
        let ms = |value: &Value| value.as_f64().unwrap();
        let kernels = estimate["kernels"].as_array().unwrap();
        let steps = kernels.iter().map(|kernel| ms(&kernel["steps_ms"])).sum::<f64>();
        let fitted = [ms(&estimate["transposing_ms"]), steps];
        let fixed = ms(&estimate["step_ms"]) - fitted[0] - fitted[1];
        Row { time_block, measured, fixed, fitted }
    };
    let rows: Vec<Row> = MEASURED.into_iter().zip(&reports).map(read).collect();
    let is_fitted = |row: &Row| FITTED.contains(&row.time_block);
    let factors = fit(&rows.iter().filter(|row| is_fitted(row)).collect::<Vec<_>>());
    println!("fitted: rate of copies that transpose, time of a grid step, on rows {FITTED:?}");
    println!("not fitted: clock, bandwidth, bundles, steps, bytes");
    println!(
        "time_block, estimated ms, measured ms, error, error if this row is left out of a fit"
    );
    let mut errors = Vec::new();
    for row in &rows {
        let others: Vec<_> = rows.iter().filter(|one| one.time_block != row.time_block).collect();
        let (error, left_out) = (row.error([1.0; 2]), row.error(fit(&others)));
        let role = if is_fitted(row) { "fitted" } else { "held out" };
        println!(
            "{}, {:.2}, {:.2}, {error:+.1} %, {left_out:+.1} % ({role})",
            row.time_block,
            row.estimate([1.0; 2]),
            row.measured
        );
        errors.push((is_fitted(row), error, left_out));
    }
    // The model has the constants that the four rows give.
    assert!(factors.iter().all(|factor| (factor - 1.0).abs() < 0.005), "{factors:?}");
    for (is_fitted, error, left_out) in errors {
        assert!(error.abs() <= 3.0, "{error} %");
        assert!(left_out.abs() <= if is_fitted { 6.0 } else { 3.0 }, "{left_out} %");
    }
    for pair in rows.windows(2) {
        let [one, other] = [&pair[0], &pair[1]].map(|row| row.estimate([1.0; 2]));
        assert!(one > other, "tiles in the order of what was measured");
    }
}

/// The old kernel took 5.95 ms at its best, with logits that enter the program transposed.
#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU, and a python with JAX"]
fn logits_that_enter_a_program_are_read_as_they_lie() {
    let report = &measure_old_kernel(&[0])[0];
    assert!(number(report, "/compiled/temporary_bytes") <= 1 << 20, "no copy of the logits");
    let estimate = &report["estimate"];
    assert_eq!(estimate["transposing_ms"], 0.0, "{estimate}");
    assert_eq!(estimate["kernels"][0]["name"], "xentile_cross_entropy_fused");
    println!("estimated ms: {}", estimate["step_ms"]);
    assert!(estimate["step_ms"].as_f64().unwrap() <= 1.2, "{estimate}");
}

/// 19.95 ms were measured of a plain JAX program on the same logits. Of this one the listing has
/// neither the sizes of the copies in fusions nor the SparseCore's instructions, which pick the labels'
/// logits.
#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU, and a python with JAX"]
fn the_plain_program_has_no_estimate_and_a_reason() {
    let report = &measure_old_kernel(&[1])[0];
    assert!(report["estimate"].is_null(), "{report}");
    let reason = report["no_estimate"].as_str().unwrap();
    assert!(reason.ends_with("does not tell how many bytes are copied"), "{reason}");
    let parts = report["schedule"]["computations"].as_array().unwrap();
    let unreported: Vec<_> = parts.iter().filter(|part| part["dma_bytes"].is_null()).collect();
    let names: Vec<_> = unreported.iter().map(|part| part["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["fusion", "select_reduce_fusion", "reduce"]);
    assert!(parts.iter().all(|part| !part["name"].as_str().unwrap().contains("gather")));
}

/// Milliseconds that JAX's Pallas guide (docs/pallas/tpu/matmul.ipynb in jax-ml/jax) lists of matrix
/// products on a v5e, each call from Python included: variant, block, size.
const GUIDE: [(&str, u64, u64, f64); 18] = [
    ("plain", 128, 1024, 0.29767),
    ("plain", 128, 4096, 11.77152),
    ("plain", 128, 8192, 91.83577),
    ("plain", 512, 1024, 0.12709),
    ("plain", 512, 4096, 0.88909),
    ("plain", 512, 8192, 6.09943),
    ("rhs", 128, 1024, 0.30294),
    ("rhs", 128, 4096, 12.01797),
    ("rhs", 128, 8192, 95.00920),
    ("rhs", 512, 1024, 0.12132),
    ("rhs", 512, 4096, 0.87906),
    ("rhs", 512, 8192, 6.10772),
    ("relu", 128, 1024, 0.30104),
    ("relu", 128, 4096, 11.80712),
    ("relu", 128, 8192, 91.81861),
    ("relu", 512, 1024, 0.12623),
    ("relu", 512, 4096, 0.89663),
    ("relu", 512, 8192, 6.13061),
];

/// The rows that the time of a v5e's grid step, and that of a call from Python, are fitted on.
const GUIDE_FITTED: [(&str, u64, u64); 2] = [("plain", 128, 8192), ("plain", 512, 1024)];

#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU, and a python with JAX"]
fn estimates_beside_the_times_of_the_pallas_guide() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new("python")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tpu/guide_matmul.py"))
        .arg(folder.path())
        .output()
        .expect("python starts");
    assert!(output.status.success(), "{}", stderr(&output));
    let read = |(variant, block, size, measured): (&'static str, u64, u64, f64)| {
        let dumped = folder.path().join(format!("{variant}_{block}_{size}"));
        let schedule = schedule::read_folder(&dumped).unwrap();
        // The blocks of an operand come once for each block of the other operand's columns or rows.
        let [rows, columns] = if block == 128 { [128, 128] } else { [512, 1024] };
        let bytes = 2 * size * size * (size / rows + size / columns + 1);
        let known = Traffic { name: "guide_matmul".to_owned(), bytes, steps: None };
        let parts = estimate::parts("v5e:2x2", &schedule, &[known]).unwrap();
        let steps = parts.iter().map(|part| part.steps_ms).sum::<f64>();
        let fixed = parts.iter().map(|part| part.ms).sum::<f64>() - steps;
        ((variant, block, size), Row { time_block: 0, measured, fixed, fitted: [1.0, steps] })
    };
    let rows: Vec<_> = GUIDE.into_iter().map(read).collect();
    let is_fitted = |row: &(&str, u64, u64)| GUIDE_FITTED.contains(row);
    let fitted: Vec<_> =
        rows.iter().filter(|(row, _)| is_fitted(row)).map(|(_, row)| row).collect();
    let [call, step] = fit(&fitted);
    println!("fitted: a call from Python, {call:.3} ms, and a grid step, on {GUIDE_FITTED:?}");
    println!("not fitted: clock, bandwidth, bundles, steps, bytes");
    println!("variant, block, size, estimated ms, listed ms, error");
    let factors = [call, 1.0];
    for ((variant, block, size), row) in &rows {
        let role = if is_fitted(&(variant, *block, *size)) { "fitted" } else { "held out" };
        println!(
            "{variant}, {block}, {size}, {:.3}, {:.3}, {:+.1} % ({role})",
            row.estimate(factors),
            row.measured,
            row.error(factors)
        );
    }
    assert!(
        (step - 1.0).abs() < 0.005,
        "the model has the step that the guide's row gives: {step}"
    );
    for (name, row) in &rows {
        assert!(row.error(factors).abs() <= 15.0, "{name:?}: {} %", row.error(factors));
    }
}

#[test]
#[ignore = "needs libtpu in XENTILE_PJRT_TPU, and a python with JAX"]
fn linear_cross_entropy_compiles_without_its_logits() {
    let cache = tempfile::tempdir().unwrap();
    // More logits than the chip's own memory holds.
    let cell = ["--op", "linear_cross_entropy", "--time", "2048", "--vocab", "40000"];
    let more = ["--cache", cache.path().to_str().unwrap(), "--set", "hidden=256"];
    let report = measure(&[&AHEAD[..], &cell, &more].concat());
    assert!(number(&report, "/compiled/temporary_bytes") < 1 << 20);
    assert!(number(&report, "/schedule/bundles") > 0);
    // Both kernels, beside the three products that there have to be, of the four that they make.
    let estimate = &report["estimate"];
    let kernels: Vec<_> = estimate["kernels"].as_array().unwrap().iter().collect();
    let names: Vec<_> = kernels.iter().map(|kernel| kernel["name"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["forward", "backward"].map(|of| format!("xentile_linear_cross_entropy_{of}"))
    );
    assert_eq!(estimate["floor"], "three_products");
    let ratio = estimate["ratio_to_floor"].as_f64().unwrap();
    assert!((1.33..4.5).contains(&ratio), "{estimate}");
    assert!(kernels.iter().all(|kernel| kernel["binds"] == "schedule"), "{estimate}");
    let plan = report["exported"]["plan"].as_str().unwrap();
    assert!(plan.starts_with("kernels: ") && plan.contains("4 products"), "{plan}");

    let grid = path(cache.path(), "grid.yaml");
    let config = format!(
        "max_scratch_bytes: [8000000]\nout: {0}/out\n\
         cell: {{op: linear_cross_entropy, backend: xla:tpu, topology: 'v6e:2x2', time: 256, \
         vocab: 2000, hidden: 128, cache: {0}}}\n",
        cache.path().display()
    );
    std::fs::write(&grid, config).unwrap();
    let output = microbench(&["sweep", "--config", &grid]);
    assert!(output.status.success(), "{}", stderr(&output));
    let read = |name: &str| std::fs::read_to_string(cache.path().join("out").join(name)).unwrap();
    let csv = read("sweep.csv");
    assert!(csv.starts_with("max_scratch_bytes,status,compile_s,code_bytes,"), "{csv}");
    assert!(
        csv.contains(",binds,estimated_step_ms,plan,error\n8000000,ok,")
            && csv.contains(",\"kernels: "),
        "{csv}"
    );
    let plot = read("sweep.svg");
    assert!(plot.contains("step time, estimated") && plot.contains("three products: "), "{plot}");
}
