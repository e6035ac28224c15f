//! Cross-entropy over logits: the attributes and the shapes of its targets, on any platform.

pub(crate) mod cpu;

use xentile::cross_entropy::CrossEntropy;
use xentile::{LogitsShape, Tile};
use xla_ffi::{Attribute, Decoder, Error, FromAttribute, Parameter, Result};

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
        let extent = |extent: Option<Extent>| extent.map(|Extent(extent)| extent);
        tuned.with(extent(self.time_block), extent(self.block_size)).map_err(invalid)
    }
}

/// An extent of a tile.
#[derive(Clone, Copy, Debug)]
struct Extent(usize);

impl<'a> FromAttribute<'a> for Extent {
    fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
        let value = i64::from_attribute(attribute)?;
        match usize::try_from(value) {
            Ok(extent @ 1..) => Ok(Self(extent)),
            _ => Err(invalid(format_args!("is {value}; it must be at least 1"))),
        }
    }
}

/// The shape of `logits` `[.., V]`, flattened, if every other operand has their leading axes.
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

fn invalid(message: impl std::fmt::Display) -> Error {
    Error::invalid_argument(message.to_string())
}
