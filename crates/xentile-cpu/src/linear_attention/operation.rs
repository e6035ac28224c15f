//! The kernels of linear attention and the gated delta rule for tools.

use xentile::linear_attention::operation::{GATED_DELTA_RULE, LINEAR_ATTENTION, OfSequence};
use xentile::operation::{ArrayElement, Arrays, Operation, Pass, Problem};
use xentile::{Element, Result, by_dtype};

use super::{Cotangents, Gradients, Kernel, Launch, Operands};
use crate::operation::{Kernels, Run};

/// The kernels of this module.
pub(crate) const ALL: &[&dyn Kernels] =
    &[&OfOperation(LINEAR_ATTENTION), &OfOperation(GATED_DELTA_RULE)];

/// Tokens from one saved state to the next.
const GROUP: usize = 1024;

/// The kernels of an operation.
struct OfOperation(OfSequence);

impl Kernels for OfOperation {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn open<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        launch: Launch<'a>,
    ) -> Result<Box<dyn Run + 'a>> {
        let attention = self.0.attention(problem);
        let kernel = Kernel::new(attention, GROUP, launch)?;
        let state = attention.heads * attention.state();
        Ok(by_dtype!(problem.dtype, E => Box::new(Sequence {
            kernel,
            q: inputs.expect::<E>("q"),
            k: inputs.expect::<E>("k"),
            v: inputs.expect::<E>("v"),
            g: inputs.expect("g"),
            b: inputs.slice("b"),
            zeros: vec![0.0; state],
            states: vec![0.0; kernel.groups() * state],
            dstate: vec![0.0; state],
        })))
    }
}

struct Sequence<'a, E> {
    kernel: Kernel<'a>,
    q: &'a [E],
    k: &'a [E],
    v: &'a [E],
    g: &'a [f32],
    b: Option<&'a [f32]>,
    /// The first state, and the cotangent of the last.
    zeros: Vec<f32>,
    /// What the forward pass saves.
    states: Vec<f32>,
    /// The gradient of the first state, for which tools have no array.
    dstate: Vec<f32>,
}

impl<E: Element + ArrayElement> Run for Sequence<'_, E> {
    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        let Self { kernel, q, k, v, g, b, ref zeros, ref mut states, ref mut dstate } = *self;
        let operands = Operands { q, k, v, g, b, state: zeros };
        let [o, dq, dk, dv] = results.slices_mut(["o", "dq", "dk", "dv"]);
        if pass != Pass::Backward {
            kernel.forward(operands, o.expect("rows to fill"), states)?;
        }
        if !pass.has_gradients() {
            return Ok(());
        }
        let [q, k, v] = [dq, dk, dv].map(|rows| rows.expect("a gradient to fill"));
        let mut numbers = [g.len(), b.map_or(0, <[f32]>::len)].map(|count| vec![0.0_f32; count]);
        let [dg, db] = &mut numbers;
        let gradients = Gradients { q, k, v, g: dg, b: b.map(|_| &mut db[..]), state: dstate };
        let cotangents = Cotangents { states, o: given.expect("do"), state: zeros };
        kernel.backward(operands, cotangents, gradients)?;
        for (name, found) in ["dg", "db"].into_iter().zip(&numbers) {
            let [to] = results.slices_mut([name]);
            if let Some(to) = to {
                to.copy_from_slice(found);
            }
        }
        Ok(())
    }
}
