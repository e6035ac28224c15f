//! What a handler takes, one parameter after another.

use std::marker::PhantomData;

use crate::{
    Dictionary, Error, FromAttribute, Result, Stage,
    frame::Frame,
    pointers::Names,
    raw::{Position, Raw},
};

/// The type of a parameter of a handler: a buffer, an attribute, or something of the
/// [`Context`](crate::Context).
pub trait Parameter<'a>: Sized {
    /// Takes the parameter called `name` from the frame.
    ///
    /// # Errors
    /// The frame has none that fits.
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self>;
}

impl<'a, T: FromAttribute<'a>> Parameter<'a> for T {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        decoder.attribute(name).get(name)
    }
}

/// All attributes of the call, whatever their names.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a>(Dictionary<'a>);

impl<'a> std::ops::Deref for Attributes<'a> {
    type Target = Dictionary<'a>;

    fn deref(&self) -> &Dictionary<'a> {
        &self.0
    }
}

impl<'a> Parameter<'a> for Attributes<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self(decoder.all_attributes()))
    }
}

/// Hands a frame out, parameter by parameter. What [`handler!`](crate::handler) makes uses it.
pub struct Decoder<'a> {
    pub(crate) frame: Frame<'a>,
    arguments: usize,
    results: usize,
    /// The attributes that the handler asked for; all of them if it took the whole dictionary.
    attributes: Vec<&'static str>,
    all_attributes: bool,
    lifetime: PhantomData<&'a ()>,
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(frame: Frame<'a>) -> Self {
        Self {
            frame,
            arguments: 0,
            results: 0,
            attributes: Vec::new(),
            all_attributes: false,
            lifetime: PhantomData,
        }
    }

    /// The next parameter of the handler, called `name`.
    ///
    /// # Errors
    /// The frame has nothing that fits.
    pub fn parameter<P: Parameter<'a>>(&mut self, name: &'static str) -> Result<P> {
        P::decode(self, name)
    }

    /// Checks that nothing of the frame is left over.
    ///
    /// # Errors
    /// The caller passes more than the handler takes. Before `Execute` a handler may leave out all
    /// arguments, all results, and any attribute, because every stage of a call gets the same frame.
    pub fn finish(&self) -> Result {
        let execute = self.frame.stage == Stage::Execute;
        for (what, taken, given) in [
            ("arguments", self.arguments, self.frame.arguments()),
            ("results", self.results, self.frame.results()),
        ] {
            if taken != given && (execute || taken != 0) {
                return Err(Error::invalid_argument(format!(
                    "the call has {given} {what}; the handler takes {taken}"
                )));
            }
        }
        if execute && !self.all_attributes {
            for index in 0..self.frame.attributes.len() {
                let name = self.frame.attributes.name(index)?;
                if !self.attributes.contains(&name) {
                    return Err(Error::invalid_argument(format!(
                        "attribute `{name}` is unknown; the handler takes {}",
                        Names(&self.attributes)
                    )));
                }
            }
        }
        Ok(())
    }

    pub(crate) fn buffer(&mut self, name: &'static str, result: bool) -> Result<Raw<'a>> {
        let next = if result { &mut self.results } else { &mut self.arguments };
        let position = Position { result, index: *next, name };
        *next += 1;
        self.frame.buffer(position)
    }

    /// Buffers of this kind that are left.
    pub(crate) fn left(&self, result: bool) -> usize {
        if result {
            self.frame.results().saturating_sub(self.results)
        } else {
            self.frame.arguments().saturating_sub(self.arguments)
        }
    }

    pub(crate) fn attribute(&mut self, name: &'static str) -> Dictionary<'a> {
        self.attributes.push(name);
        self.frame.attributes
    }

    pub(crate) fn all_attributes(&mut self) -> Dictionary<'a> {
        self.all_attributes = true;
        self.frame.attributes
    }
}
