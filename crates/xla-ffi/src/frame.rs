//! A call frame, nothing of which is used before it is checked.
//!
//! What can be told wrong without reading it is refused: sizes of structs, null and misaligned
//! pointers, counts and ranks below zero, shapes that no memory holds. That a pointer which is
//! neither null nor misaligned leads to what it should is the caller's word.

use std::{fmt, marker::PhantomData};

use crate::{
    Dictionary, Error, Result, Stage, abi,
    api::Api,
    buffer::{Place, Raw},
};

/// A checked call frame, alive for the call.
#[derive(Clone, Copy)]
pub(crate) struct Frame<'a> {
    pub(crate) api: Api<'a>,
    pub(crate) ctx: *mut abi::ExecutionContext,
    pub(crate) stage: Stage,
    pub(crate) attributes: Dictionary<'a>,
    args: List<'a>,
    rets: List<'a>,
}

/// Arguments or results.
#[derive(Clone, Copy)]
struct List<'a> {
    items: &'a [*mut std::ffi::c_void],
    types: &'a [u32],
}

impl<'a> Frame<'a> {
    /// # Safety
    /// `frame` holds at least the fields up to `attrs`, and what it points to is alive for `'a`.
    pub(crate) unsafe fn new(frame: *const abi::CallFrame, api: Api<'a>) -> Result<Self> {
        let (major, minor) = api.version();
        if major != abi::API_MAJOR {
            return Err(Error::invalid_argument(format!(
                "the runtime speaks XLA FFI {major}.{minor}; this handler needs {}.{} or a later \
                 minor version",
                abi::API_MAJOR,
                abi::API_MINOR,
            )));
        }
        // SAFETY: these fields lie before the end of `attrs`.
        let (ctx, stage, args, rets, attrs) = unsafe {
            (
                (&raw const (*frame).ctx).read(),
                (&raw const (*frame).stage).read(),
                (&raw const (*frame).args).read(),
                (&raw const (*frame).rets).read(),
                (&raw const (*frame).attrs).read(),
            )
        };
        let stage = Stage::from_u32(stage).ok_or_else(|| {
            Error::invalid_argument(format!("stage {stage} of the call is none of 0 to 3"))
        })?;
        // These are part of the frame itself: were one longer, the next would lie elsewhere.
        for (name, size, right) in [
            ("XLA_FFI_Args", args.struct_size, size_of::<abi::Args>()),
            ("XLA_FFI_Rets", rets.struct_size, size_of::<abi::Rets>()),
            ("XLA_FFI_Attrs", attrs.struct_size, size_of::<abi::Attrs>()),
        ] {
            if size != right {
                return Err(Error::invalid_argument(format!(
                    "{name} has struct_size {size}; it must be {right}"
                )));
            }
        }
        // SAFETY: the frame's own lists, alive as it is.
        unsafe {
            Ok(Self {
                api,
                ctx,
                stage,
                attributes: Dictionary::new(&attrs)?,
                args: List {
                    items: list(args.args, args.size, "arguments")?,
                    types: list(args.types, args.size, "types of the arguments")?,
                },
                rets: List {
                    items: list(rets.rets, rets.size, "results")?,
                    types: list(rets.types, rets.size, "types of the results")?,
                },
            })
        }
    }

    pub(crate) fn arguments(&self) -> usize {
        self.args.items.len()
    }

    pub(crate) fn results(&self) -> usize {
        self.rets.items.len()
    }

    /// The buffer at `place`, or why there is none.
    pub(crate) fn buffer(&self, place: Place) -> Result<Raw<'a>> {
        let list = if place.result { self.rets } else { self.args };
        let kind = if place.result { abi::RET_TYPE_BUFFER } else { abi::ARG_TYPE_BUFFER };
        let (Some(&item), Some(&actual)) =
            (list.items.get(place.index), list.types.get(place.index))
        else {
            return Err(Error::invalid_argument(format!(
                "{place} is missing: the call has {}",
                list.items.len()
            )));
        };
        if actual != kind {
            return Err(Error::invalid_argument(format!(
                "{place} has type {actual}; it must be {kind}, a buffer"
            )));
        }
        // SAFETY: an item of this type leads to a buffer, alive as the frame is.
        unsafe {
            let buffer: &abi::Buffer = sized(item.cast(), &place)?;
            Raw::new(place, buffer)
        }
    }
}

/// A reference to a struct that begins with its own size.
///
/// # Safety
/// `pointer` is null, misaligned, or leads to a struct alive for `'a`, as long as it says it is.
/// `T` begins with its `struct_size: usize`, and every field takes any bits.
pub(crate) unsafe fn sized<'a, T>(pointer: *const T, what: &dyn fmt::Display) -> Result<&'a T> {
    // SAFETY: passed on from this function's contract.
    let size = *unsafe { reference(pointer.cast::<usize>(), what) }?;
    if size < size_of::<T>() {
        return Err(Error::invalid_argument(format!(
            "{what} has struct_size {size}; it must be at least {}",
            size_of::<T>()
        )));
    }
    // SAFETY: as long as a `T`.
    unsafe { reference(pointer, what) }
}

/// A reference to what `pointer` leads to.
///
/// # Safety
/// `pointer` is null, misaligned, or leads to a `T` alive for `'a`.
pub(crate) unsafe fn reference<'a, T>(pointer: *const T, what: &dyn fmt::Display) -> Result<&'a T> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(Error::invalid_argument(format!("{what} is at {pointer:p}, {WRONG}")));
    }
    // SAFETY: neither null nor misaligned.
    Ok(unsafe { &*pointer })
}

/// The `count` values from `pointer`, which matters only if there are any.
///
/// # Safety
/// `pointer` is null, misaligned, or leads to `count` values alive for `'a`.
pub(crate) unsafe fn list<'a, T>(
    pointer: *const T,
    count: i64,
    what: impl fmt::Display,
) -> Result<&'a [T]> {
    let length = usize::try_from(count)
        .ok()
        .filter(|&length| length <= isize::MAX as usize / size_of::<T>().max(1))
        .ok_or_else(|| {
            Error::invalid_argument(format!("the number of {what} is {count}, which cannot be"))
        })?;
    if length == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(Error::invalid_argument(format!("the {what} are at {pointer:p}, {WRONG}")));
    }
    // SAFETY: neither null nor misaligned, and no larger than memory may be.
    Ok(unsafe { std::slice::from_raw_parts(pointer, length) })
}

/// What is wrong with a pointer.
const WRONG: &str = "which is null or misaligned";

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
    pub fn parameter<P: crate::Parameter<'a>>(&mut self, name: &'static str) -> Result<P> {
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
        let place = Place { result, index: *next, name };
        *next += 1;
        self.frame.buffer(place)
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

/// Names in an error.
pub(crate) struct Names<'a>(pub(crate) &'a [&'a str]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (index, name) in self.0.iter().enumerate() {
            write!(f, "{}`{name}`", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
