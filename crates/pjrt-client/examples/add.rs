//! Opens the CPU plug-in, and lets it compile and run a program:
//!
//! ```sh
//! pip install xla-cpu-pjrt==0.0.1
//! cargo run -p pjrt-client --example add
//! ```

use pjrt_client::{CompileOptions, Platform, Plugin, Program};

const PROGRAM: &str = "
module @add {
  func.func @main(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
    %z = stablehlo.add %x, %y : tensor<4xf32>
    return %z : tensor<4xf32>
  }
}";

fn main() {
    if let Err(error) = run() {
        eprintln!("add: error: {error}");
        std::process::exit(1);
    }
}

fn run() -> pjrt_client::Result {
    let plugin = Plugin::find(Platform::Cpu, None)?;
    let client = plugin.client(&[])?;
    println!("{} speaks PJRT {}", plugin.path().display(), plugin.version());

    let add = client.compile(&Program::mlir(PROGRAM), &CompileOptions::new())?;
    let x = client.buffer(&[1.0_f32, 2.0, 3.0, 4.0], &[4])?;
    let y = client.buffer(&[10.0_f32, 20.0, 30.0, 40.0], &[4])?;
    let outputs = add.execute(&[&x, &y])?;
    println!(
        "{} on {:?}: {:?}",
        add.executable().name()?,
        x.device()?,
        outputs[0].to_vec::<f32>()?
    );
    Ok(())
}
