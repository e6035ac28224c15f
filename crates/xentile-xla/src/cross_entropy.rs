//! Cross-entropy over logits: the attributes and the shapes of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::cross_entropy::CrossEntropy;
use xentile::{LogitsShape, Tile};
use xla_ffi::{Attribute, DType, Decoder, Error, FromAttribute, Parameter, Result};

use crate::dtype;

/// The attributes of every target of cross-entropy, each within its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) contract: CrossEntropy,
    time_block: Option<Extent>,
    block_size: Option<Extent>,
}

impl<'a> Parameter<'a> for Options {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let contract = CrossEntropy {
            ignore_index: decoder.parameter("ignore_index")?,
            label_smoothing: decoder.parameter("label_smoothing")?,
            z_loss: decoder.parameter("z_loss")?,
            softcap: decoder.parameter("softcap")?,
            temperature: decoder.parameter::<Option<f64>>("temperature")?.unwrap_or(1.0),
        };
        contract.validate().map_err(|error| invalid(format_args!("attribute {error}")))?;
        Ok(Self {
            contract,
            time_block: decoder.parameter("time_block")?,
            block_size: decoder.parameter("block_size")?,
        })
    }
}

impl Options {
    /// The tile to work in, where `tuned` is the one for the dtype and the vocabulary.
    pub(crate) fn tile(&self, tuned: Tile) -> Result<Tile> {
        let [time_block, block_size] = self.extents();
        tuned.with(time_block, block_size).map_err(invalid)
    }

    /// `time_block` and `block_size`, where they are given.
    pub(crate) fn extents(&self) -> [Option<usize>; 2] {
        [self.time_block, self.block_size].map(|extent| extent.map(|Extent(extent)| extent))
    }
}

/// Which outputs about a token's distribution a call asks for, both if it doesn't say. The others may
/// be left as they are.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "CPUs make both"))]
pub(crate) struct Asked {
    pub(crate) entropy: bool,
    /// And the largest logit.
    pub(crate) argmax: bool,
}

impl<'a> Parameter<'a> for Asked {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let entropy: Option<bool> = decoder.parameter("entropy")?;
        let argmax: Option<bool> = decoder.parameter("argmax")?;
        Ok(Self { entropy: entropy.unwrap_or(true), argmax: argmax.unwrap_or(true) })
    }
}

/// An extent, of a tile or a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent(pub(crate) usize);

impl<'a> FromAttribute<'a> for Extent {
    fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
        let value = i64::from_attribute(attribute)?;
        match usize::try_from(value) {
            Ok(extent @ 1..) => Ok(Self(extent)),
            _ => Err(invalid(format_args!("is {value}; it must be at least 1"))),
        }
    }
}

/// The shape of `$logits` `[.., V]`, flattened, if every other operand has their leading axes, and
/// `$dlogits`, where there is one, all of them.
macro_rules! shape_of {
    ($logits:ident $(=> $dlogits:ident)?; $($other:ident),*) => {
        $crate::cross_entropy::shape(
            $logits.dims(),
            &[$((stringify!($other), $other.dims())),*],
        )
        $(.and_then(|shape| {
            $crate::cross_entropy::check_dlogits($logits.dims(), $dlogits.dims())?;
            Ok(shape)
        }))?
    };
}
pub(crate) use shape_of;

/// The shape of `logits`, if each of the `others`, with its name, has their leading axes.
pub(crate) fn shape(logits: &[usize], others: &[(&str, &[usize])]) -> Result<LogitsShape> {
    let Some((&vocab, leading)) = logits.split_last() else {
        return Err(invalid(
            "`logits` has shape []; it must have an axis at least, the vocabulary",
        ));
    };
    if vocab == 0 {
        return Err(invalid(format_args!(
            "`logits` has shape {logits:?}; its last axis, the vocabulary, must be at least 1"
        )));
    }
    for (name, dims) in others {
        if *dims != leading {
            return Err(invalid(format_args!(
                "`{name}` has shape {dims:?}; it must be {leading:?}, the leading axes of `logits`"
            )));
        }
    }
    // An empty axis first, because the others alone may multiply to more than fits.
    let tokens = if leading.contains(&0) { 0 } else { leading.iter().product() };
    LogitsShape::new(tokens, vocab).map_err(|error| invalid(format_args!("`logits` has {error}")))
}

/// Checks that `dlogits` has the shape of `logits`.
pub(crate) fn check_dlogits(logits: &[usize], dlogits: &[usize]) -> Result {
    if dlogits == logits {
        return Ok(());
    }
    Err(invalid(format_args!(
        "`dlogits` has shape {dlogits:?}; it must be {logits:?}, that of `logits`"
    )))
}

/// The error for labels of another type than those of the two widths.
pub(crate) fn wrong_labels(dtype: DType) -> Error {
    dtype::wrong("labels", dtype, "s32 or s64")
}

fn invalid(message: impl std::fmt::Display) -> Error {
    Error::invalid_argument(message.to_string())
}
