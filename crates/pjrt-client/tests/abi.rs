//! Compares `abi` with the header that a plug-in carries: every size, offset and number, and the
//! position of every function.

use std::{fmt::Write as _, mem::offset_of, path::Path, process::Command};

use pjrt_client::{Code, DType, Extension, abi};

/// A number here, and the C expression for it.
struct Check {
    name: String,
    ours: usize,
    c: String,
    /// Whether the header may be beyond, as later versions add at the end.
    grows: bool,
}

fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    let mut check = |name: String, ours: usize, c: String, grows: bool| {
        checks.push(Check { name, ours, c, grows });
    };
    for (name, size, fields) in abi::STRUCTS.iter().chain(abi::CALLS) {
        check((*name).into(), *size, format!("sizeof(struct {name})"), true);
        for (field, offset) in *fields {
            let field = match (*name, field.trim_start_matches("r#")) {
                // Unions without a name.
                ("PJRT_NamedValue", "value") => "int64_value",
                ("PJRT_Buffer_MemoryLayout", "layout") => "tiled",
                (_, field) => field,
            };
            let c = format!("offsetof(struct {name}, {field})");
            check(format!("{name}.{field}"), *offset, c, false);
        }
    }
    for (index, name) in abi::FUNCTIONS.iter().enumerate() {
        let c = format!("offsetof(PJRT_Api, {name})");
        check(format!("PJRT_Api.{name}"), abi::offset_of_function(index), c, false);
    }
    let end = abi::offset_of_function(abi::FUNCTIONS.len());
    check("PJRT_Api".into(), end, "sizeof(PJRT_Api)".into(), true);
    for (name, ours) in [
        ("extension_start", offset_of!(abi::Api, extension_start)),
        ("pjrt_api_version", offset_of!(abi::Api, pjrt_api_version)),
    ] {
        check(format!("PJRT_Api.{name}"), ours, format!("offsetof(PJRT_Api, {name})"), false);
    }
    for (name, ours) in numbers() {
        check(name.clone(), ours, name, false);
    }
    check("PJRT_API_MINOR".into(), abi::API_MINOR as usize, "PJRT_API_MINOR".into(), true);
    for member in ["string_value", "int64_value", "int64_array_value", "float_value", "bool_value"]
    {
        let value = offset_of!(abi::NamedValue, value);
        check(
            format!("NamedValue.{member}"),
            value,
            format!("offsetof(PJRT_NamedValue, {member})"),
            false,
        );
    }
    checks
}

/// The header's constants.
fn numbers() -> Vec<(String, usize)> {
    let fixed = [
        ("API_MAJOR", abi::API_MAJOR.cast_unsigned()),
        ("Error_Code_OK", 0),
        ("NamedValue_kString", abi::VALUE_STRING),
        ("NamedValue_kInt64", abi::VALUE_INT64),
        ("NamedValue_kInt64List", abi::VALUE_INT64_LIST),
        ("NamedValue_kFloat", abi::VALUE_FLOAT),
        ("NamedValue_kBool", abi::VALUE_BOOL),
        ("HostBufferSemantics_kImmutableOnlyDuringCall", abi::HOST_IMMUTABLE_ONLY_DURING_CALL),
        ("HostBufferSemantics_kImmutableZeroCopy", abi::HOST_IMMUTABLE_ZERO_COPY),
        ("Buffer_MemoryLayout_Type_Tiled", abi::LAYOUT_TILED),
        ("Buffer_MemoryLayout_Type_Strides", abi::LAYOUT_STRIDES),
        ("Extension_Type_FFI", abi::EXTENSION_FFI),
        ("Extension_Type_Gpu_Custom_Call", abi::EXTENSION_GPU_CUSTOM_CALL),
    ]
    .map(|(name, value)| (name.to_owned(), value));
    let codes = Code::ALL.iter().map(|&code| (format!("Error_Code_{code}"), code as u32));
    let dtypes = DType::ALL
        .iter()
        .map(|&dtype| (format!("Buffer_Type_{}", dtype.name().to_uppercase()), dtype as u32));
    let extensions = [
        (Extension::Profiler, "Profiler"),
        (Extension::CustomPartitioner, "Custom_Partitioner"),
        (Extension::Stream, "Stream"),
        (Extension::Layouts, "Layouts"),
        (Extension::Ffi, "FFI"),
        (Extension::MemoryDescriptions, "MemoryDescriptions"),
        (Extension::Triton, "Triton"),
        (Extension::RawBuffer, "RawBuffer"),
        (Extension::PhaseCompile, "PhaseCompile"),
        (Extension::Example, "Example"),
        (Extension::Unknown, "Unknown"),
        (Extension::CrossHostTransfers, "CrossHostTransfers"),
        (Extension::ExecutableMetadata, "ExecutableMetadata"),
        (Extension::Callback, "Callback"),
        (Extension::HostAllocator, "HostAllocator"),
    ]
    .map(|(extension, name)| (format!("Extension_Type_{name}"), extension.number()));
    fixed
        .into_iter()
        .chain(codes)
        .chain(dtypes)
        .chain(extensions)
        .map(|(name, value)| (format!("PJRT_{name}"), value as usize))
        .collect()
}

fn compare(include: &Path) {
    let checks = checks();
    let mut program =
        String::from("#include <stdio.h>\n#include \"pjrt_c_api.h\"\nint main(void) {\n");
    for Check { c, .. } in &checks {
        writeln!(program, "printf(\"%zu\\n\", (size_t)({c}));").unwrap();
    }
    program.push_str("return 0;\n}\n");
    let directory = tempfile::tempdir().unwrap();
    let (source, binary) = (directory.path().join("abi.c"), directory.path().join("abi"));
    std::fs::write(&source, program).unwrap();
    let compiled = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .arg(&source)
        .arg("-o")
        .arg(&binary)
        .arg("-I")
        .arg(include)
        .output()
        .expect("a C compiler, `cc` or the one that CC names");
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{}: {errors}", include.display());
    let output = String::from_utf8(Command::new(&binary).output().unwrap().stdout).unwrap();
    let header: Vec<usize> = output.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(header.len(), checks.len());
    let wrong: Vec<_> = checks
        .iter()
        .zip(&header)
        .filter(|(check, theirs)| check.ours != **theirs && !(check.grows && check.ours < **theirs))
        .map(|(check, theirs)| {
            format!("{}: {} here, {theirs} in the header", check.name, check.ours)
        })
        .collect();
    assert!(wrong.is_empty(), "{}:\n{}", include.display(), wrong.join("\n"));
    println!("{}: {} numbers", include.display(), header.len());
}

#[test]
#[ignore = "needs pjrt_c_api.h: set XENTILE_PJRT_INCLUDE, and run with --include-ignored"]
fn layout_is_that_of_the_headers() {
    let includes = std::env::var_os("XENTILE_PJRT_INCLUDE").unwrap_or_default();
    let includes: Vec<_> =
        std::env::split_paths(&includes).filter(|path| !path.as_os_str().is_empty()).collect();
    assert!(
        !includes.is_empty(),
        "XENTILE_PJRT_INCLUDE is not set; it must list folders that hold pjrt_c_api.h, separated by colons, \
         such as xla_plugins/xla_cpu_pjrt/include in the site-packages of xla-cpu-pjrt"
    );
    for include in &includes {
        compare(include);
    }
}
