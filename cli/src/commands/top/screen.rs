//! The state of the dashboard, what keys change in it, and how it is drawn.

use std::path::PathBuf;

use forebay_api::jobs::ObserverKind;
use forebay_api::operator::PoolState;
use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Table, TableState};

use super::mount_sample::{Details, MountSample};
use super::panels::{History, SOURCES, aligned, draw_calls, draw_fast_pool, draw_throughput};
use super::table::{Tab, TableRow, Value, dirty, files, is_text, is_wide, jobs};
use crate::commands::status::pool_state;
use crate::values::shown;

/// Rows that a screen must have for the part in the middle: the table comes first.
const ROWS_FOR_MIDDLE: u16 = 24;

/// One mount, and what is known of it.
#[derive(Debug)]
struct ShownMount {
    mountpoint: PathBuf,
    sample: Option<MountSample>,
    /// Why there is no newer sample.
    failure: Option<String>,
    history: History,
}

/// News of one mount. `Ok(None)`: the first sample, which has no rates yet.
pub(super) struct Update {
    pub mountpoint: PathBuf,
    pub sample: Result<Option<MountSample>, String>,
}

/// The dashboard.
#[derive(Debug)]
pub(super) struct Screen {
    mounts: Vec<ShownMount>,
    mount: usize,
    tab: Tab,
    /// The column by which each tab is sorted, and whether the largest value comes first.
    sorts: [(usize, bool); Tab::ALL.len()],
    /// Only rows with this text are shown.
    filter: String,
    is_typing: bool,
    is_paused: bool,
    selected: Option<String>,
    /// The job whose files are shown.
    job: Option<String>,
    table: TableState,
}

impl Screen {
    pub fn new() -> Self {
        Self {
            mounts: Vec::new(),
            mount: 0,
            tab: Tab::Jobs,
            sorts: [(0, true), (0, true), (1, true)],
            filter: String::new(),
            is_typing: false,
            is_paused: false,
            selected: None,
            job: None,
            table: TableState::default(),
        }
    }

    /// Returns the mount that is shown, and the details that are shown of it.
    pub fn watched(&self) -> (PathBuf, Details) {
        let mountpoint = self.mounts.get(self.mount).map(|mount| mount.mountpoint.clone()).unwrap_or_default();
        let details = match (self.tab, &self.job) {
            (Tab::Files, Some(job)) => Details::FilesOf(job.clone()),
            _ => Details::None,
        };
        (mountpoint, details)
    }

    /// Takes in news, unless the dashboard is paused.
    pub fn take(&mut self, update: Update) {
        if self.is_paused {
            return;
        }
        let at = self.mounts.iter().position(|mount| mount.mountpoint == update.mountpoint).unwrap_or_else(|| {
            let (mountpoint, history) = (update.mountpoint, Default::default());
            self.mounts.push(ShownMount { mountpoint, sample: None, failure: None, history });
            self.mounts.len() - 1
        });
        let mount = &mut self.mounts[at];
        match update.sample {
            Ok(sample) => {
                mount.failure = None;
                if let Some(sample) = &sample {
                    mount.history.add(sample);
                }
                mount.sample = sample.or(mount.sample.take());
            }
            Err(why) => mount.failure = Some(why),
        }
    }

    /// Returns `false` if the key ends the program.
    pub fn press(&mut self, key: KeyEvent) -> bool {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return key.code != KeyCode::Char('c');
        }
        if self.is_typing {
            match key.code {
                KeyCode::Char(letter) => self.filter.push(letter),
                KeyCode::Backspace => _ = self.filter.pop(),
                KeyCode::Enter => self.is_typing = false,
                KeyCode::Esc => {
                    self.filter.clear();
                    self.is_typing = false;
                }
                _ => {}
            }
            return true;
        }
        match key.code {
            KeyCode::Char('q') => return false,
            KeyCode::Char(' ') => self.is_paused = !self.is_paused,
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('s') => {
                let (column, _) = self.sorts[self.tab as usize];
                let next = (column + 1) % self.tab.columns().len();
                self.sorts[self.tab as usize] = (next, self.is_numeric(next));
            }
            KeyCode::Char('r') => {
                let (_, descending) = &mut self.sorts[self.tab as usize];
                *descending = !*descending;
            }
            KeyCode::Char('j') => self.show_tab(Tab::Jobs),
            KeyCode::Char('f') | KeyCode::Enter if self.tab == Tab::Jobs => {
                // What belongs to no job has no list of files.
                if let Some(job) = self.selected_key().filter(|key| !key.is_empty()) {
                    self.job = Some(job);
                    self.show_tab(Tab::Files);
                }
            }
            KeyCode::Char('d') => self.show_tab(Tab::Dirty),
            KeyCode::Esc if !self.filter.is_empty() => self.filter.clear(),
            KeyCode::Esc => self.show_tab(Tab::Jobs),
            KeyCode::Char('n') | KeyCode::Tab if !self.mounts.is_empty() => {
                self.mount = (self.mount + 1) % self.mounts.len();
                self.show_tab(if self.tab == Tab::Files { Tab::Jobs } else { self.tab });
            }
            KeyCode::Up => self.select(-1),
            KeyCode::Down => self.select(1),
            KeyCode::PageUp => self.select(-10),
            KeyCode::PageDown => self.select(10),
            _ => {}
        }
        true
    }

    fn show_tab(&mut self, tab: Tab) {
        (self.tab, self.selected, self.table) = (tab, None, TableState::default());
    }

    fn is_numeric(&self, column: usize) -> bool {
        let rows = self.rows();
        rows.first().is_none_or(|row| matches!(row.values[column], Value::Number(..)))
    }

    /// The position of the selected row: the first one, if what was selected is gone.
    fn selected_at(&self, rows: &[TableRow]) -> usize {
        let at = self.selected.as_ref().and_then(|key| rows.iter().position(|row| row.key == *key));
        at.unwrap_or(0)
    }

    fn selected_key(&self) -> Option<String> {
        let rows = self.rows();
        rows.get(self.selected_at(&rows)).map(|row| row.key.clone())
    }

    fn select(&mut self, by: isize) {
        let rows = self.rows();
        let last = rows.len().saturating_sub(1);
        let at = self.selected_at(&rows).saturating_add_signed(by).min(last);
        self.selected = rows.get(at).map(|row| row.key.clone());
    }

    /// The rows of the table, filtered and sorted.
    fn rows(&self) -> Vec<TableRow> {
        let Some(sample) = self.mounts.get(self.mount).and_then(|mount| mount.sample.as_ref()) else {
            return Vec::new();
        };
        let mut rows = match self.tab {
            Tab::Jobs => jobs(sample),
            Tab::Files => files(sample),
            Tab::Dirty => dirty(sample),
        };
        let filter = self.filter.to_lowercase();
        rows.retain(|row| row.values.iter().any(|value| value.text().to_lowercase().contains(&filter)));
        let (column, descending) = self.sorts[self.tab as usize];
        rows.sort_by(|a, b| {
            let order = a.values[column].order(&b.values[column]);
            if descending { order.reverse() } else { order }
        });
        rows
    }

    pub fn draw(&mut self, frame: &mut Frame<'_>) {
        let middle = if frame.area().height >= ROWS_FOR_MIDDLE { 8 } else { 0 };
        let sources = SOURCES.len() as u16 + 2;
        let parts = [1, sources, middle].map(Constraint::Length);
        let [title, throughput, middle, table, keys] =
            Layout::vertical([parts[0], parts[1], parts[2], Constraint::Min(3), Constraint::Length(1)])
                .areas(frame.area());
        let rows = self.rows();
        let selected = self.selected_at(&rows);
        self.table.select((!rows.is_empty()).then_some(selected));
        frame.render_widget(self.title(), title);
        if let Some(mount) = self.mounts.get(self.mount) {
            draw_throughput(frame, throughput, &mount.history);
            if let Some(sample) = mount.sample.as_ref().filter(|_| middle.height > 0) {
                let [left, right] =
                    Layout::horizontal([Constraint::Percentage(45), Constraint::Percentage(55)]).areas(middle);
                draw_fast_pool(frame, left, sample);
                draw_calls(frame, right, sample);
            }
        }
        let (shown, state) = (self.shown_table(&rows), &mut self.table);
        frame.render_stateful_widget(shown, table, state);
        frame.render_widget(self.keys(), keys);
    }

    fn title(&self) -> Paragraph<'static> {
        let Some(mount) = self.mounts.get(self.mount) else {
            return Paragraph::new(" forebay top: the first sample is taken");
        };
        let mut spans = vec![format!(" {}", mount.mountpoint.display()).bold()];
        if self.mounts.len() > 1 {
            spans.push(format!("  ({} of {} mounts)", self.mount + 1, self.mounts.len()).into());
        }
        if self.is_paused {
            spans.push("  PAUSED".yellow().bold());
        }
        if let Some(why) = &mount.failure {
            spans.push(format!("  NO NEWER SAMPLE: {}", shown(why)).red().bold());
        }
        if let Some(sample) = &mount.sample {
            let status = &sample.status;
            let state = format!("  {}  {}", status.pool, pool_state(status));
            spans.push(if status.pool_state == PoolState::Up { state.into() } else { state.red().bold() });
            if sample.used.observer.kind != ObserverKind::Ebpf {
                spans.push("  without eBPF: requests to the daemon alone".into());
            }
        }
        Paragraph::new(Line::from(spans))
    }

    fn shown_table(&self, rows: &[TableRow]) -> Table<'static> {
        let (sorted, descending) = self.sorts[self.tab as usize];
        let columns = self.tab.columns();
        let widths: Vec<Constraint> = columns
            .iter()
            .enumerate()
            .map(|(at, name)| {
                let values = rows.iter().map(|row| row.values[at].text().chars().count()).max().unwrap_or(0);
                // Room for the arrow of the sorted column.
                let width = u16::try_from(values.max(name.chars().count() + 2)).unwrap_or(u16::MAX);
                if is_wide(name) { Constraint::Min(width.min(20)) } else { Constraint::Length(width) }
            })
            .collect();
        let heads = columns.iter().enumerate().map(|(at, name)| {
            let arrow = match (at == sorted, descending) {
                (false, _) => "",
                (true, true) => " ▼",
                (true, false) => " ▲",
            };
            Cell::from(aligned(format!("{name}{arrow}"), !is_text(name)))
        });
        let lines = rows.iter().map(|row| {
            let values = row
                .values
                .iter()
                .map(|value| Cell::from(aligned(value.text().to_owned(), matches!(value, Value::Number(..)))));
            Row::new(values)
        });
        let title = match (self.tab, &self.job) {
            (Tab::Files, Some(job)) => format!(" files of job {} that are in use: {} ", shown(job), rows.len()),
            (Tab::Dirty, _) => self.dirty_title(rows.len()),
            _ => format!(" jobs: {} ", rows.iter().filter(|row| !row.key.is_empty()).count()),
        };
        Table::new(lines, widths)
            .header(Row::new(heads).style(Style::new().add_modifier(Modifier::BOLD)))
            .column_spacing(2)
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
            .block(Block::bordered().title(title))
    }

    /// Says that files are missing in the table, if they are.
    fn dirty_title(&self, rows: usize) -> String {
        let sample = self.mounts.get(self.mount).and_then(|mount| mount.sample.as_ref());
        match sample.filter(|sample| sample.status.dirty_files > sample.dirty.len() as u64) {
            Some(sample) => format!(" not in the pool yet: {rows} of {}, the oldest ", sample.status.dirty_files),
            None => format!(" not in the pool yet: {rows} "),
        }
    }

    fn keys(&self) -> Line<'static> {
        if self.is_typing || !self.filter.is_empty() {
            let cursor = if self.is_typing { "_" } else { "" };
            let end = if self.is_typing { "Enter keeps it, Esc ends it" } else { "Esc ends it" };
            return Line::from(format!(" filter: {}{cursor}   {end}", self.filter));
        }
        let mut keys = vec![("q", "quit"), ("space", "pause"), ("s", "sort by the next column"), ("r", "reverse")];
        keys.extend([("/", "filter"), ("↑↓", "select"), ("j", "jobs"), ("f", "files of the job"), ("d", "dirty")]);
        if self.mounts.len() > 1 {
            keys.push(("n", "next mount"));
        }
        let keys = keys.into_iter().flat_map(|(key, does)| [format!(" {key}").bold(), Span::from(format!(" {does} "))]);
        Line::from(keys.collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use forebay_api::jobs::{JobSample, Sample, Traffic};
    use forebay_api::operator::{Counters, Status};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn status() -> Status {
        let text = ["version", "pool", "content_io"].map(|name| (name.to_owned(), serde_json::json!("x")));
        let numbers = [
            "pid",
            "limit_bytes",
            "used_bytes",
            "reserved_bytes",
            "dirty_files",
            "dirty_bytes",
            "leased_bytes",
            "resident_files",
            "inodes_in_memory",
            "open_files",
        ];
        let numbers = numbers.map(|name| (name.to_owned(), serde_json::json!(0)));
        let lists = ["fast", "flush_errors", "conflicts"].map(|name| (name.to_owned(), serde_json::json!([])));
        let rest = [
            ("pool_state", serde_json::json!("up")),
            ("passthrough", serde_json::json!(true)),
            ("counters", serde_json::json!(Counters::default())),
        ];
        let rest = rest.map(|(name, value)| (name.to_owned(), value));
        let fields = text.into_iter().chain(numbers).chain(lists).chain(rest);
        serde_json::from_value(serde_json::Value::Object(fields.collect())).unwrap()
    }

    fn update(jobs: &[(&str, u64)]) -> Update {
        let job = |(id, read_bytes): &(&str, u64)| {
            let traffic = Traffic { read_bytes: *read_bytes, cache_bytes: *read_bytes, ..Traffic::default() };
            JobSample { id: (*id).into(), uid: 0, files: 1, traffic }
        };
        let others = Traffic::default();
        let used = Sample { at_ms: 2_000, jobs: jobs.iter().map(job).collect(), others, observer: Default::default() };
        let (calls, dirty, files) = (Vec::new(), Vec::new(), Vec::new());
        let sample =
            MountSample { ms: 1_000, status: status(), used, peer_bytes: 0, calls, in_flight: 0, dirty, files };
        Update { mountpoint: "/m".into(), sample: Ok(Some(sample)) }
    }

    fn drawn(screen: &mut Screen, columns: u16, rows: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    fn press(screen: &mut Screen, keys: &str) {
        for key in keys.chars() {
            assert!(screen.press(KeyEvent::new(KeyCode::Char(key), KeyModifiers::NONE)), "{key}");
        }
    }

    fn order(screen: &Screen) -> Vec<String> {
        screen.rows().into_iter().map(|row| row.key).collect()
    }

    #[test]
    fn rows_are_sorted_by_the_chosen_column_and_filtered() {
        let mut screen = Screen::new();
        screen.take(update(&[("small", 10), ("large", 1_000), ("middle", 500)]));
        assert_eq!(order(&screen), ["large", "middle", "small", ""]);
        press(&mut screen, "r");
        assert_eq!(order(&screen), ["", "small", "middle", "large"]);
        // The last column has text, so it begins with the first letter.
        press(&mut screen, "sssssss");
        assert_eq!(order(&screen), ["", "large", "middle", "small"]);
        press(&mut screen, "/LL");
        assert_eq!(order(&screen), ["small"]);
        screen.press(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE));
        assert_eq!(order(&screen).len(), 4);
    }

    #[test]
    fn what_was_selected_stays_selected_when_rows_move() {
        let mut screen = Screen::new();
        screen.take(update(&[("a", 30), ("b", 20)]));
        screen.press(KeyEvent::new(KeyCode::Down, KeyModifiers::NONE));
        assert_eq!(screen.selected_key().as_deref(), Some("b"));
        screen.take(update(&[("a", 30), ("b", 40)]));
        assert_eq!(screen.selected_key().as_deref(), Some("b"));
        press(&mut screen, "f");
        assert_eq!(screen.watched(), ("/m".into(), Details::FilesOf("b".into())));
        press(&mut screen, "j");
        assert_eq!(screen.watched(), ("/m".into(), Details::None));
        screen.take(update(&[("a", 30)]));
        assert_eq!(screen.selected_key().as_deref(), Some("a"));
    }

    #[test]
    fn a_pause_keeps_what_is_shown_and_a_failure_is_told() {
        let mut screen = Screen::new();
        assert!(drawn(&mut screen, 80, 24).contains("the first sample is taken"));
        screen.take(update(&[("a", 1)]));
        press(&mut screen, " ");
        screen.take(update(&[("b", 1)]));
        assert_eq!(order(&screen), ["a", ""]);
        press(&mut screen, " ");
        screen.take(Update { mountpoint: "/m".into(), sample: Err("no \x1b[2Janswer".into()) });
        let shown = drawn(&mut screen, 120, 30);
        assert!(shown.contains(r"NO NEWER SAMPLE: no \u{1b}[2Janswer") && shown.contains("(no job)"), "{shown}");
        screen.take(update(&[("b", 1)]));
        assert!(!drawn(&mut screen, 120, 30).contains("NO NEWER"));
    }

    #[test]
    fn any_size_of_a_terminal_will_do() {
        let mut screen = Screen::new();
        screen.take(update(&[("a", 1)]));
        for (columns, rows) in [(1, 1), (10, 3), (40, 12), (80, 24), (300, 100)] {
            drawn(&mut screen, columns, rows);
        }
        assert!(!screen.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
        assert!(!screen.press(KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE)));
    }
}
