//! RMSNorm of every head of q and of k and its rotation, in one read: forward, and backward with partial sums
//! of dweight. Arrays come in pairs, that of q first.

mod arguments;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use arguments::{Arguments, BACKWARD_HEADS, BACKWARD_THREADS, FORWARD_HEADS, FORWARD_THREADS};
use xentile::DType;
use xentile::norm::Norm;
use xentile::rope::{Layout, RopeShape};

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::norm::weight_dtype;
use crate::{Device, Error, Result, check_alignment, check_places, library, rope};

/// The lanes of a warp.
const WARP: usize = 32;

/// The shapes of q `[T, H, D]`, k `[T, K, D]`, and the tables `[P, R / 2]`.
#[derive(Clone, Copy, Debug)]
pub struct QkShape {
    /// T.
    pub tokens: usize,
    /// H and K.
    pub heads: [usize; 2],
    /// D.
    pub columns: usize,
    /// R / 2.
    pub pairs: usize,
    /// P.
    pub positions: usize,
}

/// RMSNorm and rotation of arrays of one dtype, on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRope {
    norm: Norm,
    layout: Layout,
    shape: QkShape,
    dtype: DType,
    weights: [DType; 2],
    units: usize,
}

/// What a pass is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// y and rstd.
    Forward,
    /// dx, and dweight of so many blocks of heads.
    Backward {
        /// At least 1.
        blocks: usize,
    },
}

/// What the forward pass reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// q and k.
    pub x: [*const c_void; 2],
    /// `[D]` each.
    pub weight: [*const c_void; 2],
    /// `[T]`.
    pub indices: *const i32,
    /// cos and sin `[P, R / 2]`.
    pub tables: [*const f32; 2],
    /// What q and k become, which may be in their places.
    pub y: [*mut c_void; 2],
    /// `[T, H]` and `[T, K]`.
    pub rstd: [*mut f32; 2],
}

/// What the backward pass reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct Backward {
    /// q and k.
    pub x: [*const c_void; 2],
    /// `[D]` each.
    pub weight: [*const c_void; 2],
    /// As the forward pass gave them.
    pub rstd: [*const f32; 2],
    /// `[T]`.
    pub indices: *const i32,
    /// cos and sin `[P, R / 2]`.
    pub tables: [*const f32; 2],
    /// The cotangents of what q and k became.
    pub dy: [*const c_void; 2],
    /// The gradients, which may be in the places of q and k or of the cotangents.
    pub dx: [*mut c_void; 2],
    /// `[blocks, D]` each.
    pub dweight: [*mut f32; 2],
}

impl QkNormRope {
    /// That of arrays of `shape`, with weights of dtypes of their own.
    ///
    /// # Errors
    /// An option outside its range, more elements than memory can address, or heads that kernels do not take:
    /// those that do not consist of vectors of 16 bytes, or of more than 32 units of those.
    pub fn new(
        norm: Norm,
        layout: Layout,
        shape: QkShape,
        dtype: DType,
        weights: [DType; 2],
    ) -> Result<Self> {
        norm.validate()?;
        let QkShape { tokens, heads, columns, pairs, positions } = shape;
        for count in heads {
            let rows = tokens.checked_mul(count).filter(|_| i32::try_from(count).is_ok());
            let rows = rows.ok_or(xentile::Error::Shape {
                tokens,
                vocab: count,
                requirement: "tokens x heads must fit the address space",
            })?;
            RopeShape::new(rows, columns, pairs, positions)?;
        }
        let units = rope::units(layout, columns, pairs, dtype).filter(|&units| units <= WARP);
        let units = units.ok_or_else(|| {
            Error::Problem(xentile::Error::Invalid(format!(
                "heads have {columns} columns, of which {} turn, {layout}, in {dtype}; they must be of \
                 whole vectors of 16 bytes, and at most {WARP} units of one or two of them",
                2 * pairs
            )))
        })?;
        Ok(Self { norm, layout, shape, dtype, weights, units })
    }

    /// Loads the kernel of `pass`, so that it has only to be launched.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, pass: Pass, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.kernel(pass, stream) }.map(drop)
    }

    /// Has `stream` write what q and k become, and rstd.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16 or overlap in part, a
    /// failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays
    /// of these shapes on its device, which nothing else touches until it has run what was launched here.
    pub unsafe fn forward(&self, stream: *mut c_void, arrays: Forward) -> Result<()> {
        let Forward { x, weight, indices, tables, y, rstd } = arrays;
        let arguments = Arguments { rstd, ..self.arguments(x, weight, indices, tables, y)? };
        let groups = self.groups(FORWARD_HEADS);
        let teams = FORWARD_THREADS as usize / self.lanes();
        let items = self.shape.tokens.saturating_mul(groups[0] + groups[1]);
        let ctas = i32::try_from(items.div_ceil(teams)).map_err(|_| {
            Error::Problem(xentile::Error::Shape {
                tokens: self.shape.tokens,
                vocab: self.shape.columns,
                requirement: "its heads must fit a grid",
            })
        })?;
        if ctas == 0 {
            return Ok(());
        }
        let extent = Extent {
            ctas: ctas.cast_unsigned(),
            rows: 1,
            threads: FORWARD_THREADS,
            shared_bytes: 0,
            cluster: None,
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Forward, extent, stream, groups, arguments) }
    }

    /// Has `stream` write the gradients, dweight in parts of `blocks`.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward), or no blocks.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn backward(
        &self,
        stream: *mut c_void,
        blocks: usize,
        arrays: Backward,
    ) -> Result<()> {
        let Backward { x, weight, rstd, indices, tables, dy, dx, dweight } = arrays;
        for (i, name) in ["dq", "dk"].into_iter().enumerate() {
            check_places(("a cotangent", dy[i]), (name, dx[i]), self.bytes(i))?;
        }
        for (name, to) in ["dq_weight", "dk_weight"].into_iter().zip(dweight) {
            check_alignment(name, to.cast())?;
        }
        let arguments = self.arguments(x, weight, indices, tables, dx)?;
        let rstd = rstd.map(<*const f32>::cast_mut);
        let arguments = Arguments { dy, rstd, dweight, ..arguments };
        let ctas = i32::try_from(blocks).ok().filter(|&ctas| ctas > 0);
        let ctas = ctas.ok_or(xentile::Error::Option {
            name: "blocks",
            value: blocks as f64,
            requirement: "at least 1, and below 2^31",
        })?;
        // Of each warp, a row of columns for q and one for k.
        let warps = BACKWARD_THREADS / WARP as u32;
        let shared_bytes = 2 * warps * self.shape.columns as u32 * size_of::<f32>() as u32;
        let threads = BACKWARD_THREADS;
        let ctas = ctas.cast_unsigned();
        let extent = Extent { ctas, rows: 1, threads, shared_bytes, cluster: None };
        let groups = self.groups(BACKWARD_HEADS);
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Backward { blocks }, extent, stream, groups, arguments) }
    }

    /// The groups that heads of a token are taken in, of q and of k.
    fn groups(&self, heads: u32) -> [usize; 2] {
        self.shape.heads.map(|count| count.div_ceil(heads as usize))
    }

    /// The lanes of a team.
    fn lanes(&self) -> usize {
        self.units.next_power_of_two()
    }

    /// Bytes of q or of k.
    fn bytes(&self, which: usize) -> usize {
        let QkShape { tokens, heads, columns, .. } = self.shape;
        tokens * heads[which] * columns * self.dtype.size_bytes()
    }

    /// What both passes have.
    fn arguments(
        &self,
        x: [*const c_void; 2],
        weight: [*const c_void; 2],
        indices: *const i32,
        tables: [*const f32; 2],
        to: [*mut c_void; 2],
    ) -> Result<Arguments> {
        let QkShape { tokens, heads, columns, pairs, positions } = self.shape;
        for (i, (name, result)) in
            [("q", "what q becomes"), ("k", "what k becomes")].into_iter().enumerate()
        {
            check_places((name, x[i]), (result, to[i]), self.bytes(i))?;
            check_alignment("weight", weight[i])?;
        }
        for (name, table) in ["cos", "sin"].into_iter().zip(tables) {
            check_alignment(name, table.cast())?;
        }
        Ok(Arguments {
            x,
            dy: [null(); 2],
            weight,
            to,
            rstd: [null_mut(); 2],
            dweight: [null_mut(); 2],
            indices,
            cos: tables[0],
            sin: tables[1],
            tokens: tokens as i64,
            columns: columns as i64,
            pairs: pairs as i64,
            positions: positions as i64,
            eps: self.norm.eps,
            heads: heads.map(|count| count as i32),
            groups: [0; 2],
            weight_dtype: self.weights.map(weight_dtype),
            zero_centred: self.norm.zero_centred.into(),
            units: self.units as u32,
            lanes: self.lanes() as u32,
        })
    }

    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn launch(
        &self,
        pass: Pass,
        extent: Extent,
        stream: RawStream,
        groups: [usize; 2],
        arguments: Arguments,
    ) -> Result<()> {
        let arguments = Arguments { groups: groups.map(|count| count as i32), ..arguments };
        // SAFETY: passed on from this function's contract.
        unsafe {
            let kernel = self.kernel(pass, stream)?;
            Driver::get()?.launch(kernel, extent, stream, &arguments)
        }
    }

    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn kernel(&self, pass: Pass, stream: RawStream) -> Result<Kernel> {
        let pass = if pass == Pass::Forward { "forward" } else { "backward" };
        let name = format!("qk_norm_rope_{pass}_{}_{}", self.layout, self.dtype);
        // SAFETY: passed on from this function's contract.
        unsafe { library::kept_kernel(&name, Device::current()?, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_lanes_of_a_warp_hold_are_taken() {
        let of = |layout, columns, pairs, dtype| {
            let shape = QkShape { tokens: 3, heads: [14, 2], columns, pairs, positions: 5 };
            QkNormRope::new(Norm::RMS, layout, shape, dtype, [DType::F32; 2])
                .map(|found| (found.units, found.lanes(), found.groups(4)))
        };
        let (halves, interleaved) = (Layout::Halves, Layout::Interleaved);
        assert_eq!(of(halves, 128, 64, DType::Bf16), Ok((8, 8, [4, 1])));
        assert_eq!(of(halves, 96, 16, DType::F16), Ok((10, 16, [4, 1])));
        assert_eq!(of(interleaved, 128, 64, DType::F32), Ok((32, 32, [4, 1])));
        // Halves that begin within a vector, and more units than lanes.
        for (layout, columns, pairs, dtype) in
            [(halves, 64, 12, DType::Bf16), (interleaved, 256, 128, DType::F32)]
        {
            let message = of(layout, columns, pairs, dtype).unwrap_err().to_string();
            let said = format!("heads have {columns} columns, of which {} turn", 2 * pairs);
            assert!(message.contains(&said), "{message}");
        }
    }
}
