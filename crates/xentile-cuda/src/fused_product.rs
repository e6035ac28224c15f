//! The product that makes logits, with cross-entropy in its epilogue: the forward pass of linear
//! cross-entropy in one sweep that writes no logits, and dlogits from saved lse, in the place of a
//! product and a pass over what it wrote (kernels/fused_product.cuh).
//!
//! It is for Hopper, 16-bit dtypes, and rows of hidden states and weight that are multiples of 8
//! elements; [`supports`] tells. Logits are sums in f32, and what is made of them is rounded.

mod arguments;
mod sum;
mod unnormalised;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use arguments::Arguments;
pub(crate) use sum::{Sum, There};
pub(crate) use unnormalised::rescale_bytes;
pub use unnormalised::{Unnormalised, unnormalised_support};
use xentile::cross_entropy::CrossEntropy;
use xentile::{DType, LogitsShape};

use crate::cache::Cache;
use crate::cross_entropy::{
    Arguments as Row, Cotangents, Kernel, Labels, Part, SavedLse, TokenOutputs, Variant,
};
use crate::driver::{DeviceNumber, Driver, Extent, Kernel as Code, RawStream, TensorMap};
use crate::operands::{Operands, Scratch};
use crate::{Device, Error, Result, check_alignment, library};

/// Where parts of the scratch begin.
const ALIGNMENT: usize = 256;
/// Bytes of a token's sums of a part, and of what its dlogits are made of.
const SUM_BYTES: usize = 8;
/// Bytes of a part's largest logits of a token.
const LARGEST_BYTES: usize = 8;
const GRADIENT_BYTES: usize = 16;
/// Parts that a row is cut into at most: as many as let 66 clusters take equal shares of any whole
/// number of blocks of tokens.
const MOST_PARTS: usize = 66;
/// What more parts have to gain.
const WORTH: f64 = 0.998;
/// Bytes of hidden states that stay in the L2 while columns go by.
const GROUP_BYTES: usize = 16 << 20;
/// The part of all multiprocessors that must have a tile at a time, where nothing goes from tile to
/// tile: where it is less, cuBLASLt has smaller tiles, or cuts sums.
const BUSY: f64 = 0.9;
/// CTAs of a multiprocessor where these take turns at rows.
const CTAS_OF_ROWS: u32 = 16;
/// Vectors of the copy engine, in elements.
const VECTOR: usize = 8;

/// Whether the device and the problem are such that [`FusedProduct`] runs: hidden states of `width`,
/// and a weight with so many elements in a row, D or V.
#[must_use]
pub fn supports(device: &Device, dtype: DType, width: usize, row: usize) -> bool {
    check(device, dtype, width, row).is_ok()
}

fn check(device: &Device, dtype: DType, width: usize, row: usize) -> Result<()> {
    if device.capability() != (9, 0) || !device.limits().clusters {
        let (name, capability) = (device.name().to_owned(), device.capability());
        return Err(Error::NotHopper { name, capability });
    }
    let whole = width.is_multiple_of(VECTOR) && row.is_multiple_of(VECTOR);
    if dtype == DType::F32 || width == 0 || !whole {
        return Err(Error::FusedProduct { dtype, width, row });
    }
    Ok(())
}

/// The product of hidden states `[N, D]` and a weight `[V, D]` or `[D, V]`, and what is made of it.
#[derive(Clone, Copy, Debug)]
pub struct FusedProduct {
    /// N.
    pub tokens: usize,
    /// D.
    pub width: usize,
    /// V.
    pub vocab: usize,
    /// Whether the weight is `[D, V]` rather than `[V, D]`.
    pub vocab_is_last: bool,
    /// Of hidden and weight.
    pub dtype: DType,
    /// The options of cross-entropy.
    pub options: CrossEntropy,
}

/// The vocabulary columns of a forward pass.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// The first of them.
    pub first: usize,
    /// How many there are.
    pub count: usize,
    /// Where rows' sums are kept between some columns and the next, 16 bytes a token on a GPU; null
    /// where these are all.
    pub carried: *mut c_void,
}

/// Where the gradient of some columns of logits goes.
#[derive(Clone, Copy, Debug)]
pub struct DLogits {
    /// `[N, columns]` on a GPU, at a multiple of 16.
    pub at: *mut c_void,
    /// Elements from row to row, a multiple of 8. What is between the last column and the next
    /// multiple of 8 may be written.
    pub stride: usize,
    /// The first of the vocabulary's columns that are here.
    pub first_column: usize,
    /// How many are here.
    pub columns: usize,
}

/// What is made of the product: see kernels/fused_product.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Epilogue {
    Forward,
    Backward,
    Unnormalised,
    Distribution,
    Scaled,
    Added,
    AddedLater,
    Sum,
}

impl Epilogue {
    /// That of the unnormalised softmax, which may say something of the distribution too.
    fn unnormalised(has_distribution: bool) -> Self {
        if has_distribution { Self::Distribution } else { Self::Unnormalised }
    }

    /// As kernels are named.
    fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Unnormalised => "unnormalised",
            Self::Distribution => "distribution",
            Self::Scaled => "scaled",
            Self::Added => "added",
            Self::AddedLater => "added_later",
            Self::Sum => "sum",
        }
    }
}

/// Where the parts of the forward pass' scratch begin.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    label_logits: Option<usize>,
    sums: Option<usize>,
    values: Option<usize>,
    rounded: Option<usize>,
    weighted: Option<usize>,
    largest: Option<usize>,
    bytes: usize,
}

impl FusedProduct {
    /// The scratch that the forward pass cannot do without, in bytes.
    #[must_use]
    pub fn least_scratch_bytes(&self) -> usize {
        self.layout(1, Epilogue::Forward).bytes
    }

    /// The scratch that it has a use for, in bytes. With less, clusters may get unequal shares.
    #[must_use]
    pub fn scratch_bytes(&self) -> usize {
        self.layout(MOST_PARTS.min(self.tiles(self.vocab)), Epilogue::Forward).bytes
    }

    /// Bytes of what is known between products of so many tokens, and of their labels among the
    /// vocabulary.
    #[must_use]
    pub fn bytes_of_tokens(tokens: usize, vocab: usize) -> usize {
        Self::labelled_at(tokens) + Self::labelled_bytes(vocab)
    }

    /// Where a bit for each column that is a label begins there, after so many tokens.
    fn labelled_at(tokens: usize) -> usize {
        ALIGNMENT + (GRADIENT_BYTES * tokens).next_multiple_of(ALIGNMENT)
    }

    fn labelled_bytes(vocab: usize) -> usize {
        4 * vocab.div_ceil(32)
    }

    /// Those bits, as [`unnormalised`](Self::unnormalised) leaves them in `token_scalars`.
    pub(crate) fn labelled(&self, token_scalars: *mut c_void) -> *mut u32 {
        token_scalars.wrapping_byte_add(Self::labelled_at(self.tokens)).cast()
    }

    /// Where that is of a token.
    pub(crate) fn gradient_of(token_scalars: *mut c_void, token: usize) -> *mut c_void {
        token_scalars.wrapping_byte_add(ALIGNMENT + GRADIENT_BYTES * token)
    }

    fn layout(&self, parts: usize, epilogue: Epilogue) -> Layout {
        let mut bytes = 0;
        let mut take = |of_token: usize| {
            let at = bytes;
            bytes += (of_token * self.tokens).next_multiple_of(ALIGNMENT);
            (of_token > 0).then_some(at)
        };
        let label_logits = take(4);
        let sums = take(parts * SUM_BYTES);
        let values = take(if self.options.label_smoothing == 0.0 { 0 } else { parts * 4 });
        let has_distribution = epilogue == Epilogue::Distribution;
        let is_unnormalised = has_distribution || epilogue == Epilogue::Unnormalised;
        let rounded = take(if is_unnormalised { parts * 4 } else { 0 });
        let weighted = take(if has_distribution { parts * 4 } else { 0 });
        let largest = take(if has_distribution { parts * LARGEST_BYTES } else { 0 });
        Layout { label_logits, sums, values, rounded, weighted, largest, bytes }
    }

    fn tiles(&self, columns: usize) -> usize {
        columns.div_ceil(arguments::TILE_COLUMNS as usize)
    }

    fn token_blocks(&self) -> usize {
        self.tokens.div_ceil(arguments::CLUSTER_TOKENS as usize)
    }

    /// Blocks of tokens that go through the vocabulary side by side.
    fn group(&self) -> usize {
        let block = self.width * self.dtype.size_bytes() * arguments::CLUSTER_TOKENS as usize;
        (GROUP_BYTES / block).clamp(1, self.token_blocks().max(1))
    }

    /// Extents of the weight.
    fn weight(&self) -> (usize, usize) {
        if self.vocab_is_last { (self.width, self.vocab) } else { (self.vocab, self.width) }
    }

    /// Parts that rows of so many columns are cut into, where `clusters` run at a time.
    fn parts(&self, columns: usize, clusters: u32, most: usize) -> usize {
        let (blocks, tiles) = (self.token_blocks(), self.tiles(columns));
        let mut best = (f64::INFINITY, 1);
        for parts in 1..=most.min(tiles).max(1) {
            let turns = (blocks * parts).div_ceil(clusters as usize);
            let time = turns as f64 * tiles as f64 / parts as f64;
            if time < best.0 * WORTH {
                best = (time, parts);
            }
        }
        best.1
    }

    /// The same where nothing is added up over a part: 0, for equal shares of all tiles, where hidden
    /// states all stay in the L2. Then a cluster goes from tile to tile for longer.
    fn parts_or_shares(&self, columns: usize, clusters: u32) -> usize {
        if self.token_blocks() <= self.group() {
            return 0;
        }
        self.parts(columns, clusters, MOST_PARTS)
    }

    /// Parts that there is scratch for, [`MOST_PARTS`] of each of so many places at most, and one of
    /// each at least.
    fn parts_in(&self, bytes: usize, places: usize, epilogue: Epilogue) -> Result<usize> {
        let fits = |parts: usize| self.layout(parts, epilogue).bytes <= bytes;
        let needed = self.layout(places, epilogue).bytes;
        let parts = (places..=MOST_PARTS * places).rev().find(|&parts| fits(parts));
        parts.ok_or(Error::Scratch { bytes, needed })
    }

    /// How many of so many parts each of these columns get, the most first, since there equal shares
    /// count most.
    fn share_parts(&self, of_places: &[usize], clusters: u32, parts: usize) -> Vec<usize> {
        let mut shares = vec![0; of_places.len()];
        let mut order: Vec<_> = (0..of_places.len()).collect();
        order.sort_by_key(|&place| std::cmp::Reverse(of_places[place]));
        let mut left = parts;
        for (after, &place) in (0..order.len()).rev().zip(&order) {
            shares[place] = self.parts(of_places[place], clusters, left.saturating_sub(after));
            left -= shares[place].min(left);
        }
        shares
    }

    /// Has `stream` fill what `outputs` asks for, or carry what rows add up to, from all of the
    /// vocabulary's columns or some.
    ///
    /// # Errors
    /// An option outside its range, a problem that [`supports`] does not have, columns that it does
    /// not have, scratch that is too little, no driver or GPU that will do, operands that begin at no
    /// multiple of 16, or a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context; pointers lead to arrays of the
    /// documented shapes on its device, which nothing else touches until it has run what was
    /// launched here.
    pub unsafe fn forward(
        &self,
        stream: *mut c_void,
        operands: Operands,
        columns: Columns,
        outputs: TokenOutputs,
        scratch: Scratch,
    ) -> Result<()> {
        let most = self.parts_in(scratch.bytes, 1, Epilogue::Forward)?;
        let Columns { first, count, carried } = columns;
        self.check_columns(first, count, count)?;
        if self.tokens == 0 || count == 0 {
            return Ok(());
        }
        // SAFETY: passed on from this function's contract.
        let ready = unsafe { self.ready(Epilogue::Forward, stream) }?;
        let parts = self.parts(count, ready.clusters, most);
        let none =
            DLogits { at: null_mut(), stride: self.vocab, first_column: first, columns: count };
        let arguments =
            self.arguments(Epilogue::Forward, operands, (none, count), parts, scratch)?;
        let row = Row { carried, ..arguments.row.with_outputs(outputs) };
        let arguments = Arguments { row, ..arguments };
        // SAFETY: passed on from this function's contract.
        unsafe {
            ready.launch_product(stream, &arguments)?;
            self.launch_on_tokens("fused_product_merge", 1, stream, &arguments)
        }
    }

    /// Has `stream` find what tokens' dlogits are made of, for any columns, and write it to
    /// `token_scalars`, [`bytes_of_tokens`](Self::bytes_of_tokens) on a GPU at a multiple of 256.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn prepare(
        &self,
        stream: *mut c_void,
        labels: Labels,
        saved: SavedLse,
        cotangents: Cotangents,
        token_scalars: *mut c_void,
    ) -> Result<()> {
        check(Device::current()?, self.dtype, self.width, self.weight().1)?;
        if self.tokens == 0 {
            return Ok(());
        }
        let shape = LogitsShape::new(self.tokens, self.vocab)?;
        let row = Kernel::new(self.options, shape, self.dtype)?.arguments(null(), labels);
        let row = row.with_cotangents(null_mut(), saved, cotangents);
        let gradients = Self::gradient_of(token_scalars, 0);
        let arguments = Arguments { gradients, ..Arguments::with_row(row) };
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch_on_tokens("fused_product_prepare", 1, stream, &arguments) }
    }

    /// Has `stream` write the gradient for `cotangents` of the columns that `dlogits` has, from what
    /// [`prepare`](Self::prepare) wrote to a place with `first_token` other tokens before these.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward), and columns or a stride that `dlogits` cannot have.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn backward(
        &self,
        stream: *mut c_void,
        operands: Operands,
        saved: SavedLse,
        cotangents: Cotangents,
        (token_scalars, first_token): (*mut c_void, usize),
        dlogits: DLogits,
    ) -> Result<()> {
        self.check_place("dlogits", dlogits)?;
        if self.tokens == 0 || dlogits.columns == 0 {
            return Ok(());
        }
        // SAFETY: passed on from this function's contract.
        let ready = unsafe { self.ready(Epilogue::Backward, stream) }?;
        let parts = self.parts_or_shares(dlogits.columns, ready.clusters);
        let none = Scratch { at: null_mut(), bytes: 0 };
        let arguments =
            self.arguments(Epilogue::Backward, operands, (dlogits, dlogits.columns), parts, none)?;
        let row = arguments.row.with_cotangents(dlogits.at, saved, cotangents);
        let gradients = Self::gradient_of(token_scalars, first_token);
        let arguments = Arguments { row, gradients, ..arguments };
        // SAFETY: passed on from this function's contract.
        unsafe { ready.launch_product(stream, &arguments) }
    }

    /// Checks where dlogits or logits go.
    fn check_place(&self, name: &'static str, place: DLogits) -> Result<()> {
        check_alignment(name, place.at)?;
        let DLogits { first_column, columns, stride, .. } = place;
        self.check_columns(first_column, columns, stride)?;
        if !stride.is_multiple_of(VECTOR) {
            let vocab = self.vocab;
            return Err(Error::Columns { first_column, columns, stride, vocab });
        }
        Ok(())
    }

    fn check_columns(&self, first_column: usize, columns: usize, stride: usize) -> Result<()> {
        let (vocab, end) = (self.vocab, first_column.saturating_add(columns));
        if end > vocab || stride < columns {
            return Err(Error::Columns { first_column, columns, stride, vocab });
        }
        Ok(())
    }

    /// What all of them take, but for outputs and cotangents: of so many columns, of which `logits` has
    /// a place for the first.
    fn arguments(
        &self,
        epilogue: Epilogue,
        operands: Operands,
        (logits, all): (DLogits, usize),
        parts: usize,
        scratch: Scratch,
    ) -> Result<Arguments> {
        check_alignment("hidden", operands.hidden)?;
        check_alignment("weight", operands.weight)?;
        check_alignment("scratch", scratch.at)?;
        let Self { tokens, width, vocab, dtype, options, .. } = *self;
        let DLogits { at, stride, first_column, columns } = logits;
        let shape = LogitsShape::new(tokens, all)?;
        let part = Part { vocab, first_column, stride, carried: null_mut() };
        let row = Kernel::new(options, shape, dtype)?.with_part(part);
        let row = row.arguments(null(), operands.labels);
        let driver = Driver::get()?;
        let block = arguments::BLOCK;
        let of_hidden = (block, arguments::ROWS_OF_A);
        let of_weight = (block, if self.vocab_is_last { block } else { arguments::ROWS_OF_B });
        let matrix = |at: *const c_void, extents: (usize, usize), boxed: (u32, u32)| {
            driver.tensor_map(dtype, at, extents, extents.1, boxed)
        };
        let dlogits = if epilogue != Epilogue::Forward {
            let boxed = (block, arguments::ROWS_OF_STORE);
            driver.tensor_map(dtype, at, (tokens, columns), stride, boxed)?
        } else {
            TensorMap::none()
        };
        let layout = match epilogue {
            Epilogue::Forward | Epilogue::Unnormalised | Epilogue::Distribution => {
                self.layout(parts, epilogue)
            }
            _ => Layout::default(),
        };
        let place = |offset: Option<usize>| {
            offset.map_or(null_mut(), |offset| scratch.at.wrapping_byte_add(offset))
        };
        Ok(Arguments {
            hidden: matrix(operands.hidden, (tokens, width), of_hidden)?,
            weight: matrix(operands.weight, self.weight(), of_weight)?,
            dlogits,
            sums: place(layout.sums),
            values: place(layout.values).cast(),
            rounded: place(layout.rounded).cast(),
            label_logits: place(layout.label_logits).cast(),
            bias: operands.bias_from(first_column),
            blocks: count(width.div_ceil(block as usize)),
            tiles: count(self.tiles(all)),
            parts: count(parts),
            token_blocks: count(self.token_blocks()),
            group: count(self.group()),
            ..Arguments::with_row(row)
        })
    }

    /// Whether tiles of which each is a cluster's keep so many multiprocessors busy.
    fn keeps_busy(&self, multiprocessors: u32) -> bool {
        let clusters = (multiprocessors / arguments::CLUSTER_CTAS).max(1);
        let turns = (self.token_blocks() * self.tiles(self.vocab)) as f64 / f64::from(clusters);
        turns >= BUSY * turns.ceil()
    }

    /// How the weight lies, as kernels are named.
    fn factors(&self) -> &'static str {
        if self.vocab_is_last { "dv" } else { "vd" }
    }

    /// The variant of an epilogue, of which those that compute no logits' sums have one. All that have
    /// more take any temperature.
    fn variant(&self, epilogue: Epilogue) -> Variant {
        match epilogue {
            Epilogue::Forward
            | Epilogue::Backward
            | Epilogue::Unnormalised
            | Epilogue::Distribution => match Variant::of(&self.options) {
                Variant::Tempered => Variant::Capped,
                other => other,
            },
            _ => Variant::Basic,
        }
    }

    /// What a launch needs of a problem that the kernels have.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn ready(&self, epilogue: Epilogue, stream: RawStream) -> Result<Ready> {
        check(Device::current()?, self.dtype, self.width, self.weight().1)?;
        // SAFETY: passed on from this function's contract.
        unsafe { Ready::get(epilogue, self.dtype, self.variant(epilogue), self.factors(), stream) }
    }

    /// Runs a kernel that takes so many threads for a token.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn launch_on_tokens(
        &self,
        name: &str,
        threads_of_token: usize,
        stream: RawStream,
        arguments: &Arguments,
    ) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe {
            let ctas = (self.tokens * threads_of_token).div_ceil(arguments::TOKEN_THREADS as usize);
            self.launch_on_places(name, [ctas, 1], stream, arguments)
        }
    }

    /// Runs a kernel whose CTAs take turns at rows.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn launch_on_rows(
        &self,
        name: &str,
        stream: RawStream,
        arguments: &Arguments,
    ) -> Result<()> {
        let device = Device::current()?;
        // SAFETY: passed on from this function's contract.
        let code = unsafe { library::kept_kernel(name, device, stream) }?;
        let most = device.limits().multiprocessors.max(1) * CTAS_OF_ROWS;
        let extent = Extent {
            ctas: count(self.tokens).min(most),
            rows: 1,
            threads: arguments::TOKEN_THREADS,
            shared_bytes: 0,
            cluster: None,
        };
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(code, extent, stream, arguments) }
    }

    /// Runs a kernel of so many CTAs in so many rows.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn launch_on_places(
        &self,
        name: &str,
        [ctas, rows]: [usize; 2],
        stream: RawStream,
        arguments: &Arguments,
    ) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        let code = unsafe { library::kept_kernel(name, Device::current()?, stream) }?;
        let extent = Extent {
            ctas: count(ctas),
            rows: count(rows),
            threads: arguments::TOKEN_THREADS,
            shared_bytes: 0,
            cluster: None,
        };
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(code, extent, stream, arguments) }
    }
}

impl Arguments {
    /// Those of rows alone.
    fn with_row(row: Row) -> Self {
        Self {
            hidden: TensorMap::none(),
            weight: TensorMap::none(),
            dlogits: TensorMap::none(),
            row,
            sums: null_mut(),
            values: null_mut(),
            rounded: null_mut(),
            label_logits: null_mut(),
            gradients: null_mut(),
            bias: null(),
            gate: null(),
            rescales: null_mut(),
            rescaled: null_mut(),
            labelled: null_mut(),
            hidden_rows: null(),
            weight_rows: null(),
            scaled_rows: null_mut(),
            dbias: null_mut(),
            width: 0,
            vocab_step: 0,
            width_step: 0,
            written: 0,
            part: null_mut(),
            part_first: 0,
            part_count: 0,
            part_stride: 0,
            blocks: 0,
            tiles: 0,
            parts: 0,
            token_blocks: 0,
            group: 0,
            adds: 0,
            weighted: null_mut(),
            largest: null_mut(),
        }
    }
}

/// What decides which kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    device: DeviceNumber,
    epilogue: Epilogue,
    dtype: DType,
    variant: Variant,
    /// How factors lie, as kernels are named.
    factors: &'static str,
}

/// A kernel that is loaded, and how many clusters run at a time.
#[derive(Clone, Copy, Debug)]
struct Ready {
    product: Code,
    clusters: u32,
}

impl Ready {
    /// From the first call of its kind, or kept from there.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn get(
        epilogue: Epilogue,
        dtype: DType,
        variant: Variant,
        factors: &'static str,
        stream: RawStream,
    ) -> Result<Self> {
        static READY: Cache<Key, Ready> = Cache::new();
        let device = Device::current()?;
        let key = Key { device: device.number(), epilogue, dtype, variant, factors };
        // SAFETY: passed on from this function's contract.
        READY.get(key, |key| unsafe { Self::load(key, device, stream) })
    }

    /// # Safety
    /// `stream` is a stream of `device`.
    unsafe fn load(key: &Key, device: &Device, stream: RawStream) -> Result<Self> {
        let Key { epilogue, dtype, variant, factors, .. } = *key;
        let (epilogue, variant) = (epilogue.name(), variant.name());
        let name = format!("fused_product_{epilogue}_{dtype}_{variant}_{factors}");
        // SAFETY: passed on from this function's contract.
        let product = unsafe { library::kernel(&name, device, stream) }?;
        // SAFETY: passed on from this function's contract.
        let clusters = unsafe { Driver::get()?.max_active_clusters(product, extent(1), stream) }?;
        if clusters == 0 {
            return Err(Error::NoCluster { name: device.name().to_owned() });
        }
        Ok(Self { product, clusters })
    }

    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn launch_product(&self, stream: RawStream, arguments: &Arguments) -> Result<()> {
        let of_block = if arguments.parts == 0 { arguments.tiles } else { arguments.parts };
        let items = u64::from(arguments.token_blocks) * u64::from(of_block);
        let clusters = self.clusters.min(u32::try_from(items).unwrap_or(u32::MAX));
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(self.product, extent(clusters), stream, arguments) }
    }

    /// As [`launch_product`](Self::launch_product), for few long tiles: a cluster has one, so that tiles go
    /// where there is room. Clusters for whom a collective leaves none would begin their equal shares
    /// when others have ended.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn launch_tiles(&self, stream: RawStream, arguments: &Arguments) -> Result<()> {
        let clusters = arguments.token_blocks * arguments.parts;
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(self.product, extent(clusters), stream, arguments) }
    }
}

/// The launch of so many clusters.
fn extent(clusters: u32) -> Extent {
    Extent {
        ctas: clusters * arguments::CLUSTER_CTAS,
        rows: 1,
        threads: arguments::THREADS,
        shared_bytes: arguments::SHARED_BYTES,
        cluster: Some(arguments::CLUSTER_CTAS),
    }
}

/// A number of things of which there are fewer than addresses.
fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRODUCT: FusedProduct = FusedProduct {
        tokens: 8192,
        width: 2048,
        vocab: 128_256,
        vocab_is_last: false,
        dtype: DType::Bf16,
        options: CrossEntropy {
            ignore_index: -100,
            label_smoothing: 0.0,
            z_loss: 0.0,
            softcap: None,
            temperature: 1.0,
        },
    };

    #[test]
    fn clusters_get_equal_shares_where_scratch_allows_it() {
        // 32 blocks of tokens in 33 parts are 16 turns of 66 clusters.
        assert_eq!(PRODUCT.parts(128_256, 66, MOST_PARTS), 33);
        assert_eq!(PRODUCT.parts(128_256, 64, MOST_PARTS), 2);
        assert_eq!(PRODUCT.parts(128_256, 66, 1), 1);
        let few = FusedProduct { tokens: 1, ..PRODUCT };
        assert_eq!(few.parts(1000, 66, MOST_PARTS), 4);
        let none = FusedProduct { tokens: 0, ..PRODUCT };
        assert_eq!(none.parts(1000, 66, MOST_PARTS), 1);
    }

    #[test]
    fn devices_share_parts_by_width() {
        let shares = |places: &[usize], parts| PRODUCT.share_parts(places, 66, parts);
        let layout = |parts| PRODUCT.layout(parts, Epilogue::Unnormalised);
        let parts_in = |bytes, places| PRODUCT.parts_in(bytes, places, Epilogue::Unnormalised);
        assert_eq!(shares(&[128_256], 63), [33]);
        // Halves would be 31 each, and the wider one 3 % longer for it.
        assert_eq!(shares(&[28_000, 100_256], 63), [2, 33]);
        assert_eq!(shares(&[28_000, 100_256], 2), [1, 1]);
        assert_eq!(parts_in(layout(63).bytes, 2), Ok(63));
        assert_eq!(parts_in(1 << 30, 2), Ok(2 * MOST_PARTS));
        let message = parts_in(layout(1).bytes, 2).unwrap_err().to_string();
        assert_eq!(message, "scratch of 131072 bytes is too little; 229376 bytes are needed");
    }

    #[test]
    fn scratch_is_some_numbers_a_token() {
        let tokens = PRODUCT.tokens;
        assert_eq!(PRODUCT.least_scratch_bytes(), (4 + 8) * tokens);
        assert_eq!(PRODUCT.scratch_bytes(), (4 + 66 * 8) * tokens);
        let options = CrossEntropy { label_smoothing: 0.1, ..PRODUCT.options };
        let smooth = FusedProduct { options, ..PRODUCT };
        assert_eq!(smooth.scratch_bytes(), (4 + 66 * 12) * tokens);
        for parts in [1, 2, 33, 66] {
            let bytes = smooth.layout(parts, Epilogue::Forward).bytes;
            assert_eq!(smooth.parts_in(bytes, 1, Epilogue::Forward), Ok(parts));
        }
        let few = PRODUCT.parts_in(12 * tokens - 1, 1, Epilogue::Forward);
        let message = few.unwrap_err().to_string();
        assert_eq!(message, "scratch of 98303 bytes is too little; 98304 bytes are needed");
    }

    #[test]
    fn hidden_states_of_a_group_stay_in_the_l2() {
        let group = |tokens, width| FusedProduct { tokens, width, ..PRODUCT }.group();
        assert_eq!(group(8192, 2048), 16);
        assert_eq!(group(8192, 1 << 20), 1);
        assert_eq!(group(300, 64), 2);
        assert_eq!(group(0, 64), 1);
    }
}
