//! Causal depthwise convolution of one sequence for tools. Entries are judged by bounds of the roundings in f32.

use std::time::Instant;

use super::{CausalConv1d, Reference as Convolution};
use crate::operation::{
    Array, ArraySpec, Arrays, Bound, DimSpec, Distribution, ElementRule, Facts, Judged, Kind,
    Operation, OptionSpec, Pass, Problem, Reference, Role, Signature, Synthetic, TOKENS,
    Tolerances, Value, Visitor, WHOLE_RESULTS,
};
use crate::{DType, Element, Error, Result, by_dtype};

/// Causal depthwise convolution of a sequence.
pub const OPERATION: OfSequence = OfSequence;

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&OPERATION];

/// The operation.
#[derive(Clone, Copy, Debug)]
pub struct OfSequence;

const DIMS: [DimSpec; 2] = [
    TOKENS,
    DimSpec {
        letter: "C",
        key: "channels",
        index: "channel",
        about: "channels, each with a filter of its own",
        default: None,
        like: None,
        in_shape: false,
    },
];

const OPTIONS: [OptionSpec; 4] = [
    OptionSpec::new("width", Kind::Count, Value::Integer(4), "from 2 to 4", "tokens per filter"),
    OptionSpec::new(
        "silu",
        Kind::Bool,
        Value::Bool(true),
        "true or false",
        "applies SiLU to the sums",
    ),
    OptionSpec::new(
        "bias",
        Kind::Bool,
        Value::Bool(false),
        "true or false",
        "adds a bias of the weight's dtype",
    )
    .on_top(),
    OptionSpec::new(
        "weight_dtype",
        Kind::Word(&["f32", "bf16", "f16"]),
        Value::Absent,
        "f32, bf16 or f16",
        "dtype of the weight; by default that of rows",
    )
    .on_top(),
];

/// Seeds of the weight, the bias and the cotangent.
const SEEDS: [u64; 3] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// A rounding of f32.
const U: f64 = f32::EPSILON as f64 / 2.0;

/// Roundings of a sigmoid in f32, besides those of its argument.
const SIGMOID_ROUNDINGS: f64 = 12.0;

/// The loss of a few products that fall below f32's normal range.
const FLUSHED: f64 = 8.0 * f32::MIN_POSITIVE as f64;

fn weight_dtype(problem: &Problem) -> DType {
    problem.word("weight_dtype").parse().unwrap_or(problem.dtype)
}

/// The options and the shape: one sequence of all tokens.
#[must_use]
pub fn convolution(problem: &Problem) -> CausalConv1d {
    CausalConv1d {
        width: problem.dim("width"),
        silu: problem.flag("silu"),
        batch: 1,
        tokens: problem.dim("T"),
        channels: problem.dim("C"),
    }
}

/// Filters or biases `[C, columns]` of the weight's dtype, with a deviation of 1/2.
fn draw_channels(problem: &Problem, from: &Synthetic, columns: usize) -> Array<'static> {
    let from = Synthetic { distribution: Distribution::Normal, std: Some(0.5), ..from.clone() };
    let mut values = vec![0_f32; problem.dim("C") * columns];
    from.fill(&[0], values.len(), &mut values);
    by_dtype!(weight_dtype(problem), W => {
        Array::of(values.into_iter().map(W::from_f32).collect::<Vec<W>>())
    })
}

impl Operation for OfSequence {
    fn facts(&self) -> &'static Facts {
        const FACTS: Facts = Facts {
            name: "causal_conv1d",
            about: "causal depthwise convolution of a sequence, and SiLU",
            dims: &DIMS,
            options: &OPTIONS,
            tolerances: &[WHOLE_RESULTS],
            distributions: &[Distribution::Normal, Distribution::Uniform, Distribution::Offset],
            ..Facts::BASE
        };
        &FACTS
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        convolution(problem).validate().map_err(|error| Error::Invalid(error.to_string()))
    }

    fn meant(&self, problem: &Problem, option: &str) -> Value {
        match option {
            "weight_dtype" => Value::Word(weight_dtype(problem).name()),
            _ => problem.option(option),
        }
    }

    fn signature(&self, problem: &Problem, pass: Pass) -> Signature {
        let weight = match problem.option("weight_dtype") {
            Value::Absent => ElementRule::Compute,
            _ => ElementRule::Is(weight_dtype(problem)),
        };
        let has_bias = problem.flag("bias");
        let input = Role::Input { differentiable: true };
        let rows = |name, role| ArraySpec::new(name, &["T", "C"], ElementRule::Compute, role);
        let mut operands =
            vec![rows("x", input), ArraySpec::new("weight", &["C", "width"], weight, input)];
        if has_bias {
            operands.push(ArraySpec::new("bias", &["C"], weight, input));
        }
        let mut results = Vec::new();
        if pass != Pass::Backward {
            results.push(rows("y", Role::Output));
        }
        if pass.has_gradients() {
            operands.push(rows("dy", Role::Cotangent("y")));
            results.push(rows("dx", Role::Gradient("x")));
            let role = Role::Gradient("weight");
            results.push(ArraySpec::new("dweight", &["C", "width"], weight, role));
            if has_bias {
                results.push(ArraySpec::new("dbias", &["C"], weight, Role::Gradient("bias")));
            }
        }
        Signature { operands, results }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        from.check_unlabelled(self, "rows")?;
        let [weight, bias, _] = SEEDS.map(|seed| from.apart(seed));
        let mut inputs = Arrays::default();
        inputs.insert("x", from.draw(problem.dtype, rows, problem.dim("C")));
        inputs.insert("weight", draw_channels(problem, &weight, problem.dim("width")));
        if problem.flag("bias") {
            inputs.insert("bias", draw_channels(problem, &bias, 1));
        }
        Ok(inputs)
    }

    /// A standard normal cotangent.
    fn given(
        &self,
        problem: &Problem,
        pass: Pass,
        from: &Synthetic,
        rows: &[u64],
    ) -> Arrays<'static> {
        let mut given = Arrays::default();
        if pass.has_gradients() {
            let from = from.unit().apart(SEEDS[2]);
            given.insert("dy", from.draw(problem.dtype, rows, problem.dim("C")));
        }
        given
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        let columns = |name: &str| {
            by_dtype!(weight_dtype(problem), W => {
                inputs.slice::<W>(name).map(|all| all.iter().map(|x| x.to_f64()).collect())
            })
        };
        Ok(by_dtype!(problem.dtype, E => Box::new(ConvReference {
            dtype: problem.dtype,
            weight_dtype: weight_dtype(problem),
            conv: convolution(problem),
            x: inputs.expect::<E>("x").iter().map(|x| x.to_f64()).collect(),
            weight: columns("weight").unwrap_or_default(),
            bias: columns("bias"),
            tolerances,
        })))
    }

    /// Some twelve arrays `[T, C]` in float64.
    fn reference_bytes(&self, problem: &Problem, _: usize) -> Option<u64> {
        let entries = (problem.dim("T") as u64).checked_mul(problem.dim("C") as u64)?;
        entries.checked_mul(12 * size_of::<f64>() as u64)
    }

    fn shape(&self, problem: &Problem, _: Option<[usize; 2]>) -> String {
        format!("[{}, {}]", problem.dim("T"), problem.dim("C"))
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let shape = self.shape(problem, None);
        ("sequence", format!("{shape} {}, width {}", problem.dtype, problem.dim("width")))
    }
}

/// The reference, and bounds from sums of the magnitudes of what is added.
struct ConvReference {
    dtype: DType,
    weight_dtype: DType,
    conv: CausalConv1d,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
    tolerances: Tolerances,
}

/// A sum of squares.
fn squares(all: &[f64]) -> f64 {
    all.iter().map(|x| x * x).sum()
}

impl ConvReference {
    fn of<'a>(
        conv: CausalConv1d,
        [x, weight]: [&'a [f64]; 2],
        bias: Option<&'a [f64]>,
    ) -> Convolution<'a> {
        Convolution { conv, x, weight, bias, state: None, segments: None }
    }

    fn convolution(&self) -> Convolution<'_> {
        Self::of(self.conv, [&self.x, &self.weight], self.bias.as_deref())
    }

    /// Calls `body` with the sums without SiLU, and with those of magnitudes.
    fn with_sums<R>(&self, body: impl FnOnce(&Convolution<'_>, &Convolution<'_>) -> R) -> R {
        let linear = CausalConv1d { silu: false, ..self.conv };
        let magnitude = |all: &[f64]| all.iter().map(|x| x.abs()).collect::<Vec<_>>();
        let [x, weight] = [&self.x, &self.weight].map(|all| magnitude(all));
        let bias = self.bias.as_deref().map(magnitude);
        body(
            &Self::of(linear, [&self.x, &self.weight], self.bias.as_deref()),
            &Self::of(linear, [&x, &weight], bias.as_deref()),
        )
    }

    /// Roundings of a sum over the filter.
    fn roundings(&self) -> f64 {
        self.conv.width as f64 + 1.0
    }

    fn hand_over(
        &self,
        [array, name]: [&'static str; 2],
        prefix: &str,
        dtype: DType,
        [expected, bound]: [&[f64]; 2],
        visitor: &mut dyn Visitor,
    ) {
        let relative = self.tolerances.bound_whole(dtype, [squares(bound), squares(expected)]);
        let judged = Judged::WithinRounding { relative };
        visitor.result(array, &format!("{prefix}{name}"), judged, &|rows| {
            rows.row(0, expected, Bound::Each(bound));
        });
    }
}

impl Reference for ConvReference {
    /// Rows are cheap to recompute: nothing is saved.
    fn forward(&mut self) {}

    fn outputs(&self, visitor: &mut dyn Visitor) {
        let y = self.convolution().forward();
        let [z, sizes] = self.with_sums(|sums, sizes| [sums.forward(), sizes.forward()]);
        let entries = y.iter().zip(&z).zip(&sizes);
        // The slope of SiLU is at most 1.1.
        let bound: Vec<f64> = entries
            .map(|((y, z), size)| {
                let of_sum = self.roundings() * U * size;
                let of_silu = (SIGMOID_ROUNDINGS + z.abs()) * U * y.abs();
                FLUSHED + if self.conv.silu { 1.1 * of_sum + of_silu } else { of_sum }
            })
            .collect();
        self.hand_over(["y", "y"], "fwd/", self.dtype, [&y, &bound], visitor);
    }

    fn gradients(&self, _: Pass, given: &Arrays<'_>, prefix: &str, visitor: &mut dyn Visitor) {
        let began = Instant::now();
        let dy: Vec<f64> = by_dtype!(self.dtype, E => {
            given.expect::<E>("dy").iter().map(|dy| dy.to_f64()).collect()
        });
        let expected = self.convolution().backward(&dy);
        // |g| and its error, of g = dy times the slope of SiLU, whose own slope is at most 1/2.
        let bounds = self.with_sums(|sums, sizes| {
            let mut errors = dy.clone();
            let mut magnitudes = dy;
            let of_sums = sums.forward().into_iter().zip(sizes.forward());
            let entries = errors.iter_mut().zip(&mut magnitudes).zip(of_sums);
            for ((error, magnitude), (z, size)) in entries {
                let dy = error.abs();
                let (mut slope, mut of_slope) = (1.0, 0.0);
                if self.conv.silu {
                    let sigmoid = 1.0 / (1.0 + (-z).exp());
                    slope = sigmoid * (1.0 + z * (1.0 - sigmoid));
                    let of_sigmoid = sigmoid * (SIGMOID_ROUNDINGS + z.abs()) * (1.0 + z.abs());
                    of_slope = 0.5 * self.roundings() * U * size + U * of_sigmoid;
                }
                *magnitude = dy * slope.abs();
                *error = dy * of_slope + U * *magnitude;
            }
            [sizes.backward(&errors), sizes.backward(&magnitudes)]
        });
        let [errors, sizes] = bounds;
        let tokens = self.conv.tokens as f64;
        let bound = |errors: &[f64], sizes: &[f64], count: f64| -> Vec<f64> {
            let both = errors.iter().zip(sizes);
            both.map(|(error, size)| FLUSHED * count + error + count * U * size).collect()
        };
        let of_x = bound(&errors.x, &sizes.x, self.roundings());
        self.hand_over(["dx", "dx"], prefix, self.dtype, [&expected.x, &of_x], visitor);
        let of_weight = bound(&errors.weight, &sizes.weight, tokens + 2.0);
        let arrays = [&expected.weight[..], &of_weight];
        self.hand_over(["dweight", "dweight"], prefix, self.weight_dtype, arrays, visitor);
        if self.bias.is_some() {
            let of_bias = bound(&errors.bias, &sizes.bias, tokens + 2.0);
            let arrays = [&expected.bias[..], &of_bias];
            self.hand_over(["dbias", "dbias"], prefix, self.weight_dtype, arrays, visitor);
        }
        visitor.seconds("ref_grad_s", began.elapsed().as_secs_f64());
    }
}
