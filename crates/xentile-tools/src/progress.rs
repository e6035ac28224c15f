//! Where a long run stands, on a terminal: what it does, and about how long that still takes.

#[cfg(feature = "sweep")]
use std::io::IsTerminal;

#[cfg(feature = "sweep")]
use indicatif::{ProgressBar, ProgressStyle};

/// A bar on standard error while it lives; nothing where that is no terminal, or without the feature `sweep`.
pub(crate) struct Progress {
    #[cfg(feature = "sweep")]
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Of `total` equal pieces; 0 where nobody knows.
    pub(crate) fn new(doing: &str, total: usize) -> Self {
        #[cfg(feature = "sweep")]
        {
            let bar = std::io::stderr().is_terminal().then(|| {
                let template = match total {
                    0 => "{spinner} {msg}, {elapsed}",
                    _ => "{bar:30} {percent:>3} %, about {eta} left, {msg}",
                };
                let style = ProgressStyle::with_template(template);
                let bar = ProgressBar::new(total as u64);
                bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
                bar.set_message(doing.to_owned());
                bar.tick();
                bar
            });
            Self { bar }
        }
        #[cfg(not(feature = "sweep"))]
        {
            _ = (doing, total);
            Self {}
        }
    }

    /// So many pieces more are done.
    pub(crate) fn done(&self, pieces: usize) {
        #[cfg(feature = "sweep")]
        if let Some(bar) = &self.bar {
            bar.inc(pieces as u64);
        }
        #[cfg(not(feature = "sweep"))]
        {
            _ = pieces;
        }
    }
}

#[cfg(feature = "sweep")]
impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
