//! `microbench sweep`, as a user runs it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

const FILES: [&str; 5] = ["sweep.csv", "sweep.json", "sweep.md", "sweep.png", "sweep.svg"];
const OLD_TILES: &str = "\
- {dtype: bf16, vocab: 1001, time_block: 3, block_size: 33, device: before}
- {dtype: f32, vocab: 1001, time_block: 4, block_size: 44, device: before}
";

struct Folder(tempfile::TempDir);

impl Folder {
    /// With a table of tuned tiles, and a config that measures `time_blocks`.
    fn new(time_blocks: &str) -> Self {
        let folder = Self(tempfile::tempdir().expect("a temporary folder"));
        std::fs::create_dir(folder.path("tuned")).unwrap();
        std::fs::write(folder.path("tuned/cross_entropy.cpu.yaml"), OLD_TILES).unwrap();
        let config = format!(
            "time_blocks: {time_blocks}\n\
             block_sizes: [64, 512]\n\
             out: {0}/out\n\
             update_tuned: true\n\
             tuned_dir: {0}/tuned\n\
             cell: {{time: 5, vocab: 1001, dtype: bf16, iters: 2, warmup: 0}}\n",
            folder.0.path().display()
        );
        std::fs::write(folder.path("grid.yaml"), config).unwrap();
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn sweep(&self, sets: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_microbench"));
        command.current_dir(self.0.path()).args(["sweep", "--config"]).arg("grid.yaml");
        for set in sets {
            command.args(["--set", set]);
        }
        command.output().expect("microbench starts")
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn a_grid_gives_every_file_and_the_default_tile() {
    let folder = Folder::new("[1, 2, 8]");
    let output = folder.sweep(&[]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert_eq!(stderr.lines().count(), 6, "{stderr}");
    assert!(stderr.starts_with("[1/6] time_block 1 block_size 64: "), "{stderr}");
    assert!(stderr.contains("s left"), "{stderr}");
    assert_eq!(folder.names("out"), FILES);

    let found = json(&folder.read("out/sweep.json"));
    assert_eq!(found["config"]["cell"]["vocab"], 1001);
    assert!(found["machine"]["processor"].is_string());
    let rows = found["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    let median = |row: &Value| row["report"]["median_step_ms"].as_f64().expect("a time");
    for row in rows {
        assert!(row["error"].is_null());
        assert_eq!(row["report"]["time_block"], row["time_block"]);
        assert_eq!(row["report"]["block_size"], row["block_size"]);
    }
    // The smallest tile that is as quick as any to a hundredth.
    let quickest = rows.iter().map(median).fold(f64::INFINITY, f64::min);
    let extent = |row: &Value, name: &str| row[name].as_u64().expect("an extent");
    let area = |row: &Value| extent(row, "time_block") * extent(row, "block_size");
    let quick = rows.iter().filter(|row| median(row) <= 1.01 * quickest);
    let best = quick.min_by_key(|row| area(row)).unwrap();
    assert_eq!(found["best"]["median_step_ms"].as_f64(), Some(median(best)));

    let csv = folder.read("out/sweep.csv");
    let columns = |line: &str| line.split(',').count();
    assert_eq!(csv.lines().count(), 7);
    assert!(csv.lines().all(|line| columns(line) == columns(csv.lines().next().unwrap())));
    assert!(csv.lines().skip(1).all(|line| line.split(',').nth(2) == Some("ok")));
    let markdown = folder.read("out/sweep.md");
    assert_eq!(markdown.lines().filter(|line| line.starts_with('|')).count(), 8);
    assert_eq!(markdown.matches("**").count(), 2, "one best cell");
    let svg = folder.read("out/sweep.svg");
    for text in [
        "bf16",
        "[5, 1001]",
        "time_block",
        "copy of the logits",
        "process&apos;s memory, peak (MiB)",
        "logits and gradient: 0.0 MiB",
    ] {
        assert!(svg.contains(text), "the plot does not say {text}");
    }
    let png = std::fs::read(folder.path("out/sweep.png")).unwrap();
    assert_eq!(png[..8], *b"\x89PNG\r\n\x1a\n");
    assert_eq!(png[16..24], [0, 0, 4, 176, 0, 0, 4, 56], "1200 x 1080");

    // Other rows stay; the row of this dtype and vocabulary is the best cell.
    assert_eq!(folder.names("tuned"), ["cross_entropy.cpu.yaml"]);
    let tuned = folder.read("tuned/cross_entropy.cpu.yaml");
    assert_eq!(tuned.lines().count(), 2);
    let tiles: Vec<xentile::TunedTile> = serde_yaml::from_str(&tuned).expect("tuned tiles");
    let old: Vec<xentile::TunedTile> = serde_yaml::from_str(OLD_TILES).unwrap();
    assert_eq!(tiles[1], old[1]);
    assert_eq!((tiles[0].dtype.as_str(), tiles[0].vocab), ("bf16", 1001));
    assert_eq!(Some(tiles[0].time_block as u64), best["time_block"].as_u64());
    assert_eq!(Some(tiles[0].block_size as u64), best["block_size"].as_u64());
    assert_eq!(Some(tiles[0].device.as_str()), found["machine"]["processor"].as_str());
}

#[test]
fn a_cell_that_fails_is_a_row() {
    let folder = Folder::new("[2, 0, 4]");
    let output = folder.sweep(&[]);
    assert_eq!(output.status.code(), Some(1));
    let reason = "tile time_block is 0; it must be at least 1";
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains(&format!("time_block 0 block_size 64: failed: {reason}")), "{stderr}");
    assert!(stderr.ends_with("2 of 6 cells failed\n"), "{stderr}");
    assert_eq!(folder.names("out"), FILES);
    let found = json(&folder.read("out/sweep.json"));
    let failed: Vec<_> =
        found["rows"].as_array().unwrap().iter().filter(|row| !row["error"].is_null()).collect();
    assert_eq!(failed.len(), 2);
    assert!(failed.iter().all(|row| row["error"] == reason && row["report"].is_null()));
    let csv = folder.read("out/sweep.csv");
    assert!(csv.contains(&format!("0,512,failed{}\"{reason}\"\n", ",".repeat(17))), "{csv}");
    assert!(
        folder
            .read("out/sweep.md")
            .contains(&format!("| 0 | 64 | failed | | | | | | | {reason} |"))
    );
    assert!(!folder.read("tuned/cross_entropy.cpu.yaml").contains("time_block: 3"));
}

#[test]
fn a_sweep_in_which_nothing_ran_tunes_nothing() {
    let folder = Folder::new("[0]");
    assert_eq!(folder.sweep(&[]).status.code(), Some(1));
    assert_eq!(folder.names("out"), FILES);
    assert!(json(&folder.read("out/sweep.json"))["best"].is_null());
    assert_eq!(folder.read("tuned/cross_entropy.cpu.yaml"), OLD_TILES);
}

#[test]
fn tuning_is_a_choice_and_results_have_a_place_of_their_own() {
    let folder = Folder::new("[1]");
    let output = folder.sweep(&["update_tuned=false", "out=null", "block_sizes=[64]"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(folder.read("tuned/cross_entropy.cpu.yaml"), OLD_TILES);
    let [device] = &folder.names("benches/results")[..] else { panic!("not one device") };
    assert_eq!(folder.names(&format!("benches/results/{device}/grid")), FILES);
}

#[test]
fn bad_input_is_named_and_writes_nothing() {
    let folder = Folder::new("[1]");
    let cases: [(&[&str], &str); 11] = [
        (&["time_blocks=[]"], "time_blocks is empty; list at least one value"),
        (&["block_sizes=[8, 9, 8]"], "block_sizes lists 8 twice; remove one"),
        (
            &["max_scratch_bytes=[null]"],
            "max_scratch_bytes is set; a sweep of cross_entropy varies time_blocks and block_sizes",
        ),
        (&["time_blokcs=[1]"], "unknown key `time_blokcs`; did you mean `time_blocks`?"),
        (&["cell.tile.time_block=1"], "cell.tile is what the sweep varies; remove it"),
        (&["cell.impl=reference"], "cell.impl is reference, which has no tile; set it to kernel"),
        (&["cell.dtype=f64"], "dtype `f64` is unknown; it must be one of f32, bf16, f16"),
        (&["cell.time=0"], "cell: time is 0; it must be at least 1"),
        (&["cell.time=1000000000000"], "is available; lower time or vocab"),
        (&["tuned_dir=no/such"], "tuned_dir no/such is not a directory; "),
        (&["tuned_dir=broken"], "is not a table of tuned tiles"),
    ];
    std::fs::create_dir(folder.path("broken")).unwrap();
    std::fs::write(folder.path("broken/cross_entropy.cpu.yaml"), "- {dtype: 1}\n").unwrap();
    for (sets, expected) in cases {
        let output = folder.sweep(sets);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{sets:?}: {stderr}");
        assert!(stderr.starts_with("error: config grid.yaml: "), "{stderr}");
        assert!(stderr.contains(expected), "{sets:?}: {stderr}");
        assert!(output.stdout.is_empty());
        assert!(!folder.path("out").exists(), "{sets:?} wrote results");
    }
    assert_eq!(folder.read("tuned/cross_entropy.cpu.yaml"), OLD_TILES);
}

#[test]
fn shipped_configs_are_valid() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/sweep");
    let mut count = 0;
    for entry in std::fs::read_dir(configs).unwrap() {
        let path = entry.unwrap().path();
        // linear.rs has those whose programs come from JAX.
        if path.file_name().unwrap().to_string_lossy().starts_with("linear_") {
            continue;
        }
        let folder = Folder::new("[1]");
        std::fs::copy(&path, folder.path("grid.yaml")).unwrap();
        let sets =
            ["time_blocks=[1]", "block_sizes=[64]", "cell.time=2", "cell.vocab=70", "out=out"];
        // Where it takes more than this machine may have, all but that.
        let here = ["tuned_dir=tuned", "cell.backend=cpu", "cell.topology=null"];
        let output = folder.sweep(&[&sets[..], &here].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{}: {stderr}", path.display());
        count += 1;
    }
    assert!(count > 0);
}
