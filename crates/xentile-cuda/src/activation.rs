//! Activations of one array and gated, and their gradients.

mod arguments;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use arguments::{Arguments, BATCH, GELU_ERF, GELU_TANH, RELU, SILU, SQUARED_RELU, THREADS};
use xentile::DType;
use xentile::activation::{Activation, ActivationShape, Kind};

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::{Device, Error, Result, check_alignment, library};

/// The bytes of a vector.
const VECTOR: usize = 16;

/// An activation of arrays of one dtype, on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    options: Activation,
    shape: ActivationShape,
    dtype: DType,
    writes: Writes,
}

/// Which arrays a pass writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writes {
    Y,
    Dx,
    DxAndY,
}

impl Pass {
    /// The forward pass.
    ///
    /// # Errors
    /// An option outside its range.
    pub fn forward(options: Activation, shape: ActivationShape, dtype: DType) -> Result<Self> {
        options.validate()?;
        Ok(Self { options, shape, dtype, writes: Writes::Y })
    }

    /// The backward pass.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn backward(options: Activation, shape: ActivationShape, dtype: DType) -> Result<Self> {
        Ok(Self { writes: Writes::Dx, ..Self::forward(options, shape, dtype)? })
    }

    /// The backward pass that writes y too, as the forward pass did.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn backward_with_y(
        options: Activation,
        shape: ActivationShape,
        dtype: DType,
    ) -> Result<Self> {
        Ok(Self { writes: Writes::DxAndY, ..Self::forward(options, shape, dtype)? })
    }

    /// Loads the kernel, so that [`run`](Self::run) has only to launch it.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.kernel(stream) }.map(drop)
    }

    /// Has `stream` write y from `x`, or, of a backward pass, dx from `x` and `dy`, which is null
    /// elsewhere. `y` is null but for [`Self::backward_with_y`], which writes it.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16, a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays
    /// of these shapes on its device, apart from each other, which nothing else touches until it has run
    /// what was launched here.
    pub unsafe fn run(
        &self,
        stream: *mut c_void,
        x: *const c_void,
        dy: *const c_void,
        result: *mut c_void,
        y: *mut c_void,
    ) -> Result<()> {
        if self.shape.elements() == 0 {
            return Ok(());
        }
        let dy = if self.writes == Writes::Y { null() } else { dy };
        let y = if self.writes == Writes::DxAndY { y } else { null_mut() };
        for (name, address) in
            [("x", x), ("dy", dy), ("the result", result.cast_const()), ("y", y.cast_const())]
        {
            check_alignment(name, address)?;
        }
        // SAFETY: passed on from this function's contract.
        let kernel = unsafe { self.kernel(stream) }?;
        // A unit is a vector of y.
        let units = (self.shape.elements() * self.dtype.size_bytes()).div_ceil(VECTOR);
        let ctas = units.div_ceil((THREADS * BATCH) as usize);
        let ctas = u32::try_from(ctas).ok().filter(|&ctas| ctas <= i32::MAX.cast_unsigned());
        let ctas = ctas.ok_or_else(|| {
            Error::Problem(xentile::Error::Shape {
                tokens: self.shape.rows(),
                vocab: self.shape.columns(),
                requirement: "its vectors must fit a grid",
            })
        })?;
        let extent = Extent { ctas, rows: 1, threads: THREADS, shared_bytes: 0, cluster: None };
        let Activation { kind, alpha, up_offset, .. } = self.options;
        let arguments = Arguments {
            x,
            dy,
            result,
            y,
            rows: self.shape.rows() as i64,
            columns: self.shape.columns() as i64,
            alpha: alpha as f32,
            limit: self.options.bound(),
            up_offset: up_offset as f32,
            kind: match kind {
                Kind::Silu => SILU,
                Kind::GeluTanh => GELU_TANH,
                Kind::GeluErf => GELU_ERF,
                Kind::Relu => RELU,
                Kind::SquaredRelu => SQUARED_RELU,
            },
        };
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(kernel, extent, stream, &arguments) }
    }

    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn kernel(&self, stream: RawStream) -> Result<Kernel> {
        let pass = match self.writes {
            Writes::Y => "forward",
            Writes::Dx => "backward",
            Writes::DxAndY => "backward_with_y",
        };
        let name = format!("activation_{pass}_{}_{}", self.options.layout, self.dtype);
        // SAFETY: passed on from this function's contract.
        unsafe { library::kept_kernel(&name, Device::current()?, stream) }
    }
}
