//! Prints a program of cross-entropy:
//!
//! ```text
//! programs forward|forward_and_backward|mean|sum dense|kernel T V DTYPE [KEY=VALUE ...]
//! ```
//!
//! Keys are the options of the operation, `labels` (`i32`, `i64`), `time_block`, `block_size`, `weights` and
//! `cotangent` (`true`).

use std::collections::HashMap;

use xentile::cross_entropy::{CrossEntropy, Reduction};
use xentile::{DType, LogitsShape};
use xentile_programs::ElementType;
use xentile_programs::cross_entropy::{
    Implementation, Problem, Reduced, forward, forward_and_backward, value_and_grad,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [program, implementation, tokens, vocab, dtype, options @ ..] = arguments.as_slice() else {
        return Err("arguments must be a program, an implementation, T, V and a dtype".into());
    };
    let mut keys: HashMap<&str, &str> =
        options.iter().filter_map(|option| option.split_once('=')).collect();
    let mut take = |key| keys.remove(key);
    let problem = Problem {
        shape: LogitsShape::new(tokens.parse()?, vocab.parse()?)?,
        dtype: dtype.parse::<DType>()?,
        labels: if take("labels") == Some("i64") { ElementType::S64 } else { ElementType::S32 },
        options: CrossEntropy {
            ignore_index: take("ignore_index").map_or(Ok(-100), str::parse)?,
            label_smoothing: take("label_smoothing").map_or(Ok(0.0), str::parse)?,
            z_loss: take("z_loss").map_or(Ok(0.0), str::parse)?,
            softcap: take("softcap").map(str::parse).transpose()?,
            temperature: take("temperature").map_or(Ok(1.0), str::parse)?,
        },
        time_block: take("time_block").map(str::parse).transpose()?,
        block_size: take("block_size").map(str::parse).transpose()?,
    };
    let implementation =
        if implementation == "dense" { Implementation::Dense } else { Implementation::Kernel };
    let reduction = if program == "sum" { Reduction::Sum } else { Reduction::Mean };
    let (weights, cotangent) = (take("weights").is_some(), take("cotangent").is_some());
    if let Some(key) = keys.keys().next() {
        return Err(format!("unknown key {key}; the head of this file lists the keys").into());
    }
    let program = match program.as_str() {
        "forward" => forward(&problem, implementation),
        "forward_and_backward" => forward_and_backward(&problem, implementation),
        "mean" | "sum" => {
            value_and_grad(&problem, Reduced { reduction, weights, cotangent }, implementation)
        }
        other => {
            return Err(format!(
                "program is {other}; it must be forward, forward_and_backward, mean or sum"
            )
            .into());
        }
    };
    print!("{}", program.text);
    Ok(())
}
