//! The way from a C call to a Rust function.

use std::{
    any::Any,
    mem::offset_of,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::null_mut,
};

use crate::{
    Decoder, Error, Result, Stage, Traits, abi,
    api::Api,
    frame::Frame,
    once::{Key, SEEN},
    pointers::{reference, sized},
};

/// What a handler may return.
pub trait Outcome {
    /// As a result.
    ///
    /// # Errors
    /// The handler failed.
    fn into_result(self) -> Result;
}

impl Outcome for () {
    fn into_result(self) -> Result {
        Ok(())
    }
}

impl<E: Into<Error>> Outcome for Result<(), E> {
    fn into_result(self) -> Result {
        self.map_err(Into::into)
    }
}

/// Makes functions that XLA can call: `fn symbol = path::to::function::<T>(names of its parameters);`.
///
/// The types of the function's parameters say what each one is:
///
/// - [`Buffer`](crate::Buffer), [`AnyBuffer`](crate::AnyBuffer): the next argument;
///   [`BufferMut`](crate::BufferMut), [`AnyBufferMut`](crate::AnyBufferMut): the next result; an
///   `Option` of one of them: the next, if any is left; a `Vec`: all that are left; in
///   [`OnDevice`](crate::OnDevice), around which `Option` may be: its address only; in
///   [`MayAlias`](crate::MayAlias): an argument that the caller may donate to a result;
/// - numbers, [`bool`], `&str`, `&[T]`, [`Dictionary`](crate::Dictionary), `Option` of these, and what implements
///   [`FromAttribute`](crate::FromAttribute): the attribute of that name;
///   [`Attributes`](crate::Attributes): all of them;
/// - [`Context`](crate::Context), [`Stream`](crate::Stream), [`Scratch`](crate::Scratch),
///   [`ThreadPool`](crate::ThreadPool): what the runtime lends.
///
/// It returns nothing or a `Result<(), E>` with an `E` that becomes an [`Error`]. An error, a panic,
/// and a frame that does not fit reach the caller of the program with XLA's codes; nothing of the
/// function runs unless every parameter fits.
///
/// After the parameters may come `stage = Stage::…` ([`Execute`](Stage::Execute) unless given),
/// `traits = Traits::…` and `once = true`. The latter is for what a function loads and keeps: one that
/// succeeded is not run again in this process for calls of the same handler on the same device, with
/// the same types, shapes and attributes, which are answered at once.
///
/// ```
/// use xla_ffi::{Buffer, BufferMut, Error, Result, Stage};
///
/// /// `y = alpha * x`
/// fn scale(x: Buffer<f32>, mut y: BufferMut<f32>, alpha: f32) -> Result {
///     if x.dims() != y.dims() {
///         return Err(Error::invalid_argument(format!("{x:?} and {y:?} differ in shape")));
///     }
///     y.iter_mut().zip(&*x).for_each(|(y, x)| *y = alpha * x);
///     Ok(())
/// }
///
/// fn check(alpha: f32) -> Result {
///     if alpha.is_finite() { Ok(()) } else { Err(Error::invalid_argument("alpha is not finite")) }
/// }
///
/// xla_ffi::handler! {
///     /// To be registered as the target's `execute`.
///     pub fn example_scale = scale(x, y, alpha);
///     /// To be registered as the target's `instantiate`.
///     pub fn example_scale_instantiate = check(alpha), stage = Stage::Instantiate;
/// }
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! handler {
    ($(
        $(#[$attribute:meta])*
        $visibility:vis fn $symbol:ident = $function:ident $(:: $more:ident)* $(:: <$($generic:ty),*>)?
            ($($parameter:ident),* $(,)?)
            $(, stage = $stage:expr)? $(, traits = $traits:expr)? $(, once = $once:expr)?;
    )*) => {
        $(
            $(#[$attribute])*
            ///
            /// # Safety
            /// `frame` is a call frame of XLA's FFI, whose pointers lead to what they should, on a
            /// platform whose memory the handler's parameters suit.
            #[unsafe(no_mangle)]
            $visibility unsafe extern "C" fn $symbol(
                frame: *mut $crate::abi::CallFrame,
            ) -> *mut $crate::abi::Error {
                #[allow(unused_mut, unused_assignments)]
                let mut stage = $crate::Stage::Execute;
                $(stage = $stage;)?
                #[allow(unused_mut, unused_assignments)]
                let mut traits = $crate::Traits::NONE;
                $(traits = $traits;)?
                #[allow(unused_mut, unused_assignments)]
                let mut once = false;
                $(once = $once;)?
                // SAFETY: the caller passes a call frame.
                unsafe {
                    $crate::call(frame, stringify!($symbol), stage, traits, once, |decoder| {
                        // Before the parameters, one of which may have the function's name.
                        let function = $function $(:: $more)* $(:: <$($generic),*>)?;
                        $(let $parameter = decoder.parameter(stringify!($parameter))?;)*
                        decoder.finish()?;
                        $crate::Outcome::into_result(function($($parameter),*))
                    })
                }
            }
        )*
    };
}

/// Answers the call `frame` of a handler called `name`, a text of its own, as
/// [`handler!`](crate::handler) does.
///
/// # Safety
/// `frame` is null, misaligned or a call frame of XLA's FFI, whose pointers lead to what they should,
/// alive for the call.
pub unsafe fn call(
    frame: *mut abi::CallFrame,
    name: &'static str,
    stage: Stage,
    traits: Traits,
    once: bool,
    body: impl for<'a> FnOnce(&mut Decoder<'a>) -> Result,
) -> *mut abi::Error {
    // SAFETY: passed on from this function's contract.
    let Some((frame, api)) = (unsafe { open(frame) }) else {
        // There is nothing to make an error with, and to return none would claim success.
        eprintln!("{name}: the call frame has no table of functions, so the process ends");
        std::process::abort();
    };
    let answer = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: passed on from this function's contract.
        unsafe { answer(frame, api, stage, traits, once.then_some(name), body) }
    }));
    let error = match answer {
        Ok(Ok(())) => return null_mut(),
        Ok(Err(error)) => error,
        Err(panic) => Error::internal(format!("{name} panicked: {}", reason(panic))),
    };
    let error = api.make_error(&error);
    if error.is_null() {
        eprintln!("{name}: the runtime makes no error, so the process ends");
        std::process::abort();
    }
    error
}

/// The frame and its functions, if it has any.
///
/// # Safety
/// As for [`call`].
unsafe fn open<'a>(frame: *mut abi::CallFrame) -> Option<(*mut abi::CallFrame, Api<'a>)> {
    if frame.is_null() || !frame.is_aligned() {
        return None;
    }
    // SAFETY: any frame begins with its size, and what lies within the size may be read.
    unsafe {
        let size = (&raw const (*frame).struct_size).read();
        if size < offset_of!(abi::CallFrame, api) + size_of::<*const abi::Api>() {
            return None;
        }
        Some((frame, Api::new((&raw const (*frame).api).read())?))
    }
}

/// `once` is the name of a handler whose function is run once.
///
/// # Safety
/// `frame` came from [`open`].
unsafe fn answer(
    frame: *mut abi::CallFrame,
    api: Api<'_>,
    stage: Stage,
    traits: Traits,
    once: Option<&'static str>,
    body: impl for<'a> FnOnce(&mut Decoder<'a>) -> Result,
) -> Result {
    const LEAST: usize = offset_of!(abi::CallFrame, attrs) + size_of::<abi::Attrs>();
    // SAFETY: the frame is as long as it says, and longer than these.
    let (size, extensions) = unsafe {
        ((&raw const (*frame).struct_size).read(), (&raw const (*frame).extension_start).read())
    };
    if size < LEAST {
        return Err(Error::invalid_argument(format!(
            "XLA_FFI_CallFrame has struct_size {size}; it must be at least {LEAST}"
        )));
    }
    // SAFETY: extensions are structs that say their size, as the frame is.
    if unsafe { answer_metadata(extensions, traits) }? {
        return Ok(());
    }
    // SAFETY: long enough.
    let frame = unsafe { Frame::new(frame, api) }?;
    if frame.stage != stage {
        return Err(Error::invalid_argument(format!(
            "the call is in stage {}; this handler is for {stage}",
            frame.stage
        )));
    }
    let key = once.and_then(|name| Key::new(name, &frame));
    if key.is_some_and(|key| SEEN.has(key)) {
        return Ok(());
    }
    body(&mut Decoder::new(frame))?;
    if let Some(key) = key {
        SEEN.put(key);
    }
    Ok(())
}

/// Tells of the handler, if that is what an extension asks for.
///
/// # Safety
/// `extension` is null, misaligned, or leads to a list of extensions.
unsafe fn answer_metadata(mut extension: *mut abi::ExtensionBase, traits: Traits) -> Result<bool> {
    const LEAST: usize = offset_of!(abi::Metadata, traits) + size_of::<u32>();
    // The bound is for a list that bites its tail.
    for _ in 0..64 {
        if extension.is_null() {
            return Ok(false);
        }
        // SAFETY: passed on from this function's contract.
        let base = *unsafe { sized(extension.cast_const(), &"an extension") }?;
        if base.r#type != abi::EXTENSION_METADATA {
            extension = base.next;
            continue;
        }
        // SAFETY: an extension of this type is this struct, if it is as long.
        let metadata = unsafe {
            let what = &"the metadata extension";
            sized(extension.cast_const().cast::<abi::MetadataExtension>(), what)?
        }
        .metadata;
        // SAFETY: metadata begins with its size.
        let size = *unsafe { reference(metadata.cast::<usize>(), &"the metadata") }?;
        if size < LEAST {
            return Err(Error::invalid_argument(format!(
                "XLA_FFI_Metadata has struct_size {size}; it must be at least {LEAST}"
            )));
        }
        // SAFETY: the struct reaches past these fields, and is there to be written.
        unsafe {
            (&raw mut (*metadata).api_version).write(abi::ApiVersion {
                struct_size: size_of::<abi::ApiVersion>(),
                extension_start: null_mut(),
                major_version: abi::API_MAJOR,
                minor_version: abi::API_MINOR,
            });
            (&raw mut (*metadata).traits).write(traits.bits());
        }
        return Ok(true);
    }
    Err(Error::invalid_argument("the call frame has more than 64 extensions"))
}

/// The text of a panic.
fn reason(panic: Box<dyn Any + Send>) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        return (*text).into();
    }
    if let Some(text) = panic.downcast_ref::<String>() {
        return text.clone();
    }
    // Its destructor might panic in turn.
    std::mem::forget(panic);
    "with a value that is no text".into()
}
