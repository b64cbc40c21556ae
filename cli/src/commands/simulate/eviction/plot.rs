//! Miss ratios over cache sizes, as a picture.

use std::error::Error;

use plotters::prelude::*;

use super::{BELADY, LRU, Ratios, Simulated};

const PIXELS: (u32, u32) = (1200, 520);

/// The start of the axis, as a share of the unique bytes, if all sizes are larger.
const LEAST_FRACTION: f64 = 0.01;

/// An SVG document with a chart for objects and one for bytes.
pub fn draw(results: &[Simulated<'_>]) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, PIXELS).into_drawing_area();
        area.fill(&WHITE)?;
        let (left, right) = area.split_horizontally(PIXELS.0 / 2);
        chart(&left, "objects missed (%)", results, |ratios| ratios.object_miss_ratio)?;
        chart(&right, "bytes missed (%)", results, |ratios| ratios.byte_miss_ratio)?;
        area.present()?;
    }
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn chart(
    area: &Area<'_>,
    title: &str,
    results: &[Simulated<'_>],
    ratio: fn(&Ratios) -> f64,
) -> Result<(), Box<dyn Error>> {
    let mut sorted: Vec<&Simulated<'_>> = results.iter().collect();
    sorted.sort_by(|a, b| a.cache_fraction.total_cmp(&b.cache_fraction));
    let Some(first) = sorted.first() else { return Ok(()) };
    let begin = first.cache_fraction.min(LEAST_FRACTION) * 100.0;
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d((begin..100.0).log_scale(), 0.0..100.0)?;
    chart
        .configure_mesh()
        .x_desc("cache (% of the unique bytes)")
        .x_label_formatter(&|percent| format!("{percent}"))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (at, name) in first.policies.keys().enumerate() {
        let color = match *name {
            BELADY => BLACK.to_rgba(),
            LRU => RGBColor(128, 128, 128).to_rgba(),
            _ => Palette99::pick(at).to_rgba(),
        };
        let style = color.stroke_width(if *name == first.default { 3 } else { 1 });
        let points: Vec<(f64, f64)> = sorted
            .iter()
            .filter_map(|one| Some((one.cache_fraction * 100.0, ratio(one.policies.get(name)?) * 100.0)))
            .collect();
        chart
            .draw_series(LineSeries::new(points.clone(), style))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        chart.draw_series(points.into_iter().map(|point| Circle::new(point, 3, color.filled())))?;
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
    Ok(())
}
