//! Every operation there is.

use std::sync::LazyLock;

use crate::operation::Operation;

/// The operation of a config that names none.
const DEFAULT: &str = "cross_entropy";

/// The operations of each module with a file `operation.rs`; build.rs makes the list.
const LISTS: &[&[&dyn Operation]] = include!(concat!(env!("OUT_DIR"), "/operations.rs"));

/// Every operation, the default first.
#[must_use]
pub fn operations() -> &'static [&'static dyn Operation] {
    static ALL: LazyLock<Vec<&dyn Operation>> = LazyLock::new(|| {
        let mut all = LISTS.concat();
        all.sort_by_key(|operation| operation.name() != DEFAULT);
        all
    });
    &ALL
}

/// The operation called `name`.
#[must_use]
pub fn operation(name: &str) -> Option<&'static dyn Operation> {
    operations().iter().copied().find(|operation| operation.name() == name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::DType;
    use crate::operation::{Kind, Pass, Problem, Section, Synthetic, TileExtents, Value};

    fn problem(of: &dyn Operation, dtype: DType) -> Problem {
        let dims = of.dims().iter().zip([6, 37, 8]).map(|(dim, extent)| (dim.letter, extent));
        let options = of.options().iter().map(|option| (option.name, option.default));
        Problem {
            dims: dims.collect(),
            dtype,
            options: options.collect::<BTreeMap<_, _>>(),
            tile: TileExtents::default(),
            cotangent: 1.0,
        }
    }

    /// What a signature says is what is drawn.
    #[test]
    fn inputs_are_those_of_the_signature() {
        for of in operations() {
            for dtype in DType::ALL {
                let problem = problem(*of, dtype);
                of.validate(&problem).unwrap();
                let rows: Vec<u64> = (0..problem.dim("T") as u64).collect();
                for &pass in of.passes() {
                    let mut drawn = of.inputs(&problem, &Synthetic::default(), &rows).unwrap();
                    drawn.extend(of.given(&problem, pass, &Synthetic::default(), &rows));
                    let signature = of.signature(&problem, pass);
                    for spec in &signature.operands {
                        let extent = spec.extents(&problem).iter().product::<usize>();
                        let array = drawn.get(spec.name).unwrap_or_else(|| panic!("{}", spec.name));
                        assert_eq!(array.len(), extent, "{} of {}", spec.name, of.name());
                    }
                    assert_eq!(drawn.iter().count(), signature.operands.len(), "{}", of.name());
                }
            }
        }
    }

    #[test]
    fn a_dim_may_be_a_multiple_of_another() {
        let of = operation("activation").unwrap();
        let problem = problem(of, DType::F16);
        assert_eq!([problem.dim("F"), problem.dim("2F"), problem.dim("10F")], [37, 74, 370]);
        assert_eq!(problem.dim("no such"), 1);
        let mut parts = self::problem(operation("fp8_quantize").unwrap(), DType::F16);
        parts.options.insert("block_size", Value::Integer(16));
        assert_eq!(["D", "D/block_size", "T/block_size"].map(|dim| parts.dim(dim)), [37, 3, 1]);
        let x = &of.signature(&problem, Pass::Forward).operands[0];
        assert_eq!((x.extents(&problem), x.bytes(&problem)), (vec![6, 74], Some(2 * 6 * 74)));
    }

    #[test]
    fn names_are_unambiguous() {
        for of in operations() {
            assert!(operation(of.name()).is_some_and(|found| found.name() == of.name()));
            for option in of.options() {
                assert!(of.dim(option.name).is_none(), "{} is an option and a dim", option.name);
                if let (Kind::Word(words), Value::Word(default)) = (option.kind, option.default) {
                    assert!(words.contains(&default), "{}", option.name);
                }
                // One key has one meaning in a config, whatever its operation is.
                for other in operations().iter().filter_map(|other| other.option(option.name)) {
                    if option.section == Section::Top {
                        assert_eq!(other.kind, option.kind, "{}", option.name);
                    }
                }
            }
            assert!(of.passes().contains(&of.whole(&problem(*of, DType::F32))));
        }
        assert!(operation("no such").is_none());
    }
}
