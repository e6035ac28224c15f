//! Launches the kernels of linear attention and the gated delta rule in bf16.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use crate::driver::{Driver, Extent, RawStream};
use crate::{Device, Error, Result, check_alignment, library};

mirror! {
    /// See kernels/linear_attention.cuh.
    struct Arguments = LinearAttentionArguments {
        q: *const c_void,
        k: *const c_void,
        v: *const c_void,
        g: *const f32,
        b: *const f32,
        dout: *const c_void,
        before: *const f32,
        after: *mut f32,
        dafter: *const f32,
        dbefore: *mut f32,
        decays: *mut f32,
        inverse: *mut c_void,
        states: *mut c_void,
        values: *mut c_void,
        dvalues_local: *mut f32,
        dstates: *mut c_void,
        dsolved: *mut c_void,
        out: *mut c_void,
        dq: *mut c_void,
        dk: *mut c_void,
        dv: *mut c_void,
        dg: *mut f32,
        db: *mut f32,
        dq_parts: *mut f32,
        dk_parts: *mut f32,
        tokens: i64,
        before_stride: i64,
        after_stride: i64,
        dafter_stride: i64,
        dbefore_stride: i64,
        key_heads: u32,
        heads: u32,
        all_chunks: u32,
        first: u32,
        chunks: u32,
        sequences: u32,
        scale: f32,
        reversed: u32,
    }
}

numbers! {
    CHUNK: u32 = kLinearChunk, 64;
    SLICE: u32 = kLinearSlice, 32;
    THREADS: u32 = kLinearThreads, 256;
    PARTS: u32 = kLinearParts, 8;
    STEP_THREADS: u32 = kLinearStepThreads, 128;
    FORWARD_SHARED: u32 = kLinearForwardShared, 101888;
    PREPARE_SHARED: u32 = kLinearPrepareShared, 56832;
    CHAIN_SHARED: u32 = kLinearChainShared, 100688;
    REVERSE_SHARED: u32 = kLinearReverseShared, 100816;
    OUTPUTS_SHARED: u32 = kLinearOutputsShared, 87808;
    PULL_SHARED: u32 = kLinearPullShared, 71424;
    GRADIENTS_SHARED: u32 = kLinearGradientsShared, 178784;
    DELTA_CHAIN_SHARED: u32 = kDeltaChainShared, 124480;
    DELTA_REVERSE_SHARED: u32 = kDeltaReverseShared, 188000;
    DELTA_GRADIENTS_SHARED: u32 = kDeltaGradientsShared, 209440;
}

/// Threads of a CTA that multiplies for one chunk alone.
const CHUNK_THREADS: u32 = 128;
/// Columns of keys and of values that kernels have.
const WIDTHS: [usize; 2] = [64, 128];

/// The shape of a call, in tokens T, heads of keys H and of values H', and columns K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// B.
    pub sequences: usize,
    /// T.
    pub tokens: usize,
    /// H, which divides H'.
    pub key_heads: usize,
    /// H'.
    pub heads: usize,
    /// K, 64 or 128.
    pub keys: usize,
    /// V, 64 or 128.
    pub values: usize,
    /// Chunks of 64 tokens in a group.
    pub group: usize,
}

/// What both passes read, on the device.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// `[B, T, H, K]`.
    pub q: *const c_void,
    /// `[B, T, H, K]`.
    pub k: *const c_void,
    /// `[B, T, H', V]`.
    pub v: *const c_void,
    /// `[B, T, H']`, at most 0 and no less than -128.
    pub g: *const f32,
    /// `[B, T, H']`, of the delta rule.
    pub b: Option<*const f32>,
    /// `[B, H', K, V]`.
    pub initial_state: *const f32,
}

/// What the forward pass writes.
#[derive(Clone, Copy, Debug)]
pub struct Outputs {
    /// `[B, T, H', V]`.
    pub o: *mut c_void,
    /// `[B, H', groups, K, V]`, the state after each group.
    pub states: *mut f32,
}

/// Scratch of both passes. N is the number of chunks of a group, P the parts in bf16 that a number has: 2 in the backward
/// pass, else 1.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// `[B, H', chunks, 192]`.
    pub decays: *mut f32,
    /// `[B, H', N, P, K, V]` in bf16, but for a forward pass without b.
    pub states: *mut c_void,
    /// `[B, H', N, 8192]` in bf16, of the delta rule.
    pub inverse: *mut c_void,
    /// `[B, H', N, P, 64, V]` in bf16, of the delta rule.
    pub values: *mut c_void,
}

/// Scratch of the backward pass alone.
#[derive(Clone, Copy, Debug)]
pub struct BackwardScratch {
    /// `[B, H', N, 2, K, V]` in bf16.
    pub dstates: *mut c_void,
    /// `[B, H', N, 64, V]`, of the delta rule.
    pub dvalues_local: *mut f32,
    /// `[B, H', N, 2, 64, V]` in bf16, of the delta rule.
    pub dsolved: *mut c_void,
    /// `[B, H', N, 64, K]` of q and of k, where heads share keys.
    pub parts: Option<[*mut f32; 2]>,
}

/// Operands of the backward pass alone.
#[derive(Clone, Copy, Debug)]
pub struct Cotangents {
    /// `[B, T, H', V]`.
    pub o: *const c_void,
    /// `[B, H', K, V]`.
    pub final_state: *const f32,
    /// `[B, H', groups, K, V]`, as the forward pass wrote them.
    pub states: *const f32,
}

/// The gradients, each of the shape of its array.
#[derive(Clone, Copy, Debug)]
pub struct Gradients {
    /// Of q.
    pub q: *mut c_void,
    /// Of k.
    pub k: *mut c_void,
    /// Of v.
    pub v: *mut c_void,
    /// Of g.
    pub g: *mut f32,
    /// Of b.
    pub b: Option<*mut f32>,
    /// Of the initial state.
    pub initial_state: *mut f32,
}

/// Linear attention, or the delta rule, of one shape on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct LinearAttention {
    shape: Shape,
    delta: bool,
    scale: f32,
}

/// A kernel of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// o and the state after one token.
    Step,
    Decays,
    Forward,
    /// `Forward` again, of CTAs with NaN or inf.
    ForwardExact,
    /// `Forward` with a CTA for each group: its states, sums of these, and o.
    ForwardSums,
    Combine,
    ForwardOutputs,
    ForwardOutputsExact,
    Prepare,
    Chain,
    Outputs,
    Pull,
    Reverse,
    Chains,
    Gradients,
    Heads,
}

impl LinearAttention {
    /// Plans a call for arrays of a shape.
    ///
    /// # Errors
    /// A shape that kernels do not have, or arrays with more chunks than a grid.
    pub fn new(shape: Shape, delta: bool, scale: f32) -> Result<Self> {
        let Shape { sequences, tokens, key_heads, heads, keys, values, group } = shape;
        for (name, value) in [("K", keys), ("V", values)] {
            if !WIDTHS.contains(&value) {
                return Err(option(name, value, "64 or 128"));
            }
        }
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            return Err(option("H'", heads, "a multiple of H"));
        }
        if group == 0 {
            return Err(option("group", group, "at least 1"));
        }
        let chunks = tokens.div_ceil(CHUNK as usize);
        let each = [sequences, heads, chunks.max(8), 8]
            .into_iter()
            .try_fold(1_usize, |all, one| all.checked_mul(one.max(1)));
        if each.is_none_or(|all| i32::try_from(all).is_err()) {
            return Err(option("B H' T", sequences * heads, "few enough for a grid of chunks"));
        }
        Ok(Self { shape, delta, scale })
    }

    /// The number of groups of chunks.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.chunks().div_ceil(self.shape.group)
    }

    fn chunks(&self) -> usize {
        self.shape.tokens.div_ceil(CHUNK as usize)
    }

    /// Loads the kernels of the forward pass, or of the backward pass, so that running it has only to launch them.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, backward: bool, stream: *mut c_void) -> Result<()> {
        use Kernel as K;
        let device = Device::current()?;
        let all: &[Kernel] = match (backward, self.delta) {
            (false, _) if self.shape.tokens == 1 => &[K::Step],
            (false, false) => self.forward_kernels(device),
            (false, true) => &[K::Prepare, K::Chain, K::Outputs],
            (true, false) => &[K::Chains, K::Gradients, K::Heads],
            (true, true) => &[K::Prepare, K::Chain, K::Pull, K::Reverse, K::Gradients, K::Heads],
        };
        for &kernel in all.iter().chain(&[K::Decays]) {
            // SAFETY: passed on from this function's contract.
            unsafe { library::kept_kernel(&self.name(kernel), device, stream) }?;
        }
        Ok(())
    }

    /// Has `stream` write o and the state after each group.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16, a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays of
    /// these shapes on its device, which nothing else touches until it has run what was launched here.
    pub unsafe fn forward(
        &self,
        stream: *mut c_void,
        operands: Operands,
        outputs: Outputs,
        scratch: Scratch,
    ) -> Result<()> {
        for (name, array) in
            [("o", outputs.o.cast_const()), ("states", outputs.states.cast_const().cast())]
        {
            check_alignment(name, array)?;
        }
        let mut all = Arguments { out: outputs.o, ..self.arguments(&operands, &scratch)? };
        all.after_stride = (self.groups() * self.state_elements()) as i64;
        if self.shape.tokens == 1 {
            self.begin(0, &mut all, operands.initial_state, outputs.states);
            all.after = outputs.states;
            // SAFETY: passed on from this function's contract.
            return unsafe { self.launch(Kernel::Step, stream, &all) };
        }
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Kernel::Decays, stream, &all) }?;
        if !self.delta {
            self.begin(0, &mut all, operands.initial_state, outputs.states);
            all.after = outputs.states;
            for &kernel in self.forward_kernels(Device::current()?) {
                // SAFETY: passed on from this function's contract.
                unsafe { self.launch(kernel, stream, &all) }?;
            }
            return Ok(());
        }
        for group in 0..self.groups() {
            self.begin(group, &mut all, operands.initial_state, outputs.states);
            all.after = outputs.states.wrapping_add(group * self.state_elements());
            for kernel in [Kernel::Prepare, Kernel::Chain, Kernel::Outputs] {
                // SAFETY: passed on from this function's contract.
                unsafe { self.launch(kernel, stream, &all) }?;
            }
        }
        Ok(())
    }

    /// Has `stream` write all gradients.
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
        cotangents: Cotangents,
        gradients: Gradients,
        scratch: (Scratch, BackwardScratch),
    ) -> Result<()> {
        let (scratch, more) = scratch;
        let [dq_parts, dk_parts] = more.parts.unwrap_or([null_mut(); 2]);
        let shares = self.shape.heads != self.shape.key_heads;
        if shares && more.parts.is_none() {
            return Err(option("parts", 0, "given where heads share keys"));
        }
        for (name, array) in [
            ("do", cotangents.o),
            ("dfinal_state", cotangents.final_state.cast()),
            ("states", cotangents.states.cast()),
            ("dq", gradients.q.cast_const()),
            ("dk", gradients.k.cast_const()),
            ("dv", gradients.v.cast_const()),
            ("dinitial_state", gradients.initial_state.cast_const().cast()),
            ("dstates", more.dstates.cast_const()),
            ("dvalues_local", more.dvalues_local.cast_const().cast()),
            ("dsolved", more.dsolved.cast_const()),
            ("dq_parts", dq_parts.cast_const().cast()),
            ("dk_parts", dk_parts.cast_const().cast()),
        ] {
            check_alignment(name, array)?;
        }
        let stride = self.state_elements() as i64;
        let mut all = Arguments {
            dout: cotangents.o,
            dstates: more.dstates,
            dvalues_local: more.dvalues_local,
            dsolved: more.dsolved,
            dq: gradients.q,
            dk: gradients.k,
            dv: gradients.v,
            dg: gradients.g,
            db: gradients.b.unwrap_or(null_mut()),
            dq_parts: if shares { dq_parts } else { null_mut() },
            dk_parts: if shares { dk_parts } else { null_mut() },
            dbefore: gradients.initial_state,
            dafter_stride: stride,
            dbefore_stride: stride,
            reversed: self.slices() as u32,
            ..self.arguments(&operands, &scratch)?
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Kernel::Decays, stream, &all) }?;
        for group in (0..self.groups()).rev() {
            self.begin(group, &mut all, operands.initial_state, cotangents.states);
            let is_last = group + 1 == self.groups();
            all.dafter = if is_last { cotangents.final_state } else { gradients.initial_state };
            let kernels = if self.delta {
                &[Kernel::Prepare, Kernel::Chain, Kernel::Pull, Kernel::Reverse, Kernel::Gradients]
                    [..]
            } else {
                &[Kernel::Chains, Kernel::Gradients]
            };
            for &kernel in kernels.iter().chain(shares.then_some(&Kernel::Heads)) {
                // SAFETY: passed on from this function's contract.
                unsafe { self.launch(kernel, stream, &all) }?;
            }
        }
        Ok(())
    }

    /// The number of elements of a head's state.
    fn state_elements(&self) -> usize {
        self.shape.keys * self.shape.values
    }

    /// CTAs of a kernel with one for each head and 32 columns of values.
    fn slices(&self) -> usize {
        self.shape.sequences * self.shape.heads * (self.shape.values / SLICE as usize)
    }

    /// The kernels of a forward pass without b after the decays. Where half of the multiprocessors would be idle, groups run
    /// at once, for a second pass over k and v.
    fn forward_kernels(&self, device: &Device) -> &'static [Kernel] {
        use Kernel as K;
        let is_full = 2 * self.slices() > device.limits().multiprocessors as usize;
        if is_full || self.groups() == 1 {
            &[K::Forward, K::ForwardExact]
        } else {
            &[K::ForwardSums, K::Combine, K::ForwardOutputs, K::ForwardOutputsExact]
        }
    }

    /// Sets the arguments of a group, and those of the state before it.
    fn begin(&self, group: usize, all: &mut Arguments, initial: *const f32, states: *const f32) {
        let first = group * self.shape.group;
        all.first = first as u32;
        all.chunks = self.shape.group.min(self.chunks() - first) as u32;
        let elements = self.state_elements();
        (all.before, all.before_stride) = match group {
            0 => (initial, elements as i64),
            _ => (states.wrapping_add((group - 1) * elements), (self.groups() * elements) as i64),
        };
    }

    /// The arguments that do not depend on the group or the pass.
    fn arguments(&self, operands: &Operands, scratch: &Scratch) -> Result<Arguments> {
        let Shape { sequences, tokens, key_heads, heads, .. } = self.shape;
        let Operands { q, k, v, g, b, initial_state } = *operands;
        if b.is_some() != self.delta {
            return Err(option("b", usize::from(b.is_some()), "given for the delta rule alone"));
        }
        for (name, array) in [
            ("q", q),
            ("k", k),
            ("v", v),
            ("initial_state", initial_state.cast()),
            ("decays", scratch.decays.cast_const().cast()),
            ("inverse", scratch.inverse.cast_const()),
            ("chunk_states", scratch.states.cast_const()),
            ("values", scratch.values.cast_const()),
        ] {
            check_alignment(name, array)?;
        }
        Ok(Arguments {
            q,
            k,
            v,
            g,
            b: b.unwrap_or(null()),
            dout: null(),
            before: null(),
            after: null_mut(),
            dafter: null(),
            dbefore: null_mut(),
            decays: scratch.decays,
            inverse: scratch.inverse,
            states: scratch.states,
            values: scratch.values,
            dvalues_local: null_mut(),
            dstates: null_mut(),
            dsolved: null_mut(),
            out: null_mut(),
            dq: null_mut(),
            dk: null_mut(),
            dv: null_mut(),
            dg: null_mut(),
            db: null_mut(),
            dq_parts: null_mut(),
            dk_parts: null_mut(),
            tokens: tokens as i64,
            before_stride: 0,
            after_stride: 0,
            dafter_stride: 0,
            dbefore_stride: 0,
            key_heads: key_heads as u32,
            heads: heads as u32,
            all_chunks: self.chunks() as u32,
            first: 0,
            chunks: 0,
            sequences: sequences as u32,
            scale: self.scale,
            reversed: 0,
        })
    }

    /// The name of a kernel.
    fn name(&self, kernel: Kernel) -> String {
        let Shape { keys, values, .. } = self.shape;
        let name = match kernel {
            Kernel::Decays => return "linear_attention_decays".into(),
            Kernel::Prepare => return format!("linear_attention_prepare_{keys}"),
            Kernel::Heads => return format!("linear_attention_heads_{keys}"),
            Kernel::Step => "step",
            Kernel::Forward => "forward",
            Kernel::ForwardExact => "forward_exact",
            Kernel::ForwardSums => "forward_sums",
            Kernel::Combine => "combine",
            Kernel::ForwardOutputs => "forward_outputs",
            Kernel::ForwardOutputsExact => "forward_outputs_exact",
            Kernel::Pull => "pull",
            Kernel::Chains => "chains",
            Kernel::Chain => "chain",
            Kernel::Reverse => "reverse",
            Kernel::Outputs => "outputs",
            Kernel::Gradients if self.delta => "gradients_delta",
            Kernel::Gradients => "gradients_plain",
        };
        format!("linear_attention_{name}_{keys}_{values}")
    }

    /// Bytes of shared memory of a kernel's CTA.
    fn shared_bytes(&self, kernel: Kernel) -> usize {
        // Rows have eight elements more than columns.
        let rows = |rows: usize, columns: usize| rows * (columns + 8) * 2;
        let (chunk, slice) = (CHUNK as usize, SLICE as usize);
        let (key_bytes, value_bytes) =
            (rows(chunk, self.shape.keys), rows(chunk, self.shape.values));
        let state = rows(self.shape.keys, self.shape.values);
        let (square, slice_bytes) = (rows(chunk, chunk), rows(chunk, slice));
        let state_slice = rows(self.shape.keys, slice);
        let decays = 3 * chunk * 4;
        // An array that the delta rule alone has is a vector without it.
        let with_delta = |bytes: usize| if self.delta { bytes } else { 16 };
        let with_vector = |bytes: usize| 16 + if self.delta { bytes } else { 0 };
        let stages = if self.delta { 2 } else { 3 };
        match kernel {
            Kernel::Step | Kernel::Decays | Kernel::Heads | Kernel::Combine => 0,
            Kernel::Forward
            | Kernel::ForwardExact
            | Kernel::ForwardSums
            | Kernel::ForwardOutputs
            | Kernel::ForwardOutputsExact => {
                2 * (2 * key_bytes + slice_bytes + decays) + 2 * state_slice
            }
            Kernel::Prepare => key_bytes + 2 * chunk * (chunk + 4) * 4 + 3 * 16 * 20 * 4 + decays,
            Kernel::Chain => {
                stages * (key_bytes + slice_bytes + decays + with_vector(2 * square))
                    + 2 * (state_slice + with_vector(slice_bytes) + slice_bytes)
            }
            Kernel::Reverse => {
                let dvalues_local = with_delta(chunk * (slice + 4) * 4);
                let stage = key_bytes
                    + slice_bytes
                    + decays
                    + with_delta(key_bytes)
                    + with_vector(2 * square);
                stages * (stage + dvalues_local)
                    + 2 * (state_slice + slice_bytes + 2 * with_vector(slice_bytes))
            }
            Kernel::Chains => {
                self.shared_bytes(Kernel::Chain).max(self.shared_bytes(Kernel::Reverse))
            }
            Kernel::Outputs => 2 * key_bytes + value_bytes + state + decays,
            Kernel::Pull => 2 * key_bytes + value_bytes + 2 * square + decays,
            Kernel::Gradients => {
                let solved = if self.delta { 4 * slice_bytes } else { slice_bytes + 2 * 16 };
                let stage = 4 * state_slice + slice_bytes + solved;
                let sums = (2 + 4 + 2 + 2 + 5) * chunk * 4 + 8 * 4;
                2 * stage + 2 * key_bytes + 4 * square + decays + sums
            }
        }
    }

    /// Threads of a kernel's CTA.
    fn threads(&self, kernel: Kernel) -> u32 {
        match kernel {
            Kernel::Step => STEP_THREADS,
            Kernel::Prepare | Kernel::Outputs | Kernel::Pull => CHUNK_THREADS,
            _ => THREADS,
        }
    }

    /// CTAs of a kernel, for a group of `chunks`.
    fn ctas(&self, kernel: Kernel, chunks: usize) -> usize {
        let Shape { sequences, key_heads, heads, .. } = self.shape;
        match kernel {
            Kernel::Decays => (sequences * heads * self.chunks()).div_ceil(THREADS as usize / 32),
            Kernel::Step => self.slices().div_ceil(STEP_THREADS as usize / 32),
            Kernel::Forward | Kernel::ForwardExact | Kernel::Chain | Kernel::Reverse => {
                self.slices()
            }
            Kernel::Chains => 2 * self.slices(),
            Kernel::ForwardSums | Kernel::ForwardOutputs | Kernel::ForwardOutputsExact => {
                self.groups() * self.slices()
            }
            Kernel::Combine => {
                (sequences * heads * self.state_elements()).div_ceil(4 * THREADS as usize)
            }
            Kernel::Heads => sequences * key_heads * chunks * PARTS as usize,
            Kernel::Prepare | Kernel::Outputs | Kernel::Pull | Kernel::Gradients => {
                sequences * heads * chunks
            }
        }
    }

    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn launch(
        &self,
        kernel: Kernel,
        stream: RawStream,
        arguments: &Arguments,
    ) -> Result<()> {
        let ctas = self.ctas(kernel, arguments.chunks as usize);
        if ctas == 0 {
            return Ok(());
        }
        let device = Device::current()?;
        let (needed, most) = (self.shared_bytes(kernel), device.limits().shared_bytes_per_block);
        if needed > most as usize {
            return Err(Error::SharedMemory { needed, most });
        }
        let extent = Extent {
            ctas: ctas as u32,
            rows: 1,
            threads: self.threads(kernel),
            shared_bytes: needed as u32,
            cluster: None,
        };
        // SAFETY: passed on from this function's contract.
        unsafe {
            let kernel = library::kept_kernel(&self.name(kernel), device, stream)?;
            Driver::get()?.launch(kernel, extent, stream, arguments)
        }
    }
}

fn option(name: &'static str, value: usize, requirement: &'static str) -> Error {
    Error::Problem(xentile::Error::Option { name, value: value as f64, requirement })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        sequences: 2,
        tokens: 1000,
        key_heads: 1,
        heads: 3,
        keys: 128,
        values: 128,
        group: 4,
    };

    #[test]
    fn shared_memory_is_that_of_kernels() {
        let [plain, delta] =
            [false, true].map(|delta| LinearAttention::new(SHAPE, delta, 1.0).unwrap());
        for (call, kernel, right) in [
            (plain, Kernel::Forward, FORWARD_SHARED),
            (delta, Kernel::Prepare, PREPARE_SHARED),
            (plain, Kernel::Chain, CHAIN_SHARED),
            (plain, Kernel::Reverse, REVERSE_SHARED),
            (plain, Kernel::Chains, REVERSE_SHARED),
            (delta, Kernel::Outputs, OUTPUTS_SHARED),
            (delta, Kernel::Pull, PULL_SHARED),
            (plain, Kernel::Gradients, GRADIENTS_SHARED),
            (delta, Kernel::Chain, DELTA_CHAIN_SHARED),
            (delta, Kernel::Reverse, DELTA_REVERSE_SHARED),
            (delta, Kernel::Gradients, DELTA_GRADIENTS_SHARED),
        ] {
            assert_eq!(call.shared_bytes(kernel), right as usize, "{kernel:?}");
        }
    }

    #[test]
    fn groups_cover_all_chunks() {
        let call = LinearAttention::new(SHAPE, true, 1.0).unwrap();
        assert_eq!((call.chunks(), call.groups(), call.slices()), (16, 4, 24));
        assert_eq!(call.ctas(Kernel::Heads, 4), 64);
        assert_eq!(call.ctas(Kernel::Decays, 4), 12);
        assert_eq!(call.ctas(Kernel::ForwardSums, 4), 96);
        assert_eq!(call.ctas(Kernel::Combine, 4), 96);
        assert_eq!(call.ctas(Kernel::Step, 1), 6);
        assert_eq!(call.name(Kernel::Chain), "linear_attention_chain_128_128");
        let message = |shape| LinearAttention::new(shape, false, 1.0).unwrap_err().to_string();
        assert_eq!(message(Shape { keys: 96, ..SHAPE }), "K is 96; it must be 64 or 128");
        assert_eq!(message(Shape { key_heads: 2, ..SHAPE }), "H' is 3; it must be a multiple of H");
    }
}
