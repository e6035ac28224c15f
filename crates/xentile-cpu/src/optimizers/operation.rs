//! The kernels of AdamW and Lion, as tools run them: of one array, which is copied before the step.

use xentile::operation::{Array, Arrays, Operation, Pass, Problem};
use xentile::optimizers::Scalars;
use xentile::optimizers::operation::{ADAMW, ADAMW_8BIT, LION_8BIT, Optimizer};
use xentile::{Error, Result};

use super::{Codes, Grads, Launch, Moments, Parameter, Params, step};
use crate::operation::{Kernels, Run};

/// The kernels of this module.
pub(crate) const ALL: &[&dyn Kernels] = &[&Steps(ADAMW), &Steps(ADAMW_8BIT), &Steps(LION_8BIT)];

/// The kernels of an optimizer.
struct Steps(Optimizer);

impl Kernels for Steps {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn open<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        launch: Launch<'a>,
    ) -> Result<Box<dyn Run + 'a>> {
        let norm = self.0.norm(problem, array(inputs, "grads"));
        let scalars = self.0.scalars(problem, norm);
        let block = self.0.quantizes.then(|| problem.dim("block_size"));
        Ok(Box::new(Step { scalars, norm, block, inputs, launch }))
    }
}

fn array<'a>(arrays: &'a Arrays<'a>, name: &str) -> &'a Array<'a> {
    arrays.get(name).unwrap_or_else(|| panic!("no array {name}"))
}

/// Copies an array to one of the same dtype.
fn copy(from: &Array<'_>, to: &mut Array<'_>) {
    match (from, to) {
        (Array::F32(from), Array::F32(to)) => to.to_mut().copy_from_slice(from),
        (Array::Bf16(from), Array::Bf16(to)) => to.to_mut().copy_from_slice(from),
        (Array::F16(from), Array::F16(to)) => to.to_mut().copy_from_slice(from),
        (Array::U8(from), Array::U8(to)) => to.to_mut().copy_from_slice(from),
        (from, to) => panic!("{from:?} to {to:?}"),
    }
}

struct Step<'a> {
    scalars: Scalars,
    norm: Option<f64>,
    block: Option<usize>,
    inputs: &'a Arrays<'a>,
    launch: Launch<'a>,
}

impl Run for Step<'_> {
    fn run(&mut self, _: Pass, _: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        let (mut params, mut norm) = (None, None);
        let (mut moments, mut codes, mut scales) = (Vec::new(), Vec::new(), Vec::new());
        for (name, result) in results.iter_mut() {
            if let Some(before) = self.inputs.get(name.trim_start_matches("new_")) {
                copy(before, result);
            }
            match (name, result) {
                (_, Array::F64(all)) => norm = all.to_mut().first_mut(),
                ("new_params", result) => params = Some(result),
                (_, Array::U8(all)) => codes.push(all.to_mut().as_mut_slice()),
                ("new_mu_scales" | "new_nu_scales", Array::F32(all)) => scales.push(all.to_mut()),
                (_, Array::F32(all)) => moments.push(all.to_mut().as_mut_slice()),
                (name, other) => return Err(Error::Invalid(format!("{name} is {other:?}"))),
            }
        }
        if let Some((norm, found)) = norm.zip(self.norm) {
            *norm = found;
        }
        let missing = || Error::Invalid("a step has all results".to_owned());
        let params = match params.ok_or_else(missing)? {
            Array::F32(all) => Params::F32(all.to_mut()),
            Array::Bf16(all) => Params::Bf16(all.to_mut()),
            Array::F16(all) => Params::F16(all.to_mut()),
            other => return Err(Error::Invalid(format!("parameters {other:?}"))),
        };
        let grads = match array(self.inputs, "grads") {
            Array::F32(all) => Grads::F32(all),
            Array::Bf16(all) => Grads::Bf16(all),
            Array::F16(all) => Grads::F16(all),
            other => return Err(Error::Invalid(format!("gradients {other:?}"))),
        };
        let moments = match self.block {
            None => Moments::F32(moments.try_into().map_err(|_| missing())?),
            Some(block) => {
                let each = codes.into_iter().zip(scales);
                let mut each = each.map(|(codes, scales)| Codes { codes, scales });
                match (each.next().ok_or_else(missing)?, each.next()) {
                    (mu, Some(nu)) => Moments::Codes([mu, nu], block),
                    (mu, None) => Moments::Lion(mu, block),
                }
            }
        };
        let parameter = Parameter { number: 0, decays: true, grads, params, moments };
        step(&self.scalars, vec![parameter], self.launch)
    }
}
