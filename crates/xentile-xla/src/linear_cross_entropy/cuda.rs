//! Linear cross-entropy on NVIDIA GPUs.

use std::ptr::{null, null_mut};

use xentile::linear_cross_entropy::VocabAxis;
use xentile_cuda::cross_entropy::{Cotangents, DistributionOutputs, SavedLse, TokenOutputs};
use xentile_cuda::linear_cross_entropy::{
    Extents, Gradients, Linear, Operands, SavedColumns, Scratch,
};
use xla_ffi::{BufferMut, Context, DType, Decoder, OnDevice, Parameter, Result};

use super::{check_tokens, shape, vocab_axis};
use crate::arguments::{check_shape, invalid};
use crate::cross_entropy::cuda::{distribution_outputs, to_labels};
use crate::cross_entropy::{Extent, Options, Requested};
use crate::cuda::{Any, AnyMut, Floats, FloatsMut, failed, to_dtype};
use crate::dtype;
use crate::target::target_list;

target_list! {
    CUDA;

    super::FORWARD: fn xentile_linear_cross_entropy_forward_cuda = forward(
        hidden, weight, labels, bias, loss, logps, lse, lse_low, scratch, options, tiling, every_token,
        context,
    );
    super::BACKWARD: fn xentile_linear_cross_entropy_backward_cuda = backward(
        hidden, weight, labels, lse, lse_low, dloss, dlogps, dlse, bias, dhidden, dweight, scratch,
        dbias, options, tiling, context,
    );
    super::FUSED: fn xentile_linear_cross_entropy_fused_cuda = fused(
        hidden, weight, labels, dloss, bias, loss, lse, lse_low, dhidden, dweight, scratch, dbias,
        options, tiling, every_token, leaves_hidden, context,
    );
    super::HIDDEN_GRADIENT: fn xentile_linear_cross_entropy_hidden_cuda = hidden_gradient(
        hidden, weight, labels, held, dhidden, options, tiling, context,
    );
    super::DISTRIBUTION_FUSED: fn xentile_linear_cross_entropy_distribution_fused_cuda =
        distribution_fused(
        hidden, weight, labels, dloss, bias, loss, lse, lse_low, entropy, argmax, dhidden, dweight,
        scratch, dbias, options, tiling, every_token, correct, context,
    );
    super::ADD: fn xentile_linear_cross_entropy_add_cuda = add(
        hidden, weight, labels, dloss, sums, bias, loss, lse, lse_low, dhidden, dweight, scratch,
        dbias, options, tiling, every_token, context,
    );
}

/// How the problem is tiled.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    vocab_axis: VocabAxis,
    chunk: Extents,
    /// The chunks of the sweep for dweight, where a backward pass has separate sweeps.
    dweight_chunk: Option<Extents>,
    /// Columns whose logits a fused pass saves.
    saved_columns: Option<SavedColumns>,
    /// Columns that a fused pass computes in a single pass, before the others.
    single_pass: Option<Extents>,
    /// Whether logits of 16-bit operands are written to memory in float32; absent for no.
    f32_logits: bool,
    workspace_bytes: usize,
}

impl<'a> Parameter<'a> for Tiling {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let Extent(tokens) = decoder.parameter("chunk_tokens")?;
        let Extent(columns) = decoder.parameter("chunk_columns")?;
        let chunk = Extents { tokens, columns };
        let extents = |[tokens, columns]: [usize; 2]| Extents { tokens, columns };
        // These names of attributes are older than those of the fields; exported programs carry them.
        let dweight_chunk = both(decoder, ["apart_tokens", "apart_columns"])?.map(extents);
        let saved_columns = both(decoder, ["kept_columns", "kept_slot"])?
            .map(|[columns, slot]| SavedColumns { columns, slot });
        let single_pass = both(decoder, ["once_tokens", "once_columns"])?.map(extents);
        let vocab_axis = vocab_axis(decoder)?;
        let Extent(workspace_bytes) = decoder.parameter("workspace_bytes")?;
        let f32_logits: Option<bool> = decoder.parameter("wide")?;
        let f32_logits = f32_logits.unwrap_or(false);
        Ok(Self {
            vocab_axis,
            chunk,
            dweight_chunk,
            saved_columns,
            single_pass,
            f32_logits,
            workspace_bytes,
        })
    }
}

/// Decodes two attributes that must be given both or neither.
fn both(decoder: &mut Decoder, [a, b]: [&'static str; 2]) -> Result<Option<[usize; 2]>> {
    let found: [Option<Extent>; 2] = [decoder.parameter(a)?, decoder.parameter(b)?];
    match found {
        [Some(Extent(a)), Some(Extent(b))] => Ok(Some([a, b])),
        [None, None] => Ok(None),
        _ => Err(invalid(format_args!("attributes {a} and {b} must be given both or neither"))),
    }
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn forward(
    hidden: Any,
    weight: Any,
    labels: Any,
    bias: Option<Floats>,
    loss: FloatsMut,
    logps: FloatsMut,
    lse: FloatsMut,
    lse_low: FloatsMut,
    scratch: AnyMut,
    options: Options,
    tiling: Tiling,
    every_token: bool,
    context: Context,
) -> Result {
    let call = Call::new(hidden, weight, labels, bias, &scratch, &options, tiling)?;
    check_tokens(
        labels.dims(),
        &[
            ("loss", loss.dims()),
            ("logps", logps.dims()),
            ("lse", lse.dims()),
            ("lse_low", lse_low.dims()),
        ],
    )?;
    let outputs = TokenOutputs {
        loss: loss.as_ptr().cast(),
        logps: logps.as_ptr().cast(),
        lse: lse.as_ptr().cast(),
        lse_low: lse_low.as_ptr().cast(),
        zero_masked: !every_token,
    };
    let stream = context.stream()?.as_ptr();
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    unsafe { call.linear.forward(options.contract, stream, call.operands, outputs, call.scratch) }
        .map_err(failed)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    hidden: Any,
    weight: Any,
    labels: Any,
    lse: Floats,
    lse_low: Floats,
    dloss: Floats,
    dlogps: Floats,
    dlse: Floats,
    bias: Option<Floats>,
    dhidden: AnyMut,
    dweight: AnyMut,
    scratch: AnyMut,
    dbias: Option<FloatsMut>,
    options: Options,
    tiling: Tiling,
    context: Context,
) -> Result {
    let mut call = Call::new(hidden, weight, labels, bias, &scratch, &options, tiling)?;
    check_tokens(
        labels.dims(),
        &[
            ("lse", lse.dims()),
            ("lse_low", lse_low.dims()),
            ("dloss", dloss.dims()),
            ("dlogps", dlogps.dims()),
            ("dlse", dlse.dims()),
        ],
    )?;
    let gradients = call.gradients((&dhidden, hidden), (&dweight, weight), (dbias, bias))?;
    let saved = SavedLse { lse: lse.as_ptr().cast(), lse_low: lse_low.as_ptr().cast() };
    let cotangents = Cotangents {
        loss: dloss.as_ptr().cast(),
        logps: dlogps.as_ptr().cast(),
        lse: dlse.as_ptr().cast(),
    };
    let stream = context.stream()?.as_ptr();
    let Call { linear, operands, scratch } = call;
    let contract = options.contract;
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    unsafe { linear.backward(contract, stream, operands, saved, cotangents, gradients, scratch) }
        .map_err(failed)
}

/// What the fused pass gives of each token, and its gradients.
struct Fused<'a> {
    loss: FloatsMut<'a>,
    lse: FloatsMut<'a>,
    lse_low: FloatsMut<'a>,
    dhidden: AnyMut<'a>,
    dweight: AnyMut<'a>,
    scratch: AnyMut<'a>,
    dbias: Option<FloatsMut<'a>>,
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn fused(
    hidden: Any,
    weight: Any,
    labels: Any,
    dloss: Floats,
    bias: Option<Floats>,
    loss: FloatsMut,
    lse: FloatsMut,
    lse_low: FloatsMut,
    dhidden: AnyMut,
    dweight: AnyMut,
    scratch: AnyMut,
    dbias: Option<FloatsMut>,
    options: Options,
    tiling: Tiling,
    every_token: bool,
    leaves_hidden: Option<bool>,
    context: Context,
) -> Result {
    let results = Fused { loss, lse, lse_low, dhidden, dweight, scratch, dbias };
    let mut call = Call::new(hidden, weight, labels, bias, &results.scratch, &options, tiling)?;
    call.linear.leaves_hidden = leaves_hidden.unwrap_or(false);
    call.fused(hidden, weight, labels, dloss, bias, results, None, &options, every_token, &context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn hidden_gradient(
    hidden: Any,
    weight: Any,
    labels: Any,
    held: Any,
    dhidden: AnyMut,
    options: Options,
    tiling: Tiling,
    context: Context,
) -> Result {
    check_shape("dhidden", dhidden.dims(), hidden.dims())?;
    if dhidden.dtype() != hidden.dtype() {
        return Err(dtype::wrong("dhidden", dhidden.dtype(), &hidden.dtype().to_string()));
    }
    if hidden.as_ptr().cast_const() != dhidden.as_ptr().cast_const() {
        return Err(invalid(
            "dhidden must lie in the place of hidden, which is what fused left of it",
        ));
    }
    // It is only read.
    let scratch = Scratch {
        at: held.as_ptr().cast_const().cast_mut(),
        bytes: held.elements() * held.dtype().size(),
    };
    let call = Call::with_scratch(hidden, weight, labels, None, scratch, &options, tiling)?;
    let Call { mut linear, operands, scratch } = call;
    linear.leaves_hidden = true;
    let (stream, to) = (context.stream()?.as_ptr(), dhidden.as_ptr());
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    unsafe { linear.hidden(options.contract, stream, operands, to, scratch) }.map_err(failed)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn distribution_fused(
    hidden: Any,
    weight: Any,
    labels: Any,
    dloss: Floats,
    bias: Option<Floats>,
    loss: FloatsMut,
    lse: FloatsMut,
    lse_low: FloatsMut,
    entropy: FloatsMut,
    argmax: OnDevice<BufferMut<i32>>,
    dhidden: AnyMut,
    dweight: AnyMut,
    scratch: AnyMut,
    dbias: Option<FloatsMut>,
    options: Options,
    tiling: Tiling,
    every_token: bool,
    correct: bool,
    context: Context,
) -> Result {
    check_tokens(labels.dims(), &[("entropy", entropy.dims()), ("argmax", argmax.dims())])?;
    let results = Fused { loss, lse, lse_low, dhidden, dweight, scratch, dbias };
    let call = Call::new(hidden, weight, labels, bias, &results.scratch, &options, tiling)?;
    let requested = Requested { entropy: true, argmax: correct };
    let aux = Some(requested.of(distribution_outputs(entropy, None, argmax)));
    call.fused(hidden, weight, labels, dloss, bias, results, aux, &options, every_token, &context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn add(
    hidden: Any,
    weight: Any,
    labels: Any,
    dloss: Floats,
    sums: Any,
    bias: Option<Floats>,
    loss: FloatsMut,
    lse: FloatsMut,
    lse_low: FloatsMut,
    dhidden: AnyMut,
    dweight: AnyMut,
    scratch: AnyMut,
    dbias: Option<FloatsMut>,
    options: Options,
    tiling: Tiling,
    every_token: bool,
    context: Context,
) -> Result {
    if sums.as_ptr().cast_const().cast() != dweight.as_ptr().cast_const() {
        return Err(invalid("dweight must lie in the place of the sums that it adds to"));
    }
    let results = Fused { loss, lse, lse_low, dhidden, dweight, scratch, dbias };
    let mut call = Call::new(hidden, weight, labels, bias, &results.scratch, &options, tiling)?;
    call.linear.adds_to_weight = true;
    call.fused(hidden, weight, labels, dloss, bias, results, None, &options, every_token, &context)
}

/// What every pass has.
struct Call {
    linear: Linear,
    operands: Operands,
    scratch: Scratch,
}

impl Call {
    fn new(
        hidden: Any,
        weight: Any,
        labels: Any,
        bias: Option<Floats>,
        scratch: &AnyMut,
        options: &Options,
        tiling: Tiling,
    ) -> Result<Self> {
        let bytes = scratch.elements() * scratch.dtype().size();
        let scratch = Scratch { at: scratch.as_ptr(), bytes };
        Self::with_scratch(hidden, weight, labels, bias, scratch, options, tiling)
    }

    fn with_scratch(
        hidden: Any,
        weight: Any,
        labels: Any,
        bias: Option<Floats>,
        scratch: Scratch,
        options: &Options,
        tiling: Tiling,
    ) -> Result<Self> {
        let dtype = to_dtype("hidden", hidden.dtype())?;
        if weight.dtype() != hidden.dtype() {
            return Err(dtype::wrong("weight", weight.dtype(), &hidden.dtype().to_string()));
        }
        let shape = shape(hidden.dims(), weight.dims(), labels.dims(), tiling.vocab_axis)?;
        let (tokens, width, vocab) = (shape.tokens(), shape.width(), shape.vocab());
        if let Some(bias) = bias {
            check_shape("bias", bias.dims(), &[vocab])?;
        }
        xentile_cuda::available().map_err(failed)?;
        let [time_block, block_size] = options.extents();
        let within = |chunk: Extents| Extents {
            tokens: chunk.tokens.min(tokens),
            columns: chunk.columns.min(vocab),
        };
        let linear = Linear {
            tokens,
            width,
            vocab,
            vocab_is_last: tiling.vocab_axis == VocabAxis::Last,
            dtype,
            hidden_gradient: dtype,
            weight_gradient: dtype,
            adds_to_weight: false,
            leaves_hidden: false,
            chunk: within(tiling.chunk),
            dweight_chunk: tiling.dweight_chunk.map(within),
            saved_columns: tiling.saved_columns,
            single_pass: tiling.single_pass,
            f32_logits: tiling.f32_logits,
            workspace_bytes: tiling.workspace_bytes,
            time_block,
            block_size,
        };
        let operands = Operands {
            hidden: hidden.as_ptr().cast_const(),
            weight: weight.as_ptr().cast_const(),
            labels: to_labels(labels)?,
            bias: bias.map_or(null(), |bias| bias.as_ptr().cast_const().cast()),
        };
        Ok(Self { linear, operands, scratch })
    }
}

impl Call {
    #[expect(clippy::too_many_arguments, reason = "they are the call's")]
    fn fused(
        mut self,
        hidden: Any,
        weight: Any,
        labels: Any,
        dloss: Floats,
        bias: Option<Floats>,
        results: Fused,
        aux: Option<DistributionOutputs>,
        options: &Options,
        every_token: bool,
        context: &Context,
    ) -> Result {
        let Fused { loss, lse, lse_low, dhidden, dweight, dbias, .. } = results;
        check_tokens(
            labels.dims(),
            &[
                ("dloss", dloss.dims()),
                ("loss", loss.dims()),
                ("lse", lse.dims()),
                ("lse_low", lse_low.dims()),
            ],
        )?;
        let gradients = self.gradients((&dhidden, hidden), (&dweight, weight), (dbias, bias))?;
        let outputs = TokenOutputs {
            loss: loss.as_ptr().cast(),
            logps: null_mut(),
            lse: lse.as_ptr().cast(),
            lse_low: lse_low.as_ptr().cast(),
            // Entropy and argmax are of tokens without a cotangent too.
            zero_masked: !every_token && aux.is_none(),
        };
        let (stream, dloss) = (context.stream()?.as_ptr(), dloss.as_ptr().cast_const().cast());
        let Self { linear, operands, scratch } = self;
        let contract = options.contract;
        // SAFETY: XLA's stream and buffers, whose shapes were checked.
        unsafe {
            match aux {
                None => {
                    linear.fused(contract, stream, operands, dloss, outputs, gradients, scratch)
                }
                Some(of) => linear.distribution_fused(
                    contract, stream, operands, dloss, outputs, of, gradients, scratch,
                ),
            }
        }
        .map_err(failed)
    }

    /// Where gradients go, each of the shape of its operand and of its dtype or f32, which is passed to the
    /// problem.
    fn gradients(
        &mut self,
        hidden: (&AnyMut, Any),
        weight: (&AnyMut, Any),
        bias: (Option<FloatsMut>, Option<Floats>),
    ) -> Result<Gradients> {
        let dtype = |name, (gradient, operand): (&AnyMut, Any)| {
            check_shape(name, gradient.dims(), operand.dims())?;
            let (found, expected) = (gradient.dtype(), operand.dtype());
            if found != expected && found != DType::F32 {
                return Err(dtype::wrong(name, found, &format!("{expected} or f32")));
            }
            to_dtype(name, found)
        };
        self.linear.hidden_gradient = dtype("dhidden", hidden)?;
        self.linear.weight_gradient = dtype("dweight", weight)?;
        let bias = match bias {
            (Some(gradient), Some(operand)) => {
                check_shape("dbias", gradient.dims(), operand.dims())?;
                gradient.as_ptr().cast()
            }
            (None, None) => null_mut(),
            _ => return Err(invalid("the call must have both `bias` and `dbias`, or neither")),
        };
        Ok(Gradients { hidden: hidden.0.as_ptr(), weight: weight.0.as_ptr(), bias })
    }
}
