//! Holds a kernel, or the dense program, against the float64 reference and says whether it may be trusted.
//!
//! Where passes can be run one by one, both schedules are run: the one that the operation asks for, whose
//! metrics have plain names, and beside a scalar and its gradient the recomputing pair with random
//! cotangents of every output, whose metrics start with `recompute/`. A program from JAX has one of the
//! schedules, and metrics of what it does not give are left out.

mod config;
mod judge;
mod report;
mod runner;
#[cfg(test)]
mod tests;

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use xentile::operation::{Arrays, DimSpec, Pass, Problem, Reference, Stored, Synthetic};

pub use config::{Config, Input, load};
pub use report::{Index, Metric, Report};

use crate::config::{Op, Shape};
use crate::input::file::Mapped;
use crate::input::rows;
use crate::machine::Machine;
use crate::memory;
use crate::progress::Progress;
use crate::timing::timed;
use judge::{Judge, poisoned};
use runner::Runner;

/// Runs what `config` asks for.
///
/// # Errors
/// Bad input: a value out of range, a file that does not fit, too little memory.
pub fn run(config: &Config) -> Result<Report> {
    config.tolerances.check_owners()?;
    for tolerance in config.op.facts().tolerances {
        let name = tolerance.name;
        let value = config.tolerances.number(name).unwrap_or(0.0);
        ensure!(value >= 0.0, "tolerances.{name} is {value}; it must be at least 0");
    }
    ensure!(config.cotangent.is_finite(), "cotangent is {}; it must be finite", config.cotangent);
    let (plugin, isa) = (config.plugin.as_deref(), config.isa.as_deref());
    config.backend.check_choices(plugin, config.cache.as_deref(), isa, config.threads)?;
    runner::check_choices(config)?;
    match &config.input {
        Input::Synthetic(synthetic) => {
            let shape = config.synthetic_shape()?;
            let sequences = [shape.batch, shape.seq_len];
            let problem = config.problem(sequences, |dim| match dim.in_shape {
                true => shape.dims.get(dim.key).copied(),
                false => config.top.extent(dim),
            })?;
            synthetic.validate().context("input.synthetic")?;
            memory::require(config.needed_bytes(&problem, true), &config.remedy())?;
            let rows = rows(shape.batch, shape.seq_len, config.op.facts().predicts_next);
            let progress = Progress::new("making input", 0);
            let inputs = config.op.inputs(&problem, synthetic, &rows).context("input.synthetic")?;
            drop(progress);
            check(config, &problem, sequences, synthetic, &inputs)
        }
        Input::File(path) => {
            let in_file = || format!("input file {}", path.display());
            let mapped = Mapped::open(path)?;
            let tensors = mapped.tensors().with_context(in_file)?;
            check_file(config, &tensors).with_context(in_file)
        }
    }
}

fn check_file(config: &Config, file: &dyn Stored) -> Result<Report> {
    let found = config.op.stored_dims(file)?;
    let [batch, seq_len] = found.sequences;
    let of_file = |dim: &DimSpec| {
        found.dims.iter().find(|(letter, _)| *letter == dim.letter).map(|(_, extent)| *extent)
    };
    let in_shape = config.op.dims().iter().filter(|dim| dim.in_shape);
    let dims = in_shape.filter_map(|dim| Some((dim.key, of_file(dim)?))).collect();
    config.agree(Shape { batch, seq_len, dims })?;
    let problem = config.problem(found.sequences, |dim| match dim.in_shape {
        true => of_file(dim),
        false => config.top.extent(dim).or_else(|| of_file(dim)),
    })?;
    let own = config.op.stored_bytes(&problem, file);
    let needed = own.zip(config.needed_bytes(&problem, false));
    let needed = needed.and_then(|(own, needed)| own.checked_add(needed));
    memory::require(needed, "make a smaller file")?;
    let inputs = config.op.stored(&problem, file)?;
    // Weights and cotangents are not in files.
    check(config, &problem, found.sequences, &Synthetic::default(), &inputs)
}

fn check(
    config: &Config,
    problem: &Problem,
    sequences: [usize; 2],
    seeded: &Synthetic,
    inputs: &Arrays<'_>,
) -> Result<Report> {
    let began = Instant::now();
    let op = config.op;
    let tolerances = op.tolerance_values(problem, |name| config.tolerances.number(name));
    let mut reference = op.reference(problem, inputs, tolerances)?;
    let pool = runner::threads(config)?;
    let mut runner = runner::open(config, problem, inputs, pool.as_ref())?;
    let shape = op.shape(problem, Some(sequences));
    let config_json = serde_json::to_value(config).context("a config is plain data")?;
    let report = Report::new(config_json, config.implementation, &shape, &runner.setup());
    let rows = rows(sequences[0], sequences[1], op.facts().predicts_next);
    let given = |pass| op.given(problem, pass, seeded, &rows);
    let mut run = Run { op, problem, report };
    match runner.is_split() {
        true => run.each_pass(&mut *runner, &mut *reference, given)?,
        false => run.whole(&mut *runner, &mut *reference, given)?,
    }
    let mut report = run.report;
    report.seconds("total_s", began.elapsed().as_secs_f64());
    report.finish(&Machine::current(), memory::peak_resident_bytes());
    Ok(report)
}

/// A problem, and what is found of it.
struct Run<'a> {
    op: Op,
    problem: &'a Problem,
    report: Report,
}

impl Run<'_> {
    fn judge<'b>(&'b mut self, pass: Pass, found: &'b Arrays<'b>) -> Judge<'b> {
        Judge {
            report: &mut self.report,
            op: self.op,
            problem: self.problem,
            pass,
            found,
            is_timed: true,
        }
    }

    /// Runs `pass` on memory that holds no result.
    fn run(
        &self,
        runner: &mut dyn Runner,
        pass: Pass,
        given: &Arrays<'_>,
    ) -> Result<(f64, Arrays<'static>)> {
        let mut found = poisoned(self.op, self.problem, pass);
        let _progress = Progress::new("running what is under test", 0);
        let (elapsed, result) = timed(|| runner.run(pass, given, &mut found));
        result?;
        Ok((elapsed, found))
    }

    fn reference_forward(&mut self, reference: &mut dyn Reference) {
        let _progress = Progress::new("the forward pass of the reference, in float64", 0);
        let (elapsed, ()) = timed(|| reference.forward());
        self.report.seconds("ref_forward_s", elapsed);
    }

    /// A scalar and its gradients.
    fn fused(
        &mut self,
        runner: &mut dyn Runner,
        reference: &mut dyn Reference,
        given: &Arrays<'_>,
        has_forward: bool,
    ) -> Result<()> {
        let (elapsed, found) = self.run(runner, Pass::Fused, given)?;
        self.report.seconds("kernel_grad_s", elapsed);
        if !has_forward {
            self.reference_forward(reference);
        }
        let mut judge = self.judge(Pass::Fused, &found);
        reference.scalar(Pass::Fused, given, &mut judge);
        reference.gradients(Pass::Fused, given, "", &mut judge);
        Ok(())
    }

    /// Each pass by itself.
    fn each_pass(
        &mut self,
        runner: &mut dyn Runner,
        reference: &mut dyn Reference,
        given: impl Fn(Pass) -> Arrays<'static>,
    ) -> Result<()> {
        let (elapsed, mut found) = self.run(runner, Pass::Forward, &Arrays::default())?;
        self.report.seconds("forward_s", elapsed);
        self.reference_forward(reference);
        reference.outputs(&mut self.judge(Pass::Forward, &found));
        if !self.op.has_derivative() {
            return Ok(());
        }
        let cotangents = given(Pass::Backward);
        let is_fused = self.op.is_fused(self.problem);
        let prefix = if is_fused {
            self.fused(runner, reference, &given(Pass::Fused), true)?;
            "recompute/"
        } else {
            reference.scalar(Pass::Backward, &cotangents, &mut self.judge(Pass::Forward, &found));
            ""
        };
        let (elapsed, gradients) = self.run(runner, Pass::Backward, &cotangents)?;
        found.extend(gradients);
        let mut judge = self.judge(Pass::ForwardAndBackward, &found);
        judge.is_timed = !is_fused;
        reference.gradients(Pass::Backward, &cotangents, prefix, &mut judge);
        let name = if is_fused { "recompute_backward_s" } else { "kernel_grad_s" };
        self.report.seconds(name, elapsed);
        Ok(())
    }

    /// The one pass that a program from JAX has.
    fn whole(
        &mut self,
        runner: &mut dyn Runner,
        reference: &mut dyn Reference,
        given: impl Fn(Pass) -> Arrays<'static>,
    ) -> Result<()> {
        let pass = self.op.whole(self.problem);
        let given = given(pass);
        if pass == Pass::Fused {
            self.fused(runner, reference, &given, false)?;
            let has_backward = self.op.passes().contains(&Pass::Backward);
            let left_out = if has_backward { &["fwd/", "recompute/"][..] } else { &["fwd/"] };
            self.report.leave_out(left_out, "a program of value_and_grad");
            return Ok(());
        }
        let (elapsed, found) = self.run(runner, pass, &given)?;
        let name = if pass.has_gradients() { "kernel_grad_s" } else { "forward_s" };
        self.report.seconds(name, elapsed);
        self.reference_forward(reference);
        let mut judge = self.judge(pass, &found);
        reference.outputs(&mut judge);
        if !pass.has_gradients() {
            return Ok(());
        }
        reference.scalar(pass, &given, &mut judge);
        reference.gradients(pass, &given, "", &mut judge);
        Ok(())
    }
}
