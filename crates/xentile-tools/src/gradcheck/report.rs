//! Named metrics, which of them are limited, and the verdict.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::config::{Implementation, TileConfig};
use crate::machine::Machine;
use crate::memory;
use crate::setup::{ExportedBy, Setup};

/// Where a metric is worst: an index along each dim, by what indices along it are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index(pub(super) Vec<(&'static str, usize)>);

/// A bound that a metric is judged by.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

/// One named metric.
#[derive(Clone, Debug)]
pub struct Metric {
    name: String,
    value: f64,
    index: Option<Index>,
    bound: Option<Bound>,
}

impl Metric {
    /// A metric that is only reported.
    pub fn plain(name: impl Into<String>, value: f64) -> Self {
        Self { name: name.into(), value, index: None, bound: None }
    }

    /// With the index where it is worst.
    #[must_use]
    pub fn at(self, index: Option<Index>) -> Self {
        Self { index, ..self }
    }

    /// Judged: it must not exceed `limit`.
    #[must_use]
    pub fn at_most(self, limit: f64) -> Self {
        Self { bound: Some(Bound::AtMost(limit)), ..self }
    }

    /// Judged: it must reach `limit`.
    #[must_use]
    pub fn at_least(self, limit: f64) -> Self {
        Self { bound: Some(Bound::AtLeast(limit)), ..self }
    }

    /// Whether it keeps its bound; a NaN never does.
    fn passes(&self) -> bool {
        match self.bound {
            None => true,
            Some(Bound::AtMost(limit)) => self.value <= limit,
            Some(Bound::AtLeast(limit)) => self.value >= limit,
        }
    }
}

/// Everything gradcheck found.
#[derive(Clone, Debug)]
pub struct Report {
    title: String,
    metrics: Vec<Metric>,
    setup: Map<String, Value>,
    left_out: Option<String>,
}

impl Report {
    /// A report of nothing yet, of `config` as JSON.
    pub(super) fn new(
        config: Value,
        implementation: Implementation,
        shape: &str,
        runs: &Setup,
    ) -> Self {
        let name = |key: &str| config[key].as_str().unwrap_or_default().to_owned();
        let Setup { tile, isa, threads, plugin, exported } = runs;
        let by = isa.map(str::to_owned).or_else(|| plugin.clone()).unwrap_or_default();
        let by = if by.is_empty() { by } else { format!(" ({by})") };
        let program = match (exported, implementation) {
            (Some(ExportedBy { jax_version, .. }), Implementation::Kernel) => {
                format!(", program of JAX {jax_version},")
            }
            (Some(ExportedBy { jax_version, .. }), Implementation::Reference) => {
                format!(", dense program of JAX {jax_version},")
            }
            (None, Implementation::Kernel) => String::new(),
            (None, Implementation::Reference) => ", dense program,".into(),
        };
        let [op, backend, dtype] = ["op", "backend", "dtype"].map(name);
        let title = format!("{op}{program} on {backend}{by}, {shape} {dtype}");
        let setup = json!({
            "shape": shape,
            "tile": tile,
            "isa": isa,
            "threads": threads,
            "plugin": plugin,
            "exported": exported,
            "not_given": [],
            "config": config,
        });
        let Value::Object(setup) = setup else { unreachable!("json! of braces is an object") };
        Self { title, metrics: Vec::new(), setup, left_out: None }
    }

    /// A report of nothing yet, for tests of what fills it.
    #[cfg(test)]
    pub(super) fn empty() -> Self {
        Self { title: String::new(), metrics: Vec::new(), setup: Map::new(), left_out: None }
    }

    pub(super) fn add(&mut self, metric: Metric) {
        self.metrics.push(metric);
    }

    /// Says that metrics whose names start with `prefixes` are left out, as `whose` has none of what
    /// they are of.
    pub(super) fn leave_out(&mut self, prefixes: &[&str], whose: &str) {
        self.setup.insert("not_given".into(), json!(prefixes));
        self.left_out = Some(format!(
            "not in the report: {}, which {whose} gives nothing of",
            prefixes.join(" and ")
        ));
    }

    pub(super) fn seconds(&mut self, name: &str, value: f64) {
        self.add(Metric::plain(format!("time/{name}"), value));
    }

    pub(super) fn finish(&mut self, machine: &Machine, peak_bytes: Option<u64>) {
        let machine = serde_json::to_value(machine).expect("a machine is plain data");
        self.setup.insert("machine".into(), machine);
        self.setup.insert("peak_resident_bytes".into(), json!(peak_bytes));
    }

    /// Whether every judged metric keeps its bound.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.metrics.iter().all(Metric::passes)
    }

    /// The metric called `name`.
    #[must_use]
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|metric| metric.name == name).map(|metric| metric.value)
    }

    /// All of it as JSON: `passed`, `figures` by name, `limits`, where each is `worst`, and the setup. A
    /// metric that is not finite is a string, since JSON has no such numbers.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let number = |x: f64| if x.is_finite() { json!(x) } else { json!(x.to_string()) };
        let mut map = Map::new();
        map.insert("passed".into(), json!(self.passed()));
        let mut sections = ["figures", "limits", "worst"].map(|name| (name, Map::new()));
        let [(_, figures), (_, limits), (_, worst)] = &mut sections;
        for metric in &self.metrics {
            figures.insert(metric.name.clone(), number(metric.value));
            if let Some(bound) = metric.bound {
                let bound = match bound {
                    Bound::AtMost(limit) => json!({"at_most": limit}),
                    Bound::AtLeast(limit) => json!({"at_least": limit}),
                };
                limits.insert(metric.name.clone(), bound);
            }
            if let Some(Index(axes)) = &metric.index {
                let axes = axes.iter().map(|&(name, index)| (name.to_owned(), json!(index)));
                worst.insert(metric.name.clone(), axes.collect());
            }
        }
        map.extend(sections.map(|(name, section)| (name.to_owned(), Value::Object(section))));
        map.extend(self.setup.clone());
        Value::Object(map)
    }

    /// The table and the verdict that a person reads.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = format!("gradcheck: {}\n", self.title);
        let tile = serde_json::from_value::<Option<TileConfig>>(self.setup["tile"].clone());
        let tile = tile.ok().flatten().map_or("none".to_owned(), |tile| tile.to_string());
        let threads = self.setup["threads"].as_u64();
        let threads = threads.map_or(String::new(), |threads| format!("; threads: {threads}"));
        _ = writeln!(text, "tile: {tile}{threads}");
        if let Some(plan) = self.setup["exported"]["plan"].as_str() {
            _ = writeln!(text, "plan: {plan}");
        }
        let width = self.metrics.iter().map(|metric| metric.name.len()).max().unwrap_or(0);
        for metric in &self.metrics {
            let Metric { name, value, .. } = metric;
            let value = if name.starts_with("time/") || name.ends_with("equal") || name == "loss" {
                format!("{value:.6}")
            } else {
                format!("{value:.3e}")
            };
            let mut line = format!("  {name:width$}  {value:>10}");
            if let Some(bound) = metric.bound {
                let mark = if metric.passes() { "ok" } else { "FAILED" };
                let bound = match bound {
                    Bound::AtMost(limit) => format!("<= {limit:.3e}"),
                    Bound::AtLeast(limit) => format!(">= {limit}"),
                };
                _ = write!(line, "  {mark:6} {bound:13}");
            } else if metric.index.is_some() {
                line.push_str(&" ".repeat(22));
            }
            if let Some(Index(axes)) = &metric.index {
                let axes = axes.iter().map(|(name, index)| format!("{name} {index}"));
                _ = write!(line, "  {}", axes.collect::<Vec<_>>().join(", "));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        if let Some(line) = &self.left_out {
            _ = writeln!(text, "{line}");
        }
        if let Some(peak) = self.setup.get("peak_resident_bytes").and_then(Value::as_u64) {
            _ = writeln!(text, "peak memory: {}", memory::human(peak));
        }
        let verdict = if self.passed() {
            "PASSED: within tolerance of the float64 reference".to_owned()
        } else {
            let failed: Vec<_> = self.metrics.iter().filter(|metric| !metric.passes()).collect();
            let names: Vec<_> = failed.iter().map(|metric| metric.name.as_str()).collect();
            format!("FAILED: outside tolerance in {}", names.join(", "))
        };
        text.push_str(&verdict);
        text.push('\n');
        text
    }
}
