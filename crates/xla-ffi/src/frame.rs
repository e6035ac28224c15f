//! A call frame, nothing of which is used before it is checked.
//!
//! What is visibly wrong without reading it is refused: sizes of structs, null and misaligned
//! pointers, counts and ranks below zero, shapes that no memory holds. That a pointer which is
//! neither null nor misaligned leads to what it should is the caller's word.

use std::hash::{Hash, Hasher};

use crate::{
    Dictionary, Error, Result, Stage, abi,
    api::Api,
    pointers::{list, sized},
    raw::{Position, Raw},
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

    /// Adds what a handler sees of the call but memory: types and shapes, and attributes.
    ///
    /// # Errors
    /// The frame is broken.
    pub(crate) fn hash(&self, hasher: &mut impl Hasher) -> Result {
        for (result, count) in [(false, self.arguments()), (true, self.results())] {
            count.hash(hasher);
            for index in 0..count {
                let Raw { dtype, dims, .. } = self.buffer(Position { result, index, name: "" })?;
                (dtype, dims).hash(hasher);
            }
        }
        self.attributes.hash(hasher)
    }

    pub(crate) fn arguments(&self) -> usize {
        self.args.items.len()
    }

    pub(crate) fn results(&self) -> usize {
        self.rets.items.len()
    }

    /// The buffer at `position`, or why there is none.
    pub(crate) fn buffer(&self, position: Position) -> Result<Raw<'a>> {
        let list = if position.result { self.rets } else { self.args };
        let kind = if position.result { abi::RET_TYPE_BUFFER } else { abi::ARG_TYPE_BUFFER };
        let (Some(&item), Some(&actual)) =
            (list.items.get(position.index), list.types.get(position.index))
        else {
            return Err(Error::invalid_argument(format!(
                "{position} is missing: the call has {}",
                list.items.len()
            )));
        };
        if actual != kind {
            return Err(Error::invalid_argument(format!(
                "{position} has type {actual}; it must be {kind}, a buffer"
            )));
        }
        // SAFETY: an item of this type leads to a buffer, alive as the frame is.
        unsafe {
            let buffer: &abi::Buffer = sized(item.cast(), &position)?;
            Raw::new(position, buffer)
        }
    }

    /// Checks that the handler may touch the memory: not before `Execute`, and not while a result
    /// lies over it. `tolerate` is the result that may.
    pub(crate) fn check_memory(&self, buffer: &Raw<'a>, tolerate: Option<usize>) -> Result {
        let Raw { position, .. } = buffer;
        if self.stage != Stage::Execute {
            return Err(Error::failed_precondition(format!(
                "{position} has no contents in stage {}; take it as OnDevice",
                self.stage
            )));
        }
        for index in 0..self.results() {
            if tolerate == Some(index) || (position.result && position.index == index) {
                continue;
            }
            let result = self.buffer(Position { result: true, index, name: "" })?;
            if buffer.overlaps(&result) {
                return Err(buffer.must_be_apart(index));
            }
        }
        Ok(())
    }

    /// The first result that shares memory with `buffer`.
    pub(crate) fn shares(&self, buffer: &Raw<'a>) -> Result<Option<usize>> {
        for index in 0..self.results() {
            if buffer.overlaps(&self.buffer(Position { result: true, index, name: "" })?) {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }
}
