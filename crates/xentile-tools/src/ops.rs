//! The operations there are, as text for people: `xentile ops`.

use std::fmt::Write;

use anyhow::{Result, bail};
use pjrt_client::{Platform, Plugin};
use xentile::DType;
use xentile::operation::{
    ArraySpec, ElementRule, Kind, OptionSpec, Problem, Role, Signature, TileExtents, Value,
};
use xentile::operations;
use xentile_programs::programs;

use crate::config::{Op, set_by};
use crate::tpu;

/// A line for each operation.
#[must_use]
pub fn list() -> String {
    let width = operations().iter().map(|of| of.name().len()).max().unwrap_or(0);
    let mut text = String::new();
    for of in operations() {
        _ = writeln!(text, "{:width$}  {}", of.name(), of.facts().about);
    }
    text
}

/// Everything there is to know of the operation called `name`.
///
/// # Errors
/// There is none.
pub fn describe(name: &str) -> Result<String> {
    let mut text = String::new();
    let op = match (Op::named(name), Op::find_function(name)) {
        (Some(op), _) => op,
        (None, Some((op, function))) => {
            _ = writeln!(text, "{name} is {op} with {}", set_by(op, function));
            op
        }
        (None, None) => bail!("{}", unknown(name)),
    };
    _ = writeln!(text, "{op}: {}", op.facts().about);
    dims(&mut text, op);
    arrays(&mut text, op);
    options(&mut text, op);
    let passes: Vec<_> = op.passes().iter().map(|pass| pass.name()).collect();
    _ = writeln!(text, "passes\n  {}", passes.join(", "));
    let inputs: Vec<_> = op.facts().distributions.iter().map(|of| of.name()).collect();
    _ = writeln!(text, "distributions of inputs\n  {}", inputs.join(", "));
    let problem = problem(op, |option| option.default);
    let tolerances = op.facts().tolerances.iter();
    let tolerances = tolerances.map(|of| {
        let default = (of.default)(&problem);
        [format!("tolerances.{}", of.name), format!("{default:e}"), of.about.to_owned()]
    });
    table(&mut text, "tolerances, with defaults for bf16", tolerances);
    table(&mut text, "implementations", implementations(op));
    Ok(text)
}

fn unknown(name: &str) -> String {
    let near = |known: &&&str| strsim::damerau_levenshtein(known, name);
    let functions = operations().iter().flat_map(|of| of.facts().functions).map(|of| of.name);
    let names: Vec<_> = Op::names().iter().copied().chain(functions).collect();
    let hint = match names.iter().min_by_key(near) {
        Some(known) if near(&known) <= 1 + name.len() / 3 => format!("did you mean `{known}`?"),
        _ => format!("there are {}", names.join(", ")),
    };
    format!("unknown operation `{name}`; {hint}")
}

/// Rows under a head, in columns as wide as they need.
fn table<const N: usize>(
    text: &mut String,
    head: &str,
    rows: impl IntoIterator<Item = [String; N]>,
) {
    let rows: Vec<_> = rows.into_iter().collect();
    if rows.is_empty() {
        return;
    }
    _ = writeln!(text, "{head}");
    let widths: [usize; N] =
        std::array::from_fn(|at| rows.iter().map(|row| row[at].len()).max().unwrap_or(0));
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        _ = writeln!(text, "  {}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}

fn dims(text: &mut String, op: Op) {
    let dims = op.dims().iter().map(|dim| {
        let key = match dim.in_shape {
            true => format!("{} (gradcheck: shape.{})", dim.key, dim.key),
            false => dim.key.to_owned(),
        };
        let default = dim.default.map(|extent| extent.to_string());
        let default = default.or(dim.like.map(str::to_owned));
        let default = default.map_or(String::new(), |extent| format!("default {extent}"));
        [dim.letter.to_owned(), key, default, dim.about.to_owned()]
    });
    table(text, "dims, by their keys in configs", dims);
    let tile = op.facts().tile.iter().map(|dim| {
        [format!("tile.{}", dim.key), format!("of {}", dim.letter), dim.about.to_owned()]
    });
    table(text, "tile, tuned where absent", tile);
}

fn problem(op: Op, option: impl Fn(&OptionSpec) -> Value) -> Problem {
    Problem {
        dims: op.dims().iter().map(|dim| (dim.letter, dim.default.unwrap_or(1))).collect(),
        dtype: DType::Bf16,
        options: op.options().iter().map(|of| (of.name, option(of))).collect(),
        tile: TileExtents::default(),
        cotangent: 1.0,
    }
}

/// What there is of a signature that is not in `known`.
fn beside<'a>(known: &[ArraySpec], more: &'a [ArraySpec]) -> impl Iterator<Item = &'a ArraySpec> {
    let known: Vec<_> = known.iter().map(|spec| spec.name).collect();
    more.iter().filter(move |spec| !known.contains(&spec.name))
}

/// What the operation takes and gives: what it does by default, then what options add.
fn arrays(text: &mut String, op: Op) {
    let whole = |problem: &Problem| op.signature(problem, op.whole(problem));
    let plain = whole(&problem(op, |option| option.default));
    let [mut takes, mut gives] = [&plain.operands, &plain.results].map(|specs| rows(specs, ""));
    let mut known: Signature = plain;
    for option in op.options() {
        let values: Vec<Value> = match option.kind {
            Kind::Bool => vec![Value::Bool(true)],
            Kind::Word(words) => words.iter().map(|word| Value::Word(word)).collect(),
            _ => continue,
        };
        for value in values.into_iter().filter(|value| *value != option.default) {
            let with = problem(op, |of| if of.name == option.name { value } else { of.default });
            let more = whole(&with);
            let note = format!("with {} {value}", option.path());
            for (all, known, more) in [
                (&mut takes, &mut known.operands, &more.operands),
                (&mut gives, &mut known.results, &more.results),
            ] {
                let new: Vec<_> = beside(known, more).cloned().collect();
                all.extend(rows(&new, &note));
                known.extend(new);
            }
        }
    }
    table(text, "takes", takes);
    table(text, "gives", gives);
}

fn rows(specs: &[ArraySpec], note: &str) -> Vec<[String; 4]> {
    let row = |spec: &ArraySpec| {
        let element = match spec.element {
            ElementRule::Compute => "of the dtype".to_owned(),
            ElementRule::Is(dtype) => dtype.to_string(),
            ElementRule::Fp8(format) => format.to_string(),
            ElementRule::Byte => "ui8".to_owned(),
            ElementRule::Index => "i32".to_owned(),
        };
        let role = match spec.role {
            Role::Input { differentiable: true } => "has a gradient".to_owned(),
            Role::Input { differentiable: false } | Role::Output => String::new(),
            Role::Cotangent(of) => format!("cotangent of {of}"),
            Role::Gradient(of) => format!("gradient of {of}"),
        };
        let more = [role, note.to_owned()].into_iter().filter(|part| !part.is_empty());
        let shape = format!("[{}]", spec.dims.join(", "));
        [spec.name.to_owned(), shape, element, more.collect::<Vec<_>>().join(", ")]
    };
    specs.iter().map(row).collect()
}

fn options(text: &mut String, op: Op) {
    let options = op.options().iter().map(|option| {
        let kind = match option.kind {
            Kind::Bool => "bool",
            Kind::Integer => "integer",
            Kind::Count => "count",
            Kind::Number => "number",
            Kind::Word(_) => "word",
        };
        [
            option.path(),
            kind.to_owned(),
            option.range.to_owned(),
            format!("default {}", option.default),
            option.about.to_owned(),
        ]
    });
    table(text, "options", options);
}

/// What runs it where, on this machine.
fn implementations(op: Op) -> Vec<[String; 2]> {
    let mut all = Vec::new();
    let cpu = match xentile_cpu::kernels(op.name()) {
        Some(_) => format!("kernels, for {}", xentile_cpu::Isa::detect().name()),
        None => "none: take a backend of XLA".to_owned(),
    };
    all.push(["cpu".to_owned(), cpu]);
    let from = match programs(op.name()) {
        Some(_) => "programs of this build",
        None => "programs that pallas_bridge exports",
    };
    for &platform in Platform::ALL {
        let registry = match platform {
            Platform::Cpu => "Host",
            Platform::Cuda => "CUDA",
            _ => "",
        };
        let prefix = format!("xentile_{op}_");
        let kernels = xentile_xla::targets()
            .iter()
            .any(|row| row.platform() == registry && row.target().starts_with(&prefix));
        let kernels = if kernels { "our kernels" } else { "no kernels in this build" };
        let plugin = match platform {
            Platform::Tpu if tpu::would_wait() => "no TPU in this machine".to_owned(),
            _ => match Plugin::find(platform, None) {
                Ok(plugin) => format!("plug-in {}", plugin.path().display()),
                Err(_) => "no plug-in found".to_owned(),
            },
        };
        let kernels = if platform == Platform::Tpu { "kernels in them" } else { kernels };
        let line = format!("{from}, {kernels}; {plugin}");
        all.push([format!("xla:{}", platform.name()), line]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_listed() {
        assert_eq!(list().lines().count(), operations().len());
        for name in Op::names() {
            assert!(list().lines().any(|line| line.starts_with(name)));
        }
        let error = describe("rms_nrom").unwrap_err().to_string();
        assert_eq!(error, "unknown operation `rms_nrom`; did you mean `rms_norm`?");
        let error = describe("convolution").unwrap_err().to_string();
        assert!(error.contains("there are cross_entropy, "), "{error}");
        let error = describe("swigul").unwrap_err().to_string();
        assert_eq!(error, "unknown operation `swigul`; did you mean `swiglu`?");
        let text = describe("swiglu").unwrap();
        let head = "swiglu is activation with options.kind=silu layout=halves\nactivation: ";
        assert!(text.starts_with(head), "{text}");
    }

    #[test]
    fn arrays_are_those_of_signatures_and_options() {
        let op = Op::named("linear_cross_entropy").unwrap();
        let mut text = String::new();
        arrays(&mut text, op);
        let line = |start: &str| {
            let lines: Vec<_> =
                text.lines().filter(|line| line.trim_start().starts_with(start)).collect();
            assert_eq!(lines.len(), 1, "{start}: {text}");
            lines[0].split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(line("hidden "), "hidden [T, D] of the dtype has a gradient");
        assert_eq!(line("bias "), "bias [V] of the dtype has a gradient, with bias true");
        assert_eq!(line("weights "), "weights [T] f32 with options.weights random");
        assert_eq!(line("dlse "), "dlse [T] f32 cotangent of lse, with options.reduction none");
    }
}
