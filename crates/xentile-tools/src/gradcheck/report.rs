//! Named figures, which of them are limited, and the verdict.

use std::fmt::Write as _;

use super::kernels::Setup;
use serde_json::{Map, Value, json};

use super::Config;
use crate::config::TileConfig;
use crate::machine::Machine;
use crate::memory;
use crate::microbench::{ExportedBy, Implementation};

/// Where a figure is worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The token, counted over all sequences; none for figures of dweight and dbias.
    pub token: Option<usize>,
    /// The vocabulary column; none for figures of tokens and of dhidden.
    pub column: Option<usize>,
    /// The column of hidden states, for figures of dhidden and dweight.
    pub hidden: Option<usize>,
}

impl Place {
    /// What there is of it, by name.
    fn axes(self) -> impl Iterator<Item = (&'static str, usize)> {
        let Self { token, column, hidden } = self;
        [("token", token), ("column", column), ("hidden", hidden)]
            .into_iter()
            .filter_map(|(name, index)| Some((name, index?)))
    }
}

/// A bound that a figure is judged by.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

/// One named figure.
#[derive(Clone, Debug)]
pub struct Figure {
    name: String,
    value: f64,
    place: Option<Place>,
    bound: Option<Bound>,
}

impl Figure {
    /// A figure that is only reported.
    pub fn plain(name: impl Into<String>, value: f64) -> Self {
        Self { name: name.into(), value, place: None, bound: None }
    }

    /// With the place where it is worst.
    #[must_use]
    pub fn at(self, place: Option<Place>) -> Self {
        Self { place, ..self }
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
    figures: Vec<Figure>,
    setup: Map<String, Value>,
    left_out: Option<String>,
}

impl Report {
    pub(super) fn new(config: &Config, shape: String, runs: &Setup) -> Self {
        let config_json = serde_json::to_value(config).expect("a config is plain data");
        let name = |key: &str| config_json[key].as_str().unwrap_or_default().to_owned();
        let Setup { tile, isa, threads, plugin, exported } = runs;
        let by = isa.map(str::to_owned).or_else(|| plugin.clone()).unwrap_or_default();
        let by = if by.is_empty() { by } else { format!(" ({by})") };
        let program = match (exported, config.implementation) {
            (Some(ExportedBy { jax_version, .. }), Implementation::Kernel) => {
                format!(", program of JAX {jax_version},")
            }
            (Some(ExportedBy { jax_version, .. }), Implementation::Reference) => {
                format!(", dense program of JAX {jax_version},")
            }
            (None, Implementation::Kernel) => String::new(),
            (None, Implementation::Reference) => ", dense program,".into(),
        };
        let (op, backend) = (name("op"), name("backend"));
        let title = format!("{op}{program} on {backend}{by}, {shape} {}", config.dtype);
        let setup = json!({
            "shape": shape,
            "tile": tile,
            "isa": isa,
            "threads": threads,
            "plugin": plugin,
            "exported": exported,
            "not_given": [],
            "config": config_json,
        });
        let Value::Object(setup) = setup else { unreachable!("json! of braces is an object") };
        Self { title, figures: Vec::new(), setup, left_out: None }
    }

    /// A report of nothing yet, for tests of what fills it.
    #[cfg(test)]
    pub(super) fn empty() -> Self {
        Self { title: String::new(), figures: Vec::new(), setup: Map::new(), left_out: None }
    }

    pub(super) fn add(&mut self, figure: Figure) {
        self.figures.push(figure);
    }

    /// Says that figures whose names start with `prefixes` are left out, as `whose` has none of what
    /// they are of.
    pub(super) fn leave_out(&mut self, prefixes: &[&str], whose: &str) {
        self.setup.insert("not_given".into(), json!(prefixes));
        self.left_out = Some(format!(
            "not in the report: {}, which {whose} gives nothing of",
            prefixes.join(" and ")
        ));
    }

    pub(super) fn seconds(&mut self, name: &str, value: f64) {
        self.add(Figure::plain(name, value));
    }

    pub(super) fn finish(&mut self, machine: &Machine, peak_bytes: Option<u64>) {
        let machine = serde_json::to_value(machine).expect("a machine is plain data");
        self.setup.insert("machine".into(), machine);
        self.setup.insert("peak_resident_bytes".into(), json!(peak_bytes));
    }

    /// Whether every judged figure keeps its bound.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.figures.iter().all(Figure::passes)
    }

    /// The figure called `name`.
    #[must_use]
    pub fn figure(&self, name: &str) -> Option<f64> {
        self.figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
    }

    /// All of it as JSON: `passed`, `figures` by name, `limits`, `worst` places, and the setup. A
    /// figure that is not finite is a string, since JSON has no such numbers.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let number = |x: f64| if x.is_finite() { json!(x) } else { json!(x.to_string()) };
        let mut map = Map::new();
        map.insert("passed".into(), json!(self.passed()));
        let mut sections = ["figures", "limits", "worst"].map(|name| (name, Map::new()));
        let [(_, figures), (_, limits), (_, worst)] = &mut sections;
        for figure in &self.figures {
            figures.insert(figure.name.clone(), number(figure.value));
            if let Some(bound) = figure.bound {
                let bound = match bound {
                    Bound::AtMost(limit) => json!({"at_most": limit}),
                    Bound::AtLeast(limit) => json!({"at_least": limit}),
                };
                limits.insert(figure.name.clone(), bound);
            }
            if let Some(place) = figure.place {
                let axes = place.axes().map(|(name, index)| (name.to_owned(), json!(index)));
                worst.insert(figure.name.clone(), axes.collect());
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
        let width = self.figures.iter().map(|figure| figure.name.len()).max().unwrap_or(0);
        for figure in &self.figures {
            let Figure { name, value, .. } = figure;
            let value = if name.starts_with("time/") || name.ends_with("equal") || name == "loss" {
                format!("{value:.6}")
            } else {
                format!("{value:.3e}")
            };
            let mut line = format!("  {name:width$}  {value:>10}");
            if let Some(bound) = figure.bound {
                let mark = if figure.passes() { "ok" } else { "FAILED" };
                let bound = match bound {
                    Bound::AtMost(limit) => format!("<= {limit:.3e}"),
                    Bound::AtLeast(limit) => format!(">= {limit}"),
                };
                _ = write!(line, "  {mark:6} {bound:13}");
            } else if figure.place.is_some() {
                line.push_str(&" ".repeat(22));
            }
            if let Some(place) = figure.place {
                let axes = place.axes().map(|(name, index)| format!("{name} {index}"));
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
            let failed: Vec<_> = self.figures.iter().filter(|figure| !figure.passes()).collect();
            let names: Vec<_> = failed.iter().map(|figure| figure.name.as_str()).collect();
            format!("FAILED: outside tolerance in {}", names.join(", "))
        };
        text.push_str(&verdict);
        text.push('\n');
        text
    }
}
