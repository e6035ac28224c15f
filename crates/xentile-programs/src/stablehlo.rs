//! Writes StableHLO modules of one function, an operation a line.
//!
//! Types are inferred, so a program that this writes is well-typed; operands of the wrong shape are
//! defects of the caller and panic with both shapes.

use std::fmt::{self, Display, Write};

use xentile::DType;
use xentile::fp8::Format;

/// The type of an element of a tensor.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum ElementType {
    /// `f32`.
    F32,
    /// `bf16`.
    Bf16,
    /// `f16`.
    F16,
    /// `i32`.
    S32,
    /// `i64`.
    S64,
    /// `ui8`.
    U8,
    /// `i1`.
    Pred,
    /// `f8E4M3FN`.
    F8E4M3Fn,
    /// `f8E5M2`.
    F8E5M2,
}

impl ElementType {
    /// Every type.
    pub const ALL: [Self; 9] = [
        Self::F32,
        Self::Bf16,
        Self::F16,
        Self::S32,
        Self::S64,
        Self::U8,
        Self::Pred,
        Self::F8E4M3Fn,
        Self::F8E5M2,
    ];

    /// Bytes of an element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::S64 => 8,
            Self::F32 | Self::S32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::U8 | Self::Pred | Self::F8E4M3Fn | Self::F8E5M2 => 1,
        }
    }

    fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::Bf16 | Self::F16 | Self::F8E4M3Fn | Self::F8E5M2)
    }
}

impl Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::S32 => "i32",
            Self::S64 => "i64",
            Self::U8 => "ui8",
            Self::Pred => "i1",
            Self::F8E4M3Fn => "f8E4M3FN",
            Self::F8E5M2 => "f8E5M2",
        })
    }
}

impl From<DType> for ElementType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::Bf16 => Self::Bf16,
            DType::F16 => Self::F16,
        }
    }
}

impl From<Format> for ElementType {
    fn from(format: Format) -> Self {
        match format {
            Format::E4M3Fn => Self::F8E4M3Fn,
            Format::E5M2 => Self::F8E5M2,
        }
    }
}

/// The type of a tensor in row-major order.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct TensorType {
    /// The extent of every axis.
    pub dims: Vec<usize>,
    /// The type of the elements.
    pub element: ElementType,
}

impl TensorType {
    /// A tensor of `dims`.
    #[must_use]
    pub fn new(dims: &[usize], element: ElementType) -> Self {
        Self { dims: dims.to_vec(), element }
    }

    /// The number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Bytes of the tensor.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.elements() * self.element.size()
    }

    fn with(&self, element: ElementType) -> Self {
        Self { dims: self.dims.clone(), element }
    }
}

impl Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensor<")?;
        for extent in &self.dims {
            write!(f, "{extent}x")?;
        }
        write!(f, "{}>", self.element)
    }
}

/// A module, and what its function `main` takes and gives.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Program {
    /// The module's text.
    pub text: String,
    /// The arguments, in order.
    pub arguments: Vec<TensorType>,
    /// The results, in order.
    pub results: Vec<TensorType>,
}

impl Program {
    /// The program with one more argument, which is donated: its memory becomes that of the result
    /// `result`, of whose type it is, and the caller has no more use for it.
    #[must_use]
    pub fn donating(mut self, result: usize) -> Self {
        let ty = self.results[result].clone();
        let argument = format!(", %donated: {ty} {{tf.aliasing_output = {result} : i32}}) -> (");
        self.text = self.text.replacen(") -> (", &argument, 1);
        self.arguments.push(ty);
        self
    }

    /// The program with its matrices laid out row by row where they come and go. On TPUs XLA may
    /// choose another layout for what crosses the border of a program, and then copies all of it to
    /// the one that the program works on; a matrix in the middle of a program has no such border.
    /// Asked for once: a layout is no attribute to have twice.
    #[must_use]
    pub fn with_rows_in_order(self) -> Self {
        self.laid_out(true)
    }

    /// [`Self::with_rows_in_order`] for results alone: arguments are taken as they lie.
    #[must_use]
    pub fn with_results_in_order(self) -> Self {
        self.laid_out(false)
    }

    fn laid_out(mut self, arguments: bool) -> Self {
        const LAYOUT: &str = "mhlo.layout_mode = \"{1,0}\"";
        let is_main = |line: &&str| line.contains("func.func public @main(");
        let signature = self.text.lines().find(is_main).unwrap_or_default().to_owned();
        let (takes, gives) = signature.split_once(") -> (").unwrap_or_default();
        let lay_out = |side: &str, types: &[TensorType]| {
            let mut side = format!("{side})");
            let mut matrices: Vec<String> = Vec::new();
            for ty in types.iter().filter(|ty| ty.dims.len() == 2).map(ToString::to_string) {
                if !matrices.contains(&ty) {
                    side = side
                        .replace(&format!("{ty} {{"), &format!("{ty} {{{LAYOUT}, "))
                        .replace(&format!("{ty},"), &format!("{ty} {{{LAYOUT}}},"))
                        .replace(&format!("{ty})"), &format!("{ty} {{{LAYOUT}}})"));
                    matrices.push(ty);
                }
            }
            side.pop();
            side
        };
        let takes = if arguments { lay_out(takes, &self.arguments) } else { takes.to_owned() };
        let results = gives.strip_suffix(") {").unwrap_or(gives);
        let gives = lay_out(results, &self.results);
        self.text = self.text.replacen(&signature, &format!("{takes}) -> ({gives}) {{"), 1);
        self
    }
}

/// A value of the function being written.
#[derive(Clone, Debug)]
pub struct Value {
    name: String,
    ty: TensorType,
}

impl Value {
    /// Its type.
    #[must_use]
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }
}

impl Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// An attribute of a custom call, in the types that handlers read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Attribute {
    /// A truth value.
    Bool(bool),
    /// A 64-bit integer.
    S64(i64),
    /// A 64-bit float.
    F64(f64),
}

impl Display for Attribute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => write!(f, "{value}"),
            Self::S64(value) => write!(f, "{value} : i64"),
            // As bits: every number keeps all of its digits.
            Self::F64(value) => write!(f, "0x{:016X} : f64", value.to_bits()),
        }
    }
}

/// What compares as true.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Comparison {
    /// Equal.
    Equal,
    /// Less.
    Less,
    /// Greater or equal.
    GreaterOrEqual,
}

/// Writes one function.
#[derive(Debug)]
pub struct Builder {
    name: String,
    arguments: Vec<Value>,
    body: String,
    values: usize,
}

impl Builder {
    /// A module called `name` whose function takes `arguments`.
    #[must_use]
    pub fn new(name: &str, arguments: &[TensorType]) -> Self {
        let arguments = arguments.iter().enumerate();
        let arguments =
            arguments.map(|(index, ty)| Value { name: format!("%arg{index}"), ty: ty.clone() });
        Self { name: name.into(), arguments: arguments.collect(), body: String::new(), values: 0 }
    }

    /// The argument of that index.
    #[must_use]
    pub fn argument(&self, index: usize) -> Value {
        self.arguments[index].clone()
    }

    /// Writes `%n = text` and gives the value.
    fn line(&mut self, ty: TensorType, text: impl Display) -> Value {
        let name = format!("%{}", self.values);
        self.values += 1;
        writeln!(self.body, "    {name} = {text}").expect("a string takes any text");
        Value { name, ty }
    }

    /// A tensor of `ty` with `value` everywhere, rounded to its type.
    pub fn constant(&mut self, value: f64, ty: &TensorType) -> Value {
        let literal = match ty.element {
            // As bits, since decimals have no infinities.
            ElementType::F32 => format!("0x{:08X}", (value as f32).to_bits()),
            ElementType::Pred => (value != 0.0).to_string(),
            ElementType::S32 | ElementType::S64 | ElementType::U8 => format!("{}", value as i64),
            ElementType::Bf16 | ElementType::F16 | ElementType::F8E4M3Fn | ElementType::F8E5M2 => {
                panic!("constants are written in f32, not in {}", ty.element)
            }
        };
        self.line(ty.clone(), format_args!("stablehlo.constant dense<{literal}> : {ty}"))
    }

    /// An integer tensor of `ty` with `value` everywhere.
    pub fn integer(&mut self, value: i64, ty: &TensorType) -> Value {
        assert!(!ty.element.is_float(), "{ty} holds no integers");
        self.line(ty.clone(), format_args!("stablehlo.constant dense<{value}> : {ty}"))
    }

    /// `stablehlo.<op>` of one operand, with a result of its type.
    pub fn unary(&mut self, op: &str, x: &Value) -> Value {
        self.line(x.ty.clone(), format_args!("stablehlo.{op} {x} : {}", x.ty))
    }

    /// `stablehlo.<op>` of one operand, with a result of its shape in elements of another type.
    pub fn unary_to(&mut self, op: &str, x: &Value, element: ElementType) -> Value {
        let ty = x.ty.with(element);
        self.line(ty.clone(), format_args!("stablehlo.{op} {x} : ({}) -> {ty}", x.ty))
    }

    /// `stablehlo.<op>` of two operands of one type, which is that of the result.
    pub fn binary(&mut self, op: &str, a: &Value, b: &Value) -> Value {
        assert_eq!(a.ty, b.ty, "{op} of two types");
        self.line(a.ty.clone(), format_args!("stablehlo.{op} {a}, {b} : {}", a.ty))
    }

    /// `x` in elements of another type.
    pub fn convert(&mut self, x: &Value, element: ElementType) -> Value {
        if x.ty.element == element {
            return x.clone();
        }
        let ty = x.ty.with(element);
        self.line(ty.clone(), format_args!("stablehlo.convert {x} : ({}) -> {ty}", x.ty))
    }

    /// Whether `a` stands to `b` as `comparison` says, for each element.
    pub fn compare(&mut self, comparison: Comparison, a: &Value, b: &Value) -> Value {
        assert_eq!(a.ty, b.ty, "{comparison:?} of two types");
        let direction = match comparison {
            Comparison::Equal => "EQ",
            Comparison::Less => "LT",
            Comparison::GreaterOrEqual => "GE",
        };
        let kind = if a.ty.element.is_float() { "FLOAT" } else { "SIGNED" };
        let ty = a.ty.with(ElementType::Pred);
        let types = format!("({}, {}) -> {ty}", a.ty, b.ty);
        self.line(ty, format_args!("stablehlo.compare {direction}, {a}, {b}, {kind} : {types}"))
    }

    /// `a` where `condition` holds, elsewhere `b`.
    pub fn select(&mut self, condition: &Value, a: &Value, b: &Value) -> Value {
        assert_eq!(a.ty, b.ty, "select of two types");
        assert_eq!(condition.ty, a.ty.with(ElementType::Pred), "select by another shape");
        let types = format!("{}, {}", condition.ty, a.ty);
        self.line(a.ty.clone(), format_args!("stablehlo.select {condition}, {a}, {b} : {types}"))
    }

    /// `x` spread to `dims`; its axis n becomes axis `axes[n]`.
    pub fn broadcast(&mut self, x: &Value, axes: &[usize], dims: &[usize]) -> Value {
        assert_eq!(axes.len(), x.ty.dims.len(), "an axis for each of {}", x.ty);
        let ty = TensorType::new(dims, x.ty.element);
        let text = format!("stablehlo.broadcast_in_dim {x}, dims = {axes:?} : ({}) -> {ty}", x.ty);
        self.line(ty, text)
    }

    /// The numbers of the positions along `axis`.
    pub fn iota(&mut self, axis: usize, ty: &TensorType) -> Value {
        self.line(ty.clone(), format_args!("stablehlo.iota dim = {axis} : {ty}"))
    }

    /// `x` folded along `axis` by `op`, from the constant `start`.
    pub fn reduce(&mut self, op: &str, start: f64, x: &Value, axis: usize) -> Value {
        let scalar = TensorType::new(&[], x.ty.element);
        let start = self.constant(start, &scalar);
        let mut dims = x.ty.dims.clone();
        dims.remove(axis);
        let ty = TensorType::new(&dims, x.ty.element);
        let text = format!(
            "stablehlo.reduce({x} init: {start}) applies stablehlo.{op} across dimensions = \
             [{axis}] : ({}, {scalar}) -> {ty}",
            x.ty
        );
        self.line(ty, text)
    }

    /// A custom call of XLA's typed FFI.
    pub fn custom_call(
        &mut self,
        target: &str,
        operands: &[&Value],
        attributes: &[(&str, Attribute)],
        results: &[TensorType],
    ) -> Vec<Value> {
        let name = format!("%{}", self.values);
        self.values += 1;
        let list = |items: Vec<String>| items.join(", ");
        let names = list(operands.iter().map(ToString::to_string).collect());
        let config =
            list(attributes.iter().map(|(name, value)| format!("{name} = {value}")).collect());
        let layout = |ty: &TensorType| {
            let axes: Vec<_> = (0..ty.dims.len()).rev().collect();
            format!("dense<{axes:?}> : tensor<{}xindex>", axes.len())
        };
        let operand_layouts = list(operands.iter().map(|operand| layout(&operand.ty)).collect());
        let result_layouts = list(results.iter().map(layout).collect());
        let from = list(operands.iter().map(|operand| operand.ty.to_string()).collect());
        let to = list(results.iter().map(ToString::to_string).collect());
        let (count, to) = match results.len() {
            1 => (String::new(), to),
            n => (format!(":{n}"), format!("({to})")),
        };
        writeln!(
            self.body,
            "    {name}{count} = stablehlo.custom_call @{target}({names}) {{api_version = 4 : i32, \
             backend_config = {{{config}}}, operand_layouts = [{operand_layouts}], result_layouts = \
             [{result_layouts}]}} : ({from}) -> {to}"
        )
        .expect("a string takes any text");
        let name = |index: usize| {
            if results.len() == 1 { name.clone() } else { format!("{name}#{index}") }
        };
        let values = results.iter().enumerate();
        values.map(|(index, ty)| Value { name: name(index), ty: ty.clone() }).collect()
    }

    /// The module, whose function gives `results`.
    #[must_use]
    pub fn finish(self, results: &[&Value]) -> Program {
        let list = |items: Vec<String>| items.join(", ");
        let arguments =
            list(self.arguments.iter().map(|value| format!("{value}: {}", value.ty)).collect());
        let types = list(results.iter().map(|value| value.ty.to_string()).collect());
        let names = list(results.iter().map(ToString::to_string).collect());
        let text = format!(
            "module @{} {{\n  func.func public @main({arguments}) -> ({types}) {{\n{}    return \
             {names} : {types}\n  }}\n}}\n",
            self.name, self.body
        );
        Program {
            text,
            arguments: self.arguments.into_iter().map(|value| value.ty).collect(),
            results: results.iter().map(|value| value.ty.clone()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_laid_out_at_the_border() {
        let matrix = TensorType::new(&[2, 3], ElementType::F32);
        let row = TensorType::new(&[3], ElementType::F32);
        let mut b = Builder::new("twice", &[matrix.clone(), row.clone(), matrix]);
        let (x, row) = (b.argument(0), b.argument(1));
        let y = b.binary("add", &x, &x);
        let program = b.finish(&[&row, &y]);
        let body = |program: &Program| program.text.lines().skip(2).collect::<String>();
        let signature = |program: &Program| program.text.lines().nth(1).unwrap().trim().to_owned();
        let in_order = program.clone().donating(1).with_rows_in_order();
        assert_eq!(
            signature(&in_order),
            "func.func public @main(%arg0: tensor<2x3xf32> {mhlo.layout_mode = \"{1,0}\"}, \
             %arg1: tensor<3xf32>, %arg2: tensor<2x3xf32> {mhlo.layout_mode = \"{1,0}\"}, \
             %donated: tensor<2x3xf32> {mhlo.layout_mode = \"{1,0}\", tf.aliasing_output = 1 : \
             i32}) -> (tensor<3xf32>, tensor<2x3xf32> {mhlo.layout_mode = \"{1,0}\"}) {"
        );
        assert_eq!(body(&in_order), body(&program));
        let results = program.clone().with_results_in_order();
        assert_eq!(
            signature(&results),
            "func.func public @main(%arg0: tensor<2x3xf32>, %arg1: tensor<3xf32>, %arg2: \
             tensor<2x3xf32>) -> (tensor<3xf32>, tensor<2x3xf32> {mhlo.layout_mode = \"{1,0}\"}) {"
        );
    }
}
