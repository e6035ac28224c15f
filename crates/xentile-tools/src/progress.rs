//! Where a long run stands, on a terminal: what it does, and about how long that still takes.

#[cfg(feature = "sweep")]
use std::io::IsTerminal;
#[cfg(feature = "sweep")]
use std::time::{Duration, Instant};

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

/// Where a run of cells stands, each of which is a process: a bar on a terminal, a line a cell elsewhere.
#[cfg(feature = "sweep")]
pub(crate) struct Cells {
    bar: Option<ProgressBar>,
    cells: usize,
    done: usize,
    start: Instant,
}

#[cfg(feature = "sweep")]
impl Cells {
    pub(crate) fn new(cells: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(cells as u64);
            let template = "{bar:30} {pos}/{len} cells, about {eta} left, {msg}";
            bar.set_style(
                ProgressStyle::with_template(template)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        Self { bar, cells, done: 0, start: Instant::now() }
    }

    pub(crate) fn begin(&self, name: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(name.to_owned());
        }
    }

    /// `outcome` is what was found, or why nothing was.
    pub(crate) fn end(&mut self, name: &str, outcome: String, has_failed: bool) {
        self.done += 1;
        let cell = format!("{name}: {outcome}");
        if let Some(bar) = &self.bar {
            if has_failed {
                bar.println(cell);
            }
            bar.inc(1);
        } else {
            let (done, cells) = (self.done, self.cells);
            let each = self.start.elapsed().as_secs_f64() / done as f64;
            let left = each * (cells - done) as f64;
            eprintln!("[{done}/{cells}] {cell}; about {left:.0} s left");
        }
    }
}

#[cfg(feature = "sweep")]
impl Drop for Cells {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
