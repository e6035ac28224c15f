//! What steps of all optimizers have: the option `step`, and the tolerance of an entry.

use crate::operation::{Kind, OptionSpec, Problem, ToleranceSpec, Value};
use crate::{Error, Result};

pub(super) const STEP: OptionSpec =
    OptionSpec::new("step", Kind::Count, Value::Integer(10), "at least 1", "number of this step");

pub(super) const ENTRY_ROUNDINGS: ToleranceSpec = ToleranceSpec {
    name: "entry_roundings",
    about: "error of an entry, in roundings of f32",
    default: |_| 64.0,
};

/// Refuses a step outside its range.
pub(super) fn check_step(problem: &Problem) -> Result<()> {
    let step = problem.integer(STEP.name).unwrap_or(1);
    if (1..i64::from(i32::MAX)).contains(&step) {
        return Ok(());
    }
    Err(Error::Option { name: STEP.name, value: step as f64, requirement: STEP.range })
}
