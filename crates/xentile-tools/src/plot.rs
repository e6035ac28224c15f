//! Line plots, as SVG and PNG alike.

use std::fs::File;
use std::io::BufWriter;
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

/// Panels above one another over the same horizontal axis, which is logarithmic.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What is shown.
    pub title: String,
    /// Under what circumstances, in smaller type; a line each.
    pub subtitles: Vec<String>,
    /// The horizontal axis.
    pub x_label: String,
    /// A value of that axis as its mark says it.
    pub x_text: fn(usize) -> String,
    /// The title of the legend; no legend where it is empty.
    pub legend: String,
    /// Top to bottom; at least one.
    pub panels: Vec<Panel>,
}

/// One set of lines.
#[derive(Clone, Debug)]
pub struct Panel {
    /// The vertical axis, with its unit.
    pub y_label: String,
    /// The lines. A series of one place in every panel has the same colour in each.
    pub series: Vec<Series>,
    /// A value to hold the series against, and its name.
    pub level: Option<(f64, String)>,
    /// The point to look at.
    pub mark: Option<(usize, f64)>,
}

/// One line.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Left to right; no value is a gap.
    pub points: Vec<(usize, Option<f64>)>,
}

const WIDTH: u32 = 1200;
const PANEL_HEIGHT: u32 = 480;
const TITLE_HEIGHT: u32 = 64;
const SUBTITLE_HEIGHT: u32 = 28;
const LEGEND_WIDTH: u32 = 170;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(40, 40, 40);
const FAINT: RGBColor = RGBColor(225, 225, 225);
const LEVEL: RGBColor = RGBColor(190, 40, 40);

/// Dark to light in order, so that an ordered family of lines reads as one.
const ANCHORS: [(u8, u8, u8); 5] =
    [(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (220, 190, 30)];

/// Colour `index` of `count`.
fn colour(index: usize, count: usize) -> RGBColor {
    let place = index as f64 * (ANCHORS.len() - 1) as f64 / count.saturating_sub(1).max(1) as f64;
    let left = (place as usize).min(ANCHORS.len() - 2);
    let mix = |a: u8, b: u8| {
        (f64::from(a) + (f64::from(b) - f64::from(a)) * (place - left as f64)).round() as u8
    };
    let (a, b) = (ANCHORS[left], ANCHORS[left + 1]);
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

impl Figure {
    fn size(&self) -> (u32, u32) {
        let subtitles = SUBTITLE_HEIGHT * self.subtitles.len() as u32;
        (WIDTH, TITLE_HEIGHT + subtitles + PANEL_HEIGHT * self.panels.len() as u32)
    }

    /// The figure as SVG.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn svg(&self) -> Result<String> {
        let mut text = String::new();
        self.draw(SVGBackend::with_string(&mut text, self.size()))?;
        Ok(text)
    }

    /// Writes the figure to `path` as PNG.
    ///
    /// # Errors
    /// It cannot be drawn or written.
    pub fn write_png(&self, path: &Path) -> Result<()> {
        let (width, height) = self.size();
        let mut pixels = vec![0; 3 * width as usize * height as usize];
        self.draw(BitMapBackend::with_buffer(&mut pixels, (width, height)))?;
        let mut encoder = png::Encoder::new(BufWriter::new(File::create(path)?), width, height);
        encoder.set_color(png::ColorType::Rgb);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&pixels)?;
        Ok(writer.finish()?)
    }

    fn draw<B: DrawingBackend>(&self, backend: B) -> Result<()> {
        register_fonts()?;
        let root = backend.into_drawing_area();
        self.draw_on(&root).map_err(|error| anyhow!("cannot draw the plot: {error}"))
    }

    fn draw_on<B: DrawingBackend>(
        &self,
        root: &DrawingArea<B, Shift>,
    ) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
        root.fill(&WHITE)?;
        let heading = (FONT, 26, FontStyle::Bold).into_font().color(&INK);
        root.draw(&Text::new(self.title.clone(), (24, 20), heading))?;
        for (index, line) in self.subtitles.iter().enumerate() {
            let y = (TITLE_HEIGHT - 8 + SUBTITLE_HEIGHT * index as u32) as i32;
            root.draw(&Text::new(line.clone(), (24, y), (FONT, 18).into_font().color(&INK)))?;
        }
        let head = self.size().1 - PANEL_HEIGHT * self.panels.len() as u32;
        let (_, body) = root.split_vertically(head);
        let areas = body.split_evenly((self.panels.len(), 1));
        for (panel, area) in self.panels.iter().zip(areas) {
            let (chart, legend) = area.split_horizontally(WIDTH - LEGEND_WIDTH);
            self.draw_panel(panel, &chart)?;
            self.draw_legend(panel, &legend)?;
        }
        root.present()
    }

    fn draw_panel<B: DrawingBackend>(
        &self,
        panel: &Panel,
        area: &DrawingArea<B, Shift>,
    ) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
        let axis = LogAxis::new(self.ticks());
        let (ticks, ends) = (axis.ticks.len(), axis.range());
        let mut chart = ChartBuilder::on(area)
            .margin(16)
            .x_label_area_size(62)
            .y_label_area_size(86)
            .build_cartesian_2d(axis, panel.y_range())?;
        let text = || (FONT, 18).into_font().color(&INK);
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(FAINT)
            .axis_style(INK)
            .x_desc(self.x_label.clone())
            .y_desc(panel.y_label.clone())
            .x_label_style(text())
            .y_label_style(text())
            .axis_desc_style((FONT, 20).into_font().color(&INK))
            .x_labels(ticks)
            .x_label_formatter(&|&x| (self.x_text)(x as usize))
            // Sums of the axis's step end in digits that mean nothing.
            .y_label_formatter(&|y| ((y * 1e9).round() / 1e9).to_string())
            .draw()?;

        if let Some((level, name)) = &panel.level {
            let line = [(ends.start, *level), (ends.end, *level)];
            chart.draw_series(DashedLineSeries::new(line, 8, 6, LEVEL.stroke_width(2)))?;
            let style = (FONT, 18).into_font().color(&LEVEL);
            let style = style.pos(Pos::new(HPos::Left, VPos::Bottom));
            let label =
                EmptyElement::at((ends.start, *level)) + Text::new(name.clone(), (8, -5), style);
            chart.draw_series([label])?;
        }
        for (index, series) in panel.series.iter().enumerate() {
            let style = colour(index, panel.series.len()).stroke_width(2);
            for run in series.points.split(|(_, y)| y.is_none()) {
                let run = || run.iter().filter_map(|&(x, y)| Some((x as f64, y?)));
                chart.draw_series(LineSeries::new(run(), style))?;
                chart.draw_series(run().map(|point| Circle::new(point, 4, style.filled())))?;
            }
        }
        if let Some((x, y)) = panel.mark {
            chart.draw_series([Circle::new((x as f64, y), 10, INK.stroke_width(2))])?;
        }
        Ok(())
    }

    fn draw_legend<B: DrawingBackend>(
        &self,
        panel: &Panel,
        area: &DrawingArea<B, Shift>,
    ) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
        if self.legend.is_empty() {
            return Ok(());
        }
        let text = |size: u32| {
            let style = (FONT, size).into_font().color(&INK);
            style.pos(Pos::new(HPos::Left, VPos::Center))
        };
        area.draw(&Text::new(self.legend.clone(), (0, 30), text(18)))?;
        for (index, series) in panel.series.iter().enumerate() {
            let y = 58 + 26 * index as i32;
            let style = colour(index, panel.series.len()).stroke_width(2);
            area.draw(&PathElement::new(vec![(0, y), (30, y)], style))?;
            area.draw(&Circle::new((15, y), 4, style.filled()))?;
            area.draw(&Text::new(series.name.clone(), (40, y + 3), text(18)))?;
        }
        Ok(())
    }

    /// Every value of the horizontal axis, of all panels.
    fn ticks(&self) -> Vec<usize> {
        let series = self.panels.iter().flat_map(|panel| &panel.series);
        series.flat_map(|series| series.points.iter().map(|&(x, _)| x)).collect()
    }
}

/// A base-2 logarithmic axis that is marked at the values plotted, and nowhere else.
struct LogAxis {
    /// Ascending.
    ticks: Vec<f64>,
    /// The exponents at its ends.
    ends: Range<f64>,
}

impl LogAxis {
    fn new(mut values: Vec<usize>) -> Self {
        values.sort_unstable();
        values.dedup();
        let ticks: Vec<_> = values.into_iter().map(|value| value as f64).collect();
        let low = ticks.first().map_or(0.0, |first| first.log2());
        let high = ticks.last().map_or(0.0, |last| last.log2());
        let room = ((high - low) * 0.04).max(0.1);
        Self { ticks, ends: low - room..high + room }
    }
}

impl Ranged for LogAxis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (left, right): (i32, i32)) -> i32 {
        let share = (value.log2() - self.ends.start) / (self.ends.end - self.ends.start);
        left + (share * f64::from(right - left)).round() as i32
    }

    fn key_points<H: KeyPointHint>(&self, _: H) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.ends.start.exp2()..self.ends.end.exp2()
    }
}

impl Panel {
    /// From 0, so that heights compare as the values do.
    fn y_range(&self) -> Range<f64> {
        let points = self.series.iter().flat_map(|series| &series.points);
        let values = points.filter_map(|&(_, y)| y).chain(self.level.iter().map(|level| level.0));
        let top = values.filter(|y| y.is_finite()).fold(0.0, f64::max);
        0.0..if top > 0.0 { top * 1.08 } else { 1.0 }
    }
}

/// Gives the bitmap backend a font, since a machine may have none.
fn register_fonts() -> Result<()> {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    let registered = REGISTERED.get_or_init(|| {
        let normal = register_font(FONT, FontStyle::Normal, dejavu::sans::regular());
        normal.and(register_font(FONT, FontStyle::Bold, dejavu::sans::bold())).is_ok()
    });
    if *registered { Ok(()) } else { Err(anyhow!("the carried font is not a font")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_run_from_the_first_anchor_to_the_last() {
        let RGBColor(r, g, b) = colour(0, 7);
        assert_eq!((r, g, b), ANCHORS[0]);
        let RGBColor(r, g, b) = colour(6, 7);
        assert_eq!((r, g, b), ANCHORS[4]);
        assert_eq!(colour(0, 1), colour(0, 2));
    }

    #[test]
    fn a_missing_point_splits_a_line() {
        let lines = |points: Vec<(usize, Option<f64>)>| {
            let series = vec![Series { name: "one".to_owned(), points }];
            let panel = Panel { y_label: "y".to_owned(), series, level: None, mark: None };
            let figure = Figure {
                title: "t".to_owned(),
                subtitles: vec![],
                x_label: "x".to_owned(),
                x_text: |x| x.to_string(),
                legend: "l".to_owned(),
                panels: vec![panel],
            };
            figure.svg().unwrap().matches("<polyline").count()
        };
        let whole = lines(vec![(1, Some(1.0)), (2, Some(2.0)), (4, Some(3.0)), (8, Some(2.0))]);
        let split =
            lines(vec![(1, Some(1.0)), (2, Some(2.0)), (3, None), (4, Some(3.0)), (8, Some(2.0))]);
        assert!(split > whole, "{split} lines against {whole}");
        lines(vec![(1, None)]);
        lines(vec![]);
    }
}
