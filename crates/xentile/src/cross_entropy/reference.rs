//! The same mathematics written plainly in float64, one token at a time, so that no caller ever
//! holds `[T, V]` in float64.

use super::{CrossEntropy, Target};

/// What the forward pass says of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenForward {
    /// `per_token_loss`.
    pub loss: f64,
    /// `per_token_logps`.
    pub logps: f64,
    /// `logsumexp` of the (capped) row.
    pub lse: f64,
}

/// The cotangents of one token's outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenCotangents {
    /// `g`, of `per_token_loss`.
    pub loss: f64,
    /// `h`, of `per_token_logps`.
    pub logps: f64,
    /// `k`, of `lse`.
    pub lse: f64,
    /// `q`, of `entropy`.
    pub entropy: f64,
}

impl TokenCotangents {
    /// Whether nothing depends on the token.
    #[must_use]
    pub fn are_zero(&self) -> bool {
        *self == Self::default()
    }

    /// These with what cotangents of columns' log-probabilities, logits less lse, add to that of lse.
    #[must_use]
    pub fn with_columns(self, cotangents: &[f64]) -> Self {
        Self { lse: self.lse - cotangents.iter().sum::<f64>(), ..self }
    }
}

/// The forward pass of one token with `logits` `[V]`.
#[must_use]
pub fn forward(options: &CrossEntropy, logits: &[f64], label: i64) -> TokenForward {
    let z = |v: usize| options.cap(logits[v]);
    let columns = 0..logits.len();
    let max = columns.clone().map(z).fold(f64::NEG_INFINITY, f64::max);
    let lse = max + columns.clone().map(|v| (z(v) - max).exp()).sum::<f64>().ln();
    match options.target(label, logits.len()) {
        Target::Ignored => TokenForward { loss: 0.0, logps: 0.0, lse },
        Target::OutOfRange => TokenForward { loss: f64::NAN, logps: f64::NAN, lse },
        Target::Column(y) => {
            let e = options.label_smoothing;
            let mut loss = (1.0 - e) * (lse - z(y)) + options.z_loss * lse * lse;
            // Not added when e is 0: 0 x inf would be NaN in a row with a masked entry.
            if e != 0.0 {
                let mean = columns.map(z).sum::<f64>() / logits.len() as f64;
                loss += e * (lse - mean);
            }
            TokenForward { loss, logps: z(y) - lse, lse }
        }
    }
}

/// The outputs about one token's distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenDistribution {
    /// `entropy`, of the row's whoever its label is.
    pub entropy: f64,
    /// The largest logit, as given.
    pub highest: f64,
    /// Its first column; none where the row has no finite sum.
    pub argmax: Option<usize>,
}

/// The distribution of one token with `logits` `[V]`.
#[must_use]
pub fn distribution(options: &CrossEntropy, logits: &[f64]) -> TokenDistribution {
    // No column is ignored.
    let lse = forward(&CrossEntropy { ignore_index: -1, ..*options }, logits, 0).lse;
    if lse.is_nan() {
        return TokenDistribution { entropy: f64::NAN, highest: f64::NAN, argmax: None };
    }
    let terms = logits.iter().map(|&logit| {
        let log_p = options.cap(logit) - lse;
        let p = log_p.exp();
        if p == 0.0 { 0.0 } else { -p * log_p }
    });
    let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let argmax = logits.iter().position(|&logit| logit == highest);
    TokenDistribution { entropy: terms.sum(), highest, argmax }
}

/// Writes the gradient of one token to `dlogits` `[V]`, given `lse` from [`forward`].
///
/// # Panics
/// `logits` and `dlogits` differ in length.
pub fn gradient(
    options: &CrossEntropy,
    logits: &[f64],
    label: i64,
    lse: f64,
    cotangents: TokenCotangents,
    dlogits: &mut [f64],
) {
    assert_eq!(logits.len(), dlogits.len());
    if cotangents.are_zero() {
        return dlogits.fill(0.0);
    }
    let y = match options.target(label, logits.len()) {
        Target::Ignored => return dlogits.fill(0.0),
        Target::OutOfRange => return dlogits.fill(f64::NAN),
        Target::Column(_) if lse.is_nan() => return dlogits.fill(f64::NAN),
        Target::Column(y) => y,
    };
    let TokenCotangents { loss: g, logps: h, lse: k, entropy: q } = cotangents;
    let (e, w) = (options.label_smoothing, options.z_loss);
    for (v, (dz, &logit)) in dlogits.iter_mut().zip(logits).enumerate() {
        let z = options.cap(logit);
        if z == f64::NEG_INFINITY {
            *dz = 0.0;
            continue;
        }
        let p = (z - lse).exp();
        let hit = if v == y { 1.0 } else { 0.0 };
        let smooth = e / logits.len() as f64;
        *dz = g * ((1.0 + 2.0 * w * lse) * p - (1.0 - e) * hit - smooth) + h * (hit - p) + k * p;
        *dz *= options.slope(logit);
    }
    if q != 0.0 {
        add_gradient_of_entropy(
            options,
            logits,
            lse,
            distribution(options, logits).entropy,
            q,
            dlogits,
        );
    }
}

/// Adds to `dlogits` `[V]` the gradient for a cotangent of the entropy alone. Of columns that are a part of
/// a vocabulary, `lse` and `entropy` are the whole's.
pub fn add_gradient_of_entropy(
    options: &CrossEntropy,
    logits: &[f64],
    lse: f64,
    entropy: f64,
    cotangent: f64,
    dlogits: &mut [f64],
) {
    for (dz, &logit) in dlogits.iter_mut().zip(logits) {
        let log_p = options.cap(logit) - lse;
        let p = log_p.exp();
        if p != 0.0 {
            *dz -= cotangent * p * (log_p + entropy) * options.slope(logit);
        }
    }
}

/// The log-probability of a column of one token with `logits` `[V]`, given `lse` from [`forward`].
#[must_use]
pub fn column_logp(
    options: &CrossEntropy,
    logits: &[f64],
    label: i64,
    lse: f64,
    column: i64,
) -> f64 {
    if options.target(label, logits.len()) == Target::Ignored {
        return 0.0;
    }
    logit_of(logits, column).map_or(f64::NAN, |(_, logit)| options.cap(logit) - lse)
}

/// Adds to `dlogits` `[V]` the gradient for cotangents of the logits of `columns`, a cotangent each. With
/// that of lse, which [`TokenCotangents::with_columns`] has, it is that of their log-probabilities.
pub fn add_gradient_of_columns(
    options: &CrossEntropy,
    logits: &[f64],
    label: i64,
    columns: &[i64],
    cotangents: &[f64],
    dlogits: &mut [f64],
) {
    if options.target(label, logits.len()) == Target::Ignored {
        return;
    }
    for (&column, cotangent) in columns.iter().zip(cotangents) {
        // A masked entry has no gradient.
        if let Some((at, logit)) = logit_of(logits, column)
            && options.cap(logit) != f64::NEG_INFINITY
        {
            dlogits[at] += cotangent * options.slope(logit);
        }
    }
}

/// A column that there is, and its logit.
fn logit_of(logits: &[f64], column: i64) -> Option<(usize, f64)> {
    let at = usize::try_from(column).ok()?;
    logits.get(at).map(|&logit| (at, logit))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: [f64; 5] = [0.3, -1.2, 2.5, 0.0, 1.1];

    /// Every option at once, so that each term of the formula is exercised.
    const OPTIONS: CrossEntropy = CrossEntropy {
        ignore_index: -100,
        label_smoothing: 0.1,
        z_loss: 0.01,
        softcap: Some(3.0),
        temperature: 0.7,
    };

    /// The contract's gradient must be the derivative of its forward pass.
    #[test]
    fn gradient_is_the_derivative_of_forward() {
        let cotangents = TokenCotangents { loss: 0.7, logps: -0.4, lse: 0.25, entropy: -0.6 };
        // The label's column, and one that comes twice.
        let (columns, of_columns) = ([4, 1, 4], [0.8, -0.3, 0.45]);
        let objective = |row: &[f64]| {
            let out = forward(&OPTIONS, row, 1);
            let entropy = distribution(&OPTIONS, row).entropy;
            let logps = columns.map(|column| column_logp(&OPTIONS, row, 1, out.lse, column));
            cotangents.loss * out.loss
                + cotangents.logps * out.logps
                + cotangents.lse * out.lse
                + cotangents.entropy * entropy
                + logps.iter().zip(of_columns).map(|(logp, r)| r * logp).sum::<f64>()
        };
        let mut dlogits = [f64::NAN; 5];
        let all = cotangents.with_columns(&of_columns);
        gradient(&OPTIONS, &ROW, 1, forward(&OPTIONS, &ROW, 1).lse, all, &mut dlogits);
        add_gradient_of_columns(&OPTIONS, &ROW, 1, &columns, &of_columns, &mut dlogits);
        for v in 0..ROW.len() {
            let step = 1e-5;
            let (mut up, mut down) = (ROW, ROW);
            up[v] += step;
            down[v] -= step;
            let slope = (objective(&up) - objective(&down)) / (2.0 * step);
            assert!(
                (slope - dlogits[v]).abs() < 1e-9,
                "column {v}: {slope} against {}",
                dlogits[v]
            );
        }
    }

    /// Values worked out by hand: a uniform row over 4 columns.
    #[test]
    fn a_uniform_row() {
        let options = CrossEntropy { label_smoothing: 0.5, z_loss: 2.0, ..Default::default() };
        let out = forward(&options, &[1.0; 4], 3);
        let lse = 1.0 + 4f64.ln();
        assert!((out.lse - lse).abs() < 1e-15);
        assert!((out.logps + 4f64.ln()).abs() < 1e-15);
        assert!((out.loss - (4f64.ln() + 2.0 * lse * lse)).abs() < 1e-13);
    }

    /// Values worked out by hand: p = 1/2, 1/4, 1/4 at temperature 2, beside a masked entry.
    #[test]
    fn a_distribution() {
        let options = CrossEntropy { temperature: 2.0, ..Default::default() };
        let ln2 = 2f64.ln();
        let of = distribution(&options, &[-2.0 * ln2, 0.0, -2.0 * ln2, f64::NEG_INFINITY]);
        assert!((of.entropy - 1.5 * ln2).abs() < 1e-15);
        assert_eq!((of.highest, of.argmax), (0.0, Some(1)));
        // Of equals the first.
        assert_eq!(distribution(&options, &[0.0, 1.0, 1.0]).argmax, Some(1));
        assert_eq!(distribution(&options, &[0.0, f64::NAN]).argmax, None);
    }

    /// Columns that are not there, masked ones, and those of ignored tokens.
    #[test]
    fn special_columns_keep_the_contract() {
        let (options, row) = (CrossEntropy::default(), [0.0, f64::NEG_INFINITY, 0.0]);
        let lse = forward(&options, &row, 0).lse;
        let logp = |label, column| column_logp(&options, &row, label, lse, column);
        assert!((logp(0, 2) + 2f64.ln()).abs() < 1e-15);
        assert_eq!(logp(0, 1), f64::NEG_INFINITY);
        let added = |label, column| {
            let mut dlogits = [0.0; 3];
            add_gradient_of_columns(&options, &row, label, &[column], &[1.5], &mut dlogits);
            dlogits
        };
        assert_eq!(added(0, 2), [0.0, 0.0, 1.5]);
        for column in [-1, 3, i64::MIN, i64::MAX] {
            assert!(logp(0, column).is_nan());
            assert_eq!((logp(-100, column), added(0, column)), (0.0, [0.0; 3]));
        }
        assert_eq!((added(0, 1), added(-100, 2)), ([0.0; 3], [0.0; 3]));
    }

    #[test]
    fn special_tokens_keep_the_contract() {
        let options = CrossEntropy::default();
        let unit = TokenCotangents { loss: 1.0, logps: 1.0, lse: 1.0, entropy: 1.0 };
        let row = |row: &[f64], label: i64| {
            let out = forward(&options, row, label);
            let mut dlogits = vec![7.0; row.len()];
            gradient(&options, row, label, out.lse, unit, &mut dlogits);
            (out, dlogits)
        };
        let (ignored, dz) = row(&[1.0, f64::NAN], -100);
        assert_eq!((ignored.loss, ignored.logps), (0.0, 0.0));
        assert_eq!(dz, [0.0, 0.0]);
        for bad in [2, -1, i64::MIN, i64::MAX] {
            let (out, dz) = row(&[1.0, 2.0], bad);
            assert!(out.loss.is_nan() && out.logps.is_nan() && dz.iter().all(|dz| dz.is_nan()));
        }
        for poison in [f64::NAN, f64::INFINITY] {
            let (out, dz) = row(&[1.0, poison, 0.0], 0);
            assert!(out.loss.is_nan() && out.lse.is_nan() && dz.iter().all(|dz| dz.is_nan()));
        }
        let (empty, dz) = row(&[f64::NEG_INFINITY; 2], 0);
        assert!(empty.lse.is_nan() && dz.iter().all(|dz| dz.is_nan()));
        let mut dlogits = [7.0; 2];
        gradient(&options, &[f64::NAN; 2], 5, f64::NAN, TokenCotangents::default(), &mut dlogits);
        assert_eq!(dlogits, [0.0; 2]);
        let (masked, dz) = row(&[0.0, f64::NEG_INFINITY], 0);
        assert_eq!((masked.loss, masked.lse, dz[1]), (0.0, 0.0, 0.0));
    }
}
