//! The tools on the backend `xla:cpu`, as a user runs them. Most need XLA's CPU plug-in:
//!
//! ```text
//! XENTILE_PJRT_CPU=FILE cargo test -p xentile-tools --test xla -- --include-ignored
//! ```

use std::process::{Command, Output, Stdio};

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
    // All but those whose logits come from a file or from JAX, or take a real vocabulary's time.
    let configs =
        std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/gradcheck"));
    let mut checked = 0;
    for config in configs.unwrap() {
        let path = config.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let of_logits = !text.contains("op: ") || text.contains("op: cross_entropy");
        let from_jax = !of_logits
            || ["factor", "distribution: true", "columns: "]
                .iter()
                .any(|option| text.contains(option));
        if text.contains("file:") || text.contains("isa:") || from_jax {
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
fn gradcheck_passes_for_the_dense_program() {
    for config in ["z_loss", "all_options", "reduction_none", "weights"] {
        let path = format!("configs/gradcheck/{config}.yaml");
        let sets = ["backend=xla:cpu", "shape.seq_len=20", "shape.vocab=5003"];
        let flags = ["--config", &path, "--impl", "reference", "--set"];
        let output = run(GRADCHECK, &[&flags, &sets[..]].concat());
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{path}: {printed}{}", stderr(&output));
        assert!(printed.contains("cross_entropy, dense program, on xla:cpu"), "{printed}");
    }
}

/// A cache, and measurements with it.
struct CacheFolder(tempfile::TempDir);

impl CacheFolder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn flags(&self) -> [&str; 2] {
        ["--cache", self.0.path().to_str().unwrap()]
    }

    fn files(&self) -> Vec<std::path::PathBuf> {
        std::fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU"]
fn compiled_programs_are_cached() {
    let cache = CacheFolder::new();
    assert!(measure(&[])["from_cache"].is_null(), "no cache was asked for");
    let first = measure(&cache.flags());
    assert_eq!(first["from_cache"], false);
    let second = measure(&cache.flags());
    assert_eq!(second["from_cache"], true);
    assert_eq!(first["loss"], second["loss"]);
    // Another program, and the same for another tool.
    assert_eq!(
        measure(&[&cache.flags()[..], &["--reduction", "sum"]].concat())["from_cache"],
        false
    );
    let gradcheck = ["--config", "configs/gradcheck/z_loss.yaml", "--set", "backend=xla:cpu"];
    let gradcheck = [&gradcheck[..], &["shape.vocab=1003"], &cache.flags()].concat();
    let files = cache.files().len();
    for _ in 0..2 {
        let output = run(GRADCHECK, &gradcheck);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(cache.files().len(), files + 3, "forward, fused, forward and backward");
    }

    // Broken entries are named once, and mended.
    for file in cache.files() {
        std::fs::write(file, "broken").unwrap();
    }
    let again = || {
        let small = ["--backend", "xla:cpu", "--time", "64", "--vocab", "5003", "--iters", "3"];
        let output = run(MICROBENCH, &[&small, &cache.flags()[..]].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        (String::from_utf8_lossy(&output.stdout).into_owned(), stderr(&output))
    };
    let warnings = |text: &str| {
        let lines = text.lines().filter(|line| line.starts_with("warning: cannot load the cached"));
        lines.count()
    };
    let (printed, warned) = again();
    assert!(printed.contains("s of it compiling"), "{printed}");
    assert_eq!(warnings(&warned), 3, "the step, the copy, the zeros: {warned}");
    let (printed, warned) = again();
    assert!(printed.contains("s of it loading from the cache"), "{printed}");
    assert_eq!(warnings(&warned), 0, "{warned}");
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU"]
fn processes_share_a_cache() {
    let cache = CacheFolder::new();
    let flags = [&["--backend", "xla:cpu", "--time", "8", "--vocab", "1003"], &cache.flags()[..]];
    let start = || {
        let mut command = Command::new(MICROBENCH);
        command.args(flags.concat()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the binary starts")
    };
    let processes: Vec<_> = (0..4).map(|_| start()).collect();
    for process in processes {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(!stderr(&output).contains("warning: cannot"), "{}", stderr(&output));
    }
    assert_eq!(cache.files().len(), 3, "{:?}", cache.files());
    let output = start().wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("loading from the cache"));
    assert!(!stderr(&output).contains("warning: cannot"), "{}", stderr(&output));
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU"]
fn a_sweep_runs_and_shows_what_programs_take() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let config = format!(
        "{{time_blocks: [1, 4], block_sizes: [512], out: {0}/out, update_tuned: true,
         tuned_dir: {0}, cell: {{backend: \"xla:cpu\", time: 8, vocab: 1003, iters: 2}}}}",
        folder.path().display()
    );
    std::fs::write(path("grid.yaml"), config).unwrap();
    let output = run(MICROBENCH, &["sweep", "--config", path("grid.yaml").to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let svg = std::fs::read_to_string(path("out/sweep.svg")).unwrap();
    assert!(svg.contains("arguments, results, temporaries (MiB)"));
    let csv = std::fs::read_to_string(path("out/sweep.csv")).unwrap();
    let cells: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    let column = |name| cells[0].iter().position(|&column| column == name).unwrap();
    for cell in &cells[1..] {
        assert_eq!(cell.len(), cells[0].len());
        assert_eq!(cell[column("device_peak_bytes_in_use")], "", "not reported is not 0");
        let arguments: usize = cell[column("compiled_argument_bytes")].parse().unwrap();
        assert!(arguments >= 2 * 8 * 1003 * 2, "logits and the last gradient");
    }
    let markdown = std::fs::read_to_string(path("out/sweep.md")).unwrap();
    assert!(markdown.contains("| not reported |"), "{markdown}");
    // The kernels are those of the backend cpu, and so is their tile.
    assert!(path("cross_entropy.cpu.yaml").is_file());
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU"]
fn more_memory_than_there_is_is_one_line() {
    for arguments in [
        &["--backend", "xla:cpu", "--time", "1000000000"][..],
        &["--backend", "xla:cpu", "--impl", "reference", "--time", "1000000000"],
    ] {
        let error = refuse(MICROBENCH, arguments);
        assert!(error.starts_with("error: this needs ") && error.lines().count() == 1, "{error}");
    }
}

#[test]
#[ignore = "needs XLA's CPU plug-in in XENTILE_PJRT_CPU"]
fn a_plugin_of_another_platform_is_refused() {
    let plugin = std::env::var("XENTILE_PJRT_CPU").unwrap();
    let arguments = ["--backend", "xla:cuda", "--plugin", &plugin, "--time", "4", "--vocab", "9"];
    for implementation in ["kernel", "reference"] {
        let error = refuse(MICROBENCH, &[&arguments[..], &["--impl", implementation]].concat());
        assert!(error.contains("runs xla:cpu and not xla:cuda; "), "{error}");
    }
}

/// A library made of C by the system's compiler.
fn library(folder: &std::path::Path, source: &str) -> String {
    let (file, library) = (folder.join("fake.c"), folder.join("fake.so"));
    std::fs::write(&file, source).unwrap();
    let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    let output = compiler.args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&file).output();
    let output = output.expect("a C compiler, `cc` or the one that CC names");
    assert!(output.status.success(), "{}", stderr(&output));
    library.to_str().unwrap().to_owned()
}

/// A table of PJRT's with this version and this many functions, which succeed as far as
/// initialisation and then report an error.
fn fake_plugin(major: i32, minor: i32, functions: usize, code: u32, message: &str) -> String {
    format!(
        r#"
        #include <stddef.h>
        typedef struct {{
          size_t size; void* ext; void* error; const char* message; size_t message_size;
        }} Message;
        typedef struct {{ size_t size; void* ext; void* error; int code; }} GetCode;
        static const char text[] = "{message}";
        static void destroy(void* args) {{}}
        static void message(Message* args) {{
          args->message = text; args->message_size = sizeof(text) - 1;
        }}
        static void* code(GetCode* args) {{ args->code = {code}; return 0; }}
        static void* succeeds(void* args) {{ return 0; }}
        static void* fails(void* args) {{ return (void*)text; }}
        static struct {{
          size_t size; void* ext; size_t version_size; void* version_ext; int major; int minor;
          void* functions[200];
        }} table;
        void* GetPjrtApi(void) {{
          table.size = 40 + 8 * {functions};
          table.version_size = 24;
          table.major = {major};
          table.minor = {minor};
          for (int i = 0; i < 200; i++) table.functions[i] = (void*)fails;
          table.functions[0] = (void*)destroy;
          table.functions[1] = (void*)message;
          table.functions[2] = (void*)code;
          table.functions[3] = (void*)succeeds;
          return &table;
        }}
        "#
    )
}

#[test]
fn plugins_that_are_none_or_of_another_time() {
    let oom = "Out of memory while trying to allocate 64.00GiB.\\nBufferAssignment OOM Debugging.";
    for (source, expected) in [
        ("int something(void) { return 1; }".to_owned(), "is not a PJRT plug-in: it exports no"),
        (fake_plugin(1, 3, 118, 9, ""), "speaks PJRT 1.3; this crate speaks 0.x"),
        (fake_plugin(0, 40, 5, 9, ""), "has no PJRT_Client_Create: it speaks PJRT 0.40"),
        (fake_plugin(0, 81, 118, 9, "not today"), "FAILED_PRECONDITION: not today"),
        (
            fake_plugin(0, 200, 118, 8, oom),
            "out of device memory: 64.00 GiB asked for; the available size is not reported: \
             RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64.00GiB. BufferAssignment \
             OOM Debugging.\n",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = library(folder.path(), &source);
        for backend in ["xla:cpu", "xla:cuda"] {
            let error = refuse(MICROBENCH, &["--backend", backend, "--plugin", &path]);
            assert!(error.contains(expected), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
            let sets = [format!("backend={backend}"), format!("plugin={path}")];
            let config = ["--config", "configs/gradcheck/z_loss.yaml", "--impl", "reference"];
            let sets = ["--set", &sets[0], &sets[1], "shape.vocab=99"];
            let error = refuse(GRADCHECK, &[&config, &sets[..]].concat());
            assert!(error.contains(expected), "{error}");
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
fn flags_of_another_backend_are_refused() {
    for (arguments, message) in [
        (&["--backend", "xla:cpu", "--isa", "portable"][..], "isa is set; on xla:cpu"),
        (&["--backend", "xla:cpu", "--threads", "2"], "threads is set; on xla:cpu"),
        (&["--backend", "cpu", "--plugin", "x.so"], "plugin is set; backend cpu needs none"),
        (&["--backend", "cpu", "--cache", "programs"], "cache is set; backend cpu needs none"),
    ] {
        let error = refuse(MICROBENCH, arguments);
        assert!(error.contains(message), "{error}");
    }
}
