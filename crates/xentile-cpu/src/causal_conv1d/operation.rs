//! The kernels of causal convolution for tools.

use xentile::causal_conv1d::CausalConv1d;
use xentile::causal_conv1d::operation::{OPERATION, convolution};
use xentile::operation::{ArrayElement, Arrays, Operation, Pass, Problem};
use xentile::{Element, Result, by_dtype};

use super::{Gradients, Kernel, Launch, Operands, Weight};
use crate::norm::operation::add_blocks;
use crate::operation::{Kernels, Run};

/// The kernels of this module.
pub(crate) const ALL: &[&dyn Kernels] = &[&OfSequence];

/// The kernels of causal convolution.
struct OfSequence;

impl Kernels for OfSequence {
    fn name(&self) -> &'static str {
        OPERATION.name()
    }

    fn open<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        launch: Launch<'a>,
    ) -> Result<Box<dyn Run + 'a>> {
        let conv = convolution(problem);
        let (kernel, bias) = (Kernel::new(conv, launch)?, Weight::of(inputs, "bias"));
        let blocks = conv.blocks() * conv.channels;
        let sums = [blocks * conv.width, if bias.is_some() { blocks } else { 0 }];
        let weight = Weight::of(inputs, "weight").expect("a weight is an input");
        Ok(by_dtype!(problem.dtype, E => Box::new(Sequence {
            conv,
            kernel,
            operands: Operands {
                x: inputs.expect::<E>("x"),
                weight,
                bias,
                state: None,
                segments: None,
            },
            sums: sums.map(|count| vec![0.0; count]),
        })))
    }
}

struct Sequence<'a, E> {
    conv: CausalConv1d,
    kernel: Kernel<'a>,
    operands: Operands<'a, E>,
    /// Partial sums of dweight and dbias.
    sums: [Vec<f32>; 2],
}

impl<E: Element + ArrayElement> Run for Sequence<'_, E> {
    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        let [y, dx] = results.slices_mut(["y", "dx"]);
        if pass != Pass::Backward {
            self.kernel.forward(self.operands, y.expect("rows to fill"))?;
        }
        if !pass.has_gradients() {
            return Ok(());
        }
        let [weight, bias] = &mut self.sums;
        let gradients = Gradients {
            x: dx.expect("a gradient to fill"),
            weight,
            bias: self.operands.bias.map(|_| &mut bias[..]),
            state: None,
        };
        self.kernel.backward(self.operands, given.expect("dy"), gradients)?;
        let CausalConv1d { width, channels, .. } = self.conv;
        for (name, sums, columns) in
            [("dweight", &self.sums[0], channels * width), ("dbias", &self.sums[1], channels)]
        {
            add_blocks(sums, columns, results.get_mut(name));
        }
        Ok(())
    }
}
