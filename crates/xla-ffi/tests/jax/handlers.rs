//! Handlers for `test_jax.py`: one for each thing that the crate promises.

use std::{
    collections::HashSet,
    sync::{
        Mutex,
        atomic::{AtomicI64, Ordering},
    },
};

use half::bf16;
use xla_ffi::{
    Aliased, AnyBuffer, AnyBufferMut, Attributes, Buffer, BufferMut, Context, DType, Dictionary,
    Element, Error, ErrorCode, MayAlias, OnDevice, Pred, Result, Scratch, Stage, Stream,
    ThreadPool, Traits,
};

/// `y = x + 1` in place where `x` is donated; `placed` tells.
fn increment(
    x: MayAlias<Buffer<f32>>,
    y: BufferMut<f32>,
    mut placed: BufferMut<Pred, 0>,
) -> Result {
    match x.with(y)? {
        Aliased::InPlace(y) => {
            y.iter_mut().for_each(|y| *y += 1.0);
            placed[0] = true.into();
        }
        Aliased::Apart { argument, result } => {
            result.iter_mut().zip(argument).for_each(|(y, x)| *y = x + 1.0);
            placed[0] = false.into();
        }
    }
    Ok(())
}

/// Reverses an array of any type that is known here, by its bytes.
fn reverse(x: AnyBuffer, y: AnyBufferMut) -> Result {
    fn of<T: Element>(x: AnyBuffer, y: AnyBufferMut) -> Result {
        let mut y = y.typed::<T, { xla_ffi::ANY_RANK }>()?;
        y.copy_from_slice(&x.typed::<T, { xla_ffi::ANY_RANK }>()?);
        y.reverse();
        Ok(())
    }
    match x.dtype() {
        DType::F32 => of::<f32>(x, y),
        DType::Bf16 => of::<bf16>(x, y),
        DType::S32 => of::<i32>(x, y),
        DType::Pred => of::<Pred>(x, y),
        other => Err(Error::unimplemented(format!("no reversal of {other}"))),
    }
}

/// The sum of many arguments.
fn sum(x: Vec<Buffer<f32, 1>>, mut y: BufferMut<f32, 1>) {
    y.fill(0.0);
    for x in x {
        y.iter_mut().zip(&*x).for_each(|(y, x)| *y += x);
    }
}

/// Every attribute, as text in bytes.
#[allow(clippy::too_many_arguments)]
fn attributes(
    mut text: BufferMut<u8, 1>,
    flag: bool,
    small: i32,
    large: i64,
    real: f64,
    name: &str,
    list: &[i64],
    nested: Dictionary,
    absent: Option<f32>,
) -> Result {
    let inner: i64 = nested.get("inner")?;
    let line = format!("{flag} {small} {large} {real} {name} {list:?} {inner} {absent:?}");
    text.fill(b' ');
    text[..line.len()].copy_from_slice(line.as_bytes());
    Ok(())
}

/// The names of whatever attributes come.
fn names(all: Attributes, mut count: BufferMut<i64, 0>) -> Result {
    for attribute in all.iter() {
        attribute?;
    }
    count[0] = all.len() as i64;
    Ok(())
}

/// An error of the code that `code` numbers.
fn fail(code: i64, y: OnDevice<BufferMut<f32>>) -> Result {
    let code = ErrorCode::from_u32(u32::try_from(code).unwrap());
    Err(Error::new(code, format!("failing with {code} as asked, of {:?}", y.dims())))
}

fn panic(y: OnDevice<BufferMut<f32>>) {
    panic!("as asked, of {:?}", y.dims());
}

fn panic_in_task(y: OnDevice<BufferMut<f32>>, pool: ThreadPool) {
    pool.run(100, &|task| assert!(task != 50, "task {task} of {:?}", y.dims()));
}

/// How many threads took part, whether every task ran once, and how many there may be.
fn threads(mut y: BufferMut<i64, 1>, tasks: i64, pool: ThreadPool, context: Context) {
    let seen = Mutex::new(HashSet::new());
    let mut counts = vec![0_i64; tasks as usize];
    pool.run_chunks(&mut counts, 1, |_, count| {
        count[0] += 1;
        let inner = AtomicI64::new(0);
        context.thread_pool().run(10, &|_| _ = inner.fetch_add(1, Ordering::Relaxed));
        assert_eq!(inner.into_inner(), 10);
        seen.lock().unwrap().insert(std::thread::current().id());
    });
    y[0] = seen.into_inner().unwrap().len() as i64;
    y[1] = counts.iter().filter(|&&count| count == 1).count() as i64;
    y[2] = pool.threads() as i64;
}

/// Works in scratch memory, and asks for that of a device.
fn scratch(x: Buffer<f32, 1>, mut y: BufferMut<f32, 1>, scratch: Scratch) -> Result {
    let (a, b) = (scratch.on_host::<f32>(x.len())?, scratch.on_host::<f64>(x.len())?);
    assert!(a.iter().all(|&a| a == 0.0) && b.iter().all(|&b| b == 0.0));
    a.copy_from_slice(&x);
    b.iter_mut().zip(&*a).for_each(|(b, &a)| *b = 2.0 * f64::from(a));
    y.iter_mut().zip(&*b).for_each(|(y, &b)| *y = b as f32);
    Ok(())
}

fn device_scratch(mut y: BufferMut<i64, 0>, scratch: Scratch) -> Result {
    y[0] = i64::from(!scratch.on_device(1024, 64)?.is_null());
    Ok(())
}

fn stream(_y: OnDevice<BufferMut<f32>>, _stream: Stream) {}

/// What the runtime says of the call.
fn about(mut y: BufferMut<i64, 1>, context: Context) -> Result {
    let (major, minor) = context.version();
    y[0] = i64::from(major);
    y[1] = i64::from(minor);
    y[2] = i64::from(context.device_ordinal()?);
    Ok(())
}

static STAGES: [AtomicI64; 4] = [const { AtomicI64::new(0) }; 4];

fn count(limit: i64, context: Context) -> Result {
    if limit < 0 {
        let stage = context.stage();
        return Err(Error::out_of_range(format!("limit is {limit} in {stage}; it must be >= 0")));
    }
    STAGES[context.stage() as usize].fetch_add(1, Ordering::Relaxed);
    Ok(())
}

fn staged(mut y: BufferMut<i64, 1>, limit: i64, context: Context) -> Result {
    count(limit, context)?;
    y.iter_mut().zip(&STAGES).for_each(|(y, stage)| *y = stage.load(Ordering::Relaxed));
    Ok(())
}

xla_ffi::handler! {
    pub fn test_increment = increment(x, y, placed);
    pub fn test_reverse = reverse(x, y);
    pub fn test_sum = sum(x, y);
    pub fn test_attributes
        = attributes(text, flag, small, large, real, name, list, nested, absent);
    pub fn test_names = names(all, count);
    pub fn test_fail = fail(code, y);
    pub fn test_panic = panic(y);
    pub fn test_panic_in_task = panic_in_task(y, pool);
    pub fn test_threads = threads(y, tasks, pool, context);
    pub fn test_scratch = scratch(x, y, scratch);
    pub fn test_device_scratch = device_scratch(y, scratch);
    pub fn test_stream = stream(y, stream);
    pub fn test_about = about(y, context);
    pub fn test_instantiate = count(limit, context), stage = Stage::Instantiate;
    pub fn test_prepare = count(limit, context), stage = Stage::Prepare;
    pub fn test_initialize = count(limit, context), stage = Stage::Initialize,
        traits = Traits::COMMAND_BUFFER_COMPATIBLE;
    pub fn test_execute = staged(y, limit, context);
}
