//! All declarations as JSON:
//!
//! ```text
//! {"table_version": 3, "targets": [TARGET, ..]}
//! TARGET: {"name", "summary", "handlers": {"Host": ["execute"], "CUDA": ["initialize", "execute"]},
//!   "operands": [ARRAY, ..], "results": [ARRAY, ..], "attributes": [ATTRIBUTE, ..],
//!   "sharded": ["S", ..], "bounds": [["R", 2, "D"], ..], "maps_shared": true,
//!   "aliases": [{"operand": "x", "result": "y", "always": false}, ..]}
//! ARRAY: {"name", "dims": "*batch D" or {"by": ATTRIBUTE'S NAME, "cases": {VALUE: "*batch D", "*": ..}},
//!   "dtype": ["f32", ..] or {"like": ARRAY'S NAME} or {"like_or_f32": ARRAY'S NAME} or "bytes",
//!   "role": "input", "residual", "cotangent", "output", "gradient" or "scratch",
//!   "given": "always", "optional", {"where": ATTRIBUTE'S NAME}, {"unless": ATTRIBUTE'S NAME} or {"with": OPERAND'S NAME}}
//! ATTRIBUTE: {"name", "type": "bool", "s64", "f64" or "text",
//!   "range": null, [VALUE, ..] of words or integers, or {"at_least": 1}, {"finite": true},
//!   {"above": 0}, {"from": 0, "to": 1 or null},
//!   "absent": null where it must be there, else what its absence means, "cuda_only": false}
//! ```
//!
//! [`crate::declaration`] says how dimensions read.

use std::fmt::Write as _;

use crate::declaration::{Alias, ArrayDecl, AttributeDecl, Declaration, Dims, Dtype, Given, Range};
use crate::table::{TABLE_VERSION, declarations};

/// All declarations as JSON.
#[must_use]
pub fn declarations_json() -> String {
    let targets: Vec<_> = declarations().map(target).collect();
    format!("{{\"table_version\": {TABLE_VERSION}, \"targets\": [\n{}\n]}}\n", targets.join(",\n"))
}

fn target(declaration: &Declaration) -> String {
    let symbols = declaration.symbols();
    let stages = |platform: &str| {
        list(symbols.iter().filter(|symbol| symbol.1 == platform).map(|symbol| quoted(symbol.2)))
    };
    let mut text = format!(
        " {{\"name\": {}, \"summary\": {},\n  \"handlers\": {{\"Host\": {}, \"CUDA\": {}}}",
        quoted(declaration.name()),
        quoted(declaration.summary),
        stages("Host"),
        stages("CUDA"),
    );
    let mut add = |name: &str, lines: Vec<String>| {
        let lines: String = lines.join(",\n   ");
        let _ = write!(text, ",\n  \"{name}\": [\n   {lines}\n  ]");
    };
    add("operands", declaration.operands.iter().map(array).collect());
    add("results", declaration.results.iter().map(array).collect());
    add("attributes", declaration.attributes().map(attribute_json).collect());
    let bounds = declaration.bounds.iter();
    let bounds = bounds.map(|(a, n, b)| format!("[{}, {n}, {}]", quoted(a), quoted(b)));
    let aliases = declaration.aliases.iter().map(|Alias { operand, result, always }| {
        let [operand, result] = [operand, result].map(|name| quoted(name));
        format!("{{\"operand\": {operand}, \"result\": {result}, \"always\": {always}}}")
    });
    let _ = write!(
        text,
        ",\n  \"sharded\": {}, \"bounds\": {}, \"maps_shared\": {},\n  \"aliases\": {}}}",
        list(declaration.sharded.iter().map(|name| quoted(name))),
        list(bounds),
        declaration.maps_shared,
        list(aliases),
    );
    text
}

fn array(ArrayDecl { name, dims, dtype, role, given }: &ArrayDecl) -> String {
    let dims = match dims {
        Dims::Fixed(text) => quoted(text),
        Dims::By(attribute, cases) => {
            let cases =
                cases.iter().map(|(value, dims)| format!("{}: {}", quoted(value), quoted(dims)));
            let cases = cases.collect::<Vec<_>>().join(", ");
            format!("{{\"by\": {}, \"cases\": {{{cases}}}}}", quoted(attribute))
        }
    };
    let dtype = match dtype {
        Dtype::OneOf(all) => list(all.iter().map(|one| quoted(one.name()))),
        Dtype::Like(other) => one("like", other),
        Dtype::LikeOrF32(other) => one("like_or_f32", other),
        Dtype::Bytes => quoted("bytes"),
    };
    let given = match given {
        Given::Always => quoted("always"),
        Given::Optional => quoted("optional"),
        Given::Where(attribute) => one("where", attribute),
        Given::Unless(attribute) => one("unless", attribute),
        Given::With(operand) => one("with", operand),
    };
    let role = quoted(&format!("{role:?}").to_lowercase());
    format!(
        "{{\"name\": {}, \"dims\": {dims}, \"dtype\": {dtype}, \"role\": {role}, \"given\": {given}}}",
        quoted(name),
    )
}

fn attribute_json(AttributeDecl { name, range, absent, cuda_only }: &AttributeDecl) -> String {
    let (kind, range) = match range {
        Range::Bool => ("bool", "null".into()),
        Range::Integer => ("s64", "null".into()),
        Range::Extent => ("s64", "{\"at_least\": 1}".into()),
        Range::OneOf(all) => ("s64", list(all.iter().map(i64::to_string))),
        Range::Finite => ("f64", "{\"finite\": true}".into()),
        Range::Positive => ("f64", "{\"above\": 0}".into()),
        Range::Between(from, to) => {
            let to = if to.is_finite() { to.to_string() } else { "null".into() };
            ("f64", format!("{{\"from\": {from}, \"to\": {to}}}"))
        }
        Range::Word(all) => ("text", list(all.iter().map(|word| quoted(word)))),
    };
    let absent = absent.map_or("null".into(), quoted);
    format!(
        "{{\"name\": {}, \"type\": \"{kind}\", \"range\": {range}, \"absent\": {absent}, \
         \"cuda_only\": {cuda_only}}}",
        quoted(name),
    )
}

/// An object of one entry.
fn one(key: &str, value: &str) -> String {
    format!("{{\"{key}\": {}}}", quoted(value))
}

fn list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(", "))
}

/// A JSON string; declarations have no text with a quotation mark, a backslash or a control character.
fn quoted(text: &str) -> String {
    format!("\"{text}\"")
}
