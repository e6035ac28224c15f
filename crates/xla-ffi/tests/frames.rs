//! Call frames by hand, right ones and ones broken in every way, with no XLA.

use std::{
    cell::Cell,
    ffi::c_void,
    mem::offset_of,
    ptr::{null, null_mut},
    sync::atomic::{AtomicUsize, Ordering},
};

use xla_ffi::testing::{Array, Call, Pool};
use xla_ffi::{
    Aliased, AnyBuffer, AnyBufferMut, Buffer, BufferMut, DType, Dictionary, Error, ErrorCode,
    MayAlias, OnDevice, Result, Scratch, Stage, Stream, ThreadPool, Traits, abi,
};

fn scale(x: Buffer<f32, 1>, mut y: BufferMut<f32, 1>, alpha: f32) {
    y.iter_mut().zip(&*x).for_each(|(y, x)| *y = alpha * x);
}

fn generic<T: xla_ffi::Element>(x: Buffer<T>, mut y: BufferMut<T>) {
    y.copy_from_slice(&x);
}

fn any(_x: AnyBuffer) {}

fn in_place(x: MayAlias<Buffer<f32>>, y: BufferMut<f32>, _z: BufferMut<f32>) -> Result {
    match x.with(y)? {
        Aliased::InPlace(y) => y.iter_mut().for_each(|y| *y += 1.0),
        Aliased::Apart { argument, result } => result.copy_from_slice(argument),
    }
    Ok(())
}

fn may_add(
    x: Buffer<f32>,
    more: Option<Buffer<f32, 1>>,
    mut y: BufferMut<f32>,
    z: Option<BufferMut<f32>>,
) {
    y.copy_from_slice(&x);
    if let Some(more) = more {
        y.iter_mut().zip(&*more).for_each(|(y, more)| *y += more);
    }
    if let Some(mut z) = z {
        z.copy_from_slice(&y);
    }
}

fn options(list: &[i64], text: &str, nested: Dictionary, flag: Option<bool>) -> Result {
    assert_eq!((list, text), (&[1, 2][..], "text"));
    assert_eq!(nested.get::<i64>("inner")?, 7);
    assert_eq!(flag, None);
    Ok(())
}

fn panicking() {
    panic!("as asked");
}

fn parallel(y: BufferMut<f32>, pool: ThreadPool) {
    let y = y.into_slice();
    pool.run_chunks(y, 3, |first, chunk| {
        assert_ne!(first, 999, "chunk");
        for (index, y) in chunk.iter_mut().enumerate() {
            *y += (first + index) as f32;
        }
    });
}

fn early(_x: OnDevice<Buffer<f32>>) {}
fn too_early(_x: Buffer<f32>) {}
fn wants_stream(_stream: Stream) {}
fn wants_memory(scratch: Scratch) -> Result {
    scratch.on_host::<f32>(10)?.fill(1.0);
    scratch.on_device(64, 64).map(|_| ())
}

xla_ffi::handler! {
    fn test_scale = scale(x, y, alpha);
    fn test_generic = generic::<half::bf16>(x, y);
    fn test_any = any(x);
    fn test_in_place = in_place(x, y, z);
    fn test_may_add = may_add(x, more, y, z);
    fn test_options = options(list, text, nested, flag);
    fn test_panicking = panicking(), traits = Traits::COMMAND_BUFFER_COMPATIBLE;
    fn test_parallel = parallel(y, pool);
    fn test_early = early(x), stage = Stage::Initialize;
    fn test_too_early = too_early(x), stage = Stage::Initialize;
    fn test_prepare = wants_nothing(), stage = Stage::Prepare;
    fn test_stream = wants_stream(stream);
    fn test_memory = wants_memory(scratch);
    fn test_load = load(x, y, list, level), stage = Stage::Initialize, once = true;
    fn test_load_other = load(x, y, list, level), stage = Stage::Initialize, once = true;
    fn test_load_always = load(x, y, list, level), stage = Stage::Initialize;
}

fn wants_nothing() {}

thread_local! {
    static LOADED: Cell<usize> = const { Cell::new(0) };
}

fn load(_x: OnDevice<AnyBuffer>, _y: OnDevice<AnyBufferMut>, _list: &[i64], level: i32) -> Result {
    LOADED.set(LOADED.get() + 1);
    if level < 0 { Err(Error::invalid_argument("is below 0")) } else { Ok(()) }
}

fn right() -> Call {
    let call = Call::new(vec![Array::f32(&[1.0, 2.0, 3.0])], vec![Array::f32(&[0.0; 3])]);
    call.scalar("alpha", 2.0_f32)
}

#[test]
fn a_right_frame_is_run() {
    let mut call = right();
    call.call(test_scale).unwrap();
    assert_eq!(call.results[0].values::<f32>(), [2.0, 4.0, 6.0]);
    let mut call = Call::new(
        vec![Array::new(DType::Bf16, &[2, 0, 3])],
        vec![Array::new(DType::Bf16, &[2, 0, 3])],
    );
    call.arguments[0].buffer.data = null_mut();
    call.call(test_generic).unwrap();
}

#[test]
fn state_is_loaded_once_for_equal_calls() {
    let list = [1_i64, 2];
    let right = |dtype, dims: &[i64], of_result: &[i64], level: i32| {
        let arguments = vec![Array::new(dtype, dims)];
        let array = abi::Array { dtype: DType::S64 as u32, size: 2, data: list.as_ptr() as _ };
        let mut call = Call::new(arguments, vec![Array::new(dtype, of_result)])
            .attribute("list", abi::ATTR_TYPE_ARRAY, array)
            .scalar("level", level);
        call.frame.stage = abi::STAGE_INITIALIZE;
        call
    };
    // How often the function runs for two calls.
    let runs = |call: &mut Call, handler| {
        let before = LOADED.get();
        assert_eq!(call.call(handler), call.call(handler));
        LOADED.get() - before
    };
    let usual = || right(DType::F32, &[2, 3], &[6], 0);
    assert_eq!(runs(&mut usual(), test_load_always), 2);
    assert_eq!(runs(&mut usual(), test_load), 1);
    assert_eq!(runs(&mut usual(), test_load), 0, "in other memory");
    for (what, mut call) in [
        ("dtype", right(DType::S32, &[2, 3], &[6], 0)),
        ("shape", right(DType::F32, &[3, 2], &[6], 0)),
        ("rank", right(DType::F32, &[2, 3], &[2, 3], 0)),
        ("attribute", right(DType::F32, &[2, 3], &[6], 1)),
    ] {
        assert_eq!(runs(&mut call, test_load), 1, "another {what}");
    }
    assert_eq!(runs(&mut usual(), test_load_other), 1);
    let mut elsewhere = usual();
    elsewhere.pool.device = 1;
    assert_eq!(runs(&mut elsewhere, test_load), 1);
    // Nothing is taken for loaded that failed, or whose device nobody knows.
    assert_eq!(runs(&mut right(DType::F32, &[2, 3], &[6], -1), test_load), 2);
    let mut nowhere = usual();
    nowhere.api.device_ordinal_get = None;
    assert_eq!(runs(&mut nowhere, test_load), 2);
    // A broken frame is refused whatever went before.
    let mut broken = usual();
    broken.arguments[0].dims[0] = -2;
    assert!(broken.refused(test_load).contains("no extent may be below 0"));
    let mut late = usual();
    late.frame.stage = abi::STAGE_EXECUTE;
    assert!(late.refused(test_load).contains("this handler is for initialize"));
}

/// Breaks the right frame, and expects the reason in the error and an untouched result.
fn broken(reason: &str, change: impl FnOnce(&mut Call)) {
    let mut call = right();
    let data = call.results[0].buffer.data;
    change(&mut call);
    let message = call.refused(test_scale);
    assert!(message.contains(reason), "{message:?} does not say {reason:?}");
    if let Some(result) = call.results.first_mut().filter(|result| result.buffer.data == data) {
        assert!(result.data.iter().all(|&word| word == 0));
    }
}

#[test]
fn a_wrong_frame_is_refused() {
    broken("XLA_FFI_CallFrame has struct_size 40; it must be at least", |call| {
        call.frame.struct_size = offset_of!(abi::CallFrame, args);
    });
    broken("XLA_FFI_Args has struct_size 8; it must be 40", |call| call.frame.args.struct_size = 8);
    broken("XLA_FFI_Rets has struct_size 48", |call| call.frame.rets.struct_size = 48);
    broken("XLA_FFI_Attrs has struct_size 0", |call| call.frame.attrs.struct_size = 0);
    broken("stage 9 of the call is none of 0 to 3", |call| call.frame.stage = 9);
    broken("in stage prepare; this handler is for execute", |call| call.frame.stage = 1);
    broken("the runtime speaks XLA FFI 1.3", |call| call.api.api_version.major_version = 1);
}

#[test]
fn wrong_lists_are_refused() {
    broken("argument 0 (`x`) is missing: the call has 0", |call| call.frame.args.size = 0);
    broken("the number of arguments is -1", |call| call.frame.args.size = -1);
    broken("the number of results is 4611686018427387904", |call| call.frame.rets.size = 1 << 62);
    broken("the types of the arguments are at 0x0", |call| call.frame.args.types = null_mut());
    broken("the arguments are at 0x0", |call| call.frame.args.args = null_mut());
    broken("the results are at 0x1", |call| {
        call.frame.rets.rets = std::ptr::dangling_mut::<u8>().cast();
    });
    broken("the attributes are at 0x0", |call| call.frame.attrs.attrs = null_mut());
    broken("the names of the attributes are at 0x0", |call| call.frame.attrs.names = null_mut());
    broken("argument 0 (`x`) has type 3; it must be 1, a buffer", |call| call.types[0] = 3);
    broken("the call has 2 arguments; the handler takes 1", |call| {
        call.arguments.push(Array::f32(&[1.0]));
        call.types.push(1);
        call.link();
    });
    broken("the call has 2 results; the handler takes 1", |call| {
        call.results.push(Array::f32(&[1.0]));
        call.types.push(1);
        call.link();
    });
}

#[test]
fn wrong_buffers_are_refused() {
    broken("argument 0 (`x`) has struct_size 8; it must be at least 48", |call| {
        call.arguments[0].buffer.struct_size = 8;
    });
    // SAFETY: the list has one item.
    broken("argument 0 (`x`) is at 0x0", |call| unsafe { *call.frame.args.args = null_mut() });
    broken("has dtype s32; it must be f32", |call| call.arguments[0].buffer.dtype = 4);
    broken("has dtype 999, which is unknown", |call| call.results[0].buffer.dtype = 999);
    broken("has shape [1, 3], of rank 2; its rank must be 1", |call| {
        call.arguments[0] = Array::new(DType::F32, &[1, 3]);
        call.link();
    });
    broken("the number of dimensions of argument 0 (`x`) is -1", |call| {
        call.arguments[0].buffer.rank = -1;
    });
    broken("the dimensions of result 0 are at 0x0", |call| {
        call.results[0].buffer.dims = null_mut();
    });
    broken("has shape [-3]; no extent may be below 0", |call| call.arguments[0].dims[0] = -3);
    broken("has shape [9223372036854775807] of f32, more than memory holds", |call| {
        call.arguments[0].dims[0] = i64::MAX;
    });
    broken("the data of argument 0 (`x`) is null, and its shape is [3]", |call| {
        call.arguments[0].buffer.data = null_mut();
    });
    broken("which is no multiple of 4", |call| {
        let data = &mut call.arguments[0].buffer.data;
        *data = data.wrapping_byte_add(2);
    });
    broken("argument 0 (`x`) shares memory with result 0; the handler needs them apart", |call| {
        call.arguments[0].buffer.data = call.results[0].buffer.data.wrapping_byte_add(8);
    });
}

#[test]
fn wrong_attributes_are_refused() {
    let bare = || Call::new(vec![Array::f32(&[1.0])], vec![Array::f32(&[0.0])]);
    let scalar = |dtype, value| abi::Scalar { dtype, value };
    for (mut call, reason) in [
        (bare(), "attribute `alpha` is missing; the call has none"),
        (bare().scalar("beta", 1.0_f32), "attribute `alpha` is missing; the call has `beta`"),
        (right().scalar("beta", 1.0_f32), "attribute `beta` is unknown; the handler takes `alpha`"),
        (bare().scalar("alpha", 1.0_f64), "attribute `alpha` is f64; it must be f32"),
        (bare().attribute("alpha", 9, 0), "attribute `alpha` has type 9, which is unknown"),
        (
            bare().attribute("alpha", abi::ATTR_TYPE_SCALAR, scalar(11, null_mut())),
            "bytes of attribute `alpha` are at 0x0",
        ),
        (
            bare().attribute("alpha", abi::ATTR_TYPE_SCALAR, scalar(77, leak(0))),
            "attribute `alpha` has dtype 77, which is unknown",
        ),
        (
            bare().attribute("alpha", abi::ATTR_TYPE_STRING, span("x")),
            "attribute `alpha` is a string; it must be f32",
        ),
        (
            bare().attribute(
                "alpha",
                abi::ATTR_TYPE_ARRAY,
                abi::Array { dtype: 11, size: usize::MAX, data: leak(0) },
            ),
            "attribute `alpha` has 18446744073709551615 elements, more than memory holds",
        ),
    ] {
        let message = call.refused(test_scale);
        assert!(message.contains(reason), "{message:?} does not say {reason:?}");
    }
    broken("attribute `alpha` is at 0x0", |call| call.attrs[0] = null_mut());
    broken("the bytes of the name of attribute 0 are at 0x0", |call| call.names[0].ptr = null());
    broken("the name of attribute 0 is [255], not UTF-8", |call| {
        *call.names[0] = abi::ByteSpan { ptr: leak(255_u8).cast_const().cast(), len: 1 };
    });
}

#[test]
fn attributes_of_every_kind() {
    let mut inner = Call::new(vec![], vec![]).scalar("inner", 7_i64);
    let mut call = Call::new(vec![], vec![])
        .attribute(
            "list",
            abi::ATTR_TYPE_ARRAY,
            abi::Array { dtype: DType::S64 as u32, size: 2, data: leak([1_i64, 2]) },
        )
        .attribute("text", abi::ATTR_TYPE_STRING, span("text"))
        .attribute("nested", abi::ATTR_TYPE_DICTIONARY, inner.frame.attrs);
    call.call(test_options).unwrap();
    // SAFETY: the value is the dictionary that the call above leaked.
    unsafe { (*call.attrs[2].cast::<abi::Attrs>()).struct_size = 8 };
    let message = call.refused(test_options);
    assert_eq!(message, "attribute `nested` has struct_size 8; it must be at least 48");
    inner.link();
}

#[test]
fn a_result_in_the_memory_of_a_donated_argument() {
    let arrays = |count| (0..count).map(|_| Array::f32(&[1.0; 4])).collect::<Vec<_>>();
    let mut call = Call::new(arrays(1), arrays(2));
    call.call(test_in_place).unwrap();
    assert_eq!(call.results[0].values::<f32>(), [1.0; 4]);

    call.arguments[0].buffer.data = call.results[0].buffer.data;
    call.call(test_in_place).unwrap();
    assert_eq!(call.results[0].values::<f32>(), [2.0; 4]);

    call.arguments[0].buffer.data = call.results[1].buffer.data;
    assert!(call.refused(test_in_place).contains("over a part of result 1"));
    call.arguments[0].buffer.data = call.results[0].buffer.data.wrapping_byte_add(4);
    assert!(call.refused(test_in_place).contains("over a part of result 0"));
    call.results[1].buffer.data = call.results[0].buffer.data;
    assert!(call.refused(test_in_place).contains("shares memory with result 1"));
}

#[test]
fn the_last_array_is_optional() {
    let arrays = |count| (0..count).map(|_| Array::f32(&[1.0; 4])).collect::<Vec<_>>();
    for (arguments, results, sum) in [(1, 1, 1.0), (2, 1, 2.0), (1, 2, 1.0), (2, 2, 2.0)] {
        let mut call = Call::new(arrays(arguments), arrays(results));
        call.call(test_may_add).unwrap();
        assert!(call.results.iter_mut().all(|result| result.values::<f32>() == [sum; 4]));
    }
    let refused = |arguments, results| Call::new(arguments, results).refused(test_may_add);
    assert_eq!(refused(arrays(3), arrays(1)), "the call has 3 arguments; the handler takes 2");
    assert_eq!(refused(arrays(1), arrays(3)), "the call has 3 results; the handler takes 2");
    let matrix = vec![Array::f32(&[1.0; 4]), Array::new(DType::F32, &[2, 2])];
    assert!(refused(matrix, arrays(1)).contains("argument 1 (`more`) has shape [2, 2]"));
}

#[test]
fn any_dtype_and_rank() {
    for &dtype in DType::ALL {
        Call::new(vec![Array::new(dtype, &[2, 3])], vec![]).call(test_any).unwrap();
        assert_eq!(DType::from_u32(dtype as u32), Some(dtype));
    }
    for rank in 0..12 {
        Call::new(vec![Array::new(DType::U8, &vec![1; rank])], vec![]).call(test_any).unwrap();
    }
}

#[test]
fn panics_are_errors() {
    let (code, message) = Call::new(vec![], vec![]).call(test_panicking).unwrap_err();
    assert_eq!((code, &*message), (ErrorCode::Internal, "test_panicking panicked: as asked"));
}

#[test]
fn stages() {
    let mut call = Call::new(vec![Array::f32(&[1.0])], vec![]).scalar("alpha", 1_f32);
    call.frame.stage = abi::STAGE_INITIALIZE;
    call.arguments[0].buffer.data = leak(0_u32);
    call.call(test_early).unwrap();
    let (code, message) = call.call(test_too_early).unwrap_err();
    assert_eq!(code, ErrorCode::FailedPrecondition);
    assert!(message.contains("no contents in stage initialize; take it as OnDevice"), "{message}");
    call.frame.stage = abi::STAGE_PREPARE;
    call.call(test_prepare).unwrap();
    assert!(call.refused(test_early).contains("stage prepare; this handler is for initialize"));
}

#[test]
fn metadata() {
    // SAFETY: zeros are a value of every field.
    let metadata: *mut abi::Metadata = leak(unsafe { std::mem::zeroed::<abi::Metadata>() }).cast();
    let extension: *mut abi::MetadataExtension = leak(abi::MetadataExtension {
        extension_base: abi::ExtensionBase {
            struct_size: size_of::<abi::MetadataExtension>(),
            r#type: abi::EXTENSION_METADATA,
            next: null_mut(),
        },
        metadata,
    })
    .cast();
    let other: *mut abi::ExtensionBase = leak(abi::ExtensionBase {
        struct_size: size_of::<abi::ExtensionBase>(),
        r#type: 99,
        next: extension.cast(),
    })
    .cast();
    let mut call = Call::new(vec![], vec![]);
    call.frame.extension_start = other;
    // The question comes with a frame that is otherwise empty.
    call.frame.args.struct_size = 0;
    call.frame.stage = 77;
    // SAFETY: the three structs are leaked, and only touched here and by the calls.
    unsafe {
        (*metadata).struct_size = offset_of!(abi::Metadata, traits) + 4;
        (*metadata).state_type_id = 42;
        call.call(test_panicking).unwrap();
        let version = (*metadata).api_version;
        assert_eq!((version.major_version, version.minor_version), (0, 1));
        assert_eq!((*metadata).traits, abi::TRAIT_COMMAND_BUFFER_COMPATIBLE);
        assert_eq!((*metadata).state_type_id, 42, "past struct_size");
        call.call(test_scale).unwrap();
        assert_eq!((*metadata).traits, 0);

        (*metadata).struct_size -= 4;
        assert!(call.refused(test_scale).contains("XLA_FFI_Metadata has struct_size"));
        (*extension).metadata = null_mut();
        assert!(call.refused(test_scale).contains("the metadata is at 0x0"));
        (*other).next = other;
        assert!(call.refused(test_scale).contains("more than 64 extensions"));
        (*other).struct_size = 8;
        assert!(call.refused(test_scale).contains("an extension has struct_size 8"));
    }
}

#[test]
fn functions_missing_from_the_runtime_are_unimplemented() {
    let mut call = Call::new(vec![], vec![]);
    let (code, message) = call.call(test_stream).unwrap_err();
    assert_eq!(
        (code, &*message),
        (ErrorCode::Unimplemented, "this runtime (XLA FFI 0.3) has no streams")
    );
    assert_eq!(call.call(test_memory).unwrap_err().0, ErrorCode::Unimplemented);
    // A function past the end of the table must not be read.
    call.api.struct_size = offset_of!(abi::Api, stream_get);
    call.api.stream_get = Some(never);
    assert_eq!(call.call(test_stream).unwrap_err().0, ErrorCode::Unimplemented);
}

unsafe extern "C" fn never(_: *mut abi::StreamGetArgs) -> *mut abi::Error {
    panic!("called past the end of the table")
}

#[test]
fn threads() {
    // Three threads that help, threads that come when all is done, one thread, and no pool.
    for (threads, late, pool) in
        [(4, false, true), (4, true, true), (1, false, true), (0, false, true), (4, false, false)]
    {
        let mut call = Call::new(vec![], vec![Array::f32(&[0.5; 1000])]);
        call.pool = Pool::new(threads, late);
        call.link();
        if !pool {
            call.api.struct_size = offset_of!(abi::Api, device_memory_allocate);
        }
        // One call of `run` panics: 999 is where a chunk begins.
        let (code, message) = call.call(test_parallel).unwrap_err();
        assert_eq!(code, ErrorCode::Internal);
        assert!(message.contains("chunk"), "{message}");

        let mut call = Call::new(vec![], vec![Array::f32(&[0.5; 998])]);
        call.pool = Pool::new(threads, late);
        call.link();
        call.call(test_parallel).unwrap();
        for (index, value) in call.results[0].values::<f32>().into_iter().enumerate() {
            assert!((value - index as f32 - 0.5).abs() < 1e-6);
        }
    }
}

#[test]
fn helpers_never_outlive_what_they_use() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    fn count(pool: ThreadPool) {
        let local: Vec<AtomicUsize> = (0..17).map(|_| AtomicUsize::new(0)).collect();
        pool.run(local.len(), &|task| _ = local[task].fetch_add(1, Ordering::Relaxed));
        CALLS.fetch_add(local.iter().map(|n| n.load(Ordering::Relaxed)).sum(), Ordering::Relaxed);
    }
    xla_ffi::handler! { fn test_count = count(pool); }
    for round in 0..200 {
        let mut call = Call::new(vec![], vec![]);
        call.pool.late = round % 3 == 0;
        call.call(test_count).unwrap();
    }
    assert_eq!(CALLS.load(Ordering::Relaxed), 200 * 17);
}

fn span(text: &'static str) -> abi::ByteSpan {
    abi::ByteSpan { ptr: text.as_ptr().cast(), len: text.len() }
}

fn leak<T>(value: T) -> *mut c_void {
    (Box::leak(Box::new(value)) as *mut T).cast()
}
