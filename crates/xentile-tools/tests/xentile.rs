//! `xentile`: the tools as its commands, presets, completions and man pages.

use std::process::{Command, Output};

fn xentile(arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_xentile"));
    command.current_dir(folder.path()).args(arguments).output().unwrap()
}

/// What it prints where it succeeds.
fn printed(arguments: &[&str]) -> String {
    let output = xentile(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn presets_are_there_without_a_checkout() {
    let small = ["--set", "shape.batch=1", "shape.seq_len=3", "shape.vocab=67"];
    let text = printed(&[&["gradcheck", "--preset", "z_loss"], &small[..]].concat());
    assert!(text.contains("67"), "{text}");
    let tiny = ["--time", "3", "--vocab", "67", "--iters", "2", "--json", "-"];
    let text = printed(&[&["microbench", "--preset", "cross_entropy_cpu"], &tiny[..]].concat());
    assert!(text.contains("\"vocab\":67"), "{text}");
    let grid =
        ["cell.time=3", "cell.vocab=67", "cell.iters=2", "time_blocks=[1,2]", "block_sizes=[64]"];
    let sweep = ["sweep", "--preset", "quick", "--set", "update_tuned=false", "out=found"];
    let text = printed(&[&sweep[..], &grid].concat());
    assert!(text.contains("best: "), "{text}");
}

#[test]
fn a_preset_that_is_not_there_is_named() {
    let output = xentile(&["gradcheck", "--preset", "qwen_151644"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("qwen_151644") && error.contains("qwen_151643"), "{error}");
    let output = xentile(&["gradcheck", "--preset", "z_loss", "--config", "mine.yaml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot be used with"));
    assert_eq!(xentile(&["gradcheck"]).status.code(), Some(2));
}

#[test]
fn old_command_names_take_the_same_flags() {
    let flags = |help: &[u8]| -> Vec<String> {
        let help = String::from_utf8_lossy(help);
        let words = help.split_whitespace().filter(|word| word.starts_with("--"));
        // Programs have a version, whatever commands have.
        words.filter(|word| *word != "--version").map(str::to_owned).collect()
    };
    for (command, binary) in [
        ("gradcheck", env!("CARGO_BIN_EXE_gradcheck")),
        ("microbench", env!("CARGO_BIN_EXE_microbench")),
    ] {
        let old = Command::new(binary).arg("--help").output().unwrap();
        let of_old = flags(&old.stdout);
        let found = flags(&xentile(&[command, "--help"]).stdout);
        assert!(!found.is_empty());
        assert_eq!(found, of_old, "{command}");
    }
}

#[test]
fn shells_and_man_know_every_command() {
    let commands = ["gradcheck", "microbench", "sweep", "ops", "plugins"];
    for shell in ["bash", "zsh", "fish"] {
        let text = printed(&["completions", shell]);
        assert!(commands.iter().all(|command| text.contains(command)), "{shell}");
    }
    let folder = tempfile::tempdir().unwrap();
    printed(&["man", folder.path().to_str().unwrap()]);
    for command in commands {
        let page =
            std::fs::read_to_string(folder.path().join(format!("xentile-{command}.1"))).unwrap();
        assert!(page.contains(".TH"), "{command}");
    }
}
