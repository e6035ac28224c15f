//! Compares `abi` with the header that jaxlib carries: every size, offset and number.

use std::{fmt::Write as _, mem::offset_of, path::Path, process::Command};

use xla_ffi::{DType, ErrorCode, abi};

/// A struct of `abi` beside the one of the header.
struct Layout {
    /// The name in the header.
    name: &'static str,
    /// The name since minor version 4, if it changed.
    renamed: &'static str,
    size: usize,
    /// Whether later headers have more fields at the end.
    grows: bool,
    fields: Vec<(&'static str, usize)>,
}

macro_rules! layout {
    ($type:ident, $name:literal $(=> $renamed:literal)? $(, grows = $grows:literal)?:
     $($field:ident $(as $c:literal)?),*) => {{
        // Does not compile if a field is left out.
        fn _all(value: abi::$type) {
            let abi::$type { $($field: _),* } = value;
        }
        #[allow(unused_mut, unused_assignments)]
        let mut layout = Layout {
            name: $name,
            renamed: $name,
            size: size_of::<abi::$type>(),
            grows: false,
            fields: vec![$({
                let name = stringify!($field).trim_start_matches("r#");
                $(let name = { _ = name; $c };)?
                (name, offset_of!(abi::$type, $field))
            }),*],
        };
        $(layout.renamed = $renamed;)?
        $(layout.grows = $grows;)?
        layout
    }};
}

#[rustfmt::skip]
fn layouts() -> Vec<Layout> {
    vec![
        layout!(ExtensionBase, "XLA_FFI_Extension_Base" => "XLA_FFI_InternalExtension":
            struct_size, r#type, next),
        layout!(ApiVersion, "XLA_FFI_Api_Version":
            struct_size, extension_start, major_version, minor_version),
        layout!(ByteSpan, "XLA_FFI_ByteSpan": ptr, len),
        layout!(Scalar, "XLA_FFI_Scalar": dtype, value),
        layout!(Array, "XLA_FFI_Array": dtype, size, data),
        layout!(Buffer, "XLA_FFI_Buffer":
            struct_size, extension_start, dtype, data, rank, dims),
        layout!(Args, "XLA_FFI_Args": struct_size, extension_start, size, types, args),
        layout!(Rets, "XLA_FFI_Rets": struct_size, extension_start, size, types, rets),
        layout!(Attrs, "XLA_FFI_Attrs":
            struct_size, extension_start, size, types, names, attrs),
        layout!(CallFrame, "XLA_FFI_CallFrame":
            struct_size, extension_start, api, ctx, stage, args, rets, attrs, future),
        layout!(Metadata, "XLA_FFI_Metadata": struct_size, api_version, traits, state_type_id),
        layout!(MetadataExtension, "XLA_FFI_Metadata_Extension": extension_base, metadata),
        layout!(ErrorCreateArgs, "XLA_FFI_Error_Create_Args":
            struct_size, extension_start, message, errc),
        layout!(ErrorDestroyArgs, "XLA_FFI_Error_Destroy_Args":
            struct_size, extension_start, error),
        layout!(StreamGetArgs, "XLA_FFI_Stream_Get_Args":
            struct_size, extension_start, ctx, stream),
        layout!(DeviceMemoryAllocateArgs, "XLA_FFI_DeviceMemory_Allocate_Args":
            struct_size, extension_start, ctx, size, alignment, data),
        layout!(DeviceMemoryFreeArgs, "XLA_FFI_DeviceMemory_Free_Args":
            struct_size, extension_start, ctx, size, data),
        layout!(ThreadPoolScheduleArgs, "XLA_FFI_ThreadPool_Schedule_Args":
            struct_size, extension_start, ctx, task, data),
        layout!(ThreadPoolNumThreadsArgs, "XLA_FFI_ThreadPool_NumThreads_Args":
            struct_size, extension_start, ctx, num_threads),
        layout!(DeviceOrdinalGetArgs, "XLA_FFI_DeviceOrdinal_Get_Args":
            struct_size, extension_start, ctx, device_ordinal),
        layout!(Api, "XLA_FFI_Api", grows = true:
            struct_size, extension_start, api_version, internal_api,
            error_create as "XLA_FFI_Error_Create",
            error_get_details as "error_get_details",
            error_destroy as "XLA_FFI_Error_Destroy",
            handler_register as "XLA_FFI_Handler_Register",
            stream_get as "XLA_FFI_Stream_Get",
            type_register as "XLA_FFI_Type_Register",
            execution_context_get as "execution_context_get",
            state_set as "XLA_FFI_State_Set",
            state_get as "XLA_FFI_State_Get",
            device_memory_allocate as "XLA_FFI_DeviceMemory_Allocate",
            device_memory_free as "XLA_FFI_DeviceMemory_Free",
            thread_pool_schedule as "XLA_FFI_ThreadPool_Schedule",
            thread_pool_num_threads as "XLA_FFI_ThreadPool_NumThreads",
            future_create as "XLA_FFI_Future_Create",
            future_set_available as "XLA_FFI_Future_SetAvailable",
            future_set_error as "XLA_FFI_Future_SetError",
            run_id_get as "XLA_FFI_RunId_Get",
            device_ordinal_get as "XLA_FFI_DeviceOrdinal_Get"),
    ]
}

/// Names and numbers of the header's enums and limits, with those of `abi`.
fn numbers() -> Vec<(String, usize)> {
    let fixed = [
        ("Error_Code_OK", 0),
        ("ArgType_BUFFER", abi::ARG_TYPE_BUFFER),
        ("RetType_BUFFER", abi::RET_TYPE_BUFFER),
        ("AttrType_ARRAY", abi::ATTR_TYPE_ARRAY),
        ("AttrType_DICTIONARY", abi::ATTR_TYPE_DICTIONARY),
        ("AttrType_SCALAR", abi::ATTR_TYPE_SCALAR),
        ("AttrType_STRING", abi::ATTR_TYPE_STRING),
        ("ExecutionStage_INSTANTIATE", abi::STAGE_INSTANTIATE),
        ("ExecutionStage_PREPARE", abi::STAGE_PREPARE),
        ("ExecutionStage_INITIALIZE", abi::STAGE_INITIALIZE),
        ("ExecutionStage_EXECUTE", abi::STAGE_EXECUTE),
        ("Extension_Metadata", abi::EXTENSION_METADATA),
        ("HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE", abi::TRAIT_COMMAND_BUFFER_COMPATIBLE),
        ("API_MAJOR", abi::API_MAJOR.cast_unsigned()),
    ]
    .map(|(name, value)| (name.to_owned(), value));
    let codes = ErrorCode::ALL.iter().map(|&code| (format!("Error_Code_{code}"), code as u32));
    let dtypes = DType::ALL
        .iter()
        .map(|&dtype| (format!("DataType_{}", dtype.name().to_uppercase()), dtype as u32));
    let numbers = fixed.into_iter().chain(codes).chain(dtypes);
    // What the C side counts of a struct, up to the field in the header's XLA_FFI_DEFINE_STRUCT_TRAITS.
    let sizes = [
        ("CallFrame", offset_of!(abi::CallFrame, attrs) + size_of::<abi::Attrs>()),
        ("Metadata", offset_of!(abi::Metadata, traits) + size_of::<u32>()),
        ("Metadata_Extension", size_of::<abi::MetadataExtension>()),
        ("Buffer", size_of::<abi::Buffer>()),
        ("Args", size_of::<abi::Args>()),
        ("Rets", size_of::<abi::Rets>()),
        ("Attrs", size_of::<abi::Attrs>()),
    ];
    numbers
        .map(|(name, value)| (format!("XLA_FFI_{name}"), value as usize))
        .chain(sizes.map(|(name, size)| (format!("XLA_FFI_{name}_STRUCT_SIZE"), size)))
        .collect()
}

/// A C program that prints the header's own numbers, in the order of `expected`.
fn program(layouts: &[Layout]) -> String {
    let mut text = String::from(
        "#include <stdio.h>\n#include \"xla/ffi/api/c_api.h\"\n\
         #if XLA_FFI_API_MINOR >= 4\n\
         #define error_get_details XLA_FFI_Error_GetDetails\n\
         #define execution_context_get XLA_FFI_InvokeContext_Get\n",
    );
    for Layout { name, renamed, .. } in layouts {
        writeln!(text, "#define STRUCT_{name} struct {renamed}").unwrap();
    }
    text.push_str(
        "#else\n\
         #define error_get_details XLA_FFI_Error_GetMessage\n\
         #define execution_context_get XLA_FFI_ExecutionContext_Get\n",
    );
    for Layout { name, .. } in layouts {
        writeln!(text, "#define STRUCT_{name} struct {name}").unwrap();
    }
    text.push_str("#endif\nint main(void) {\n");
    for Layout { name, fields, .. } in layouts {
        writeln!(text, "printf(\"{name} %zu\\n\", sizeof(STRUCT_{name}));").unwrap();
        for (field, _) in fields {
            writeln!(text, "printf(\"{name}.{field} %zu\\n\", offsetof(STRUCT_{name}, {field}));")
                .unwrap();
        }
    }
    for (name, _) in numbers() {
        writeln!(text, "printf(\"{name} %zu\\n\", (size_t){name});").unwrap();
    }
    text.push_str(
        "#if XLA_FFI_API_MINOR >= 4\n\
         printf(\"errc %zu\\n\", offsetof(XLA_FFI_Error_GetDetails_Args, errc));\n\
         printf(\"message %zu\\n\", offsetof(XLA_FFI_Error_GetDetails_Args, message));\n\
         #else\n\
         printf(\"errc %zu\\n\", sizeof(struct XLA_FFI_Error_GetMessage_Args));\n\
         printf(\"message %zu\\n\", offsetof(struct XLA_FFI_Error_GetMessage_Args, message));\n\
         #endif\n\
         printf(\"state_type_id %zu\\n\", sizeof(XLA_FFI_TypeId));\n\
         printf(\"minor %d\\n\", XLA_FFI_API_MINOR);\n\
         return 0;\n}\n",
    );
    text
}

fn compare(include: &Path) {
    let layouts = layouts();
    let directory = tempfile::tempdir().unwrap();
    let (source, binary) = (directory.path().join("abi.c"), directory.path().join("abi"));
    std::fs::write(&source, program(&layouts)).unwrap();
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
    let lines: Vec<(&str, usize)> = output
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect();
    let header = |name: &str| lines.iter().find(|line| line.0 == name).expect(name).1;

    let mut wrong = Vec::new();
    let mut check = |name: &str, ours: usize, right: bool| {
        if !right {
            wrong.push(format!("{name}: {ours} here, {} in the header", header(name)));
        }
    };
    for Layout { name, size, grows, fields, .. } in &layouts {
        let theirs = header(name);
        check(name, *size, *size == theirs || (*grows && *size < theirs));
        for (field, offset) in fields {
            let name = format!("{name}.{field}");
            check(&name, *offset, *offset == header(&name));
        }
    }
    for (name, value) in numbers() {
        check(&name, value, value == header(&name));
    }
    let errc = offset_of!(abi::ErrorGetDetailsArgs, errc);
    let message = offset_of!(abi::ErrorGetDetailsArgs, message);
    check("errc", errc, errc == header("errc"));
    check("message", message, message == header("message"));
    check("state_type_id", 8, header("state_type_id") == 8);
    let minor = abi::API_MINOR as usize;
    check("minor", minor, minor <= header("minor"));
    assert!(wrong.is_empty(), "{}:\n{}", include.display(), wrong.join("\n"));
    println!("{}: {} numbers of XLA FFI 0.{}", include.display(), lines.len(), header("minor"));
}

#[test]
#[ignore = "needs the headers of jaxlib: set XLA_FFI_JAXLIB_INCLUDE, and run with --include-ignored"]
fn layout_is_that_of_the_headers() {
    let includes = std::env::var_os("XLA_FFI_JAXLIB_INCLUDE").unwrap_or_default();
    let includes: Vec<_> =
        std::env::split_paths(&includes).filter(|path| !path.as_os_str().is_empty()).collect();
    assert!(
        !includes.is_empty(),
        "XLA_FFI_JAXLIB_INCLUDE is not set; it must list the include directories of jaxlib, \
         separated by colons:\n    export XLA_FFI_JAXLIB_INCLUDE=$(python -c 'import jaxlib, \
         pathlib; print(pathlib.Path(jaxlib.__file__).parent / \"include\")')"
    );
    for include in &includes {
        compare(include);
    }
}
