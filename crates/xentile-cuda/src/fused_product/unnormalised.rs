//! The fused pass without a pass over logits: the unnormalised softmax in their place, and its factors
//! where they cost least (kernels/unnormalised.cuh).

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use xentile::cross_entropy::CrossEntropy;
use xentile::{DType, LogitsShape};

use super::{Arguments, DLogits, Epilogue, FusedProduct, Ready};
use super::{LARGEST_BYTES, SUM_BYTES, arguments, check, count};
use crate::blas::Matrix;
use crate::cross_entropy::Arguments as Row;
use crate::cross_entropy::{
    DistributionOutputs, Kernel, Labels, Part, TokenOutputs, Variant, past,
};
use crate::driver::Driver;
use crate::operands::{Operands, Scratch};
use crate::{Device, Error, Result, check_alignment};

/// Threads of a token, where a warp has one.
const WARP: usize = 32;

/// Tokens of a call at most: all labels are compared with one another.
const MOST_TOKENS: usize = 1 << 15;

/// The largest softcap, over the temperature: logits are no further apart than twice that, and entries
/// for one are at most 2^74 then, from a shift 58 powers of two above any of its row.
const MOST_CAP: f64 = 45.0;

/// The least temperature: a shift is raised by half a million powers of two at most, which logits 5600
/// apart reach there.
const LEAST_TEMPERATURE: f64 = 1.0 / 64.0;

/// Bytes of a tile's shift of a token.
const RESCALE_BYTES: usize = 2;

/// Whether there is an unnormalised softmax of so many tokens for `options`: it has the range of f32.
/// What a uniform target takes off is one number a row, unless a softcap's derivative multiplies it.
#[must_use]
pub fn unnormalised_support(dtype: DType, tokens: usize, options: &CrossEntropy) -> bool {
    let temperature = options.temperature;
    let of_options = match options.softcap {
        Some(cap) => options.label_smoothing == 0.0 && cap / temperature <= MOST_CAP,
        None => temperature >= LEAST_TEMPERATURE,
    };
    dtype == DType::Bf16 && tokens <= MOST_TOKENS && of_options
}

/// Bytes of the shifts of so many tokens' unnormalised softmax, in places of so many columns.
pub(crate) fn rescale_bytes(tokens: usize, places: impl Iterator<Item = usize>) -> usize {
    RESCALE_BYTES * tokens * places.map(tiles_of).sum::<usize>()
}

fn tiles_of(columns: usize) -> usize {
    columns.div_ceil(arguments::TILE_COLUMNS as usize)
}

/// Where the unnormalised softmax goes, and what is kept beside it.
#[derive(Clone, Copy, Debug)]
pub struct Unnormalised<'a> {
    /// Some columns each, one after the other, from the vocabulary's first on. Those that are in none
    /// count in the rows' sums, and have gradients of their own.
    pub places: &'a [DLogits],
    /// Hidden states, each times its factor: `[N, D]` on a GPU, at a multiple of 16.
    pub scaled: *mut c_void,
    /// Room for [`bytes_of_tokens`](FusedProduct::bytes_of_tokens), at a multiple of 256, which
    /// nothing else writes between [`unnormalised`](FusedProduct::unnormalised) and
    /// [`times_weight`](FusedProduct::times_weight).
    pub token_scalars: *mut c_void,
    /// Room for two bytes for each token and each 256 columns of every place, at a multiple of 256.
    pub rescales: *mut c_void,
    /// The outputs about each token's distribution, if requested. `argmax` is -1 unless it is the label,
    /// and `highest` is not written.
    pub distribution: Option<DistributionOutputs>,
}

/// Rows of sums in f32 that a kernel multiplies by factors, and where they go.
struct Scale {
    name: &'static str,
    from: *const f32,
    to: *mut c_void,
}

impl FusedProduct {
    /// Has `stream` write the unnormalised softmax and scaled hidden states, so that the transpose of
    /// the former times these is the weight's gradient for cotangents `dloss` `[N]` of the losses, but
    /// for what `add_label_term` adds, and fill what `outputs` asks for.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward), and options that [`unnormalised_support`] does not have.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn unnormalised(
        &self,
        stream: *mut c_void,
        operands: Operands,
        dloss: *const f32,
        outputs: TokenOutputs,
        to: Unnormalised,
        scratch: Scratch,
    ) -> Result<()> {
        let Self { tokens, dtype, vocab, options, .. } = *self;
        if !unnormalised_support(dtype, tokens, &options) {
            return Err(Error::Unnormalised { dtype, tokens, most: MOST_TOKENS });
        }
        let Unnormalised { places, scaled, token_scalars, rescales, distribution } = to;
        let epilogue = Epilogue::unnormalised(distribution.is_some());
        let wants_argmax = distribution.is_some_and(|to| !to.argmax.is_null());
        let most = self.parts_in(scratch.bytes, places.len().max(1), epilogue)?;
        check_alignment("scaled hidden states", scaled)?;
        places.iter().try_for_each(|&place| self.check_place("unnormalised", place))?;
        if tokens == 0 || vocab == 0 {
            return Ok(());
        }
        // SAFETY: passed on from this function's contract.
        let product = unsafe { self.ready(epilogue, stream) }?;
        let (rescaled, labelled) = (token_scalars.cast::<u32>(), self.labelled(token_scalars));
        let written = places.last().map_or(0, |last| last.first_column + last.columns);
        let of_pass = |of_product, place: DLogits, columns, parts| -> Result<Arguments> {
            let common = self.arguments(of_product, operands, (place, columns), parts, scratch)?;
            let layout = self.layout(parts, epilogue);
            let at = |offset: Option<usize>| {
                offset.map_or(null_mut(), |offset| scratch.at.wrapping_byte_add(offset))
            };
            let row = Row { dlogits: place.at, dloss, ..common.row.with_outputs(outputs) };
            Ok(Arguments {
                row: distribution.map_or(row, |to| row.with_distribution(to)),
                rounded: at(layout.rounded).cast(),
                weighted: at(layout.weighted).cast(),
                largest: if wants_argmax { at(layout.largest) } else { null_mut() },
                gradients: Self::gradient_of(token_scalars, 0),
                rescales: rescales.cast(),
                rescaled,
                labelled,
                hidden_rows: operands.hidden,
                scaled_rows: scaled,
                written: written as i64,
                part_first: place.first_column as i64,
                part_count: place.columns as i64,
                ..self.with_weight(operands.weight, common)
            })
        };
        // Every place has parts of rows' sums to itself. What is beyond the last one's columns the copy
        // engine does not write.
        let columns = |place: &DLogits| {
            let end = place.first_column + place.columns;
            if end == written { vocab - place.first_column } else { place.columns }
        };
        let columns: Vec<_> = places.iter().map(columns).collect();
        let shares = self.share_parts(&columns, product.clusters, most);
        let nowhere = DLogits { at: null_mut(), stride: vocab, first_column: 0, columns: vocab };
        let all = of_pass(Epilogue::Forward, nowhere, vocab, shares.iter().sum())?;
        let (mut parts, mut tiles) = (0, 0);
        let of_places = places.iter().zip(columns).zip(shares).map(|((&place, columns), own)| {
            let arguments = of_pass(epilogue, place, columns, own)?;
            let before = tokens * parts;
            let here = Arguments {
                sums: all.sums.wrapping_byte_add(SUM_BYTES * before),
                rounded: past(all.rounded, before),
                weighted: past(all.weighted, before),
                largest: past(all.largest.cast::<u8>(), LARGEST_BYTES * before).cast(),
                values: past(all.values, before),
                label_logits: all.label_logits,
                rescales: all.rescales.wrapping_add(tokens * tiles),
                ..arguments
            };
            parts += own;
            tiles += tiles_of(place.columns);
            Ok(here)
        });
        let of_places = of_places.collect::<Result<Vec<_>>>()?;
        let gate = if options.label_smoothing == 0.0 { rescaled.cast_const() } else { null() };
        let rescale_bytes = rescale_bytes(tokens, places.iter().map(|place| place.columns));
        // SAFETY: passed on from this function's contract.
        unsafe {
            Driver::get()?.clear(stream, labelled.cast(), Self::labelled_bytes(vocab))?;
            Driver::get()?.clear(stream, rescales, rescale_bytes)?;
            self.launch_on_tokens("unnormalised_begin", WARP, stream, &all)?;
            for arguments in &of_places {
                product.launch_product(stream, arguments)?;
            }
            if distribution.is_some() {
                self.launch_on_tokens("unnormalised_distribution", WARP, stream, &all)?;
            }
            for &arguments in &of_places {
                // Of all parts of a row, wherever it lies.
                let Arguments { sums, rounded, values, parts, .. } = all;
                let row = Arguments { sums, rounded, values, parts, gate, ..arguments };
                self.launch_on_rows("unnormalised_align", stream, &row)?;
            }
            for (index, &place) in places.iter().enumerate() {
                let row =
                    Row { dlogits: self.column_0(place), stride: place.stride as i64, ..all.row };
                let arguments = Arguments {
                    row,
                    part_first: place.first_column as i64,
                    part_count: place.columns as i64,
                    ..all
                };
                let (name, threads) = if index == 0 {
                    ("unnormalised_end", WARP)
                } else {
                    ("unnormalised_labels", 1)
                };
                self.launch_on_tokens(name, threads, stream, &arguments)?;
            }
        }
        Ok(())
    }

    /// Returns the least scratch for the unnormalised softmax in so many places, in bytes, with outputs
    /// about the distribution or without.
    #[must_use]
    pub fn unnormalised_scratch_bytes(&self, places: usize, has_distribution: bool) -> usize {
        self.layout(places, Epilogue::unnormalised(has_distribution)).bytes
    }

    /// Where the first row would begin if it had all columns, which is how labels count them.
    fn column_0(&self, place: DLogits) -> *mut c_void {
        place.at.wrapping_byte_sub(place.first_column * self.dtype.size_bytes())
    }

    /// Whether [`times_weight`](Self::times_weight) keeps a GPU of so many multiprocessors busy.
    #[must_use]
    pub fn times_weight_keeps_busy(&self, multiprocessors: u32) -> bool {
        self.by_width().keeps_busy(multiprocessors)
    }

    /// The product whose columns are the hidden states', and what it sums over is the vocabulary.
    fn by_width(&self) -> Self {
        let Self { width, vocab, vocab_is_last, .. } = *self;
        Self { width: vocab, vocab: width, vocab_is_last: !vocab_is_last, ..*self }
    }

    /// Has `stream` write `sums` `[N, D]` in f32, times each row's factor, to `dhidden`: for
    /// [`times_weight`](Self::times_weight), where another product has the sums.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn scale_sums(
        &self,
        stream: *mut c_void,
        (sums, weight): (*const f32, *const c_void),
        token_scalars: *mut c_void,
        dhidden: *mut c_void,
    ) -> Result<()> {
        let scale = Scale { name: "unnormalised_round", from: sums, to: dhidden };
        // SAFETY: passed on from this function's contract.
        unsafe { self.scale(stream, weight, Self::gradient_of(token_scalars, 0), scale) }
    }

    /// Has `stream` multiply `sums` in f32 of some tokens, `count` from `first` on, by each row's
    /// factor where they lie, with what labels among the columns that have an unnormalised softmax
    /// lack.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub(crate) unsafe fn scale_in_place(
        &self,
        stream: *mut c_void,
        weight: *const c_void,
        token_scalars: *mut c_void,
        (first, count): (usize, usize),
        sums: *mut c_void,
    ) -> Result<()> {
        let scale = Scale { name: "unnormalised_scale", from: sums.cast(), to: sums };
        let rows = Self { tokens: count, ..*self };
        // SAFETY: passed on from this function's contract.
        unsafe { rows.scale(stream, weight, Self::gradient_of(token_scalars, first), scale) }
    }

    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn scale(
        &self,
        stream: *mut c_void,
        weight: *const c_void,
        gradients: *mut c_void,
        Scale { name, from, to }: Scale,
    ) -> Result<()> {
        check_alignment("sums", from.cast())?;
        check_alignment("dhidden", to)?;
        if self.tokens == 0 {
            return Ok(());
        }
        let arguments = Arguments {
            hidden_rows: from.cast(),
            scaled_rows: to,
            ..self.with_weight(weight, self.without_tensors(self.width, gradients)?)
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch_on_tokens(name, WARP, stream, &arguments) }
    }

    /// Has `stream` add to `part`, some rows from `first` on of the weight's gradient or of its sums,
    /// without which it is the product of the unnormalised softmax and scaled hidden states, what these
    /// lack of it; or write it to the rows of labels, where the others count for nothing, and of `[D,
    /// V]` in bf16 to all, where it is 0 but for labels. The same of the bias' gradient, if `dbias` is
    /// not null: to columns of labels among those rows.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub(crate) unsafe fn add_label_term(
        &self,
        stream: *mut c_void,
        operands: Operands,
        (place, token_scalars): (DLogits, *mut c_void),
        (first, part): (usize, Matrix),
        dbias: *mut f32,
        writes: bool,
    ) -> Result<()> {
        if self.tokens == 0 {
            return Ok(());
        }
        let shape = LogitsShape::new(self.tokens, self.vocab)?;
        let (Self { tokens, vocab, .. }, stride, carried) = (*self, place.stride, null_mut());
        let whole = Part { vocab, first_column: 0, stride, carried };
        let row = Kernel::new(self.options, shape, self.dtype)?.with_part(whole);
        let row = Row { dlogits: self.column_0(place), ..row.arguments(null(), operands.labels) };
        let taken = Arguments {
            gradients: Self::gradient_of(token_scalars, 0),
            labelled: if writes { self.labelled(token_scalars) } else { null_mut() },
            hidden_rows: operands.hidden,
            dbias,
            width: self.width as i64,
            part: part.at,
            part_first: first as i64,
            part_count: part.rows as i64,
            part_stride: part.stride as i64,
            ..Arguments::with_row(row)
        };
        let name = format!("unnormalised_label_term_{}_{}", part.dtype, self.factors());
        // SAFETY: passed on from this function's contract.
        unsafe {
            if self.vocab_is_last && part.dtype != DType::F32 {
                let columns = vocab.div_ceil(arguments::COLUMNS_OF_PLACE as usize);
                let rows = part.rows.div_ceil(arguments::ROWS_OF_PLACE as usize);
                return self.launch_on_places(&name, [columns, rows], stream, &taken);
            }
            let parts = self.width.div_ceil(arguments::COLUMNS_OF_WARP as usize);
            let ctas = (tokens * WARP).div_ceil(arguments::TOKEN_THREADS as usize);
            self.launch_on_places(&name, [ctas, parts], stream, &taken)
        }
    }

    /// The same with where elements of the weight are.
    fn with_weight(&self, weight: *const c_void, arguments: Arguments) -> Arguments {
        let (row, one) = (self.weight().1 as i64, 1);
        let (vocab_step, width_step) = if self.vocab_is_last { (one, row) } else { (row, one) };
        let width = self.width as i64;
        Arguments { weight_rows: weight, width, vocab_step, width_step, ..arguments }
    }

    /// What kernels take that need no more than the tokens' factors, for rows of so many columns.
    fn without_tensors(&self, columns: usize, gradients: *mut c_void) -> Result<Arguments> {
        let Self { tokens, dtype, .. } = *self;
        let part = Part { vocab: columns, first_column: 0, stride: columns, carried: null_mut() };
        let shape = LogitsShape::new(tokens, columns)?;
        let row = Kernel::new(self.options, shape, dtype)?.with_part(part);
        Ok(Arguments {
            gradients,
            ..Arguments::with_row(row.arguments(null(), Labels::I32(null())))
        })
    }

    /// Has `stream` write the hidden states' gradient `[N, D]`, the unnormalised softmax, which has one
    /// place, times the weight and each row's factor, which [`unnormalised`](Self::unnormalised) left
    /// in `token_scalars`.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn times_weight(
        &self,
        stream: *mut c_void,
        weight: *const c_void,
        (place, token_scalars): (DLogits, *mut c_void),
        dhidden: *mut c_void,
    ) -> Result<()> {
        let Self { tokens, width, vocab, vocab_is_last, dtype, .. } = *self;
        let DLogits { at, stride, .. } = place;
        check(Device::current()?, dtype, width, self.weight().1)?;
        check_alignment("unnormalised", at)?;
        check_alignment("weight", weight)?;
        check_alignment("dhidden", dhidden)?;
        if tokens == 0 || vocab == 0 {
            return Ok(());
        }
        let product = self.by_width();
        // SAFETY: passed on from this function's contract.
        let ready = unsafe {
            Ready::get(Epilogue::Scaled, dtype, Variant::Basic, product.factors(), stream)
        }?;
        // Nothing goes from tile to tile.
        let parts = product.tiles(width);
        let gradients = Self::gradient_of(token_scalars, 0);
        let driver = Driver::get()?;
        let matrix = |at: *const c_void, extents, stride, boxed| {
            driver.tensor_map(dtype, at, extents, stride, boxed)
        };
        let block = arguments::BLOCK;
        let of_weight = (block, if vocab_is_last { arguments::ROWS_OF_B } else { block });
        let extents = self.weight();
        let arguments = Arguments {
            hidden: matrix(at, (tokens, vocab), stride, (block, arguments::ROWS_OF_A))?,
            weight: matrix(weight, extents, extents.1, of_weight)?,
            dlogits: matrix(dhidden, (tokens, width), width, (block, arguments::ROWS_OF_STORE))?,
            blocks: count(vocab.div_ceil(block as usize)),
            tiles: count(parts),
            parts: count(parts),
            token_blocks: count(product.token_blocks()),
            group: count(product.group()),
            ..self.with_weight(weight, self.without_tensors(width, gradients)?)
        };
        // SAFETY: passed on from this function's contract.
        unsafe { ready.launch_tiles(stream, &arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: CrossEntropy = CrossEntropy {
        ignore_index: -100,
        label_smoothing: 0.0,
        z_loss: 1e-4,
        softcap: None,
        temperature: 1.0,
    };

    #[test]
    fn unnormalised_need_the_range_of_f32_and_one_share_of_a_row() {
        assert!(unnormalised_support(DType::Bf16, 32_768, &OPTIONS));
        assert!(!unnormalised_support(DType::F16, 1, &OPTIONS));
        let smooth = CrossEntropy { label_smoothing: 0.1, ..OPTIONS };
        let capped = CrossEntropy { softcap: Some(30.0), ..OPTIONS };
        assert!(!unnormalised_support(DType::Bf16, 32_769, &OPTIONS));
        assert!(unnormalised_support(DType::Bf16, 1, &smooth));
        assert!(unnormalised_support(DType::Bf16, 1, &capped));
        let both = CrossEntropy { softcap: Some(30.0), ..smooth };
        assert!(!unnormalised_support(DType::Bf16, 1, &both));
        let tempered = |options, temperature| {
            let options = CrossEntropy { temperature, ..options };
            unnormalised_support(DType::Bf16, 1, &options)
        };
        assert!(tempered(OPTIONS, 1.0 / 64.0) && !tempered(OPTIONS, 0.015));
        assert!(tempered(capped, 0.7) && !tempered(capped, 0.6));
        assert_eq!(
            Error::Unnormalised { dtype: DType::F16, tokens: 7, most: MOST_TOKENS }.to_string(),
            "there is no unnormalised softmax of 7 tokens in f16 or for these options; it \
             needs bf16, 32768 tokens at most, and not both softcap and label_smoothing"
        );
    }

    #[test]
    fn cublas_runs_products_whose_tiles_fill_waves() {
        let keeps_busy = |tokens, width| {
            let (vocab, vocab_is_last, dtype) = (128_256, false, DType::Bf16);
            FusedProduct { tokens, width, vocab, vocab_is_last, dtype, options: OPTIONS }
                .times_weight_keeps_busy(132)
        };
        // 256 tiles, and 64, are four turns and one of 66 clusters; 288 are a third of the fifth.
        assert!(keeps_busy(8192, 2048));
        assert!(keeps_busy(4096, 1024));
        assert!(!keeps_busy(8192, 2304));
        assert!(!keeps_busy(2048, 1024));
    }
}
