//! A complete custom call, `z = alpha * x + y`; `axpy.py` builds it and calls it from JAX.

use xla_ffi::{Buffer, BufferMut, Error, Result, ThreadPool};

fn axpy(
    x: Buffer<f32>,
    y: Buffer<f32>,
    mut z: BufferMut<f32>,
    alpha: f32,
    pool: ThreadPool,
) -> Result {
    if x.dims() != y.dims() || x.dims() != z.dims() {
        return Err(Error::invalid_argument(format!("{x:?}, {y:?} and {z:?} differ in shape")));
    }
    pool.run_chunks(&mut z, 1 << 14, |first, chunk| {
        for ((z, x), y) in chunk.iter_mut().zip(&x[first..]).zip(&y[first..]) {
            *z = alpha * x + y;
        }
    });
    Ok(())
}

xla_ffi::handler! {
    /// Register it as the target of a custom call with the attribute `alpha`.
    pub fn example_axpy = axpy(x, y, z, alpha, pool);
}
