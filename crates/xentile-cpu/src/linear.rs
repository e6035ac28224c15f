//! Products of few tokens and a matrix: those of the layers of a decoder in a step.
//!
//! They are bound by reading the matrix, which is read once for all tokens, in the order in which it lies: nothing
//! is packed. A task has consecutive rows. It multiplies a few of them at a time, whose sums stay in registers, and
//! asks for the next few meanwhile.

use xentile::{Element, Error, Result};

use crate::parallel::Shared;
use crate::simd::{LINE_BYTES, Simd};
use crate::{Job, Launch};

crate::compiled::passes! {
    /// The pass over elements `E`.
    struct Passes { multiply: Multiply }
}

/// Bytes of a task's rows: several tasks a thread, each longer than handing it over.
const TASK_BYTES: usize = 1 << 17;

/// Rows that are multiplied at a time.
const ROWS: usize = 4;

/// The extents of a product.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    /// B.
    pub tokens: usize,
    /// O.
    pub rows: usize,
    /// I.
    pub terms: usize,
}

/// Sets `y` `[B, O]` to the products of the rows of `weight` `[O, I]` and each token of `x` `[B, I]`, summed
/// in f32 and rounded once. A sum's order depends on I alone.
///
/// # Errors
/// An array of another length.
pub fn linear<E: Element, Y: Element>(
    launch: Launch<'_>,
    extents: Extents,
    x: &[E],
    weight: &[E],
    y: &mut [Y],
) -> Result<()> {
    let Extents { tokens, rows, terms } = extents;
    for (name, actual, axes, expected) in [
        ("x", x.len(), "[B, I]", tokens * terms),
        ("weight", weight.len(), "[O, I]", rows * terms),
        ("y", y.len(), "[B, O]", tokens * rows),
    ] {
        if actual != expected {
            return Err(Error::Length { name, actual, axes, expected });
        }
    }
    if tokens == 0 {
        return Ok(());
    }
    let row_bytes = (terms * size_of::<E>()).max(1);
    let most = (TASK_BYTES / row_bytes).max(1).next_multiple_of(ROWS);
    let y = Shared::new(y);
    launch.pool.run(rows.div_ceil(most), &|task| {
        let first = task * most;
        let count = most.min(rows - first);
        let weight = &weight[first * terms..][..count * terms];
        let mut sums = vec![0.0; tokens * count];
        let job = Multiply { x, weight, count, terms, sums: &mut sums };
        (Passes::get().multiply)(launch.isa, job);
        for (token, sums) in sums.chunks_exact(count).enumerate() {
            // SAFETY: these rows are the task's alone.
            let to = unsafe { y.slice(token * rows + first, count) };
            for (to, sum) in to.iter_mut().zip(sums) {
                *to = Y::from_f32(*sum);
            }
        }
    });
    Ok(())
}

/// The rows of a task, and the sums `[B, count]`.
struct Multiply<'a, E> {
    x: &'a [E],
    weight: &'a [E],
    count: usize,
    terms: usize,
    sums: &'a mut [f32],
}

impl<E: Element> Job for Multiply<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let tokens = self.sums.len() / self.count;
        for row in (0..self.count).step_by(ROWS) {
            let mut token = 0;
            while token < tokens {
                // With few registers the sums of two tokens would not stay in them.
                if S::REGISTERS >= 32 && token + 2 <= tokens {
                    self.rows::<S, 2>(s, row, token);
                    token += 2;
                } else {
                    self.rows::<S, 1>(s, row, token);
                    token += 1;
                }
            }
        }
    }
}

impl<E: Element> Multiply<'_, E> {
    /// Multiplies the next [`ROWS`] rows, or those that are left, by `TOKENS` tokens.
    #[inline(always)]
    fn rows<S: Simd, const TOKENS: usize>(&mut self, s: S, row: usize, token: usize) {
        if row + ROWS <= self.count {
            self.tile::<S, ROWS, TOKENS>(s, row, token);
        } else {
            for row in row..self.count {
                self.tile::<S, 1, TOKENS>(s, row, token);
            }
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const COUNT: usize, const TOKENS: usize>(
        &mut self,
        s: S,
        row: usize,
        token: usize,
    ) {
        let Self { x, weight, count, terms, .. } = *self;
        let x = x[token * terms..][..TOKENS * terms].as_ptr();
        let weight = weight[row * terms..][..COUNT * terms].as_ptr();
        let mut sums = [[[s.splat(0.0); 2]; TOKENS]; COUNT];
        let whole = terms - terms % S::CHUNK;
        for column in (0..whole).step_by(S::CHUNK) {
            // SAFETY: each row has a chunk from here.
            unsafe {
                let x: [_; TOKENS] =
                    std::array::from_fn(|index| s.load(x.add(index * terms + column)));
                for (row, sums) in sums.iter_mut().enumerate() {
                    let from = weight.add(row * terms + column);
                    // Of the rows that come next, in memory too.
                    let next = from.wrapping_add(COUNT * terms).cast::<u8>();
                    for line in (0..S::CHUNK * size_of::<E>()).step_by(LINE_BYTES) {
                        s.prefetch(next.wrapping_add(line));
                    }
                    add(s, sums, s.load(from), &x);
                }
            }
        }
        if whole < terms {
            let load = |from: *const E| {
                // SAFETY: so many elements of the row are left.
                unsafe { s.load_part(from.add(whole), terms - whole, E::from_f32(0.0)) }
            };
            let x: [_; TOKENS] = std::array::from_fn(|index| load(x.wrapping_add(index * terms)));
            for (row, sums) in sums.iter_mut().enumerate() {
                add(s, sums, load(weight.wrapping_add(row * terms)), &x);
            }
        }
        for (index, sums) in sums.iter().enumerate() {
            for (one, sum) in sums.iter().enumerate() {
                self.sums[(token + one) * count + row + index] =
                    s.sum(s.add(sum[0], sum[1])) as f32;
            }
        }
    }
}

/// Adds the products of a chunk of weights and one of each token.
#[inline(always)]
fn add<S: Simd, const TOKENS: usize>(
    s: S,
    sums: &mut [[S::Vector; 2]; TOKENS],
    weight: [S::Vector; 2],
    x: &[[S::Vector; 2]; TOKENS],
) {
    for token in 0..TOKENS {
        for half in 0..2 {
            sums[token][half] = s.mul_add(weight[half], x[token][half], sums[token][half]);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::{Isa, Threads};

    fn numbers<E: Element>(count: usize, seed: usize) -> Vec<E> {
        (0..count).map(|i| E::from_f32(((i * i + seed) as f32).sin())).collect()
    }

    fn check<E: Element>(isa: Isa, extents: Extents) {
        let Extents { tokens, rows, terms } = extents;
        let (x, weight) = (numbers::<E>(tokens * terms, 1), numbers::<E>(rows * terms, 2));
        let pool = Threads::new(2).unwrap();
        let launch = Launch { isa, pool: &pool };
        let mut y = vec![f32::NAN; tokens * rows];
        linear(launch, extents, &x, &weight, &mut y).unwrap();
        for (index, found) in y.iter().enumerate() {
            let (x, row) = (&x[index / rows * terms..], &weight[index % rows * terms..]);
            let products = x.iter().zip(row).take(terms).map(|(x, w)| x.to_f64() * w.to_f64());
            let (sum, size) = products.fold((0.0, 0.0), |(a, b), one| (a + one, b + one.abs()));
            assert!((f64::from(*found) - sum).abs() <= 1e-6 * size, "{index}: {found}, not {sum}");
        }
        // A token by itself has the same bits, and a result is a sum that is rounded.
        let mut alone = vec![E::from_f32(f32::NAN); rows];
        let first = Extents { tokens: 1, ..extents };
        linear(launch, first, &x[..terms], &weight, &mut alone).unwrap();
        for (alone, beside) in alone.iter().zip(&y) {
            assert_eq!(alone.to_f32(), E::from_f32(*beside).to_f32());
        }
    }

    #[test]
    fn every_instruction_set_multiplies() {
        for isa in Isa::available() {
            for (tokens, rows, terms) in [(1, 9, 64), (3, 5, 77), (8, 700, 128), (2, 3, 0)] {
                let extents = Extents { tokens, rows, terms };
                check::<f32>(isa, extents);
                check::<bf16>(isa, extents);
                check::<f16>(isa, extents);
            }
        }
    }

    #[test]
    fn arrays_of_another_length_are_refused() {
        let pool = Threads::new(1).unwrap();
        let launch = Launch { isa: Isa::detect(), pool: &pool };
        let extents = Extents { tokens: 1, rows: 2, terms: 3 };
        let error = linear(launch, extents, &[0.0; 3], &[0.0; 5], &mut [0.0; 2]).unwrap_err();
        assert_eq!(error.to_string(), "weight holds 5 elements; [O, I] needs 6");
    }
}
