//! The dense program of the backend `cpu`: cross-entropy, written plainly. The forward pass keeps the
//! probability of every column in f32; the backward pass reads them. Rows are spread over the same
//! threads as the kernel's; nothing is tiled, and `exp` is the standard library's.

use xentile::Element;
use xentile::cross_entropy::reference::{TokenCotangents, TokenForward};
use xentile::cross_entropy::{CrossEntropy, Target};

use crate::Parallel;
use crate::operation::for_each;

/// Logits `[T, V]` and labels `[T]`.
pub(crate) struct Dense<'a, E> {
    pub(crate) options: CrossEntropy,
    pub(crate) vocab: usize,
    pub(crate) logits: &'a [E],
    pub(crate) labels: &'a [i64],
    pub(crate) pool: &'a dyn Parallel,
}

impl<E: Element> Dense<'_, E> {
    /// Fills `probabilities` `[T, V]`.
    pub(crate) fn forward(&self, probabilities: &mut [f32]) -> Vec<TokenForward> {
        let nothing = TokenForward { loss: 0.0, logps: 0.0, lse: 0.0 };
        let mut tokens = vec![nothing; self.labels.len()];
        let logits = self.logits.chunks_exact(self.vocab);
        let rows = logits.zip(probabilities.chunks_exact_mut(self.vocab)).zip(&mut tokens);
        for_each(self.pool, rows, |token, ((logits, probabilities), out)| {
            *out = self.forward_row(logits, self.labels[token], probabilities);
        });
        tokens
    }

    fn forward_row(&self, logits: &[E], label: i64, probabilities: &mut [f32]) -> TokenForward {
        let z = |v: usize| self.capped(logits[v]);
        let columns = 0..logits.len();
        let max = columns.clone().map(z).fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for (v, p) in probabilities.iter_mut().enumerate() {
            *p = (z(v) - max).exp();
            sum += f64::from(*p);
        }
        let scale = (1.0 / sum) as f32;
        probabilities.iter_mut().for_each(|p| *p *= scale);
        let lse = f64::from(max) + sum.ln();
        let (loss, logps) = match self.options.target(label, logits.len()) {
            Target::Ignored => (0.0, 0.0),
            Target::OutOfRange => (f64::NAN, f64::NAN),
            Target::Column(y) => {
                let (e, w) = (self.options.label_smoothing, self.options.z_loss);
                let logps = f64::from(z(y)) - lse;
                let mut loss = (1.0 - e) * -logps + w * lse * lse;
                if e != 0.0 {
                    let mean = columns.map(|v| f64::from(z(v))).sum::<f64>() / logits.len() as f64;
                    loss += e * (lse - mean);
                }
                (loss, logps)
            }
        };
        TokenForward { loss, logps, lse }
    }

    /// Writes the gradient for `cotangents` `[T]` to `dlogits`.
    pub(crate) fn backward(
        &self,
        probabilities: &[f32],
        forward: &[TokenForward],
        cotangents: &[TokenCotangents],
        dlogits: &mut [E],
    ) {
        let probabilities = probabilities.chunks_exact(self.vocab);
        let rows = dlogits.chunks_exact_mut(self.vocab).zip(probabilities);
        for_each(self.pool, rows, |token, (dlogits, probabilities)| {
            let (label, lse) = (self.labels[token], forward[token].lse as f32);
            let label = match self.options.target(label, self.vocab) {
                Target::Column(label) => label,
                Target::Ignored => return dlogits.fill(E::from_f32(0.0)),
                Target::OutOfRange => return dlogits.fill(E::from_f32(f32::NAN)),
            };
            let (e, w) = (self.options.label_smoothing as f32, self.options.z_loss as f32);
            let TokenCotangents { loss, logps, lse: of_lse, .. } = cotangents[token];
            let [g, h, k] = [loss, logps, of_lse].map(|cotangent| cotangent as f32);
            let slope = g * (1.0 + 2.0 * w * lse) - h + k;
            let constant = g * e / self.vocab as f32;
            let row = token * self.vocab;
            for (v, (dz, &p)) in dlogits.iter_mut().zip(probabilities).enumerate() {
                let hit = if v == label { g * (1.0 - e) - h } else { 0.0 };
                let mut gradient = slope * p - constant - hit;
                let temperature = self.options.temperature as f32;
                if let Some(cap) = self.options.softcap {
                    let z = self.capped(self.logits[row + v]) * temperature;
                    gradient *= 1.0 - (z / cap as f32).powi(2);
                }
                gradient /= temperature;
                *dz = E::from_f32(gradient);
            }
        });
    }

    fn capped(&self, logit: E) -> f32 {
        let z = logit.to_f32();
        let z = self.options.softcap.map_or(z, |cap| cap as f32 * (z / cap as f32).tanh());
        z / self.options.temperature as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Threads;
    use xentile::cross_entropy::reference;
    use xentile::operation::Synthetic;

    #[test]
    fn the_dense_program_agrees_with_the_float64_reference() {
        let (vocab, rows) = (257, [0, 1, 2, 3, 4]);
        let synthetic = Synthetic { ignored: 0.3, ..Synthetic::default() };
        let mut logits = vec![0.0_f32; rows.len() * vocab];
        synthetic.fill_logits(&rows, vocab, &mut logits);
        let labels = synthetic.labels(&rows, vocab, -100);
        let [g, h, k] = synthetic.cotangents(&rows);
        let cotangents: Vec<_> = (0..rows.len())
            .map(|token| TokenCotangents {
                loss: g[token].into(),
                logps: h[token].into(),
                lse: k[token].into(),
                ..TokenCotangents::default()
            })
            .collect();
        let plain = CrossEntropy::default();
        let all = CrossEntropy {
            label_smoothing: 0.1,
            z_loss: 1e-3,
            softcap: Some(5.0),
            temperature: 0.7,
            ..plain
        };
        let pool = Threads::new(2).unwrap();
        for options in [plain, all] {
            let dense = Dense { options, vocab, logits: &logits, labels: &labels, pool: &pool };
            let mut probabilities = vec![f32::NAN; logits.len()];
            let forward = dense.forward(&mut probabilities);
            let mut dlogits = vec![f32::NAN; logits.len()];
            dense.backward(&probabilities, &forward, &cotangents, &mut dlogits);
            for token in 0..rows.len() {
                let columns = token * vocab..(token + 1) * vocab;
                let row: Vec<f64> = logits[columns.clone()].iter().map(|&z| z.into()).collect();
                let expected = reference::forward(&options, &row, labels[token]);
                assert!((forward[token].loss - expected.loss).abs() < 1e-5, "{options:?}");
                assert!((forward[token].logps - expected.logps).abs() < 1e-5);
                let mut expected_row = vec![f64::NAN; vocab];
                let lse = expected.lse;
                reference::gradient(
                    &options,
                    &row,
                    labels[token],
                    lse,
                    cotangents[token],
                    &mut expected_row,
                );
                for (got, expected) in dlogits[columns].iter().zip(expected_row) {
                    assert!((f64::from(*got) - expected).abs() < 1e-6, "{options:?}");
                }
            }
        }
    }
}
