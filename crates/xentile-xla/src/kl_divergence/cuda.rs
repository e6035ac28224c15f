//! KL divergence of rows of logits from a teacher's, on NVIDIA GPUs.

use xentile_cuda::kl_divergence::{Arrays, KlDivergence};
use xla_ffi::{Buffer, Context, OnDevice, Result, Stage};

use crate::arguments::{check_shape, invalid};
use crate::cuda::{Any, AnyMut, Floats, FloatsMut, check_result, failed, to_dtype};
use crate::target::target_list;

target_list! {
    CUDA;

    super::KL_DIVERGENCE: fn xentile_kl_divergence_cuda,
        initialize xentile_kl_divergence_cuda_initialize = divergence(
        student, teacher, factor, first, dlogits_so_far, temperature, loss, dlogits, context,
    );
}

const _: () = match usize::from_str_radix(super::KL_DIVERGENCE.bounds[1].2, 10) {
    Ok(most) => {
        assert!(most == KlDivergence::LARGEST_VOCAB, "the declared bound is not the kernel's");
    }
    Err(_) => panic!("the declared bound is no number"),
};

#[expect(clippy::too_many_arguments, reason = "the target's")]
fn divergence(
    student: Floats,
    teacher: Floats,
    factor: Floats,
    first: OnDevice<Buffer<i32>>,
    dlogits_so_far: Any,
    temperature: f64,
    loss: FloatsMut,
    dlogits: AnyMut,
    context: Context,
) -> Result {
    let (&[rows, vocab], &[all, _]) = (student.dims(), dlogits_so_far.dims()) else {
        let (student, dlogits) = (student.dims(), dlogits_so_far.dims());
        return Err(invalid(format_args!(
            "`student` has shape {student:?} and `dlogits_so_far` {dlogits:?}; both must be matrices"
        )));
    };
    for (name, dims, right) in [
        ("teacher", teacher.dims(), &[rows, vocab][..]),
        ("factor", factor.dims(), &[rows]),
        ("first", first.dims(), &[1]),
        ("dlogits_so_far", dlogits_so_far.dims(), &[all, vocab]),
        ("loss", loss.dims(), &[rows]),
        ("dlogits", dlogits.dims(), &[all, vocab]),
    ] {
        check_shape(name, dims, right)?;
    }
    check_result(("dlogits_so_far", dlogits_so_far), ("dlogits", &dlogits))?;
    if dlogits.as_ptr() != dlogits_so_far.as_ptr() {
        return Err(invalid("`dlogits` must be in the place of `dlogits_so_far`"));
    }
    let dtype = to_dtype("dlogits_so_far", dlogits_so_far.dtype())?;
    let divergence = KlDivergence::new(dtype, rows, all, vocab, temperature).map_err(failed)?;
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    let arrays = Arrays {
        student: student.as_ptr().cast_const().cast(),
        teacher: teacher.as_ptr().cast_const().cast(),
        factors: factor.as_ptr().cast_const().cast(),
        first: first.as_ptr().cast_const().cast(),
        losses: loss.as_ptr().cast(),
        dlogits: dlogits.as_ptr(),
    };
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => divergence.load(stream),
            _ => divergence.run(stream, arrays),
        }
    };
    outcome.map_err(failed)
}
