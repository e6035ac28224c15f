//! Calls of the shared library itself, as those make them who load it with dlopen.
//!
//! `XENTILE_XLA_LIBRARY` names another library than that of this build, such as a wheel's.

use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;

use libloading::{Library, Symbol};
use rand::RngExt;
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, Pred, abi};

#[path = "../../xentile-cpu/tests/common/mod.rs"]
mod common;
mod folder;

fn library() -> PathBuf {
    let named = std::env::var_os("XENTILE_XLA_LIBRARY").map(PathBuf::from);
    named.unwrap_or_else(|| folder::library_folder().join(folder::library_name()))
}

#[test]
fn a_loaded_library_computes() {
    let path = library();
    // SAFETY: it runs no code as it is loaded.
    let library = unsafe { Library::new(&path) }.unwrap();
    // SAFETY: the header declares both.
    let (version, forward): (
        Symbol<'_, extern "C" fn() -> *const c_char>,
        Symbol<'_, abi::Handler>,
    ) = unsafe {
        (
            library.get(b"xentile_version").unwrap(),
            library.get(b"xentile_rms_norm_forward_host").unwrap(),
        )
    };
    // SAFETY: it is a text that ends with a null and lives as long as the library.
    let version = unsafe { CStr::from_ptr(version()) };
    assert_eq!(version.to_str(), Ok(env!("CARGO_PKG_VERSION")), "{}", path.display());

    let (rows, columns, eps) = (5, 67, 1e-5);
    let mut rng = common::fresh_rng("a call of the library");
    let mut floats =
        |count: usize| -> Vec<f32> { (0..count).map(|_| rng.random_range(-3.0..3.0)).collect() };
    let (x, weight) = (floats(rows * columns), floats(columns));
    let dims = [rows as i64, columns as i64];
    let mut call = Call::new(
        vec![Array::of(&dims, &x), Array::of(&dims[1..], &weight)],
        vec![Array::new(DType::F32, &dims), Array::new(DType::F32, &dims[..1])],
    )
    .scalar("eps", eps)
    .scalar("zero_centred", Pred::from(false));
    call.call(*forward).unwrap();

    let y = call.results[0].values::<f32>();
    for (x, y) in x.chunks(columns).zip(y.chunks(columns)) {
        let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
        let rstd = (squares / columns as f64 + eps).sqrt().recip();
        for ((&x, &weight), &y) in x.iter().zip(&weight).zip(y) {
            let right = f64::from(x) * rstd * f64::from(weight);
            assert!((f64::from(y) - right).abs() <= 1e-6 * right.abs(), "{y} is not {right}");
        }
    }
}

#[test]
fn plans_and_errors_are_answered() {
    // SAFETY: it runs no code as it is loaded.
    let library = unsafe { Library::new(library()) }.unwrap();
    type Plan = unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> usize;
    // SAFETY: the header declares it.
    let plan: Symbol<'_, Plan> = unsafe { library.get(b"xentile_plan") }.unwrap();
    let problem = "\"problem\": {\"tokens\": 64, \"hidden\": 8, \"vocab\": 100, \
        \"hidden_bytes\": 2, \"weight_bytes\": 2, \"bias\": false, \"reduced\": true, \
        \"vocab_is_last\": false, \"running\": false}";
    let ask = |rest: &str| -> String {
        let request = CString::new(format!("{{{problem}, {rest}}}")).unwrap();
        let mut answer = [0_u8; 4096];
        // SAFETY: a text that ends with a null, and memory of this size.
        let length = unsafe { plan(request.as_ptr(), answer.as_mut_ptr().cast(), answer.len()) };
        let text = CStr::from_bytes_until_nul(&answer).unwrap().to_str().unwrap();
        assert_eq!(text.len(), length);
        text.into()
    };
    let cuda_plan = ask("\"platform\": \"cuda\", \"limits\": {\"scratch_bytes\": 100000000}");
    let right = "{\"plan\":{\"tokens\":64,\"columns\":100,\"products\":3.0";
    assert!(cuda_plan.starts_with(right), "{cuda_plan}");
    let none = ask("\"platform\": \"cuda\", \"limits\": {\"scratch_bytes\": 0}");
    assert!(none.starts_with("{\"plan\":"), "{none}");
    for (rest, error) in [
        ("\"platform\": \"cuda\"", "`limits` or `call`"),
        ("\"platform\": \"tpu\"", "unknown variant"),
        ("\"platform\": \"cuda\", \"limits\": {}", "missing field"),
    ] {
        let text = ask(rest);
        assert!(text.starts_with("{\"error\":") && text.contains(error), "{text}");
    }
}
