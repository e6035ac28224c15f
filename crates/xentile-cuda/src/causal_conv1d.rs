//! Causal depthwise convolution: forward, and backward with partial sums of dweight and dbias.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use xentile::causal_conv1d::CausalConv1d;
use xentile::{DType, Error as ProblemError};

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::norm::weight_dtype;
use crate::{Device, Error, Result, check_alignment, check_places, library};

mirror! {
    /// See kernels/causal_conv1d.cu.
    struct Arguments = CausalConv1dArguments {
        x: *const c_void,
        weight: *const c_void,
        bias: *const c_void,
        state: *const c_void,
        segments: *const i32,
        dy: *const c_void,
        to: *mut c_void,
        dstate: *mut c_void,
        dweight: *mut f32,
        dbias: *mut f32,
        tokens: i64,
        channels: i64,
        weight_sequences: i64,
        bias_sequences: i64,
        blocks: i64,
        tasks: i64,
        unit_ctas: u32,
        weight_dtype: u32,
    }
}

numbers! {
    THREADS: u32 = kConvThreads, 128;
    BLOCK: u32 = kConvBlock, 128;
    UNIT: u32 = kConvUnit, 4;
}

const _: () = assert!(BLOCK as usize == xentile::causal_conv1d::BLOCK_TOKENS);

/// Lanes of a warp, each with a unit of channels.
const LANES: usize = 32;

/// What both passes read, on the device.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// `[B, T, C]`.
    pub x: *const c_void,
    /// `[G, C, W]`, each for B / G consecutive sequences.
    pub weight: *const c_void,
    /// G.
    pub weight_groups: usize,
    /// `[G, C]` of the weight's dtype, with a G of its own.
    pub bias: Option<(*const c_void, usize)>,
    /// `[B, W - 1, C]`.
    pub state: Option<*const c_void>,
    /// `[B, T]`.
    pub segments: Option<*const i32>,
}

/// What the backward pass writes, on the device.
#[derive(Clone, Copy, Debug)]
pub struct Gradients {
    /// `[B, T, C]`.
    pub x: *mut c_void,
    /// Partial sums `[B, blocks, C, W]`.
    pub weight: *mut f32,
    /// Partial sums `[B, blocks, C]`.
    pub bias: Option<*mut f32>,
    /// `[B, W - 1, C]`.
    pub state: Option<*mut c_void>,
}

/// A pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// y.
    Forward,
    /// dx and the other gradients.
    Backward,
}

/// A causal convolution of one shape on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Convolution {
    conv: CausalConv1d,
    dtype: DType,
    weight_dtype: DType,
}

impl Convolution {
    /// The convolution of `[B, T, C]` in `dtype` with a weight of a dtype of its own.
    ///
    /// # Errors
    /// A width that kernels do not have, or arrays larger than memory.
    pub fn new(conv: CausalConv1d, dtype: DType, weight_dtype: DType) -> Result<Self> {
        conv.validate()?;
        Ok(Self { conv, dtype, weight_dtype })
    }

    /// Loads the kernel of a pass, with segments or without, so that running it has only to launch it.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, pass: Pass, has_segments: bool, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.kernel(pass, has_segments, stream) }.map(drop)
    }

    /// Has `stream` write y `[B, T, C]`.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16 or overlap, more CTAs than a grid
    /// has, a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays of
    /// these shapes on its device, which nothing else touches until it has run what was launched here.
    pub unsafe fn forward(
        &self,
        stream: *mut c_void,
        operands: Operands,
        y: *mut c_void,
    ) -> Result<()> {
        let arguments = Arguments { to: y, ..self.arguments(&operands) };
        self.check_apart(("x", operands.x), ("y", y))?;
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Forward, stream, &arguments) }
    }

    /// Has `stream` write all gradients for `dy` `[B, T, C]`.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn backward(
        &self,
        stream: *mut c_void,
        operands: Operands,
        dy: *const c_void,
        gradients: Gradients,
    ) -> Result<()> {
        let Gradients { x: dx, weight: dweight, bias: dbias, state: dstate } = gradients;
        let blocks = self.conv.blocks();
        let arguments = Arguments {
            dy,
            to: dx,
            dstate: dstate.unwrap_or(null_mut()),
            dweight,
            dbias: dbias.unwrap_or(null_mut()),
            // A sequence without tokens has a task too, where its state has a gradient.
            tasks: if dstate.is_some() { blocks.max(1) } else { blocks } as i64,
            ..self.arguments(&operands)
        };
        for (name, array) in [("x", operands.x), ("dy", dy)] {
            self.check_apart((name, array), ("dx", dx))?;
        }
        check_alignment("dinitial_state", arguments.dstate)?;
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Backward, stream, &arguments) }
    }

    /// Checks that an argument and a result `[B, T, C]`, with their names, begin where kernels read vectors
    /// from, and do not overlap: a row of the argument is read for several of the result.
    fn check_apart(
        &self,
        argument: (&'static str, *const c_void),
        result: (&'static str, *mut c_void),
    ) -> Result<()> {
        let CausalConv1d { batch, tokens, channels, .. } = self.conv;
        let bytes = batch * tokens * channels * self.dtype.size_bytes();
        if bytes > 0 && argument.1 == result.1.cast_const() {
            return Err(Error::Overlap { name: argument.0, other: result.0 });
        }
        check_places(argument, result, bytes)
    }

    /// Channels of a lane: a vector, or one where rows do not consist of vectors.
    fn unit(&self) -> usize {
        let vector = UNIT as usize;
        if self.conv.channels.is_multiple_of(vector) { vector } else { 1 }
    }

    /// The arguments of a pass, without what it writes.
    fn arguments(&self, operands: &Operands) -> Arguments {
        let CausalConv1d { batch, tokens, channels, .. } = self.conv;
        let Operands { x, weight, weight_groups, bias, state, segments } = *operands;
        let (bias, bias_groups) = bias.unwrap_or((null(), 1));
        let sequences = |groups: usize| (batch / groups.max(1)).max(1) as i64;
        let blocks = self.conv.blocks() as i64;
        Arguments {
            x,
            weight,
            bias,
            state: state.unwrap_or(null()),
            segments: segments.unwrap_or(null()),
            dy: null(),
            to: null_mut(),
            dstate: null_mut(),
            dweight: null_mut(),
            dbias: null_mut(),
            tokens: tokens as i64,
            channels: channels as i64,
            weight_sequences: sequences(weight_groups),
            bias_sequences: sequences(bias_groups),
            blocks,
            tasks: blocks,
            unit_ctas: 0,
            weight_dtype: weight_dtype(self.weight_dtype),
        }
    }

    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn launch(&self, pass: Pass, stream: *mut c_void, arguments: &Arguments) -> Result<()> {
        let CausalConv1d { batch, tokens, channels, .. } = self.conv;
        for (name, array) in [
            ("weight", arguments.weight),
            ("bias", arguments.bias),
            ("initial_state", arguments.state),
        ] {
            check_alignment(name, array)?;
        }
        let unit_ctas = channels.div_ceil(self.unit() * LANES);
        let ctas = batch
            .checked_mul(arguments.tasks as usize)
            .and_then(|tasks| tasks.checked_mul(unit_ctas))
            .and_then(|ctas| i32::try_from(ctas).ok())
            .ok_or(Error::Problem(ProblemError::Shape {
                tokens,
                vocab: channels,
                requirement: "its blocks of tokens must fit a grid",
            }))?;
        if ctas == 0 {
            return Ok(());
        }
        let extent = Extent {
            ctas: ctas.cast_unsigned(),
            rows: 1,
            threads: THREADS,
            shared_bytes: 0,
            cluster: None,
        };
        let arguments = Arguments { unit_ctas: unit_ctas as u32, ..*arguments };
        // SAFETY: passed on from this function's contract.
        unsafe {
            let kernel = self.kernel(pass, !arguments.segments.is_null(), stream)?;
            Driver::get()?.launch(kernel, extent, stream, &arguments)
        }
    }

    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn kernel(&self, pass: Pass, has_segments: bool, stream: RawStream) -> Result<Kernel> {
        let CausalConv1d { width, silu, .. } = self.conv;
        let pass = match pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        };
        let activation = if silu { "silu" } else { "linear" };
        let rows = match (self.unit(), has_segments) {
            (1, _) => "_single",
            (_, true) => "_segments",
            (_, false) => "",
        };
        let name = format!("causal_conv1d_{pass}_{width}_{activation}{rows}_{}", self.dtype);
        // SAFETY: passed on from this function's contract.
        unsafe { library::kept_kernel(&name, Device::current()?, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_have_vectors_of_rows_that_consist_of_them() {
        let unit = |channels| {
            let conv = CausalConv1d { width: 4, silu: true, batch: 1, tokens: 5, channels };
            Convolution::new(conv, DType::Bf16, DType::F32).unwrap().unit()
        };
        assert_eq!([64, 60, 62, 0].map(unit), [4, 4, 1, 4]);
    }
}
