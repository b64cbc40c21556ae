//! The parts of the dashboard above the table: throughput, fast pool, and calls to the pool.

use std::collections::VecDeque;

use forebay_api::jobs::Traffic;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Gauge, Paragraph, Row, Sparkline, Table};

use super::mount_sample::{CallActivity, MountSample, per_second};
use crate::values::{bytes, span};

/// Intervals that are kept for the lines of the throughput.
const HISTORY: usize = 512;
/// Where bytes come from and go to, in the order of the lines.
pub(super) const SOURCES: [(&str, Color); 5] = [
    ("page cache", Color::Blue),
    ("fast pool", Color::Cyan),
    ("peers", Color::Magenta),
    ("pool", Color::Yellow),
    ("written", Color::Green),
];

/// Bytes per second of each of [`SOURCES`]; the newest last.
#[derive(Debug, Default)]
pub(super) struct History([VecDeque<u64>; SOURCES.len()]);

impl History {
    pub fn add(&mut self, sample: &MountSample) {
        for (history, rate) in self.0.iter_mut().zip(rates(sample)) {
            history.push_back(rate);
            history.drain(..history.len().saturating_sub(HISTORY));
        }
    }
}

pub(super) fn aligned(text: String, to_the_right: bool) -> Line<'static> {
    if to_the_right { Line::from(text).right_aligned() } else { Line::from(text) }
}

/// Returns the bytes per second of each of [`SOURCES`].
fn rates(sample: &MountSample) -> [u64; SOURCES.len()] {
    let sum = |part: fn(&Traffic) -> u64| {
        let jobs = sample.used.jobs.iter().map(|job| part(&job.traffic)).sum::<u64>();
        jobs + part(&sample.used.others)
    };
    // What peers gave came through the daemon, and so it counts there as read from the pool.
    let from_pool = sum(|traffic| traffic.pool_bytes).saturating_sub(sample.peer_bytes);
    let cache = sum(|traffic| traffic.cache_bytes);
    let fast = sum(|traffic| traffic.fast_bytes);
    let counts = [cache, fast, sample.peer_bytes, from_pool, sum(|traffic| traffic.written_bytes)];
    counts.map(|count| per_second(count, sample.ms))
}

pub(super) fn draw_throughput(frame: &mut Frame<'_>, area: Rect, history: &History) {
    let block = Block::bordered().title(" throughput ");
    let inside = block.inner(area);
    frame.render_widget(block, area);
    // One scale for all lines, so that they can be compared.
    let highest = history.0.iter().flatten().copied().max().unwrap_or(0).max(1);
    let lines = Layout::vertical([Constraint::Length(1); SOURCES.len()]).split(inside);
    for (((name, color), history), line) in SOURCES.iter().zip(&history.0).zip(lines.iter()) {
        let [label, rate, bars] =
            Layout::horizontal([Constraint::Length(11), Constraint::Length(12), Constraint::Min(1)]).areas(*line);
        let now = history.back().copied().unwrap_or(0);
        frame.render_widget(Line::from(name.fg(*color)), label);
        frame.render_widget(Line::from(format!("{}/s ", bytes(now))).right_aligned(), rate);
        let newest: Vec<u64> = history.iter().rev().take(bars.width.into()).rev().copied().collect();
        frame.render_widget(Sparkline::default().data(newest).max(highest).style(Style::new().fg(*color)), bars);
    }
}

pub(super) fn draw_fast_pool(frame: &mut Frame<'_>, area: Rect, sample: &MountSample) {
    let status = &sample.status;
    let block = Block::bordered().title(" fast pool ");
    let inside = block.inner(area);
    frame.render_widget(block, area);
    let [gauge, text] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(inside);
    let share = status.used_bytes as f64 / status.limit_bytes.max(1) as f64;
    let label = format!("{} of {}", bytes(status.used_bytes), bytes(status.limit_bytes));
    frame.render_widget(Gauge::default().ratio(share.clamp(0.0, 1.0)).label(label).gauge_style(Color::Cyan), gauge);
    let oldest = status.oldest_dirty_secs.map_or(String::new(), |secs| format!(", oldest {}", span(secs)));
    let dirty = format!("dirty {} in {} files{oldest}", bytes(status.dirty_bytes), status.dirty_files);
    let mut lines = vec![Line::from(dirty)];
    let trouble = status.flush_errors.iter().chain(&status.flush_stuck).chain(&status.conflicts).count();
    if trouble > 0 {
        lines.push(Line::from(format!("{trouble} not flushed or in conflict: `forebay status` says why").red()));
    }
    if status.waiting_for_room > 0 {
        lines.push(Line::from(format!("{} writers wait for space", status.waiting_for_room).red()));
    }
    if let Some(rate) = status.write_pace_bytes {
        lines.push(Line::from(format!("writers slowed to {}/s", bytes(rate)).yellow()));
    }
    lines.push(Line::from(format!(
        "leased {}, evicted {}",
        bytes(status.leased_bytes),
        bytes(status.counters.evicted_bytes)
    )));
    for device in &status.fast {
        let text = format!("{}  {}, {} free", device.path, device.state, bytes(device.free_bytes));
        lines.push(if device.errors > 0 { Line::from(text.red()) } else { Line::from(text) });
    }
    frame.render_widget(Paragraph::new(lines), text);
}

pub(super) fn draw_calls(frame: &mut Frame<'_>, area: Rect, sample: &MountSample) {
    let title = format!(" calls to the pool: {} in flight ", sample.in_flight);
    let mut calls: Vec<&CallActivity> = sample.calls.iter().collect();
    calls.sort_by_key(|call| std::cmp::Reverse(call.count));
    let rows = calls.into_iter().map(|call| {
        let p99 = call.p99_us.map_or_else(|| "> 60 s".to_owned(), |us| format!("≤ {}", latency(us)));
        let values =
            [per_second(call.count, sample.ms).to_string(), latency(call.mean_us), p99, call.failed.to_string()];
        let row =
            Row::new([Cell::from(call.call)].into_iter().chain(values.map(|value| Cell::from(aligned(value, true)))));
        if call.failed > 0 { row.red() } else { row }
    });
    let heads =
        ["call", "per s", "mean", "99 %", "failed"].map(|head| Cell::from(aligned(head.into(), head != "call")));
    let widths = [
        Constraint::Min(12),
        Constraint::Length(8),
        Constraint::Length(9),
        Constraint::Length(10),
        Constraint::Length(7),
    ];
    let table = Table::new(rows, widths).header(Row::new(heads).bold()).block(Block::bordered().title(title));
    frame.render_widget(table, area);
}

/// A latency in the unit that fits it.
fn latency(us: u64) -> String {
    match us {
        0..1_000 => format!("{us} µs"),
        1_000..1_000_000 => format!("{:.1} ms", us as f64 / 1e3),
        _ => format!("{:.1} s", us as f64 / 1e6),
    }
}
