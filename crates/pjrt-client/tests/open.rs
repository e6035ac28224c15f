//! Opening what is no plug-in, and made-up plug-ins: C files that a compiler makes libraries of.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use pjrt_client::{Code, Error, Extension, Plugin, Topology, Version};

/// A table of functions like PJRT's, whose last entries are cut off by `struct_size`. Errors are
/// numbers.
const FAKE: &str = r#"
#include <stddef.h>
#include <string.h>
typedef struct Base { size_t size; int type; struct Base* next; } Base;
typedef struct {
  size_t size; void* ext; void* error; const char* message; size_t message_size;
} Message;
typedef struct { size_t size; void* ext; void* error; int code; } GetCode;
static int alive = 0;
static void destroy(void* args) { alive--; }
static void message(Message* args) { args->message = "it is a fake"; args->message_size = 12; }
static void* code(GetCode* args) { args->code = 9; return 0; }
static int initialized = 0;
static void* initialize(void* args) {
  initialized++;
  if (FAILS) { alive++; return &alive; }
  return 0;
}
static void* fails(void* args) { alive++; return &alive; }
static Base second = {24, 5, 0};
static Base first = {24, 77, &second};
static struct {
  size_t size; Base* ext;
  struct { size_t size; void* ext; int major; int minor; } version;
  void* functions[200];
} table;
void* GetPjrtApi(void) {
  if (NO_TABLE) return 0;
  table.size = 40 + 8 * COUNT;
  table.ext = &first;
  if (LOOPS) second.next = &first;
  table.version.size = 24;
  table.version.major = MAJOR;
  table.version.minor = MINOR;
  for (int i = 0; i < 200; i++) table.functions[i] = (void*)fails;
  table.functions[0] = (void*)destroy;
  table.functions[1] = (void*)message;
  table.functions[2] = (void*)code;
  table.functions[3] = (void*)initialize;
  table.functions[4] = 0;
  return &table;
}
int initializations(void) { return initialized; }
int errors_alive(void) { return alive; }
"#;

/// A library made of C, with macros set before.
fn library(directory: &Path, source: &str, macros: &[(&str, i32)]) -> PathBuf {
    let defaults =
        [("FAILS", 0), ("NO_TABLE", 0), ("LOOPS", 0), ("COUNT", 118), ("MAJOR", 0), ("MINOR", 81)];
    let (file, library) = (directory.join("fake.c"), directory.join("fake.so"));
    std::fs::write(&file, source).unwrap();
    let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    compiler.args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&file);
    for (name, default) in defaults {
        let value = macros.iter().find(|set| set.0 == name).map_or(default, |set| set.1);
        compiler.arg(format!("-D{name}={value}"));
    }
    let output = compiler.output().expect("a C compiler, `cc` or the one that CC names");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

fn fake(macros: &[(&str, i32)]) -> (tempfile::TempDir, Result<Plugin, Error>) {
    let directory = tempfile::tempdir().unwrap();
    let plugin = Plugin::open(library(directory.path(), FAKE, macros));
    (directory, plugin)
}

#[test]
fn a_file_that_cannot_be_loaded_is_named_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing.so");
    let error = Plugin::open(&missing).unwrap_err();
    assert!(matches!(&error, Error::Open { path, .. } if *path == missing), "{error:?}");
    assert!(error.to_string().contains("No such file"), "{error}");

    let text = directory.path().join("notes.txt");
    std::fs::write(&text, "not a library\n").unwrap();
    let error = Plugin::open(&text).unwrap_err();
    assert!(matches!(&error, Error::Open { .. }), "{error:?}");
    assert!(error.to_string().contains("notes.txt"), "{error}");

    let error = Plugin::open(directory.path()).unwrap_err();
    assert!(error.to_string().contains("it is a directory"), "{error}");
}

#[test]
fn a_library_without_the_function_is_no_plugin() {
    let directory = tempfile::tempdir().unwrap();
    let path = library(directory.path(), "int something(void) { return 1; }", &[]);
    let error = Plugin::open(&path).unwrap_err();
    assert!(matches!(&error, Error::NotAPlugin { .. }), "{error:?}");
    assert!(error.to_string().contains("GetPjrtApi"), "{error}");

    let (_directory, plugin) = fake(&[("NO_TABLE", 1)]);
    let error = plugin.unwrap_err();
    assert!(matches!(&error, Error::NotAPlugin { .. }), "{error:?}");

    let (_directory, plugin) = fake(&[("COUNT", -4)]);
    let error = plugin.unwrap_err().to_string();
    assert!(error.contains("struct_size 8; it must be at least 40"), "{error}");
}

#[test]
fn another_major_version_is_refused() {
    let (_directory, plugin) = fake(&[("MAJOR", 1), ("MINOR", 3)]);
    let error = plugin.unwrap_err();
    let version = Version { major: 1, minor: 3 };
    assert!(matches!(&error, Error::Version { plugin, .. } if *plugin == version), "{error:?}");
    assert!(error.to_string().ends_with("speaks PJRT 1.3; this crate speaks 0.x"), "{error}");
}

#[test]
fn a_function_beyond_the_api_table_is_missing() {
    // Up to PJRT_Plugin_Attributes, which is null.
    let (_directory, plugin) = fake(&[("COUNT", 5), ("MINOR", 40)]);
    let plugin = plugin.unwrap();
    assert_eq!(plugin.version(), Version { major: 0, minor: 40 });
    assert!(plugin.has("PJRT_Error_Message"));
    assert!(!plugin.has("PJRT_Plugin_Attributes") && !plugin.has("PJRT_Client_Create"));
    for (function, error) in [
        ("PJRT_Client_Create", plugin.client(&[]).unwrap_err()),
        ("PJRT_Plugin_Attributes", plugin.attributes().unwrap_err()),
        ("PJRT_TopologyDescription_Create", Topology::new(plugin, "v6e:2x2", &[]).unwrap_err()),
    ] {
        assert!(matches!(&error, Error::MissingFunction { .. }), "{error:?}");
        let text = error.to_string();
        let expected = format!("has no {function}: it speaks PJRT 0.40, and this crate 0.81");
        assert!(text.contains(&expected), "{text}");
    }

    // Errors could not be read.
    let (_directory, plugin) = fake(&[("COUNT", 2)]);
    let error = plugin.unwrap_err().to_string();
    assert!(error.contains("has no PJRT_Error_GetCode"), "{error}");
}

#[test]
fn a_longer_table_is_fine() {
    let (_directory, plugin) = fake(&[("COUNT", 150), ("MINOR", 200)]);
    let plugin = plugin.unwrap();
    assert_eq!(plugin.version().minor, 200);
    let error = plugin.client(&[]).unwrap_err();
    assert_eq!(error.code(), Some(Code::FailedPrecondition));
    assert_eq!(error.to_string(), "PJRT_Client_Create: FAILED_PRECONDITION: it is a fake");
}

#[test]
fn a_plugin_is_initialised_once_and_errors_are_destroyed() {
    let (directory, plugin) = fake(&[]);
    let plugin = plugin.unwrap();
    let link = directory.path().join("link.so");
    std::os::unix::fs::symlink(plugin.path(), &link).unwrap();
    assert_eq!(Plugin::open(&link).unwrap(), plugin);
    plugin.client(&[]).unwrap_err();
    assert_eq!(number(plugin.path(), c"initializations"), 1);
    assert_eq!(number(plugin.path(), c"errors_alive"), 0);

    let (directory, plugin) = fake(&[("FAILS", 1)]);
    let error = plugin.unwrap_err().to_string();
    assert!(error.starts_with("PJRT_Plugin_Initialize: "), "{error}");
    let path = directory.path().join("fake.so");
    Plugin::open(&path).unwrap_err();
    assert_eq!(number(&path, c"initializations"), 2);
    assert_eq!(number(&path, c"errors_alive"), 0);
}

#[test]
fn extensions_are_listed_even_if_the_list_is_a_loop() {
    let (_directory, plugin) = fake(&[]);
    let plugin = plugin.unwrap();
    let extensions: Vec<_> = plugin.extensions().collect();
    assert_eq!(extensions, [Extension::Other(77), Extension::Ffi]);
    // The struct of this one is too short to hold a function.
    let handlers = pjrt_client::Handlers::execute(std::ptr::dangling());
    // SAFETY: the address is not called.
    let error = unsafe { plugin.register("target", "Host", handlers) }.unwrap_err();
    assert!(matches!(&error, Error::MissingExtension { extension: "FFI", .. }), "{error:?}");

    let (_directory, plugin) = fake(&[("LOOPS", 1)]);
    assert_eq!(plugin.unwrap().extensions().count(), 64);
}

/// What a function of the library returns.
fn number(library: &Path, function: &std::ffi::CStr) -> i32 {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(library.as_os_str().as_bytes()).unwrap();
    // SAFETY: the library is open, and the functions asked for take nothing and return an int.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        let symbol = libc::dlsym(handle, function.as_ptr());
        assert!(!symbol.is_null());
        std::mem::transmute::<*mut std::ffi::c_void, extern "C" fn() -> i32>(symbol)()
    }
}
