//! What was read, and what the pool sent, over the time.

use std::error::Error;

use forebay_cluster::simulate::{ClusterOutcome, ClusterProgress};
use plotters::prelude::*;

const PIXELS: (u32, u32) = (1200, 520);

/// An SVG document with a chart for the jobs and one for the pool.
pub fn draw(outcomes: &[ClusterOutcome]) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, PIXELS).into_drawing_area();
        area.fill(&WHITE)?;
        let (left, right) = area.split_horizontally(PIXELS.0 / 2);
        chart(&left, ("read by the jobs (%)", 100.0), outcomes, |progress| progress.read * 100.0)?;
        let most = outcomes.iter().map(ClusterOutcome::pool_copies).fold(1.0, f64::max);
        let copies = "sent by the pool (copies of the data set)";
        chart(&right, (copies, most * 1.05), outcomes, |progress| progress.pool_copies)?;
        area.present()?;
    }
    Ok(svg)
}

type ChartArea<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn chart(
    area: &ChartArea<'_>,
    (title, top): (&str, f64),
    outcomes: &[ClusterOutcome],
    value: fn(&ClusterProgress) -> f64,
) -> Result<(), Box<dyn Error>> {
    // What slow nodes read after all others is cut off: it would leave no room for the others.
    let ends = outcomes.iter().flat_map(|outcome| [outcome.all, outcome.bound]);
    let end = ends.map(|time| time.as_secs_f64() * 1.05).fold(0.001, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d(0.0..end, 0.0..top)?;
    chart.configure_mesh().x_desc("seconds").light_line_style(TRANSPARENT).draw()?;
    for (at, outcome) in outcomes.iter().enumerate() {
        let style = Palette99::pick(at).to_rgba().stroke_width(2);
        let points = outcome.timeline.points().iter().map(|progress| (progress.at.as_secs_f64(), value(progress)));
        let line = points.take_while(|(seconds, _)| *seconds <= end);
        chart
            .draw_series(LineSeries::new(line, style))?
            .label(outcome.settings.scenario.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    // The shortest possible time.
    if let Some(bound) = outcomes.iter().map(|outcome| outcome.bound.as_secs_f64()).reduce(f64::max) {
        let style = BLACK.stroke_width(1);
        chart
            .draw_series(LineSeries::new([(bound, 0.0), (bound, top)], style))?
            .label("bound")
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(())
}
