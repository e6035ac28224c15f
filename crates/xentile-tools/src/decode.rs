//! Times steps of a decoder: one program, which `pallas_bridge` exports, takes so many steps and reads as many bytes as a
//! step does so many times. A time is the difference of two runs, so that what a run does once is not in it, and each run the fastest of several.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Args, Parser};
use serde::Serialize;
use serde_json::{Map, Value, json};
use xentile_programs::Exported;

use crate::config::{self, Backend, Implementation};
use crate::exported::{calls_kernels, export};
use crate::machine::Machine;
use crate::presets;
use crate::timing::timed;
use crate::xla::{Compiled, Session};

/// Steps of the program's blocks.
const BLOCK: u32 = 16;

/// The most steps: the program counts them in 32 bits.
const MOST_STEPS: u32 = 1 << 30;

/// What is measured.
#[derive(Args, Clone, Debug, Serialize)]
pub struct Config {
    /// The decoder's config.json, as Hugging Face has it.
    #[arg(long, value_name = "FILE", required_unless_present = "preset")]
    #[serde(skip)]
    model: Option<PathBuf>,
    /// A shipped one, instead of --model.
    #[arg(long, value_name = "NAME", conflicts_with = "model", value_parser = presets::parser("decode"))]
    #[serde(skip)]
    preset: Option<String>,
    /// xla:cpu or xla:cuda.
    #[arg(long, default_value = "xla:cpu", hide_possible_values = true)]
    backend: Backend,
    /// reference is XLA's program.
    #[arg(long = "impl", default_value = "kernel", hide_possible_values = true)]
    #[serde(rename = "impl")]
    implementation: Implementation,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// The position of their tokens.
    #[arg(long, default_value_t = 1000)]
    position: usize,
    /// bf16, f16 or f32.
    #[arg(long, default_value = "bf16")]
    dtype: String,
    /// Draws tokens at this temperature; by default the most probable ones.
    #[arg(long)]
    temperature: Option<f64>,
    /// Of the most probable tokens, so many.
    #[arg(long, requires = "temperature")]
    top_k: Option<u32>,
    /// Of the most probable tokens, the fewest of this probability.
    #[arg(long, requires = "temperature")]
    top_p: Option<f64>,
    /// Tokens of at least this part of the largest probability.
    #[arg(long, requires = "temperature")]
    min_p: Option<f64>,
    /// Steps of the longer run, rounded up to a multiple of 32; the other has half as many.
    #[arg(long, default_value_t = 256)]
    steps: u32,
    /// Measurements, of which the fastest counts.
    #[arg(long, default_value_t = 5)]
    iters: usize,
    /// The PJRT plug-in's file; searched for by default.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    plugin: Option<PathBuf>,
    /// The folder of compiled programs; only these tools may write there. Default: XENTILE_CACHE, if set.
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    cache: Option<PathBuf>,
}

/// What is found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Milliseconds of a step of all sequences.
    pub step_ms: f64,
    /// Milliseconds of reading as many bytes.
    pub read_ms: f64,
    /// Tokens of all sequences.
    pub tokens_per_s: f64,
    /// Bytes of weights and of the cache that a step reads.
    pub bytes: u64,
    /// Billions of these.
    pub gb_per_s: f64,
    /// The same of reading alone.
    pub read_gb_per_s: f64,
    /// The part of the rate of reading that a step has.
    pub share_of_read_rate: f64,
    /// Whether a step is one kernel.
    pub is_one_kernel: bool,
    /// The plug-in.
    pub plugin: String,
    /// The object in config.json.
    pub model: Value,
    /// The rest of the config.
    pub config: Config,
    /// The machine.
    pub machine: Machine,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "step            {:.4} ms", self.step_ms)?;
        writeln!(f, "tokens          {:.1} a second", self.tokens_per_s)?;
        writeln!(f, "bytes           {} a step, {:.1} GB/s", self.bytes, self.gb_per_s)?;
        writeln!(f, "reading         {:.4} ms, {:.1} GB/s", self.read_ms, self.read_gb_per_s)?;
        writeln!(f, "share of reads  {:.3}", self.share_of_read_rate)
    }
}

/// Flags without a command.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct Flags {
    #[command(flatten)]
    config: Config,
}

impl Config {
    /// Reads flags, `--batch=8`.
    ///
    /// # Errors
    /// One that there is not, or whose value is no good.
    pub(crate) fn from_flags(flags: &[String]) -> Result<Self> {
        let found = Flags::try_parse_from(flags).map_err(|error| {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            anyhow!("{}", line.strip_prefix("error: ").unwrap_or(line))
        });
        Ok(found?.config)
    }

    /// Model, batch and position; the dtype; and how tokens are drawn.
    pub(crate) fn described(&self) -> [String; 3] {
        let file = self.model.as_deref().and_then(Path::file_stem).unwrap_or_default();
        let model = self.preset.clone().unwrap_or_else(|| file.display().to_string());
        let options = self.options().map(|(key, value)| format!("{key} {value}"));
        let drawn = options.collect::<Vec<_>>().join(", ");
        let drawn = if drawn.is_empty() { "greedy".to_owned() } else { drawn };
        let shape = format!("{model}, [{}] at {}", self.batch, self.position);
        [shape, self.dtype.clone(), drawn]
    }

    /// Options of the sampler that are set.
    fn options(&self) -> impl Iterator<Item = (&'static str, Value)> {
        [
            ("temperature", json!(self.temperature)),
            ("top_k", json!(self.top_k)),
            ("top_p", json!(self.top_p)),
            ("min_p", json!(self.min_p)),
        ]
        .into_iter()
        .filter(|(_, value)| !value.is_null())
    }

    /// The config of the exported program.
    fn cell(&self, model: &Value) -> Map<String, Value> {
        let cell = json!({
            "op": "decode",
            "backend": self.backend,
            "impl": self.implementation,
            "dtype": self.dtype,
            "batch": self.batch,
            "position": self.position,
            "options": self.options().map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>(),
            "model": model,
        });
        cell.as_object().cloned().unwrap_or_default()
    }
}

/// Measures what `config` describes.
///
/// # Errors
/// A value that cannot be measured; the program is not exported, does not compile, or fails.
pub fn run(config: &Config) -> Result<Report> {
    let platform =
        config.backend.platform().context("backend is cpu; it must be xla:cpu or xla:cuda")?;
    ensure!(config.steps >= 1, "steps is 0; it must be at least 1");
    ensure!(
        config.steps <= MOST_STEPS,
        "steps is {}; it must be at most {MOST_STEPS}",
        config.steps
    );
    ensure!(config.iters >= 1, "iters is 0; it must be at least 1");
    let path = presets::choose("decode", config.model.as_deref(), config.preset.as_deref());
    let path = path.context("no model: name one by --model or --preset")?;
    let (shown, text) = (path.display(), config::read(&path)?);
    let model: Value =
        serde_json::from_str(&text).with_context(|| format!("{shown} is no JSON"))?;
    let manifest = export("decode", config.cell(&model), config.cache.as_deref(), "decode", "")?;
    let exported = Exported::load(&manifest)?;
    let settings = exported.settings.clone().unwrap_or_default();
    let bytes = settings.get("bytes").and_then(Value::as_u64);
    let bytes = bytes.context("the program's manifest tells no bytes of a step")?;
    let session = Session::open(platform, config.plugin.as_deref(), config.cache.as_deref())?;
    if calls_kernels(&exported, config.backend) {
        session.register_kernels()?;
    }
    let program = session.compile_code(&exported.bytecode)?;

    let blocks = config.steps.div_ceil(2 * BLOCK).max(1);
    let steps = [blocks * BLOCK, 2 * blocks * BLOCK];
    let reads = [steps[0].div_ceil(4), steps[1].div_ceil(4)];
    let runs = [(steps[0], 0), (steps[1], 0), (0, reads[0]), (0, reads[1])];
    let mut least = [f64::INFINITY; 4];
    // One more than is asked for warms up.
    for _ in 0..=config.iters {
        for ((steps, reads), least) in runs.into_iter().zip(&mut least) {
            let (seconds, done) = timed(|| start(&session, &program, steps, reads));
            done?;
            *least = least.min(seconds);
        }
    }
    let step = (least[1] - least[0]) / f64::from(steps[1] - steps[0]);
    let read = (least[3] - least[2]) / f64::from(reads[1] - reads[0]);
    ensure!(
        step > 0.0 && read > 0.0,
        "steps is {}: more steps took no longer than fewer; take more of them",
        config.steps
    );
    Ok(Report {
        step_ms: step * 1e3,
        read_ms: read * 1e3,
        tokens_per_s: config.batch as f64 / step,
        bytes,
        gb_per_s: bytes as f64 / step / 1e9,
        read_gb_per_s: bytes as f64 / read / 1e9,
        share_of_read_rate: read / step,
        is_one_kernel: settings.get("is_one_kernel") == Some(&json!(true)),
        plugin: session.describe()?,
        model,
        config: config.clone(),
        machine: Machine::current(),
    })
}

/// Runs the program, and checks the tokens.
fn start(session: &Session, program: &Compiled, steps: u32, reads: u32) -> Result<()> {
    let number = |count: u32| session.upload(&[i32::try_from(count)?], &[]);
    let arguments = [number(steps)?, number(reads)?];
    let outputs = program.executable.execute(&arguments.each_ref())?;
    let tokens = outputs.first().context("the program gives tokens")?.to_vec::<i32>()?;
    ensure!(tokens.iter().all(|&token| token >= 0), "a step found no token: its logits are NaN");
    // Reads are done once their sum is there.
    outputs.last().context("the program gives a sum")?.to_vec::<i32>()?;
    Ok(())
}
