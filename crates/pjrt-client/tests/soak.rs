//! Running a program many times takes no more memory than running it a few times. In a process of
//! its own.

use pjrt_client::{CompileOptions, Platform, Plugin, Program};

const PROGRAM: &str = "
func.func @main(%x: tensor<256xf32>) -> (tensor<256xf32>, tensor<256xf32>) {
  %y = stablehlo.add %x, %x : tensor<256xf32>
  %z = stablehlo.multiply %x, %x : tensor<256xf32>
  return %y, %z : tensor<256xf32>, tensor<256xf32>
}";

/// Bytes of this process in memory.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
#[ignore = "needs the CPU plug-in: see the top of tests/cpu.rs"]
fn ten_thousand_runs_take_no_more_memory() {
    let client = Plugin::find(Platform::Cpu, None).unwrap().client(&[]).unwrap();
    let program = client.compile(&Program::mlir(PROGRAM), &CompileOptions::new()).unwrap();
    let input = vec![1.5_f32; 256];
    let run = || {
        let x = client.buffer(&input, &[256]).unwrap();
        let outputs = program.execute(&[&x]).unwrap();
        assert_eq!(outputs[0].to_vec::<f32>().unwrap()[255], 3.0);
        assert!(program.execute(&[]).is_err());
    };
    (0..2000).for_each(|_| run());
    let before = resident();
    (0..10_000).for_each(|_| run());
    let grown = resident().saturating_sub(before);
    // The results alone would be 20 MB.
    assert!(grown < 2 << 20, "{grown} bytes more after 10000 runs");
    println!("{grown} bytes more after 10000 runs");
}
