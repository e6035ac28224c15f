//! Registering handlers with the plug-in for NVIDIA GPUs, for which none need be present. Where there
//! is no plug-in, this fails:
//!
//! ```sh
//! pip install --no-deps jax-cuda13-pjrt
//! export XENTILE_PJRT_CUDA=.../site-packages/jax_plugins/xla_cuda13/xla_cuda_plugin.so
//! cargo test -p pjrt-client --test cuda_handlers -- --include-ignored
//! ```

use pjrt_client::{Error, Extension, Handlers, Platform, Plugin};

mod handlers {
    use xla_ffi::{BufferMut, OnDevice, Stage};

    fn nothing(_y: OnDevice<BufferMut<f32>>) {}

    fn ready() {}

    xla_ffi::handler! {
        /// The call.
        pub fn pjrt_client_test_cuda = nothing(y);
        /// Before the program is built.
        pub fn pjrt_client_test_cuda_instantiate = ready(), stage = Stage::Instantiate;
    }
}

#[test]
#[ignore = "needs jax-cuda13-pjrt: see the top of this file"]
fn cuda_handlers_are_registered_for_every_stage() {
    let plugin = Plugin::find(Platform::Cuda, None).unwrap_or_else(|error| panic!("{error}"));
    for extension in [Extension::Ffi, Extension::GpuCustomCall] {
        assert!(plugin.extensions().any(|found| found == extension), "{extension:?}");
    }
    let call = Handlers::execute(handlers::pjrt_client_test_cuda as *const _);
    let instantiate = handlers::pjrt_client_test_cuda_instantiate as *const _;
    let stages = Handlers { instantiate, ..call };
    // SAFETY: both are handlers, which stay in this process.
    unsafe {
        plugin.register("pjrt_client_test_call", "CUDA", call).unwrap();
        plugin.register("pjrt_client_test_stages", "CUDA", stages).unwrap();
        plugin.register("pjrt_client_test_stages", "CUDA", stages).unwrap();
        let error = plugin.register("pjrt_client_test_stages", "CUDA", call).unwrap_err();
        assert!(matches!(error, Error::Registered { .. }), "{error}");
    }
}
