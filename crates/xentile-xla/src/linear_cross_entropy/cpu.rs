//! Linear cross-entropy on the CPU.

use xentile::linear_cross_entropy::{LinearShape, VocabAxis};
use xentile::{Element, Tile};
use xentile_cpu::Isa;
use xentile_cpu::cross_entropy::{Cotangents, Launch, SavedLse, TokenOutputs};
use xentile_cpu::linear_cross_entropy::{Gradients, Linear, Operands};
use xla_ffi::{
    ANY_RANK, Aliased, AnyBuffer, AnyBufferMut, Buffer, BufferMut, Decoder, MayAlias, Parameter,
    Result, ThreadPool,
};

use super::{check_tokens, shape, vocab_axis};
use crate::arguments::{check_shape, invalid};
use crate::cpu::{Pool, ask_for_huge_pages};
use crate::cross_entropy::cpu::to_labels;
use crate::cross_entropy::{Extent, Options};
use crate::dtype::with_element;
use crate::target::target_list;

target_list! {
    HOST;

    super::FORWARD: fn xentile_linear_cross_entropy_forward_host = forward(
        hidden, weight, labels, bias, loss, logps, lse, lse_low, scratch, options, tiling, every_token,
        pool,
    );
    super::BACKWARD: fn xentile_linear_cross_entropy_backward_host = backward(
        hidden, weight, labels, lse, lse_low, dloss, dlogps, dlse, bias, dhidden, dweight, scratch,
        dbias, options, tiling, pool,
    );
    super::FUSED: fn xentile_linear_cross_entropy_fused_host = fused(
        hidden, weight, labels, dloss, bias, loss, lse, lse_low, dhidden, dweight, scratch, dbias,
        options, tiling, every_token, pool,
    );
    super::KEEP: fn xentile_linear_cross_entropy_keep_host = keep(
        hidden, weight, labels, bias, loss, logps, lse, lse_low, kept, scratch, options, tiling,
        every_token, pool,
    );
    super::RESUME: fn xentile_linear_cross_entropy_resume_host = resume(
        hidden, weight, labels, lse, lse_low, dloss, dlogps, dlse, kept, held, bias, dhidden,
        dweight, scratch, dbias, options, tiling, pool,
    );
}

/// How the problem is tiled.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    vocab_axis: VocabAxis,
    columns: usize,
}

impl<'a> Parameter<'a> for Tiling {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let Extent(columns) = decoder.parameter("chunk_columns")?;
        Ok(Self { vocab_axis: vocab_axis(decoder)?, columns })
    }
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn forward(
    hidden: AnyBuffer,
    weight: AnyBuffer,
    labels: AnyBuffer,
    bias: Option<Buffer<f32>>,
    loss: BufferMut<f32>,
    logps: BufferMut<f32>,
    lse: BufferMut<f32>,
    lse_low: BufferMut<f32>,
    scratch: BufferMut<u8>,
    options: Options,
    tiling: Tiling,
    every_token: bool,
    pool: ThreadPool,
) -> Result {
    let call = Call::new(hidden, weight, labels, bias, options, tiling, pool)?;
    let outputs = every_output(labels, [loss, logps, lse, lse_low], !every_token)?;
    let scratch = scratch.into_slice();
    with_element!(hidden.dtype(), "hidden", E => {
        call.linear()?.forward(call.operands::<E>()?, outputs, scratch).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    hidden: AnyBuffer,
    weight: AnyBuffer,
    labels: AnyBuffer,
    lse: Buffer<f32>,
    lse_low: Buffer<f32>,
    dloss: Buffer<f32>,
    dlogps: Buffer<f32>,
    dlse: Buffer<f32>,
    bias: Option<Buffer<f32>>,
    dhidden: AnyBufferMut,
    dweight: AnyBufferMut,
    scratch: BufferMut<u8>,
    dbias: Option<BufferMut<f32>>,
    options: Options,
    tiling: Tiling,
    pool: ThreadPool,
) -> Result {
    let call = Call::new(hidden, weight, labels, bias, options, tiling, pool)?;
    let (saved, cotangents) = for_backward(labels, [&lse, &lse_low], [&dloss, &dlogps, &dlse])?;
    let scratch = scratch.into_slice();
    with_element!(hidden.dtype(), "hidden", E => {
        let operands = call.operands::<E>()?;
        let gradients = call.gradients::<E>(dhidden, dweight, dbias)?;
        let linear = call.linear()?;
        linear.backward(operands, saved, cotangents, gradients, scratch).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn fused(
    hidden: AnyBuffer,
    weight: AnyBuffer,
    labels: AnyBuffer,
    dloss: Buffer<f32>,
    bias: Option<Buffer<f32>>,
    loss: BufferMut<f32>,
    lse: BufferMut<f32>,
    lse_low: BufferMut<f32>,
    dhidden: AnyBufferMut,
    dweight: AnyBufferMut,
    scratch: BufferMut<u8>,
    dbias: Option<BufferMut<f32>>,
    options: Options,
    tiling: Tiling,
    every_token: bool,
    pool: ThreadPool,
) -> Result {
    let call = Call::new(hidden, weight, labels, bias, options, tiling, pool)?;
    let named = [
        ("dloss", dloss.dims()),
        ("loss", loss.dims()),
        ("lse", lse.dims()),
        ("lse_low", lse_low.dims()),
    ];
    check_tokens(labels.dims(), &named)?;
    let outputs = TokenOutputs {
        loss: Some(loss.into_slice()),
        logps: None,
        lse: Some(lse.into_slice()),
        lse_low: Some(lse_low.into_slice()),
        zero_masked: !every_token,
    };
    let scratch = scratch.into_slice();
    with_element!(hidden.dtype(), "hidden", E => {
        let operands = call.operands::<E>()?;
        let gradients = call.gradients::<E>(dhidden, dweight, dbias)?;
        call.linear()?.fused(operands, &dloss, outputs, gradients, scratch).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn keep(
    hidden: AnyBuffer,
    weight: AnyBuffer,
    labels: AnyBuffer,
    bias: Option<Buffer<f32>>,
    loss: BufferMut<f32>,
    logps: BufferMut<f32>,
    lse: BufferMut<f32>,
    lse_low: BufferMut<f32>,
    kept: AnyBufferMut,
    scratch: BufferMut<u8>,
    options: Options,
    tiling: Tiling,
    every_token: bool,
    pool: ThreadPool,
) -> Result {
    let call = Call::new(hidden, weight, labels, bias, options, tiling, pool)?;
    let outputs = every_output(labels, [loss, logps, lse, lse_low], !every_token)?;
    let scratch = scratch.into_slice();
    check_alignment(scratch)?;
    with_element!(hidden.dtype(), "hidden", E => {
        let kept = call.like_weight::<E>("kept", kept)?.into_slice();
        ask_for_huge_pages(kept);
        call.linear()?.keep(call.operands::<E>()?, outputs, kept, scratch).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn resume(
    hidden: AnyBuffer,
    weight: AnyBuffer,
    labels: AnyBuffer,
    lse: Buffer<f32>,
    lse_low: Buffer<f32>,
    dloss: Buffer<f32>,
    dlogps: Buffer<f32>,
    dlse: Buffer<f32>,
    kept: MayAlias<AnyBuffer>,
    held: MayAlias<Buffer<u8>>,
    bias: Option<Buffer<f32>>,
    dhidden: AnyBufferMut,
    dweight: AnyBufferMut,
    scratch: BufferMut<u8>,
    dbias: Option<BufferMut<f32>>,
    options: Options,
    tiling: Tiling,
    pool: ThreadPool,
) -> Result {
    let call = Call::new(hidden, weight, labels, bias, options, tiling, pool)?;
    let (saved, cotangents) = for_backward(labels, [&lse, &lse_low], [&dloss, &dlogps, &dlse])?;
    check_shape("kept", kept.dims(), weight.dims())?;
    check_shape("held", held.dims(), scratch.dims())?;
    with_element!(hidden.dtype(), "hidden", E => {
        let operands = call.operands::<E>()?;
        let linear = call.linear()?;
        let dweight = call.like_weight::<E>("dweight", dweight)?;
        let dweight = kept.typed::<E, ANY_RANK>()?.with(dweight)?;
        let (hidden, bias) = call.other_gradients(dhidden, dbias)?;
        let scratch = held.with(scratch)?;
        // Before anything is written.
        check_alignment(scratch.result())?;
        linear.check_scratch::<E>(scratch.result().len(), true).map_err(invalid)?;
        let gradients = Gradients { hidden, weight: taken_over(dweight), bias };
        linear.resume(operands, saved, cotangents, gradients, taken_over(scratch)).map_err(invalid)
    })
}

/// Every output of each token of `labels`: loss, logps, lse and lse_low.
fn every_output<'a>(
    labels: AnyBuffer,
    outputs: [BufferMut<'a, f32>; 4],
    zero_masked: bool,
) -> Result<TokenOutputs<'a>> {
    let names = ["loss", "logps", "lse", "lse_low"];
    for (name, output) in names.into_iter().zip(&outputs) {
        check_tokens(labels.dims(), &[(name, output.dims())])?;
    }
    let [loss, logps, lse, lse_low] = outputs.map(|output| Some(output.into_slice()));
    Ok(TokenOutputs { loss, logps, lse, lse_low, zero_masked })
}

/// What a backward pass takes of each token: lse and lse_low, and cotangents of loss, logps and lse.
fn for_backward<'a>(
    labels: AnyBuffer,
    [lse, lse_low]: [&'a Buffer<f32>; 2],
    [dloss, dlogps, dlse]: [&'a Buffer<f32>; 3],
) -> Result<(SavedLse<'a>, Cotangents<'a>)> {
    let named = [
        ("lse", lse.dims()),
        ("lse_low", lse_low.dims()),
        ("dloss", dloss.dims()),
        ("dlogps", dlogps.dims()),
        ("dlse", dlse.dims()),
    ];
    check_tokens(labels.dims(), &named)?;
    let saved = SavedLse { lse, lse_low: Some(lse_low) };
    Ok((saved, Cotangents { loss: Some(dloss), logps: Some(dlogps), lse: Some(dlse) }))
}

/// Checks scratch that one call leaves to another, in which what lies where must not depend on its
/// address.
fn check_alignment(scratch: &[u8]) -> Result<()> {
    match scratch.as_ptr().align_offset(align_of::<f32>()) {
        0 => Ok(()),
        _ => Err(invalid("`scratch` begins within an f32; its address must be a multiple of 4")),
    }
}

/// The memory of a result, with what the argument holds.
fn taken_over<T: Copy>(aliased: Aliased<'_, T>) -> &mut [T] {
    match aliased {
        Aliased::InPlace(both) => both,
        Aliased::Apart { argument, result } => {
            ask_for_huge_pages(result);
            result.copy_from_slice(argument);
            result
        }
    }
}

/// What every pass has.
struct Call<'a> {
    hidden: AnyBuffer<'a>,
    weight: AnyBuffer<'a>,
    labels: AnyBuffer<'a>,
    bias: Option<Buffer<'a, f32>>,
    shape: LinearShape,
    options: Options,
    columns: usize,
    pool: Pool<'a>,
}

impl<'a> Call<'a> {
    fn new(
        hidden: AnyBuffer<'a>,
        weight: AnyBuffer<'a>,
        labels: AnyBuffer<'a>,
        bias: Option<Buffer<'a, f32>>,
        options: Options,
        tiling: Tiling,
        pool: ThreadPool<'a>,
    ) -> Result<Self> {
        let shape = shape(hidden.dims(), weight.dims(), labels.dims(), tiling.vocab_axis)?;
        if let Some(bias) = bias {
            check_shape("bias", bias.dims(), &[shape.vocab()])?;
        }
        let pool = Pool(pool);
        Ok(Self { hidden, weight, labels, bias, shape, options, columns: tiling.columns, pool })
    }

    fn linear(&self) -> Result<Linear<'_>> {
        let [time_block, _] = self.options.extents();
        // Columns are those of a chunk.
        let tile = time_block.map(|rows| Tile::new(rows, self.columns));
        let tile = tile.transpose().map_err(invalid)?;
        let launch = Launch { isa: Isa::detect(), tile, pool: &self.pool };
        let labels = to_labels(self.labels)?;
        Linear::new(self.options.contract, self.shape, labels, launch, self.columns)
            .map_err(invalid)
    }

    fn operands<E: Element + xla_ffi::Element>(&self) -> Result<Operands<'a, E>> {
        Ok(Operands {
            hidden: self.hidden.typed::<E, ANY_RANK>()?.as_slice(),
            weight: self.weight.typed::<E, ANY_RANK>()?.as_slice(),
            bias: self.bias.map(|bias| bias.as_slice()),
        })
    }

    /// Where gradients go, each of the shape of its operand.
    fn gradients<E: Element + xla_ffi::Element>(
        &self,
        hidden: AnyBufferMut<'a>,
        weight: AnyBufferMut<'a>,
        bias: Option<BufferMut<'a, f32>>,
    ) -> Result<Gradients<'a, E>> {
        let weight = self.like_weight("dweight", weight)?.into_slice();
        let (hidden, bias) = self.other_gradients(hidden, bias)?;
        ask_for_huge_pages(weight);
        Ok(Gradients { hidden, weight, bias })
    }

    /// A result of the shape of the weight.
    fn like_weight<E: Element + xla_ffi::Element>(
        &self,
        name: &str,
        result: AnyBufferMut<'a>,
    ) -> Result<BufferMut<'a, E>> {
        check_shape(name, result.dims(), self.weight.dims())?;
        result.typed()
    }

    /// Where the gradients of hidden states and bias go.
    fn other_gradients<E: Element + xla_ffi::Element>(
        &self,
        hidden: AnyBufferMut<'a>,
        bias: Option<BufferMut<'a, f32>>,
    ) -> Result<(&'a mut [E], Option<&'a mut [f32]>)> {
        check_shape("dhidden", hidden.dims(), self.hidden.dims())?;
        match (&bias, self.bias) {
            (Some(dbias), Some(bias)) => check_shape("dbias", dbias.dims(), bias.dims())?,
            (None, None) => {}
            _ => return Err(invalid("the call must have both `bias` and `dbias`, or neither")),
        }
        let hidden = hidden.typed::<E, ANY_RANK>()?.into_slice();
        Ok((hidden, bias.map(BufferMut::into_slice)))
    }
}
