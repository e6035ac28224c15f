//! FP8 quantisation of matrices, with scales by row, by block or given, and transposed copies.
//!
//! Scales that are made and what they scale come from one read of x, unless a block is larger than the
//! registers of a CTA. Transposed copies do too where blocks are of 1 x 128 or 128 x 128, or scales are given.
//! With blocks that are whole rows there are two reads, and with others the copy has one or two of its own.

mod arguments;
mod plan;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use arguments::{APART, AWAITED, Arguments, GatedArguments, HALVES, INTERLEAVED, NormedArguments};
use plan::{Pass, Step};
use xentile::DType;
use xentile::activation::Activation;
use xentile::fp8_quantize::{Blocks, Format, Fp8Quantize, QuantizeShape};
use xentile::norm::{Norm, NormShape};

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::norm::{self, Weight};
use crate::{Device, Error, Result, check_alignment, check_places, library};

/// What is asked for, of arrays of one dtype.
#[derive(Clone, Copy, Debug)]
pub struct Quantization {
    options: Fp8Quantize,
    shape: QuantizeShape,
    dtype: DType,
    pass: Pass,
}

/// The arrays. Those that a pass does not have are null.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// `[G, M, D]`.
    pub x: *const c_void,
    /// A scale for so many of the G x M rows, where scales are given.
    pub scale: *const f32,
    /// `[G, M, D]`, in bits.
    pub values: *mut u8,
    /// A scale of each block; amax `[G, M]` where scales are given or there are no values.
    pub numbers: *mut f32,
    /// `[G, D, M]`, in bits.
    pub values_t: *mut u8,
    /// A scale of each block of the transposed copy, where scales are not given.
    pub scales_t: *mut f32,
}

impl Operands {
    /// None of them but x.
    #[must_use]
    pub fn of(x: *const c_void) -> Self {
        Self {
            x,
            scale: null(),
            values: null_mut(),
            numbers: null_mut(),
            values_t: null_mut(),
            scales_t: null_mut(),
        }
    }
}

/// What a number of a block is that has no entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Empty {
    /// A scale, 1.
    Scale,
    /// amax, 0.
    Amax,
}

impl Empty {
    /// Loads what [`fill`](Self::fill) launches.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(self, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { kernel(&plan::scales_of_amax(0), Format::E4M3Fn, DType::F32, stream) }.map(drop)
    }

    /// Has `stream` write `count` of them.
    ///
    /// # Errors
    /// No driver or GPU that will do, a failure of the driver.
    ///
    /// # Safety
    /// As for [`load`](Self::load), and `numbers` leads to so many on its device, which nothing else touches
    /// until it has run what was launched here.
    pub unsafe fn fill(self, stream: *mut c_void, numbers: *mut f32, count: usize) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let driver = Driver::get()?;
        // SAFETY: passed on from this function's contract.
        unsafe { driver.clear(stream, numbers.cast(), count * size_of::<f32>()) }?;
        if self == Self::Amax {
            return Ok(());
        }
        let step = plan::scales_of_amax(count);
        let arrays = Arguments { numbers, ..Arguments::NONE };
        // SAFETY: passed on from this function's contract.
        unsafe { launch(&step, &step.arguments(arrays), Format::E4M3Fn, DType::F32, stream) }
    }
}

impl Quantization {
    /// Values, and a scale of each of `blocks`; and the transposed copy with its own scales.
    ///
    /// # Errors
    /// A block of no rows or columns; of a transposed copy, blocks of several rows that are not as many
    /// columns; more rows or columns than kernels count.
    pub fn new(
        options: Fp8Quantize,
        shape: QuantizeShape,
        dtype: DType,
        blocks: Blocks,
        is_transposed: bool,
    ) -> Result<Self> {
        blocks.validate()?;
        if is_transposed && blocks.rows > 1 && blocks.columns != Some(blocks.rows) {
            return Err(Error::Problem(xentile::Error::Invalid(format!(
                "blocks are {} x {}; of a transposed copy they must be parts of rows, or squares",
                blocks.rows,
                blocks.columns_of(shape.columns())
            ))));
        }
        Self::checked(options, shape, dtype, Pass::Scales { blocks, is_transposed })
    }

    /// Values by given scales, one for so many rows or, with a transposed copy, matrices; and amax of rows.
    ///
    /// # Errors
    /// Scales that are not one for so many, or more rows or columns than kernels count.
    pub fn scaled(
        format: Format,
        shape: QuantizeShape,
        dtype: DType,
        scales: usize,
        is_transposed: bool,
    ) -> Result<Self> {
        let of = shape.matrices() * if is_transposed { 1 } else { shape.rows() };
        if shape.elements() > 0 && (scales == 0 || !of.is_multiple_of(scales)) {
            let what = if is_transposed { "matrices" } else { "rows" };
            return Err(Error::Problem(xentile::Error::Invalid(format!(
                "scale holds {scales} elements; it must hold one for every so many of {of} {what}"
            ))));
        }
        let options = Fp8Quantize { format, power_of_two: false };
        Self::checked(options, shape, dtype, Pass::Given { scales, is_transposed })
    }

    /// amax of rows.
    ///
    /// # Errors
    /// More rows or columns than kernels count.
    pub fn amax(shape: QuantizeShape, dtype: DType) -> Result<Self> {
        let options = Fp8Quantize { format: Format::E4M3Fn, power_of_two: false };
        Self::checked(options, shape, dtype, Pass::Amax)
    }

    fn checked(
        options: Fp8Quantize,
        shape: QuantizeShape,
        dtype: DType,
        pass: Pass,
    ) -> Result<Self> {
        let longest = shape.rows().max(shape.columns());
        if shape.elements() > 0 && i32::try_from(longest).is_err() {
            return Err(Error::Problem(xentile::Error::Shape {
                tokens: shape.rows(),
                vocab: shape.columns(),
                requirement: "rows and columns must each fit 31 bits",
            }));
        }
        Ok(Self { options, shape, dtype, pass })
    }

    /// Loads the kernels, so that [`run`](Self::run) has only to launch them.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, stream: *mut c_void) -> Result<()> {
        for step in self.steps() {
            // SAFETY: passed on from this function's contract.
            unsafe { kernel(&step, self.options.format, self.dtype, stream) }?;
        }
        Ok(())
    }

    /// Has `stream` write the results.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16, a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays
    /// of these shapes on its device, apart from each other, which nothing else touches until it has run
    /// what was launched here.
    pub unsafe fn run(&self, stream: *mut c_void, operands: Operands) -> Result<()> {
        if self.shape.elements() == 0 {
            return Ok(());
        }
        let arrays = self.arrays(operands)?;
        let driver = Driver::get()?;
        let Operands { numbers, scales_t, .. } = operands;
        for step in self.steps() {
            for (at, count) in
                [(numbers, step.zeros.numbers), (scales_t, step.zeros.transposed_scales)]
            {
                if count > 0 {
                    // SAFETY: an array of this pass that holds so many numbers.
                    unsafe { driver.clear(stream, at.cast(), count * size_of::<f32>()) }?;
                }
            }
            let arguments = step.arguments(arrays);
            // SAFETY: passed on from this function's contract.
            unsafe { launch(&step, &arguments, self.options.format, self.dtype, stream) }?;
        }
        Ok(())
    }

    /// The arguments that kernels of every step share.
    ///
    /// # Errors
    /// Arrays that begin at no multiple of 16.
    fn arrays(&self, operands: Operands) -> Result<Arguments> {
        let Operands { x, scale, values, numbers, values_t, scales_t } = operands;
        let written = [("values", values.cast()), ("values_t", values_t.cast::<c_void>())];
        check_alignment("x", x)?;
        for (name, address) in written {
            check_alignment(name, address.cast_const())?;
        }
        Ok(Arguments {
            x,
            given: scale,
            values,
            numbers,
            transposed: values_t,
            transposed_scales: scales_t,
            e5m2: (self.options.format == Format::E5M2).into(),
            power_of_two: self.options.power_of_two.into(),
            ..Arguments::NONE
        })
    }

    fn steps(&self) -> Vec<Step> {
        plan::steps(self.pass, self.shape, self.dtype)
    }
}

/// Where gate and up are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// In two arrays.
    Apart,
    /// In a row of one, the gate first.
    Halves,
    /// In a row of one, by turns.
    Interleaved,
}

/// SwiGLU in FP8, in blocks of one row and 128 columns.
#[derive(Clone, Copy, Debug)]
pub struct Gated {
    to: Quantization,
    activation: Activation,
    packing: Packing,
    is_transposed: bool,
}

impl Gated {
    /// The columns of a block, of which rows are a whole number.
    pub const BLOCK: usize = arguments::TILE as usize;

    /// That of y of `shape`, of whose `activation` layout and kind are not read.
    ///
    /// # Errors
    /// An option outside its range, a dtype other than bf16, rows that are no whole number of blocks, or more
    /// rows or columns than kernels count.
    pub fn new(
        activation: Activation,
        packing: Packing,
        options: Fp8Quantize,
        shape: QuantizeShape,
        dtype: DType,
        is_transposed: bool,
    ) -> Result<Self> {
        activation.validate()?;
        if dtype != DType::Bf16 || !shape.columns().is_multiple_of(Self::BLOCK) {
            return Err(Error::Problem(xentile::Error::Invalid(format!(
                "rows have {} columns in {dtype}; kernels take whole blocks of {} in bf16",
                shape.columns(),
                Self::BLOCK
            ))));
        }
        let blocks = Blocks { rows: 1, columns: Some(Self::BLOCK) };
        let to = Quantization::new(options, shape, dtype, blocks, is_transposed)?;
        Ok(Self { to, activation, packing, is_transposed })
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
        unsafe { kernel(&self.step(), self.to.options.format, self.to.dtype, stream) }.map(drop)
    }

    /// Has `stream` write the results of y. `operands.x` is the gate `[G, M, D]` and `up` as it; or x is what
    /// packs both, and `up` null.
    ///
    /// # Errors
    /// As for [`Quantization::run`].
    ///
    /// # Safety
    /// As for [`Quantization::run`].
    pub unsafe fn run(
        &self,
        stream: *mut c_void,
        operands: Operands,
        up: *const c_void,
    ) -> Result<()> {
        let shape = self.to.shape;
        if shape.elements() == 0 {
            return Ok(());
        }
        let arrays = self.to.arrays(operands)?;
        check_alignment("up", up)?;
        let step = self.step();
        let behind =
            |elements: usize| operands.x.wrapping_byte_add(elements * self.to.dtype.size_bytes());
        let (up, packing) = match self.packing {
            Packing::Apart => (up, APART),
            Packing::Halves => (behind(shape.columns()), HALVES),
            // The next vector.
            Packing::Interleaved => (operands.x.wrapping_byte_add(plan::VECTOR), INTERLEAVED),
        };
        let arguments = GatedArguments {
            to: step.arguments(arrays),
            up,
            columns: shape.columns() as i64,
            alpha: self.activation.alpha as f32,
            limit: self.activation.bound(),
            up_offset: self.activation.up_offset as f32,
            packing,
        };
        // SAFETY: passed on from this function's contract.
        unsafe { launch(&step, &arguments, self.to.options.format, self.to.dtype, stream) }
    }

    fn step(&self) -> Step {
        plan::gated(self.to.shape, self.to.dtype, self.is_transposed)
    }
}

/// RMSNorm in FP8, in blocks of one row and 128 columns.
#[derive(Clone, Copy, Debug)]
pub struct Normed {
    to: Quantization,
    norm: norm::Norm,
    adds: bool,
    is_transposed: bool,
}

/// What the norm reads and writes beside what is quantised.
#[derive(Clone, Copy, Debug)]
pub struct NormOperands {
    /// What is added to x, and where the sum goes, which may be the same place.
    pub residual: Option<(*const c_void, *mut c_void)>,
    /// `[D]`.
    pub weight: *const c_void,
    /// `[G, M]`.
    pub rstd: *mut f32,
}

impl Normed {
    /// The columns of rows, at least and at most.
    pub const COLUMNS: [usize; 2] = [640, 32768];

    /// That of rows of `shape`; `adds` says that they are sums with a residual.
    ///
    /// # Errors
    /// An option outside its range, a weight of another shape, a dtype other than bf16, or rows that are no whole
    /// number of blocks, or too short or too long for kernels.
    pub fn new(
        options: Norm,
        to: Fp8Quantize,
        shape: QuantizeShape,
        dtype: DType,
        weight: Weight,
        adds: bool,
        is_transposed: bool,
    ) -> Result<Self> {
        options.validate()?;
        let (columns, [least, most]) = (shape.columns(), Self::COLUMNS);
        let is_taken = (least..=most).contains(&columns) && columns.is_multiple_of(Gated::BLOCK);
        if dtype != DType::Bf16 || !is_taken {
            return Err(Error::Problem(xentile::Error::Invalid(format!(
                "rows have {columns} columns in {dtype}; kernels take {least} to {most}, in whole blocks \
                 of {}, in bf16",
                Gated::BLOCK
            ))));
        }
        let kernels = if adds { "fp8_quantize_norm_add" } else { "fp8_quantize_norm" };
        let rows = NormShape::new(shape.matrices() * shape.rows(), columns)?;
        let norm = norm::Norm::with_kernels(kernels, options, rows, dtype, weight, adds)?;
        let blocks = Blocks { rows: 1, columns: Some(Gated::BLOCK) };
        let to = Quantization::new(to, shape, dtype, blocks, is_transposed)?;
        Ok(Self { to, norm, adds, is_transposed })
    }

    /// Loads the kernels, so that [`run`](Self::run) has only to launch them.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, stream: *mut c_void) -> Result<()> {
        if self.in_one()?.is_some() {
            // SAFETY: passed on from this function's contract.
            return unsafe { self.kernel_in_one(stream) }.map(drop);
        }
        // SAFETY: passed on from this function's contract.
        unsafe { self.norm.load(norm::Pass::Forward, stream) }?;
        if self.is_transposed {
            let step = plan::normed(self.to.shape, self.to.dtype);
            // SAFETY: passed on from this function's contract.
            unsafe { kernel(&step, self.to.options.format, self.to.dtype, stream) }?;
        }
        Ok(())
    }

    /// Has `stream` write the results of the norm of `operands.x`, its rstd and, with a residual, the sum.
    ///
    /// # Errors
    /// As for [`Quantization::run`], or a residual and a sum that overlap in part.
    ///
    /// # Safety
    /// As for [`Quantization::run`], but that a sum may lie in the place of its residual.
    pub unsafe fn run(
        &self,
        stream: *mut c_void,
        operands: Operands,
        of_norm: NormOperands,
    ) -> Result<()> {
        if self.to.shape.elements() == 0 {
            return Ok(());
        }
        let NormOperands { residual, weight, rstd } = of_norm;
        assert_eq!(self.adds, residual.is_some(), "what is added was said before");
        let (added, sum) = residual.unwrap_or((null(), null_mut()));
        if self.adds {
            check_places(("residual", added), ("sum", sum), self.norm.bytes())?;
        }
        let to = self.to.arrays(operands)?;
        let values = if self.is_transposed { null_mut() } else { to.values };
        let norm =
            norm::Arguments { x: operands.x, added, sum, rstd, ..self.norm.arguments(weight)? };
        let x = if self.adds { sum.cast_const() } else { operands.x };
        if let Some(step) = self.in_one()? {
            let lanes = self.norm.forward_lanes(Device::current()?.limits());
            let norm = norm::Arguments { lanes, ..norm };
            let arguments = NormedArguments { norm, to: step.arguments(Arguments { x, ..to }) };
            let bytes = self.norm.shape.rows() * size_of::<f32>();
            let driver = Driver::get()?;
            // SAFETY: passed on from this function's contract.
            unsafe {
                driver.fill(stream, rstd.cast(), AWAITED as u8, bytes)?;
                let kernel = self.kernel_in_one(stream)?;
                return driver.launch(kernel, extent_of(&step)?, stream, &arguments);
            }
        }
        let first = |norm| NormedArguments { norm, to: Arguments { values, ..to } };
        // SAFETY: passed on from this function's contract.
        unsafe { self.norm.launch_with(norm::Pass::Forward, stream, norm, first) }?;
        if !self.is_transposed {
            return Ok(());
        }
        let step = plan::normed(self.to.shape, self.to.dtype);
        let arguments = NormedArguments { norm, to: step.arguments(Arguments { x, ..to }) };
        // SAFETY: passed on from this function's contract.
        unsafe { launch(&step, &arguments, self.to.options.format, self.to.dtype, stream) }
    }

    /// The launch that does all, where there is one.
    fn in_one(&self) -> Result<Option<Step>> {
        if !self.is_transposed || self.to.shape.elements() == 0 {
            return Ok(None);
        }
        let multiprocessors = Device::current()?.limits().multiprocessors;
        Ok(plan::norm_in_one(self.to.shape, self.to.dtype, multiprocessors))
    }

    /// Its kernel.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn kernel_in_one(&self, stream: RawStream) -> Result<Kernel> {
        let (kernels, format) = (self.norm.kernels, self.to.options.format);
        let name = format!("{kernels}_transposed_{format}_{}", self.to.dtype);
        // SAFETY: passed on from this function's contract.
        unsafe { library::kept_kernel(&name, Device::current()?, stream) }
    }
}

/// Launches a step with what its kernel takes.
///
/// # Safety
/// As for [`Quantization::run`].
unsafe fn launch<A>(
    step: &Step,
    arguments: &A,
    format: Format,
    dtype: DType,
    stream: RawStream,
) -> Result<()> {
    let extent = extent_of(step)?;
    // SAFETY: passed on from this function's contract.
    unsafe {
        let kernel = kernel(step, format, dtype, stream)?;
        Driver::get()?.launch(kernel, extent, stream, arguments)
    }
}

/// The CTAs of a step.
fn extent_of(step: &Step) -> Result<Extent> {
    step.extent().ok_or_else(|| {
        Error::Problem(xentile::Error::Invalid(
            "there are 2^31 blocks or more, which fit no grid".to_owned(),
        ))
    })
}

/// # Safety
/// `stream` is a `CUstream` of the calling thread's current context.
unsafe fn kernel(step: &Step, format: Format, dtype: DType, stream: RawStream) -> Result<Kernel> {
    // SAFETY: passed on from this function's contract.
    unsafe { library::kept_kernel(&step.name(format, dtype), Device::current()?, stream) }
}
