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
        group_dstates: *mut f32,
        exponents: *mut f32,
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
        groups: u32,
        cluster: u32,
    }
}

numbers! {
    CHUNK: u32 = kLinearChunk, 64;
    SLICE: u32 = kLinearSlice, 32;
    SUM_COLUMNS: u32 = kLinearSumColumns, 64;
    THREADS: u32 = kLinearThreads, 256;
    PARTS: u32 = kLinearParts, 8;
    CLUSTER: u32 = kLinearCluster, 4;
    STEP_THREADS: u32 = kLinearStepThreads, 128;
    SUM_SHARED: u32 = kLinearSumShared, 115712;
    FORWARD_SHARED: u32 = kLinearForwardShared, 107520;
    CLUSTER_SUM_SHARED: u32 = kLinearClusterSumShared, 111632;
    STATES_SHARED: u32 = kLinearStatesShared, 99840;
    PREPARE_SHARED: u32 = kLinearPrepareShared, 56832;
    OUTPUTS_SHARED: u32 = kLinearOutputsShared, 87808;
    PULL_SHARED: u32 = kLinearPullShared, 71424;
    DELTA_CHAIN_SHARED: u32 = kDeltaChainShared, 124416;
    DELTA_REVERSE_SHARED: u32 = kDeltaReverseShared, 187904;
    DELTA_GRADIENTS_SHARED: u32 = kDeltaGradientsShared, 209440;
}

/// Threads of a CTA that multiplies for one chunk alone.
const CHUNK_THREADS: u32 = 128;
/// CTAs of a forward pass that fill a GPU without groups at once.
const FULL_CTAS: usize = 128;
/// The most CTAs of kernels that run again what is not finite.
const EXACT_CTAS: usize = 128;
/// Columns of values of kernels that add up dq and dk of heads within a cluster.
const CLUSTER_VALUES: usize = 64;
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
    /// `[B, H', N, P, K, V]` in bf16, of the delta rule.
    pub states: *mut c_void,
    /// `[B, H', N, 8192]` in bf16, of the delta rule.
    pub inverse: *mut c_void,
    /// `[B, H', N, P, 64, V]` in bf16, of the delta rule.
    pub values: *mut c_void,
}

/// Scratch of the backward pass alone.
#[derive(Clone, Copy, Debug)]
pub struct BackwardScratch {
    /// `[B, H', N, 2, K, V]` in bf16, of the delta rule.
    pub dstates: *mut c_void,
    /// `[B, H', N, 64, V]`, of the delta rule.
    pub dvalues_local: *mut f32,
    /// `[B, H', N, 2, 64, V]` in bf16, of the delta rule.
    pub dsolved: *mut c_void,
    /// `[B, H', groups, K, V]`, the gradients of states before groups, without b.
    pub group_dstates: *mut f32,
    /// `[B, H', chunks, 256]`, terms of dg, without b.
    pub exponents: *mut f32,
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
    /// States after groups from states of 0, and sums of these.
    GroupStates,
    Combine,
    /// o, and again of CTAs with NaN or inf.
    Forward,
    ForwardExact,
    /// As the four before, backwards.
    GroupGradients,
    CombineGradients,
    Backward,
    BackwardExact,
    DecayGradients,
    Prepare,
    Chain,
    Outputs,
    Pull,
    Reverse,
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

    /// The number of heads whose dq and dk a cluster of CTAs adds up.
    fn cluster(&self) -> usize {
        let Shape { key_heads, heads, values, .. } = self.shape;
        let shared = heads / key_heads;
        let adds =
            !self.delta && values == CLUSTER_VALUES && shared.is_multiple_of(CLUSTER as usize);
        if adds { CLUSTER as usize } else { 1 }
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
            (false, false) => &[K::GroupStates, K::Combine, K::Forward, K::ForwardExact],
            (false, true) => &[K::Prepare, K::Chain, K::Outputs],
            (true, false) => &[
                K::GroupGradients,
                K::CombineGradients,
                K::Backward,
                K::BackwardExact,
                K::Heads,
                K::DecayGradients,
            ],
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
            use Kernel as K;
            let kernels = [K::GroupStates, K::Combine, K::Forward, K::ForwardExact];
            // Enough heads run one group after another.
            let is_full = self.ctas(K::Forward, 0, 1) >= FULL_CTAS;
            let first = if is_full || self.groups() == 1 { 2 } else { 0 };
            if first > 0 {
                all.groups = 1;
            }
            for &kernel in &kernels[first..] {
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
            ("group_dstates", more.group_dstates.cast_const().cast()),
            ("exponents", more.exponents.cast_const().cast()),
            ("dq_parts", dq_parts.cast_const().cast()),
            ("dk_parts", dk_parts.cast_const().cast()),
        ] {
            check_alignment(name, array)?;
        }
        let stride = self.state_elements() as i64;
        // Else a cluster has all heads that share keys.
        let has_parts = self.shape.heads / self.shape.key_heads > self.cluster();
        let mut all = Arguments {
            dout: cotangents.o,
            dstates: more.dstates,
            dvalues_local: more.dvalues_local,
            dsolved: more.dsolved,
            group_dstates: more.group_dstates,
            exponents: more.exponents,
            dq: gradients.q,
            dk: gradients.k,
            dv: gradients.v,
            dg: gradients.g,
            db: gradients.b.unwrap_or(null_mut()),
            dq_parts: if has_parts { dq_parts } else { null_mut() },
            dk_parts: if has_parts { dk_parts } else { null_mut() },
            dbefore: gradients.initial_state,
            dafter_stride: stride,
            dbefore_stride: stride,
            ..self.arguments(&operands, &scratch)?
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Kernel::Decays, stream, &all) }?;
        if !self.delta {
            self.begin(0, &mut all, operands.initial_state, null());
            all.after = cotangents.states.cast_mut();
            all.dafter = cotangents.final_state;
            // SAFETY: passed on from this function's contract.
            return unsafe { self.backward_without_b(stream, all) };
        }
        for group in (0..self.groups()).rev() {
            self.begin(group, &mut all, operands.initial_state, cotangents.states);
            let is_last = group + 1 == self.groups();
            all.dafter = if is_last { cotangents.final_state } else { gradients.initial_state };
            let kernels =
                [Kernel::Prepare, Kernel::Chain, Kernel::Pull, Kernel::Reverse, Kernel::Gradients];
            for &kernel in kernels.iter().chain(has_parts.then_some(&Kernel::Heads)) {
                // SAFETY: passed on from this function's contract.
                unsafe { self.launch(kernel, stream, &all) }?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn backward_without_b(&self, stream: RawStream, mut all: Arguments) -> Result<()> {
        use Kernel as K;
        let has_parts = !all.dq_parts.is_null();
        // Parts of dq and dk are added before those of the groups before overwrite them. There is room for a group's of
        // each head, or for those of as many groups as a cluster has heads.
        let at_once = if has_parts { self.cluster() } else { self.groups() }.max(1);
        // A group alone begins with the gradients of states that the last one wrote.
        if at_once > 1 && self.groups() > 1 {
            for kernel in [K::GroupGradients, K::CombineGradients] {
                // SAFETY: passed on from this function's contract.
                unsafe { self.launch(kernel, stream, &all) }?;
            }
        }
        for first in (0..self.groups()).step_by(at_once).rev() {
            all.first = (first * self.shape.group) as u32;
            all.groups = at_once.min(self.groups() - first) as u32;
            let kernels = [K::Backward, K::BackwardExact];
            for &kernel in kernels.iter().chain(has_parts.then_some(&K::Heads)) {
                // SAFETY: passed on from this function's contract.
                unsafe { self.launch(kernel, stream, &all) }?;
            }
        }
        (all.first, all.groups) = (0, self.groups() as u32);
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(K::DecayGradients, stream, &all) }
    }

    /// The number of elements of a head's state.
    fn state_elements(&self) -> usize {
        self.shape.keys * self.shape.values
    }

    /// The number of slices of K.
    fn key_slices(&self) -> usize {
        self.shape.keys / SUM_COLUMNS as usize
    }

    /// CTAs of a kernel with one for each head and 32 columns of values.
    fn slices(&self) -> usize {
        self.shape.sequences * self.shape.heads * (self.shape.values / SLICE as usize)
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
            group_dstates: null_mut(),
            exponents: null_mut(),
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
            groups: if self.delta { 1 } else { self.groups() as u32 },
            cluster: self.cluster() as u32,
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
            Kernel::GroupStates => "group_states",
            Kernel::Combine => "combine",
            Kernel::Forward => "forward",
            Kernel::ForwardExact => "forward_exact",
            Kernel::GroupGradients => "group_gradients",
            Kernel::CombineGradients => "combine_gradients",
            Kernel::Backward => "backward",
            Kernel::BackwardExact => "backward_exact",
            Kernel::DecayGradients => "decay_gradients",
            Kernel::Pull => "pull",
            Kernel::Chain => "chain",
            Kernel::Reverse => "reverse",
            Kernel::Outputs => "outputs",
            Kernel::Gradients => "gradients",
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
        // Of a chunk, rows of `width` columns for each operand of scores, those of a slice, and sums of g.
        let wide = |width: usize| chunk * width * 2;
        let stage = |width, count| count * wide(width) + wide(SUM_COLUMNS as usize) + 2 * chunk * 4;
        // Two chunks, parts of a state, and where there is room the rows that leave.
        let sum = |width, parts| {
            let bytes = 2 * stage(width, 2) + parts * wide(width);
            bytes + if bytes <= 104 << 10 { wide(SUM_COLUMNS as usize) } else { 0 }
        };
        // Without rows, three or four chunks with all slices.
        let states = || {
            let own =
                (self.key_slices() - 1) * wide(SUM_COLUMNS as usize) + stage(self.shape.values, 1);
            own * if own > (24 << 10) + 512 { 3 } else { 4 }
        };
        match kernel {
            Kernel::Step
            | Kernel::Decays
            | Kernel::Heads
            | Kernel::Combine
            | Kernel::CombineGradients => 0,
            Kernel::GroupStates | Kernel::GroupGradients => states(),
            Kernel::Forward | Kernel::ForwardExact => sum(self.shape.keys, 1),
            Kernel::Backward | Kernel::BackwardExact => {
                // Of a cluster, two chunks' rows of dq or dk in float32, with gaps, and two barriers.
                let inbox = if self.cluster() > 1 { 2 * chunk * (64 + 8) * 4 + 16 } else { 0 };
                (sum(self.shape.values, 2) + inbox).max(sum(self.shape.keys, 2))
            }
            Kernel::DecayGradients => self.shape.group * 4,
            Kernel::Prepare => key_bytes + 2 * chunk * (chunk + 4) * 4 + 3 * 16 * 20 * 4 + decays,
            Kernel::Chain => {
                2 * (key_bytes + slice_bytes + decays + 2 * square)
                    + 2 * (state_slice + 2 * slice_bytes)
            }
            Kernel::Reverse => {
                let dvalues_local = chunk * (slice + 4) * 4;
                let stage = 2 * key_bytes + slice_bytes + decays + 2 * square;
                2 * (stage + dvalues_local) + 2 * (state_slice + 3 * slice_bytes)
            }
            Kernel::Outputs => 2 * key_bytes + value_bytes + state + decays,
            Kernel::Pull => 2 * key_bytes + value_bytes + 2 * square + decays,
            Kernel::Gradients => {
                let stage = 4 * state_slice + 5 * slice_bytes;
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

    /// CTAs of a kernel, for groups of `chunks`.
    fn ctas(&self, kernel: Kernel, chunks: usize, groups: usize) -> usize {
        let Shape { sequences, key_heads, heads, values, .. } = self.shape;
        let head_groups = sequences * heads * groups;
        let (key_slices, value_slices) = (self.key_slices(), values / SUM_COLUMNS as usize);
        match kernel {
            Kernel::Decays => (sequences * heads * self.chunks()).div_ceil(THREADS as usize / 32),
            Kernel::Step => self.slices().div_ceil(STEP_THREADS as usize / 32),
            Kernel::Chain | Kernel::Reverse => self.slices(),
            // The walk with rows has the last group's.
            Kernel::GroupStates | Kernel::GroupGradients => head_groups - sequences * heads,
            Kernel::DecayGradients => head_groups,
            Kernel::Forward => head_groups * value_slices,
            Kernel::Backward => head_groups * (2 * key_slices + value_slices),
            // They look for what there is to run.
            Kernel::ForwardExact => self.ctas(Kernel::Forward, chunks, groups).min(EXACT_CTAS),
            Kernel::BackwardExact => self.ctas(Kernel::Backward, chunks, groups).min(EXACT_CTAS),
            Kernel::Combine | Kernel::CombineGradients => {
                (sequences * heads * self.state_elements()).div_ceil(4 * THREADS as usize)
            }
            Kernel::Heads if self.delta => sequences * key_heads * chunks * PARTS as usize,
            Kernel::Heads => sequences * key_heads * chunks * groups * PARTS as usize,
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
        let ctas = self.ctas(kernel, arguments.chunks as usize, arguments.groups as usize);
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
            cluster: match kernel {
                Kernel::Backward | Kernel::BackwardExact if self.cluster() > 1 => {
                    Some(self.cluster() as u32)
                }
                _ => None,
            },
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
        let call = LinearAttention::new(SHAPE, true, 1.0).unwrap();
        for (kernel, right) in [
            (Kernel::Backward, SUM_SHARED),
            (Kernel::Forward, FORWARD_SHARED),
            (Kernel::GroupStates, STATES_SHARED),
            (Kernel::Prepare, PREPARE_SHARED),
            (Kernel::Outputs, OUTPUTS_SHARED),
            (Kernel::Pull, PULL_SHARED),
            (Kernel::Chain, DELTA_CHAIN_SHARED),
            (Kernel::Reverse, DELTA_REVERSE_SHARED),
            (Kernel::Gradients, DELTA_GRADIENTS_SHARED),
        ] {
            assert_eq!(call.shared_bytes(kernel), right as usize, "{kernel:?}");
        }
        let shape = Shape { heads: 24, keys: 64, values: 64, ..SHAPE };
        let call = LinearAttention::new(shape, false, 1.0).unwrap();
        assert_eq!(call.cluster(), 4);
        assert_eq!(call.shared_bytes(Kernel::Backward), CLUSTER_SUM_SHARED as usize);
    }

    #[test]
    fn groups_cover_all_chunks() {
        let call = LinearAttention::new(SHAPE, true, 1.0).unwrap();
        assert_eq!((call.chunks(), call.groups(), call.slices()), (16, 4, 24));
        assert_eq!(call.ctas(Kernel::Heads, 4, 4), 64);
        assert_eq!(call.ctas(Kernel::Decays, 4, 4), 12);
        assert_eq!(call.ctas(Kernel::Forward, 4, 4), 48);
        assert_eq!(call.ctas(Kernel::Backward, 4, 1), 36);
        assert_eq!(call.ctas(Kernel::Combine, 4, 4), 96);
        assert_eq!(call.ctas(Kernel::Step, 1, 1), 6);
        assert_eq!(call.name(Kernel::Chain), "linear_attention_chain_128_128");
        let message = |shape| LinearAttention::new(shape, false, 1.0).unwrap_err().to_string();
        assert_eq!(message(Shape { keys: 96, ..SHAPE }), "K is 96; it must be 64 or 128");
        assert_eq!(message(Shape { key_heads: 2, ..SHAPE }), "H' is 3; it must be a multiple of H");
    }
}
