//! Everything with XLA's CPU plug-in. Where there is none, these tests fail:
//!
//! ```sh
//! pip install xla-cpu-pjrt==0.0.1
//! export XENTILE_PJRT_CPU=.../site-packages/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so
//! cargo test -p pjrt-client --test cpu -- --include-ignored
//! ```

use std::{sync::Arc, time::Duration};

use half::{bf16, f16};
use pjrt_client::{
    Buffer, Cache, CacheError, Cached, Client, Code, CompileOptions, DType, Element, Error,
    ExecuteOptions, Extension, Handlers, Layout, LoadedExecutable, Place, Platform, Plugin,
    Program, Topology, Version,
};

fn plugin() -> Plugin {
    Plugin::find(Platform::Cpu, None).unwrap_or_else(|error| panic!("{error}"))
}

fn client() -> Client {
    plugin().client(&[]).unwrap()
}

fn compile(client: &Client, program: &str) -> LoadedExecutable {
    client
        .compile(&Program::mlir(program), &CompileOptions::new())
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Numbers that differ from one to the next, in [-1, 1).
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

const ADD: &str = "
module @add {
  func.func @main(%x: tensor<4x3xf32>, %y: tensor<4x3xf32>) -> tensor<4x3xf32> {
    %z = stablehlo.add %x, %y : tensor<4x3xf32>
    return %z : tensor<4x3xf32>
  }
}";

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn the_plugin_says_what_it_is() {
    let plugin = plugin();
    assert_eq!(plugin, Plugin::open(plugin.path()).unwrap());
    assert_eq!(plugin.version().major, Version::OURS.major);
    assert!(plugin.has("PJRT_Client_Create") && !plugin.has("PJRT_Nothing"));
    assert!(plugin.extensions().any(|extension| extension == Extension::Ffi));
    let attributes = plugin.attributes().unwrap();
    assert!(attributes.contains_key("xla_version"), "{attributes:?}");

    let client = client();
    assert_eq!(client.plugin(), plugin);
    assert_eq!(client.platform_name().unwrap(), "cpu");
    assert!(!client.platform_version().unwrap().is_empty());
    assert_eq!(client.process_index().unwrap(), 0);
    assert!(format!("{client:?}").contains("cpu"));
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn devices_and_memories_are_described() {
    let client = plugin().client(&[("cpu_device_count", 4.into())]).unwrap();
    let devices = client.devices().unwrap();
    assert_eq!(devices.len(), 4);
    assert_eq!(devices, client.addressable_devices().unwrap());
    for (index, device) in devices.iter().enumerate() {
        assert_eq!(device.id().unwrap(), index as i32);
        assert_eq!(device.local_hardware_id().unwrap(), Some(index as i32));
        assert!(device.is_addressable().unwrap());
        assert_eq!(device.kind().unwrap(), "cpu");
        let description = device.description().unwrap();
        assert_eq!(description.process_index().unwrap(), 0);
        assert!(description.text().unwrap().contains(&index.to_string()));
        assert!(!description.debug_text().unwrap().is_empty());
        description.attributes().unwrap();
        let memory = device.default_memory().unwrap();
        assert!(device.memories().unwrap().contains(&memory));
        assert_eq!(memory.kind().unwrap(), "device");
        assert!(!memory.text().unwrap().is_empty() && !memory.debug_text().unwrap().is_empty());
        memory.id().unwrap();
        // This plug-in counts nothing: an error with its code, and no zeros.
        let error = device.memory_stats().unwrap_err();
        assert_eq!(error.code(), Some(Code::Unimplemented), "{error}");
    }
}

fn round_trip<T: Element + PartialEq + std::fmt::Debug>(client: &Client, values: &[T]) {
    let shapes: [&[i64]; 4] = [&[2, 3], &[6], &[3, 1, 2], &[0, 5]];
    for dims in shapes {
        let data = &values[..dims.iter().product::<i64>() as usize];
        let buffer = client.buffer(data, dims).unwrap();
        assert_eq!(buffer.dtype().unwrap(), T::DTYPE);
        assert_eq!(buffer.dims().unwrap(), dims);
        assert_eq!(buffer.count().unwrap(), data.len());
        assert_eq!(buffer.to_vec::<T>().unwrap(), data, "{}{dims:?}", T::DTYPE);
        let mut out = vec![values[5]; data.len()];
        buffer.copy_to(&mut out).unwrap();
        assert_eq!(out, data);
        if !data.is_empty() {
            assert_eq!(buffer.on_device_size().unwrap(), size_of_val(data));
        }
        let bytes = buffer.to_bytes().unwrap();
        assert_eq!(bytes.len(), size_of_val(data));
        let again = client.buffer_from_bytes(&bytes, T::DTYPE, dims, Place::Default).unwrap();
        assert_eq!(again.to_vec_async::<T>().unwrap().wait().unwrap(), data);
    }
    let scalar = client.buffer(&values[..1], &[]).unwrap();
    assert_eq!(scalar.dims().unwrap(), [0_i64; 0]);
    assert_eq!(scalar.to_vec::<T>().unwrap(), values[..1]);
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn every_type_goes_there_and_back() {
    let client = client();
    round_trip(&client, &[true, false, false, true, true, false]);
    round_trip(&client, &[i8::MIN, -1, 0, 1, 2, i8::MAX]);
    round_trip(&client, &[i16::MIN, -1, 0, 1, 2, i16::MAX]);
    round_trip(&client, &[i32::MIN, -1, 0, 1, 2, i32::MAX]);
    round_trip(&client, &[i64::MIN, -1, 0, 1, 2, i64::MAX]);
    round_trip(&client, &[u8::MAX, 5, 0, 1, 2, 3]);
    round_trip(&client, &[u16::MAX, 5, 0, 1, 2, 3]);
    round_trip(&client, &[u32::MAX, 5, 0, 1, 2, 3]);
    round_trip(&client, &[u64::MAX, 5, 0, 1, 2, 3]);
    let floats = [0.5_f32, -0.0, 1e-3, f32::INFINITY, -2.0, 65504.0];
    round_trip(&client, &floats.map(f16::from_f32));
    round_trip(&client, &floats.map(bf16::from_f32));
    round_trip(&client, &floats);
    round_trip(&client, &floats.map(f64::from));
    round_trip(&client, &floats.map(|value| [value, -value]));
    round_trip(&client, &floats.map(|value| [f64::from(value), 3.0]));
    // Those without a type in Rust.
    for dtype in [DType::F8E5M2, DType::F8E4M3FN, DType::F8E8M0FNU, DType::F8E4M3] {
        let bytes = [1, 0x3c, 0x40, 0x7b];
        let buffer = client.buffer_from_bytes(&bytes, dtype, &[2, 2], Place::Default).unwrap();
        assert_eq!(buffer.dtype().unwrap(), dtype);
        assert_eq!(buffer.to_bytes().unwrap(), bytes, "{dtype}");
    }
    for dtype in [DType::S4, DType::U4, DType::S2, DType::U2] {
        let buffer = client.buffer_from_bytes(&[1, 0, 1], dtype, &[3], Place::Default).unwrap();
        assert_eq!(buffer.to_bytes().unwrap(), [1, 0, 1], "{dtype}");
    }
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn any_nonzero_byte_is_true() {
    let bytes = [7, 0, 1, 255];
    let buffer = client().buffer_from_bytes(&bytes, DType::Pred, &[4], Place::Default).unwrap();
    assert_eq!(buffer.to_vec::<bool>().unwrap(), [true, false, true, true]);
    let mut out = [false; 4];
    buffer.copy_to(&mut out).unwrap();
    assert_eq!(out, [true, false, true, true]);
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn wrong_shapes_are_refused_on_the_host() {
    let client = client();
    let error = client.buffer(&[1.0_f32; 5], &[2, 3]).unwrap_err();
    assert_eq!(error.to_string(), "5 elements of f32 do not fill [2, 3], which takes 6");
    let error = client.buffer(&[1.0_f32], &[-1]).unwrap_err();
    assert!(matches!(&error, Error::WrongDims { .. }), "{error:?}");
    let error = client.buffer_from_bytes(&[0; 5], DType::F32, &[1], Place::Default).unwrap_err();
    assert_eq!(error.to_string(), "5 bytes of f32 do not fill [1], which takes 4");

    let buffer = client.buffer(&[1.0_f32; 6], &[2, 3]).unwrap();
    let error = buffer.to_vec::<i32>().unwrap_err();
    assert_eq!(error.to_string(), "the buffer holds f32, not s32");
    let error = buffer.copy_to(&mut [0.0_f32; 7]).unwrap_err();
    assert!(matches!(&error, Error::WrongLength { expected: 6, found: 7, .. }), "{error:?}");
    assert!(matches!(buffer.copy_into(Place::Default).unwrap_err(), Error::Arguments(_)));
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn programs_compute_what_plain_rust_does() {
    let client = client();
    let add = compile(&client, ADD);
    let (x, y) = (numbers(12, 1), numbers(12, 2));
    let arguments = [client.buffer(&x, &[4, 3]).unwrap(), client.buffer(&y, &[4, 3]).unwrap()];
    let outputs = add.execute(&arguments.each_ref()).unwrap();
    let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
    assert_eq!(outputs.len(), 1);
    assert_eq!(outputs[0].to_vec::<f32>().unwrap(), expected);

    let (m, k, n) = (17, 33, 9);
    let program = format!(
        "func.func @main(%a: tensor<{m}x{k}xf32>, %b: tensor<{k}x{n}xf32>) -> tensor<{m}x{n}xf32> {{
           %c = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
             : (tensor<{m}x{k}xf32>, tensor<{k}x{n}xf32>) -> tensor<{m}x{n}xf32>
           return %c : tensor<{m}x{n}xf32>
         }}"
    );
    let matmul = compile(&client, &program);
    let (a, b) = (numbers(m * k, 3), numbers(k * n, 4));
    let arguments = [
        client.buffer(&a, &[m as i64, k as i64]).unwrap(),
        client.buffer(&b, &[k as i64, n as i64]).unwrap(),
    ];
    let c = matmul.execute(&arguments.each_ref()).unwrap()[0].to_vec::<f32>().unwrap();
    for row in 0..m {
        for column in 0..n {
            let expected: f64 =
                (0..k).map(|i| f64::from(a[row * k + i]) * f64::from(b[i * n + column])).sum();
            let found = f64::from(c[row * n + column]);
            assert!((found - expected).abs() < 1e-5, "[{row}, {column}]: {found}, not {expected}");
        }
    }
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn bytecode_compiles_as_text_does() {
    // x * x + y, as StableHLO 1.0 has it.
    let client = client();
    let bytecode = include_bytes!("fma.mlirbc");
    let fma = client.compile(&Program::mlir(bytecode), &CompileOptions::new()).unwrap();
    let x = client.buffer(&[1.0_f32, 2.0, 3.0], &[3]).unwrap();
    let y = client.buffer(&[0.5_f32, 0.25, 0.0], &[3]).unwrap();
    assert_eq!(fma.execute(&[&x, &y]).unwrap()[0].to_vec::<f32>().unwrap(), [1.5, 4.25, 9.0]);
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn executables_say_what_they_are() {
    let client = client();
    let program = "module @two {
      func.func @main(%x: tensor<64x32xf32>) -> (tensor<64x64xf32>, tensor<i32>) {
        %y = stablehlo.transpose %x, dims = [1, 0] : (tensor<64x32xf32>) -> tensor<32x64xf32>
        %z = stablehlo.dot %x, %y : (tensor<64x32xf32>, tensor<32x64xf32>) -> tensor<64x64xf32>
        %c = stablehlo.constant dense<7> : tensor<i32>
        return %z, %c : tensor<64x64xf32>, tensor<i32>
      }
    }";
    let loaded = compile(&client, program);
    assert_eq!(loaded.devices().unwrap(), client.devices().unwrap()[..1]);
    let executable = loaded.executable();
    assert_eq!(executable.name().unwrap(), "two");
    assert_eq!((executable.replicas().unwrap(), executable.partitions().unwrap()), (1, 1));
    assert_eq!(executable.output_count().unwrap(), 2);
    let outputs = executable.outputs().unwrap();
    assert_eq!((outputs[0].dtype, &outputs[0].dims[..]), (DType::F32, &[64, 64][..]));
    assert_eq!((outputs[1].dtype, &outputs[1].dims[..]), (DType::S32, &[][..]));
    assert!(!executable.fingerprint().unwrap().is_empty());
    // Not reported by this plug-in.
    assert_eq!(executable.code_size().unwrap(), None);

    let stats = executable.memory_stats().unwrap();
    assert_eq!(stats.generated_code, None);
    assert_eq!(stats.arguments, Some(64 * 32 * 4));
    assert!(stats.outputs.unwrap() >= 64 * 64 * 4 + 4, "{stats:?}");
    assert_eq!(stats.alias, Some(0));
    assert!(stats.peak.unwrap() >= 64 * 64 * 4, "{stats:?}");
    let costs = executable.cost_analysis().unwrap();
    assert_eq!(costs["flops"], 2.0 * 64.0 * 64.0 * 32.0, "{costs:?}");
    assert!(costs["bytes accessed"] > 0.0);

    let optimized = executable.optimized_program().unwrap();
    assert_eq!(optimized.format, "hlo_with_config");
    assert!(optimized.code.windows(3).any(|name| name == b"two"));
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn a_program_that_does_not_compile_is_an_error_with_its_line() {
    let client = client();
    let error = |program: &str, options: CompileOptions| {
        client.compile(&Program::mlir(program), &options).unwrap_err()
    };
    let broken = "module {\n  func.func @main() -> tensor<f32> {\n    oh no\n  }\n}";
    let text = error(broken, CompileOptions::new()).to_string();
    assert!(text.contains("3:5") && text.contains("oh"), "{text}");
    assert!(text.contains("PJRT_Client_Compile"), "{text}");

    let target = "func.func @main() -> tensor<f32> {
      %0 = stablehlo.custom_call @xentile_nowhere() {api_version = 4 : i32, backend_config = {}}
        : () -> tensor<f32>
      return %0 : tensor<f32>
    }";
    let unregistered = error(target, CompileOptions::new());
    assert_eq!(unregistered.code(), Some(Code::NotFound));
    assert!(unregistered.to_string().contains("xentile_nowhere"), "{unregistered}");

    let bytes = error(ADD, CompileOptions::from_bytes(*b"no options"));
    assert_eq!(bytes.code(), Some(Code::InvalidArgument));
    let flag = error(ADD, CompileOptions::new().flag("xla_no_such_flag", true)).to_string();
    assert!(flag.contains("xla_no_such_flag"), "{flag}");
    let fast = CompileOptions::new().flag("xla_cpu_enable_fast_math", true);
    client.compile(&Program::mlir(ADD), &fast).unwrap();
    let format = client.compile(&Program::new("brainf", b"+"), &CompileOptions::new()).unwrap_err();
    assert!(format.to_string().contains("brainf"), "{format}");
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn more_memory_than_there_is_ends_as_a_typed_error() {
    // 32 TiB, which no system hands out: the allocation fails at once.
    let huge = 1_u64 << 45;
    let count = huge / 4;
    let result = format!(
        "func.func @main(%x: tensor<f32>) -> tensor<{count}xf32> {{
           %y = stablehlo.broadcast_in_dim %x, dims = [] : (tensor<f32>) -> tensor<{count}xf32>
           return %y : tensor<{count}xf32>
         }}"
    );
    let temporary = format!(
        "func.func @main(%x: tensor<f32>) -> tensor<1xf32> {{
           %i = stablehlo.iota dim = 0 : tensor<{count}xf32>
           %y = \"stablehlo.sort\"(%i) ({{
             ^bb0(%a: tensor<f32>, %b: tensor<f32>):
               %c = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
               stablehlo.return %c : tensor<i1>
           }}) {{dimension = 0 : i64}} : (tensor<{count}xf32>) -> tensor<{count}xf32>
           %s = stablehlo.slice %y [5:6] : (tensor<{count}xf32>) -> tensor<1xf32>
           return %s : tensor<1xf32>
         }}"
    );
    let client = client();
    let x = client.buffer(&[1.0_f32], &[]).unwrap();
    for (program, code) in [(&result, Code::ResourceExhausted), (&temporary, Code::Internal)] {
        let program = compile(&client, program);
        let needed = program.executable().memory_stats().unwrap().needed().unwrap();
        assert!(needed >= huge, "{needed}");
        let error = program.execute(&[&x]).unwrap_err();
        assert!(
            matches!(&error, Error::OutOfMemory { requested, .. } if *requested == Some(huge)),
            "{error:?}"
        );
        assert_eq!(error.code(), Some(code));
        let text = error.to_string();
        for part in ["32768.00 GiB asked for", "Out of memory allocating 35184372088832 bytes."] {
            assert!(text.contains(part), "no {part} in {text}");
        }
    }
    // And it goes on.
    let add = compile(&client, ADD);
    let y = client.buffer(&[1.0_f32; 12], &[4, 3]).unwrap();
    assert_eq!(add.execute(&[&y, &y]).unwrap()[0].to_vec::<f32>().unwrap(), [2.0; 12]);
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn wrong_arguments_are_errors() {
    let (client, other) = (client(), client());
    let add = compile(&client, ADD);
    let x = client.buffer(&[1.0_f32; 12], &[4, 3]).unwrap();
    let short = client.buffer(&[1.0_f32; 11], &[11]).unwrap();
    for arguments in [&[&x][..], &[&x, &short], &[&x, &x, &x], &[]] {
        let error = add.execute(arguments).unwrap_err();
        assert_eq!(error.code(), Some(Code::InvalidArgument), "{error}");
    }
    // As long as the plug-in is asked nicely, it says so itself.
    let error = add.execute_sharded(&[], &ExecuteOptions::default()).unwrap_err();
    assert_eq!(error.code(), Some(Code::InvalidArgument), "{error}");
    let error = add.execute_sharded(&[&[&x, &x], &[&x]], &ExecuteOptions::default()).unwrap_err();
    assert!(error.to_string().starts_with("1 arguments for one device, and 2"), "{error}");

    let foreign = other.buffer(&[1.0_f32; 12], &[4, 3]).unwrap();
    let error = add.execute(&[&x, &foreign]).unwrap_err().to_string();
    assert_eq!(error, "argument 1 belongs to another client; it must be of the client in use");
    let device = other.devices().unwrap().remove(0);
    assert!(matches!(
        client.buffer_on(&[1.0_f32], &[], &device).unwrap_err(),
        Error::OtherClient { .. }
    ));
    // None of this broke anything.
    assert_eq!(add.execute(&[&x, &x]).unwrap()[0].to_vec::<f32>().unwrap(), [2.0; 12]);
}

fn deleted(buffer: &Buffer) {
    assert!(buffer.is_deleted().unwrap());
    assert!(matches!(buffer.to_vec::<f32>().unwrap_err(), Error::Deleted));
    assert!(matches!(buffer.dims().unwrap_err(), Error::Deleted));
    assert!(matches!(buffer.ready().unwrap_err(), Error::Deleted));
    assert_eq!(format!("{buffer:?}"), "Buffer(deleted)");
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn donated_and_deleted_buffers_are_gone() {
    let client = client();
    let program =
        "func.func @main(%x: tensor<4xf32> {tf.aliasing_output = 0 : i32}) -> tensor<4xf32> {
      %y = stablehlo.add %x, %x : tensor<4xf32>
      return %y : tensor<4xf32>
    }";
    let double = compile(&client, program);
    assert_eq!(double.executable().memory_stats().unwrap().alias, Some(16));
    let x = client.buffer(&[1.0_f32, 2.0, 3.0, 4.0], &[4]).unwrap();

    let kept = double.execute_async(&[&x], &ExecuteOptions::default().keep(&[0])).unwrap();
    assert!(!x.is_deleted().unwrap());
    assert_eq!(kept.wait().unwrap()[0].to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0, 8.0]);
    assert_eq!(x.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);

    let y = double.execute(&[&x]).unwrap().remove(0);
    assert_eq!(y.to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0, 8.0]);
    deleted(&x);
    let error = double.execute(&[&x]).unwrap_err().to_string();
    assert!(error.contains("deleted or donated"), "{error}");

    assert!(!y.is_deleted().unwrap());
    y.delete().unwrap();
    y.delete().unwrap();
    deleted(&y);

    assert!(!double.is_deleted().unwrap());
    double.delete().unwrap();
    double.delete().unwrap();
    assert!(double.is_deleted().unwrap());
    assert!(matches!(double.devices().unwrap_err(), Error::Unloaded));
    let z = client.buffer(&[1.0_f32; 4], &[4]).unwrap();
    assert!(matches!(double.execute(&[&z]).unwrap_err(), Error::Unloaded));
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn serialised_programs_run_again() {
    let first = client();
    let bytes = compile(&first, ADD).executable().serialize().unwrap();
    assert!(!bytes.is_empty());
    drop(first);
    let client = client();
    // SAFETY: this plug-in made the bytes.
    let (add, with_options) = unsafe {
        let options = CompileOptions::new();
        (client.deserialize(&bytes, None).unwrap(), client.deserialize(&bytes, Some(&options)))
    };
    let x = client.buffer(&[1.5_f32; 12], &[4, 3]).unwrap();
    for add in [add, with_options.unwrap()] {
        assert_eq!(add.executable().name().unwrap(), "add");
        assert_eq!(add.execute(&[&x, &x]).unwrap()[0].to_vec::<f32>().unwrap(), [3.0; 12]);
    }
    // SAFETY: no machine code is in these.
    let error = unsafe { client.deserialize(b"not a program", None) }.unwrap_err();
    assert!(error.code().is_some(), "{error}");
}

fn cache(directory: &std::path::Path) -> Cache {
    // SAFETY: nothing but these tests writes there.
    unsafe { Cache::new(directory.join("programs")) }
}

fn cached(cache: &Cache, client: &Client, extra: &[&str]) -> Cached {
    let cached = cache.compile(client, &Program::mlir(ADD), &CompileOptions::new(), extra).unwrap();
    let x = client.buffer(&[1.5_f32; 12], &[4, 3]).unwrap();
    let sum = cached.executable.execute(&[&x, &x]).unwrap()[0].to_vec::<f32>().unwrap();
    assert_eq!(sum, [3.0; 12]);
    cached
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn a_cached_program_is_loaded_and_a_broken_one_compiled_anew() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache(directory.path());
    let look = |extra: &[&str]| cached(&cache, &client(), extra);
    let entries = || {
        let entries = std::fs::read_dir(cache.directory()).unwrap();
        let mut entries: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        entries
    };
    let first = look(&["a"]);
    assert!(!first.is_hit && first.problem.is_none(), "{first:?}");
    let own = entries().remove(0);
    let second = look(&["a"]);
    assert!(second.is_hit && second.problem.is_none(), "{second:?}");
    assert!(!look(&["b"]).is_hit, "another library of custom calls");
    let options = CompileOptions::new().flag("xla_cpu_enable_fast_math", true);
    let fast = cache.compile(&client(), &Program::mlir(ADD), &options, &["a"]).unwrap();
    assert!(!fast.is_hit, "other options");

    assert_eq!(entries().len(), 3, "{:?}", entries());
    // Cut short, with bytes that differ, empty, and in the place of another.
    let whole = std::fs::read(&own).unwrap();
    let other = std::fs::read(entries().iter().find(|&entry| *entry != own).unwrap()).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 0x40;
    for broken in [&whole[..whole.len() / 2], &flipped, &[], &other] {
        for entry in entries() {
            std::fs::write(entry, broken).unwrap();
        }
        let anew = look(&["a"]);
        assert!(!anew.is_hit);
        let problem = anew.problem.unwrap();
        assert!(matches!(problem, CacheError::Entry { .. }), "{problem:?}");
        assert!(problem.to_string().ends_with("; compiled it anew"), "{problem}");
        assert!(look(&["a"]).is_hit, "it was mended");
        look(&["b"]);
        assert_eq!(entries().len(), 3, "{:?}", entries());
    }
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn a_cache_that_cannot_be_written_is_no_error() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("programs"), "a file").unwrap();
    let found = cached(&cache(directory.path()), &client(), &[]);
    assert!(!found.is_hit);
    let problem = found.problem.unwrap().to_string();
    assert!(problem.starts_with("cannot store the compiled program "), "{problem}");
    let broken = cache(directory.path()).compile(
        &client(),
        &Program::mlir("oh no"),
        &CompileOptions::new(),
        &[],
    );
    assert!(broken.unwrap_err().code().is_some());
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn several_threads_share_a_cache() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache(directory.path());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5 {
                    assert!(cached(&cache, &client(), &[]).problem.is_none());
                }
            });
        }
    });
    assert!(cached(&cache, &client(), &[]).is_hit);
    assert_eq!(std::fs::read_dir(cache.directory()).unwrap().count(), 1);
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn several_devices_run_their_own() {
    let client = plugin().client(&[("cpu_device_count", 4.into())]).unwrap();
    let devices = client.devices().unwrap();

    // A portable program, on whatever device is asked for.
    let options = CompileOptions::new().portable(true);
    let add = client.compile(&Program::mlir(ADD), &options).unwrap();
    for device in &devices {
        let x = client.buffer_on(&[1.0_f32; 12], &[4, 3], device).unwrap();
        assert_eq!(x.device().unwrap(), *device);
        assert_eq!(x.memory().unwrap(), device.default_memory().unwrap());
        let run = add.execute_async(&[&x, &x], &ExecuteOptions::default().on(device)).unwrap();
        let outputs = run.wait().unwrap();
        assert_eq!(outputs[0].device().unwrap(), *device);
        assert_eq!(outputs[0].to_vec::<f32>().unwrap(), [2.0; 12]);
    }

    // One for a device that the options name.
    let options = CompileOptions::new().devices(vec![vec![2]]);
    let add = client.compile(&Program::mlir(ADD), &options).unwrap();
    assert_eq!(add.devices().unwrap(), devices[2..3]);
    let there = client.buffer_on(&[1.0_f32; 12], &[4, 3], &devices[1]).unwrap();
    let here = there.copy_into(&devices[2]).unwrap();
    assert_eq!(here.device().unwrap(), devices[2]);
    assert_eq!(add.execute(&[&here, &here]).unwrap()[0].to_vec::<f32>().unwrap(), [2.0; 12]);
    assert!(add.execute(&[&there, &here]).is_err());

    // Four that talk to each other.
    let program = r#"func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
      %y = "stablehlo.all_reduce"(%x) ({
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %c = stablehlo.add %a, %b : tensor<f32>
          stablehlo.return %c : tensor<f32>
      }) {replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}
        : (tensor<2xf32>) -> tensor<2xf32>
      return %y : tensor<2xf32>
    }"#;
    let options = CompileOptions::new().replicas(4).devices(vec![vec![3, 2, 1, 0]]);
    let sum = client.compile(&Program::mlir(program), &options).unwrap();
    assert_eq!(sum.executable().replicas().unwrap(), 4);
    let on = sum.devices().unwrap();
    let inputs: Vec<Buffer> = on
        .iter()
        .map(|device| client.buffer_on(&[device.id().unwrap() as f32, 1.0], &[2], device).unwrap())
        .collect();
    let lists: Vec<[&Buffer; 1]> = inputs.iter().map(|input| [input]).collect();
    let lists: Vec<&[&Buffer]> = lists.iter().map(|list| &list[..]).collect();
    let runs = sum.execute_sharded(&lists, &ExecuteOptions::default()).unwrap();
    assert_eq!(runs.len(), 4);
    for (run, device) in runs.into_iter().zip(&on) {
        let outputs = run.wait().unwrap();
        assert_eq!(outputs[0].device().unwrap(), *device);
        assert_eq!(outputs[0].to_vec::<f32>().unwrap(), [6.0, 4.0]);
    }
    // On one device alone it is refused, not a wait for ever.
    assert!(sum.execute(&[&inputs[0]]).is_err());
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn partitioned_programs_run_in_parts() {
    // Rows are sharded over two devices, and each needs all columns' sums.
    let body = "{
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        %sums = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<4x2xf32>, tensor<f32>) -> tensor<2xf32>
        %all = stablehlo.broadcast_in_dim %sums, dims = [1] : (tensor<2xf32>) -> tensor<4x2xf32>
        %y = stablehlo.add %x, %all : tensor<4x2xf32>
        return %y : tensor<4x2xf32>
      }";
    let gspmd = r#"{mhlo.sharding = "{devices=[2,1]<=[2]}"}"#;
    let shardy = r#"{sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}"#;
    let client = plugin().client(&[("cpu_device_count", 2.into())]).unwrap();
    for (sharding, mesh, is_shardy) in
        [(gspmd, "", false), (shardy, r#"sdy.mesh @mesh = <["x"=2]>"#, true)]
    {
        let program = format!(
            "module @parts attributes {{mhlo.num_partitions = 2 : i32}} {{
               {mesh}
               func.func @main(%x: tensor<4x2xf32> {sharding}) -> (tensor<4x2xf32> {sharding}) {body}
             }}"
        );
        let options = CompileOptions::new().partitions(2).shardy(is_shardy);
        let parts = client
            .compile(&Program::mlir(&program), &options)
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(parts.executable().partitions().unwrap(), 2);
        assert_eq!(parts.executable().outputs().unwrap()[0].dims, [2, 2], "shardy {is_shardy}");
        let on = parts.devices().unwrap();
        let upper = client.buffer_on(&[1.0_f32, 2.0, 3.0, 4.0], &[2, 2], &on[0]).unwrap();
        let lower = client.buffer_on(&[5.0_f32, 6.0, 7.0, 8.0], &[2, 2], &on[1]).unwrap();
        let runs =
            parts.execute_sharded(&[&[&upper], &[&lower]], &ExecuteOptions::default()).unwrap();
        let rows: Vec<f32> = runs
            .into_iter()
            .flat_map(|run| run.wait().unwrap()[0].to_vec::<f32>().unwrap())
            .collect();
        assert_eq!(rows, [17.0, 22.0, 19.0, 24.0, 21.0, 26.0, 23.0, 28.0]);
    }
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn memories_can_be_copied_into() {
    let client = client();
    let device = client.devices().unwrap().remove(0);
    let x = client.buffer(&[1.0_f32, 2.0], &[2]).unwrap();
    for memory in device.memories().unwrap() {
        if memory == device.default_memory().unwrap() {
            continue;
        }
        let kind = memory.kind().unwrap();
        let copy = x.copy_into(&memory).unwrap();
        assert_eq!(copy.memory().unwrap(), memory, "{kind}");
        assert_eq!(copy.to_vec::<f32>().unwrap(), [1.0, 2.0], "{kind}");
        let direct = client.buffer_on(&[5_i32], &[], &memory).unwrap();
        assert_eq!(direct.memory().unwrap(), memory, "{kind}");
        assert_eq!(direct.to_vec::<i32>().unwrap(), [5], "{kind}");
    }
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn other_layouts_come_back_in_row_major_order() {
    let client = client();
    let program = r#"func.func @main(%x: tensor<2x3xf32>)
        -> (tensor<2x3xf32> {mhlo.layout_mode = "{0,1}"}, tensor<2x3xf32>) {
      %y = stablehlo.add %x, %x : tensor<2x3xf32>
      return %y, %x : tensor<2x3xf32>, tensor<2x3xf32>
    }"#;
    let x = client.buffer(&[0.0_f32, 1.0, 2.0, 3.0, 4.0, 5.0], &[2, 3]).unwrap();
    let outputs = compile(&client, program).execute(&[&x]).unwrap();
    let order = |buffer: &Buffer| match buffer.layout().unwrap() {
        Layout::Tiled { minor_to_major, tiles } if tiles.is_empty() => minor_to_major,
        other => panic!("{other:?}"),
    };
    assert_eq!(order(&outputs[0]), [0, 1]);
    assert_eq!(order(&outputs[1]), [1, 0]);
    assert_eq!(outputs[0].to_vec::<f32>().unwrap(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
    let mut out = [0.0_f32; 6];
    outputs[0].copy_to(&mut out).unwrap();
    assert_eq!(out, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
    let bytes: Vec<u8> = out.iter().flat_map(|value| value.to_ne_bytes()).collect();
    assert_eq!(outputs[0].to_bytes().unwrap(), bytes);
    assert_eq!(outputs[1].to_vec::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn many_runs_are_under_way_at_once() {
    let client = client();
    let program =
        "func.func @main(%x: tensor<256x256xf32>, %y: tensor<256x256xf32>) -> tensor<256x256xf32> {
      %z = stablehlo.dot %x, %y : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
      return %z : tensor<256x256xf32>
    }";
    let multiply = compile(&client, program);
    let mut identity = vec![0.0_f32; 256 * 256];
    identity.iter_mut().step_by(257).for_each(|value| *value = 1.0);
    let identity = client.buffer(&identity, &[256, 256]).unwrap();
    let data = numbers(256 * 256, 5);

    // Each on the result of the one before, and nothing waits until the end.
    let mut x = client.buffer(&data, &[256, 256]).unwrap();
    let mut events = Vec::new();
    for _ in 0..200 {
        let run = multiply.execute_async(&[&x, &identity], &ExecuteOptions::default()).unwrap();
        events.push(run.done);
        x = run.outputs.into_iter().next().unwrap();
    }
    let ready = x.ready().unwrap();
    assert_eq!(x.to_vec::<f32>().unwrap(), data);
    ready.wait().unwrap();
    assert!(ready.is_ready().unwrap());
    for event in &events {
        event.wait().unwrap();
        assert!(event.is_ready().unwrap() && event.error().is_none());
    }

    // From several threads at once, with events and results dropped before the end.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..50 {
                    let run = multiply
                        .execute_async(&[&x, &identity], &ExecuteOptions::default())
                        .unwrap();
                    if round % 10 == 0 {
                        let transfer = run.outputs[0].to_vec_async::<f32>().unwrap();
                        assert_eq!(transfer.wait().unwrap(), data);
                    } else if round % 10 == 1 {
                        drop(run.outputs[0].to_vec_async::<f32>().unwrap());
                    }
                }
            });
        }
    });
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn a_client_may_be_dropped_before_its_buffers() {
    let client = client();
    let add = compile(&client, ADD);
    let x = client.buffer(&[1.0_f32; 12], &[4, 3]).unwrap();
    let device = client.devices().unwrap().remove(0);
    let memory = device.default_memory().unwrap();
    let topology = client.topology().unwrap();
    let description = topology.devices().unwrap().remove(0);
    drop((client, topology));
    let run = add.execute_async(&[&x, &x], &ExecuteOptions::default()).unwrap();
    drop((add, x));
    assert_eq!(run.outputs[0].to_vec::<f32>().unwrap(), [2.0; 12]);
    let done = run.done;
    drop(run.outputs);
    done.wait().unwrap();
    drop(done);
    assert_eq!(device.id().unwrap(), 0);
    assert_eq!(memory.kind().unwrap(), "device");
    drop((device, memory));
    assert_eq!(description.kind().unwrap(), "cpu");

    // All at once, with the work under way.
    for _ in 0..20 {
        let client = self::client();
        let add = compile(&client, ADD);
        let x = client.buffer(&[1.0_f32; 12], &[4, 3]).unwrap();
        for _ in 0..10 {
            drop(add.execute_async(&[&x, &x], &ExecuteOptions::default()).unwrap());
        }
    }
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn memory_of_the_host_is_borrowed_for_as_long_as_it_is_read() {
    let client = client();
    let add = compile(&client, ADD);
    for round in 0..64_usize {
        let data: Arc<Vec<f32>> = Arc::new(vec![round as f32; 64]);
        // Half of them where the plug-in reads them in place, half where it makes a copy.
        let aligned = (0..16).find(|&i| data[i..].as_ptr().addr().is_multiple_of(64)).unwrap();
        let start = aligned + round % 2;
        let x = client
            .buffer_from_owner(data.clone(), |d| &d[start..start + 12], &[4, 3], Place::Default)
            .unwrap();
        assert!(round % 2 == 1 || Arc::strong_count(&data) == 2, "aligned data was copied");
        let run = add.execute_async(&[&x, &x], &ExecuteOptions::default()).unwrap();
        drop(x);
        assert_eq!(run.outputs[0].to_vec::<f32>().unwrap(), [2.0 * round as f32; 12]);
        run.done.wait().unwrap();
        let free = || Arc::strong_count(&data) == 1;
        let mut patience = 0;
        while !free() && patience < 1000 {
            std::thread::sleep(Duration::from_millis(1));
            patience += 1;
        }
        assert!(free(), "round {round} is still borrowed");
    }
    let error =
        client.buffer_from_owner(vec![1.0_f32; 3], |data| data, &[4], Place::Default).unwrap_err();
    assert!(matches!(error, Error::WrongLength { .. }));
}

mod handlers {
    use xla_ffi::{Buffer, BufferMut, Error, Result};

    fn axpy(x: Buffer<f32>, y: Buffer<f32>, mut z: BufferMut<f32>, alpha: f32) {
        for (z, (x, y)) in z.iter_mut().zip(x.iter().zip(&*y)) {
            *z = alpha * x + y;
        }
    }

    fn fail(_x: Buffer<f32>, _y: BufferMut<f32>) -> Result {
        Err(Error::data_loss("the handler lost it"))
    }

    xla_ffi::handler! {
        /// `z = alpha * x + y`
        pub fn pjrt_client_test_axpy = axpy(x, y, z, alpha);
        /// An error.
        pub fn pjrt_client_test_fail = fail(x, y);
    }
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn custom_calls_reach_their_handlers() {
    let client = client();
    let plugin = client.plugin();
    let axpy = Handlers::execute(handlers::pjrt_client_test_axpy as *const _);
    let fail = Handlers::execute(handlers::pjrt_client_test_fail as *const _);
    let host = "Host";
    // SAFETY: both are handlers, which stay in this process.
    unsafe {
        plugin.register("pjrt_client_test_axpy", host, axpy).unwrap();
        plugin.register("pjrt_client_test_axpy", host, axpy).unwrap();
        plugin.register("pjrt_client_test_fail", host, fail).unwrap();
        let error = plugin.register("pjrt_client_test_axpy", host, fail).unwrap_err();
        assert!(matches!(&error, Error::Registered { .. }), "{error:?}");
        let stages = Handlers { prepare: axpy.execute, ..axpy };
        let error = plugin.register("pjrt_client_test_stages", host, stages).unwrap_err();
        assert!(error.to_string().contains("Gpu_Custom_Call"), "{error}");
        let none = Handlers::execute(std::ptr::null());
        assert!(plugin.register("pjrt_client_test_none", host, none).is_err());
    }

    let program = "func.func @main(%x: tensor<3xf32>, %y: tensor<3xf32>) -> tensor<3xf32> {
      %z = stablehlo.custom_call @pjrt_client_test_axpy(%x, %y)
        {api_version = 4 : i32, backend_config = {alpha = 2.0 : f32}}
        : (tensor<3xf32>, tensor<3xf32>) -> tensor<3xf32>
      return %z : tensor<3xf32>
    }";
    let axpy = compile(&client, program);
    let x = client.buffer(&[1.0_f32, 2.0, 3.0], &[3]).unwrap();
    let y = client.buffer(&[10.0_f32, 20.0, 30.0], &[3]).unwrap();
    let z = axpy.execute(&[&x, &y]).unwrap();
    assert_eq!(z[0].to_vec::<f32>().unwrap(), [12.0, 24.0, 36.0]);

    // An error inside a run is that of the run, of its results, and of what uses them.
    let program = "func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
      %y = stablehlo.custom_call @pjrt_client_test_fail(%x)
        {api_version = 4 : i32, backend_config = {}} : (tensor<3xf32>) -> tensor<3xf32>
      return %y : tensor<3xf32>
    }";
    let fail = compile(&client, program);
    let check = |error: Error| {
        assert_eq!(error.code(), Some(Code::DataLoss), "{error}");
        assert!(error.to_string().contains("the handler lost it"), "{error}");
    };
    check(fail.execute(&[&x]).unwrap_err());
    if let Ok(run) = fail.execute_async(&[&x], &ExecuteOptions::default()) {
        check(run.outputs[0].to_vec::<f32>().unwrap_err());
        check(run.done.wait().unwrap_err());
        check(run.done.error().unwrap());
        check(run.outputs[0].copy_to(&mut [0.0_f32; 3]).unwrap_err());
        check(axpy.execute(&[&x, &run.outputs[0]]).unwrap_err());
    }
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of this file"]
fn a_topology_describes_and_its_errors_are_typed() {
    let client = plugin().client(&[("cpu_device_count", 2.into())]).unwrap();
    let topology = client.topology().unwrap();
    assert_eq!(topology.platform_name().unwrap(), "cpu");
    topology.platform_version().unwrap();
    topology.attributes().unwrap();
    assert!(!topology.serialize().unwrap().is_empty());
    let devices = topology.devices().unwrap();
    assert_eq!(devices.len(), 2);
    assert_eq!(devices[1].id().unwrap(), 1);

    // This plug-in compiles for devices that are present alone.
    let error = Topology::new(plugin(), "cpu", &[]).unwrap_err();
    assert_eq!(error.code(), Some(Code::Unimplemented), "{error}");
    let error = topology.compile(&Program::mlir(ADD), &CompileOptions::new()).unwrap_err();
    assert_eq!(error.code(), Some(Code::NotFound), "{error}");
}
