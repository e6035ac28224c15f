//! Declarations: they are right in themselves, handlers are as they say, and so is what is made of them.
//!
//! `XENTILE_UPDATE=1` has the files written that are compared otherwise.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fmt::Write as _;
use std::path::Path;

use rand::RngExt;
use xentile_xla::declaration::{Declaration, Dims, Dtype, Given, Range, Stages};
use xentile_xla::{declarations, targets};
use xla_ffi::testing::Array;
use xla_ffi::{DType, abi};

#[path = "../../xentile-cpu/tests/common/mod.rs"]
mod common;
mod frames;

use frames::{Choice, Frame, Value, right};

/// The texts of an array's dimensions.
fn texts(dims: Dims) -> Vec<&'static str> {
    match dims {
        Dims::Fixed(text) => vec![text],
        Dims::By(_, cases) => cases.iter().map(|(_, text)| *text).collect(),
    }
}

fn of(target: &str) -> &'static Declaration {
    declarations().find(|one| one.name() == target).expect("every target is declared")
}

/// Those that compute, with their declarations and their platforms.
fn handlers() -> impl Iterator<Item = (&'static Declaration, &'static str, abi::Handler)> {
    let rows = targets().iter().filter(|row| row.stage() == abi::STAGE_EXECUTE);
    rows.map(|row| (of(row.target()), row.platform(), row.handler()))
}

/// Handlers for CPUs.
fn host() -> impl Iterator<Item = (&'static Declaration, abi::Handler)> {
    handlers().filter(|row| row.1 == "Host").map(|(declaration, _, handler)| (declaration, handler))
}

/// Right frames whose attributes fit each other.
fn samples(declaration: &'static Declaration, platform: &str, count: usize) -> Vec<Frame> {
    let mut rng = common::fresh_rng(declaration.name());
    let mut choose = |choice, count: usize| match choice {
        Choice::Free => rng.random_range(0..count),
        Choice::Value => 0,
    };
    (0..count).map(|_| right(declaration, platform, &mut choose)).collect()
}

#[test]
fn declared_names_are_unique_and_known() {
    let mut targets = HashSet::new();
    for declaration in declarations() {
        let target = declaration.name();
        assert!(targets.insert(target), "{target} is declared twice");
        let both = || declaration.operands.iter().chain(declaration.results);
        let mut attributes = HashSet::new();
        for attribute in declaration.attributes() {
            let name = attribute.name;
            assert!(attributes.insert(name), "{target} has the attribute {name} twice");
        }
        let mut before: HashSet<&str> = HashSet::new();
        let mut axes: HashSet<String> = HashSet::new();
        for array in both() {
            let name = array.name;
            if let Dims::By(attribute, _) = array.dims {
                assert!(attributes.contains(attribute), "{target}: {name} by {attribute}");
            }
            if let Dtype::Like(other) | Dtype::LikeOrF32(other) = array.dtype {
                assert!(before.contains(other), "{target}: {name} is like {other}");
            }
            match array.given {
                Given::Where(attribute) | Given::Unless(attribute) => {
                    assert!(attributes.contains(attribute), "{target}: {name}");
                }
                Given::With(operand) => assert!(before.contains(operand), "{target}: {name}"),
                Given::Always | Given::Optional => {}
            }
            let is_result = declaration.results.iter().any(|one| one.name == name);
            for text in texts(array.dims) {
                for axis in text.strip_prefix("*batch").unwrap_or(text).split_whitespace() {
                    let (extent, block) = axis.split_once('/').unwrap_or((axis, "1"));
                    let is_number = block.parse::<usize>().is_ok();
                    assert!(is_number || attributes.contains(block), "{target}: {name} has {axis}");
                    for part in extent.split('.').filter(|part| part.parse::<usize>().is_err()) {
                        let is_letter = part.len() == 1 && part.as_bytes()[0].is_ascii_uppercase();
                        assert!(is_letter, "{target}: {name} has {axis}");
                        // Bytes of scratch are the caller's to say.
                        let is_known = !axes.insert(part.into()) || part == "B";
                        assert!(
                            is_known || !is_result,
                            "{target}: {name} has {axis} of no operand"
                        );
                    }
                }
            }
            assert!(before.insert(name) || array.given == Given::Always, "{target}: {name} twice");
        }
        for alias in declaration.aliases {
            let find =
                |name| both().find(|array| array.name == name).expect("an array of the call");
            let [operand, result] = [alias.operand, alias.result].map(find);
            assert_eq!(operand.dims, result.dims, "{target}: {alias:?}");
        }
        let multiples = declaration.multiples.iter().map(|(a, b)| (a, b));
        for (a, b) in declaration.bounds.iter().map(|(a, _, b)| (a, b)).chain(multiples) {
            let is_number = b.parse::<usize>().is_ok();
            assert!(axes.contains(*a) && (is_number || axes.contains(*b)), "{target}: {a} and {b}");
        }
        assert!(declaration.sharded.iter().all(|name| axes.contains(*name)), "{target}");
        assert_ne!(declaration.host, Stages::InitializeAndExecute, "{target}");
    }
}

#[test]
fn the_table_has_what_is_declared() {
    let mut declared: Vec<_> = declarations()
        .flat_map(|one| one.symbols().into_iter().map(|symbol| (one.name(), symbol)))
        .filter(|(_, symbol)| cfg!(feature = "cuda") || symbol.1 == "Host")
        .map(|(target, (symbol, platform, stage))| (symbol, target, platform, stage))
        .collect();
    let mut rows: Vec<_> = targets()
        .iter()
        .map(|row| {
            let stage = if row.stage() == abi::STAGE_EXECUTE { "execute" } else { "initialize" };
            (row.symbol().to_owned(), row.target(), row.platform(), stage)
        })
        .collect();
    declared.sort_unstable();
    rows.sort_unstable();
    assert_eq!(rows, declared);
}

#[test]
fn right_frames_are_computed() {
    for (declaration, handler) in host() {
        for frame in samples(declaration, "Host", 12) {
            let shown = show(&frame);
            if let Err((_, message)) = frame.call().call(handler) {
                panic!("{}: {message}\n{shown}", declaration.name());
            }
        }
    }
}

fn show(frame: &Frame) -> String {
    let mut text = String::new();
    for (array, dims, dtype) in frame.arrays.iter().flatten() {
        let _ = write!(text, "{} {dtype}{dims:?} ", array.name);
    }
    for (attribute, value) in &frame.attributes {
        let _ = write!(text, "{}={value:?} ", attribute.name);
    }
    text
}

#[test]
fn handlers_name_arrays_in_order() {
    for (declaration, platform, handler) in handlers() {
        for frame in samples(declaration, platform, 2) {
            for (side, what) in ["argument", "result"].into_iter().enumerate() {
                for (index, (array, ..)) in frame.arrays[side].iter().enumerate() {
                    // Kernels for GPUs take few extents, which is said before what a call lacks.
                    let is_late = matches!(array.given, Given::Where(_) | Given::Unless(_))
                        && platform == "CUDA";
                    if is_late || matches!(array.given, Given::Optional | Given::With(_)) {
                        continue;
                    }
                    let mut call = frame.call();
                    let arrays = if side == 0 { &mut call.arguments } else { &mut call.results };
                    arrays.truncate(index);
                    call.link();
                    let message = call.refused(handler);
                    let right = match array.given {
                        Given::Where(_) | Given::Unless(_) => format!("`{}`", array.name),
                        _ => format!("{what} {index} (`{}`)", array.name),
                    };
                    assert!(message.contains(&right), "{}: {message}; {right}", declaration.name());
                }
            }
        }
    }
}

#[test]
fn other_dtypes_are_refused_by_name() {
    for (declaration, handler) in host() {
        // What a handler does not read it need not know the type of.
        let is_full = |frame: &Frame| frame.arrays.iter().flatten().all(|one| !one.1.contains(&0));
        for frame in samples(declaration, "Host", 4).into_iter().filter(is_full) {
            for side in 0..2 {
                for (index, (array, dims, dtype)) in frame.arrays[side].iter().enumerate() {
                    let others = match array.dtype {
                        Dtype::Like(_) => {
                            DType::ALL.iter().copied().filter(|one| one != dtype).collect()
                        }
                        Dtype::OneOf(all) => {
                            DType::ALL.iter().copied().filter(|one| !all.contains(one)).collect()
                        }
                        _ => vec![DType::C64],
                    };
                    for other in others {
                        let mut call = frame.call();
                        let arrays =
                            if side == 0 { &mut call.arguments } else { &mut call.results };
                        arrays[index] = Array::new(other, dims);
                        call.link();
                        let message = call.refused(handler);
                        let name = format!("`{}`", array.name);
                        assert!(message.contains(&name), "{}: {message}", declaration.name());
                    }
                }
            }
        }
    }
}

#[test]
fn arrays_that_disagree_are_refused() {
    for (declaration, handler) in host() {
        for frame in samples(declaration, "Host", 3) {
            for side in 0..2 {
                for (index, (array, dims, dtype)) in frame.arrays[side].iter().enumerate() {
                    for axis in tied_axes(declaration, &frame, array.name, dims.len()) {
                        let mut dims = dims.clone();
                        dims[axis] += 1;
                        let mut call = frame.call();
                        let arrays =
                            if side == 0 { &mut call.arguments } else { &mut call.results };
                        arrays[index] = Array::new(*dtype, &dims);
                        call.link();
                        let message = call.refused(handler);
                        assert!(message.contains("shape"), "{}: {message}", declaration.name());
                    }
                }
            }
        }
    }
}

/// The last axes of an array that other arrays have too.
fn tied_axes(declaration: &Declaration, frame: &Frame, name: &str, rank: usize) -> Vec<usize> {
    let letters = |array: &str| -> HashSet<char> {
        let all = declaration.operands.iter().chain(declaration.results);
        let found = all.filter(|one| one.name == array).flat_map(|one| texts(one.dims));
        found.flat_map(str::chars).filter(char::is_ascii_uppercase).collect()
    };
    let own = letters(name);
    let given = frame.arrays.iter().flatten().filter(|(array, ..)| array.name != name);
    let others: HashSet<char> = given.flat_map(|(array, ..)| letters(array.name)).collect();
    let is_tied = rank > 0 && own.is_subset(&others) && !own.is_empty() && !own.contains(&'B');
    if is_tied { vec![rank - 1] } else { vec![] }
}

#[test]
fn attributes_are_asked_for_as_declared() {
    for (declaration, handler) in host() {
        let target = declaration.name();
        for mut frame in samples(declaration, "Host", 3) {
            for index in 0..frame.attributes.len() {
                let (attribute, value) = frame.attributes.remove(index);
                let name = format!("attribute `{}`", attribute.name);
                let outcome = frame.call().call(handler);
                // What is there decides what an absent attribute may be.
                let decides = declaration.operands.iter().chain(declaration.results).any(|array| {
                    texts(array.dims)
                        .iter()
                        .any(|text| text.contains(&format!("/{}", attribute.name)))
                });
                match (attribute.absent, outcome) {
                    (Some(_), Ok(())) => {}
                    (Some(_), Err(_)) if decides => {}
                    (None, Err((_, message))) => assert!(
                        message.contains(&name) && message.contains("is missing"),
                        "{target}: {message}"
                    ),
                    (_, outcome) => panic!("{target} without {name}: {outcome:?}"),
                }
                for wrong in wrong_values(attribute.range) {
                    frame.attributes.insert(index, (attribute, wrong));
                    let message = frame.call().refused(handler);
                    assert!(
                        message.contains(attribute.name),
                        "{target}: {name} of {wrong:?}: {message}"
                    );
                    frame.attributes.remove(index);
                }
                frame.attributes.insert(index, (attribute, value));
            }
        }
    }
}

/// Values outside a range, and of other types.
fn wrong_values(range: Range) -> Vec<Value> {
    let floats = |all: &[f64]| all.iter().map(|value| Value::Float(*value)).collect::<Vec<_>>();
    let mut wrong = match range {
        Range::Bool => vec![Value::Integer(1)],
        Range::Integer => vec![Value::Float(1.0)],
        Range::Extent => vec![Value::Integer(0), Value::Integer(i64::MIN)],
        Range::OneOf(all) => vec![Value::Integer(all.iter().max().unwrap() + 1)],
        Range::Finite => floats(&[f64::NAN, f64::INFINITY, f64::MAX]),
        Range::Positive => floats(&[f64::NAN, f64::INFINITY, 0.0, -1.0]),
        Range::Between(from, to) => {
            let above = if to.is_finite() { to * 1.001 } else { to };
            floats(&[f64::NAN, from - 1.0, above])
        }
        Range::Word(_) => vec![Value::Word("no such word"), Value::Integer(1)],
    };
    if !matches!(range, Range::Word(_)) {
        wrong.push(Value::Word("no number"));
    }
    wrong
}

/// Compares a file with what it should be, or writes it.
fn compare(path: &Path, right: &str) {
    if std::env::var_os("XENTILE_UPDATE").is_some() {
        std::fs::write(path, right).unwrap();
        return;
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        found == right,
        "{} is not what declarations make: run `XENTILE_UPDATE=1 cargo test -p xentile-xla --test \
         declarations`",
        path.display()
    );
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

#[test]
fn the_text_is_json_and_the_package_carries_it() {
    // SAFETY: it is a text that ends with a null and lives as long as the library.
    let text = unsafe { CStr::from_ptr(xentile_xla::xentile_declarations()) }.to_str().unwrap();
    let parsed: serde_json::Value = serde_json::from_str(text).unwrap();
    let names: Vec<_> = declarations().map(Declaration::name).collect();
    let targets = parsed["targets"].as_array().unwrap();
    assert_eq!(targets.iter().map(|one| one["name"].as_str().unwrap()).collect::<Vec<_>>(), names);
    for (target, declaration) in targets.iter().zip(declarations()) {
        for (side, arrays) in [("operands", declaration.operands), ("results", declaration.results)]
        {
            let parsed = target[side].as_array().unwrap().iter().map(|one| one["name"].clone());
            assert!(parsed.eq(arrays.iter().map(|array| array.name)), "{}", declaration.name());
        }
        let attributes = target["attributes"].as_array().unwrap();
        assert_eq!(attributes.len(), declaration.attributes().count(), "{}", declaration.name());
    }
    compare(&root().join("pallas_bridge/src/pallas_bridge/_src/targets.json"), text);
}

/// The header's part that declarations make.
const BEGIN: &str = "/* From here on made by tests/declarations.rs. */\n";
const END: &str = "/* To here. */\n";

#[test]
fn the_header_declares_every_handler() {
    let mut text = String::new();
    for declaration in declarations() {
        let names = |side: &[xentile_xla::declaration::ArrayDecl]| {
            side.iter().map(|one| one.name).collect::<Vec<_>>().join(", ")
        };
        let _ = write!(text, "\n/* {}:", declaration.name());
        let words = format!(
            "{} ({}) -> ({}).",
            declaration.summary,
            names(declaration.operands),
            names(declaration.results)
        );
        let mut width = declaration.name().len() + 4;
        for word in words.split(' ') {
            if width + word.len() + 4 > 100 {
                text.push_str("\n *");
                width = 2;
            }
            let _ = write!(text, " {word}");
            width += word.len() + 1;
        }
        text.push_str(" */\n");
        for (symbol, ..) in declaration.symbols() {
            let (start, end) = (
                format!("struct XLA_FFI_Error* {symbol}("),
                "struct XLA_FFI_CallFrame* call_frame);",
            );
            let space = if start.len() + end.len() > 100 { "\n    " } else { "" };
            let _ = writeln!(text, "{start}{space}{end}");
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/xentile_xla.h");
    let header = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = header.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    compare(&path, &format!("{before}{BEGIN}{text}\n{END}{after}"));
}
