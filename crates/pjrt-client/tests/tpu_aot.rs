//! Compiling for TPUs where there is none. Where there is no plug-in, this fails:
//!
//! ```sh
//! pip install libtpu==0.0.51
//! export XENTILE_PJRT_TPU=.../site-packages/libtpu/libtpu.so TPU_SKIP_MDS_QUERY=1
//! cargo test -p pjrt-client --test tpu_aot -- --include-ignored
//! ```

use pjrt_client::{CompileOptions, DType, Platform, Plugin, Program, Topology};

const PROGRAM: &str = "
module @matmul {
  func.func @main(%x: tensor<512x256xbf16>, %y: tensor<256x128xbf16>) -> tensor<512x128xf32> {
    %z = stablehlo.dot %x, %y
      : (tensor<512x256xbf16>, tensor<256x128xbf16>) -> tensor<512x128xf32>
    return %z : tensor<512x128xf32>
  }
}";

#[test]
#[ignore = "needs libtpu: see the top of this file"]
fn tpu_aot_compiles_for_each_generation() {
    let plugin = Plugin::find(Platform::Tpu, None).unwrap_or_else(|error| panic!("{error}"));
    for (name, devices, kind) in [
        ("v5e:2x2", 4, "TPU v5 lite"),
        ("v6e:2x2", 4, "TPU v6 lite"),
        ("v5p:2x2x1", 4, "TPU v5"),
        // With two devices a chip.
        ("tpu7x:2x2x1", 8, "TPU7x"),
    ] {
        let topology = Topology::new(plugin, name, &[]).unwrap();
        assert_eq!(topology.platform_name().unwrap(), "tpu");
        assert!(!topology.serialize().unwrap().is_empty());
        let descriptions = topology.devices().unwrap();
        assert_eq!(descriptions.len(), devices, "{name}");
        assert!(descriptions[0].kind().unwrap().starts_with(kind), "{descriptions:?}");
        assert!(descriptions[0].attributes().unwrap().contains_key("coords"));

        let executable = topology.compile(&Program::mlir(PROGRAM), &CompileOptions::new()).unwrap();
        drop(topology);
        assert_eq!(executable.name().unwrap(), "matmul");
        let outputs = executable.outputs().unwrap();
        assert_eq!((outputs[0].dtype, &outputs[0].dims[..]), (DType::F32, &[512, 128][..]));
        let stats = executable.memory_stats().unwrap();
        assert_eq!(stats.arguments, Some((512 * 256 + 256 * 128) * 2));
        assert_eq!(stats.outputs, Some(512 * 128 * 4));
        assert!(stats.generated_code.is_some() && stats.peak.is_some(), "{stats:?}");
        assert_eq!(executable.cost_analysis().unwrap()["flops"], 2.0 * 512.0 * 256.0 * 128.0);
        assert!(!executable.serialize().unwrap().is_empty());
    }
    let error = Topology::new(plugin, "v1:9x9", &[]).unwrap_err();
    assert!(error.code().is_some(), "{error}");
}
