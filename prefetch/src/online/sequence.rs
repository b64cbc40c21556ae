//! A reader goes through a directory in the order of its names: forward, backward, or with a stride.
//!
//! A job reads with several processes, so there may be several such streams in one directory. Streams are told apart by
//! their positions. A file that is left out, or that is opened a little before or after its turn, as by a pool of
//! workers, does not end a stream. If names have more than one order, streams are searched in each order, and the order
//! counts that explains more of the last opens. If a reader has gone through one directory in an order and begins the
//! next directory where that order begins, it is expected to go through it in the same way.

use std::collections::VecDeque;

use super::listing::{DirectoryListing, NameOrder};

/// The most streams of one reader in one directory; those that moved last are kept.
const STREAMS_MAX: usize = 8;

/// The last opens, among which a new stream is searched: four of each of eight streams.
const RECENT_MAX: usize = 32;

/// The most positions from one file of a stream to the next: a job of a thousand ranks, each of which takes every
/// thousandth file, is a large one.
const STRIDE_MAX: i64 = 1024;

/// Steps by which a file may be out of turn: loaders have up to eight workers for one order (AMP and the kernel's
/// readahead look as far for a request that was overtaken).
const SLACK_STEPS: i64 = 8;

/// The orders are compared over about this many of the last opens.
const ORDER_OPENS: f64 = 32.0;

/// Equal steps that make a stream.
const STEPS_MIN: u64 = 3;

/// The most steps of one directory that count in the next: the pattern of one directory is no promise for all other
/// directories.
const HABIT_STEPS_MAX: u64 = 16;

/// The assumed share of opens that an order explains if it follows from habit alone.
const HABIT_SCORE: f64 = 0.5;

/// Suggestions ahead of a stream: the first number and the largest. The kernel's readahead doubles in the same way; 64
/// files of one stream keep any pool busy.
const WINDOW_FIRST: u32 = 2;
const WINDOW_MAX: u32 = 64;

/// The most outstanding suggestions of all streams of a reader together.
pub(super) const OUTSTANDING_MAX: usize = STREAMS_MAX * WINDOW_MAX as usize;

/// Opens by its reader after which a suggestion was wrong: all streams at their largest window, each with its turn.
pub(super) const AWAITED_TOUCHES: u64 = OUTSTANDING_MAX as u64;

/// How far ahead to suggest. Doubles when as many suggestions as its size were used, halves when one was wasted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    size: u32,
    /// Suggestions used since the size has changed.
    used: u32,
}

impl Default for Window {
    fn default() -> Self {
        Self { size: WINDOW_FIRST, used: 0 }
    }
}

impl Window {
    pub fn note(&mut self, used: bool) {
        self.used += 1;
        if !used {
            *self = Self { size: (self.size / 2).max(WINDOW_FIRST), used: 0 };
        } else if self.used >= self.size {
            *self = Self { size: (self.size * 2).min(WINDOW_MAX), used: 0 };
        }
    }

    /// Returns the size for a predictor whose suggestions are used with the share `accuracy`.
    pub fn files(&self, accuracy: f64) -> i64 {
        (f64::from(self.size) * accuracy).ceil() as i64
    }
}

/// Returns the probability that a pattern which held for `steps` steps holds for `ahead` more (Laplace's rule of
/// succession).
pub(super) fn goes_on(steps: u64, ahead: i64) -> f64 {
    let steps = steps as f64 + 1.0;
    steps / (steps + ahead as f64)
}

/// A file and its position.
#[derive(Debug, Clone, Copy)]
struct FilePosition {
    file: u64,
    /// `None` until there is a listing that contains it.
    position: Option<i64>,
}

#[derive(Debug)]
struct Stream {
    number: u32,
    /// The farthest file that it has reached.
    last: FilePosition,
    stride: i64,
    steps: u64,
    window: Window,
    /// It was observed, and does not follow from habit alone.
    is_seen: bool,
}

/// How a reader goes through directories.
#[derive(Debug, Clone, Copy)]
pub(super) struct Habit {
    /// `None` if that directory has only one order.
    order: Option<NameOrder>,
    stride: i64,
    steps: u64,
    window: Window,
}

/// An expectation of a stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct StreamPrediction {
    pub file: u64,
    pub stream: u32,
    /// Steps ahead of the file that was opened, from 1 on.
    pub ahead: u32,
    pub stride: i64,
    pub probability: f64,
}

/// The streams of one reader in one directory, in one order.
#[derive(Debug)]
struct Streams {
    order: NameOrder,
    /// The stream that moved last is the last element.
    streams: Vec<Stream>,
    recent: VecDeque<FilePosition>,
    made: u32,
    version: u64,
    /// Whether the last open continued a stream.
    follows: bool,
    /// The share of the last opens that did.
    score: f64,
}

impl Streams {
    fn of(order: NameOrder) -> Self {
        Self { order, streams: Vec::new(), recent: VecDeque::new(), made: 0, version: 0, follows: false, score: 0.0 }
    }

    /// Notes an open of a file that was not opened before in this pass.
    fn touched(&mut self, file: u64, listing: &DirectoryListing) {
        self.refresh(listing);
        let place = FilePosition { file, position: listing.place(file, self.order) };
        self.follows = self.follow(place) || self.begin(place);
        self.score += (f64::from(u8::from(self.follows)) - self.score) / ORDER_OPENS;
        self.push_recent(place);
    }

    fn push_recent(&mut self, place: FilePosition) {
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(place);
    }

    /// Updates the positions after a new listing.
    fn refresh(&mut self, listing: &DirectoryListing) {
        if self.version != listing.version {
            self.version = listing.version;
            self.recent.iter_mut().for_each(|place| place.position = listing.place(place.file, self.order));
            self.streams
                .iter_mut()
                .for_each(|stream| stream.last.position = listing.place(stream.last.file, self.order));
        }
    }

    /// Advances the stream that expects this file, or one near it.
    fn follow(&mut self, place: FilePosition) -> bool {
        let Some(position) = place.position else { return false };
        let steps = |stream: &Stream| {
            let distance = position - stream.last.position?;
            (distance % stream.stride == 0).then_some(distance / stream.stride)
        };
        let near = |(at, stream)| steps(stream).filter(|steps| steps.abs() <= SLACK_STEPS).map(|steps| (steps, at));
        let found = self.streams.iter().enumerate().filter_map(near).min_by_key(|(steps, at)| (steps.abs(), *at));
        let Some((steps, at)) = found else { return false };
        let mut stream = self.streams.remove(at);
        stream.steps += 1;
        stream.is_seen = true;
        if steps > 0 {
            stream.last = place;
        }
        self.streams.push(stream);
        true
    }

    /// Begins a stream if three earlier files lead to this one in equal steps. Of several such strides, takes the
    /// smallest: parallel streams produce many strides that are not real.
    fn begin(&mut self, place: FilePosition) -> bool {
        let Some(position) = place.position else { return false };
        let when = |position: i64| self.recent.iter().rposition(|place| place.position == Some(position));
        let stride = self
            .recent
            .iter()
            .enumerate()
            .filter_map(|(at, before)| Some((at, position - before.position?)))
            .filter(|(_, stride)| *stride != 0 && stride.abs() <= STRIDE_MAX)
            .filter(|(at, stride)| {
                when(position - 2 * stride).is_some() && when(position - 3 * stride).is_some_and(|first| first < *at)
            })
            .map(|(_, stride)| stride)
            .min_by_key(|stride| (stride.abs(), *stride < 0));
        let Some(stride) = stride else { return false };
        if self.streams.len() == STREAMS_MAX {
            self.streams.remove(0);
        }
        let (number, window) = (self.number(), Window::default());
        self.streams.push(Stream { number, last: place, stride, steps: STEPS_MIN, window, is_seen: true });
        true
    }

    /// Returns a number that no other stream has, in any order.
    fn number(&mut self) -> u32 {
        self.made = self.made.wrapping_add(1);
        self.made.wrapping_mul(NameOrder::ALL.len() as u32).wrapping_add(self.order.index() as u32)
    }

    /// Begins the first stream by habit, if the reader entered the directory with the file `first` where such a stream
    /// begins, and the last open lies on its way.
    fn begin_by_habit(&mut self, first: u64, habit: Habit, listing: &DirectoryListing) {
        let Some(last) = self.recent.back().copied().filter(|_| self.streams.is_empty()) else { return };
        let (Some(first), Some(place)) = (listing.place(first, self.order), last.position) else { return };
        let Habit { stride, steps, window, .. } = habit;
        let from_the_start = if stride > 0 { first } else { listing.len() as i64 - 1 - first };
        let is_on_the_way = (place - first) % stride == 0 && (0..=SLACK_STEPS).contains(&((place - first) / stride));
        if from_the_start < stride.abs() && is_on_the_way {
            let number = self.number();
            self.streams.push(Stream { number, last, stride, steps, window, is_seen: place != first });
            (self.follows, self.score) = (true, HABIT_SCORE);
        }
    }
}

/// The streams of one reader in one directory.
#[derive(Debug)]
pub(super) struct Sequence {
    of: [Streams; NameOrder::ALL.len()],
    /// The order that explains the most opens.
    preferred: NameOrder,
}

impl Default for Sequence {
    fn default() -> Self {
        Self { of: NameOrder::ALL.map(Streams::of), preferred: NameOrder::Natural }
    }
}

impl Sequence {
    /// Notes an open without a listing.
    pub fn touched_unlisted(&mut self, file: u64) {
        self.of.iter_mut().for_each(|streams| streams.push_recent(FilePosition { file, position: None }));
    }

    /// Notes an open of a file that was not opened before in this pass; true if it continues a stream. `entered`: the
    /// first file in this directory, and the reader's habit from the previous one.
    pub fn touched(&mut self, file: u64, listing: &DirectoryListing, entered: Option<(u64, Habit)>) -> bool {
        let orders = listing.orders();
        orders.iter().for_each(|order| self.of[order.index()].touched(file, listing));
        if let Some((first, habit)) = entered {
            let alike = orders.iter().filter(|order| orders.len() == 1 || habit.order.is_none_or(|of| of == **order));
            alike.for_each(|order| self.of[order.index()].begin_by_habit(first, habit, listing));
        }
        // Of equal orders, the natural one.
        let score = |order: &NameOrder| self.of[order.index()].score;
        let best = |best: NameOrder, order: &NameOrder| if score(order) > score(&best) { *order } else { best };
        self.preferred = orders.iter().fold(NameOrder::Natural, best);
        self.preferred().follows
    }

    fn preferred(&self) -> &Streams {
        &self.of[self.preferred.index()]
    }

    /// Returns how the reader will go through the next directory. It does so if the last open was in an observed order,
    /// or if the stream that follows from habit has reached the end of the directory.
    pub fn habit(&self, listing: &DirectoryListing) -> Option<Habit> {
        let streams = self.preferred();
        let last = streams.streams.last().filter(|_| streams.follows)?;
        let is_at_the_end = || listing.at(last.last.position? + last.stride, streams.order);
        let order = (listing.orders().len() > 1).then_some(streams.order);
        let (stride, window) = (last.stride, last.window);
        let habit = Habit { order, stride, steps: last.steps.min(HABIT_STEPS_MAX), window };
        (last.is_seen || is_at_the_end().is_none()).then_some(habit)
    }

    /// Returns what follows the last noted open, if it continued a stream. `accuracy`: the share of these suggestions
    /// that is used.
    pub fn next<'a>(
        &'a self,
        listing: &'a DirectoryListing,
        accuracy: f64,
    ) -> impl Iterator<Item = StreamPrediction> + 'a {
        let streams = self.preferred();
        let stream = streams.streams.last();
        let window = stream.map_or(0, |stream| stream.window.files(accuracy));
        (1..=window).filter_map(move |ahead| {
            let stream = stream?;
            let file = listing.at(stream.last.position? + ahead * stream.stride, streams.order)?;
            let probability = accuracy * goes_on(stream.steps, ahead);
            Some(StreamPrediction {
                file,
                stream: stream.number,
                ahead: ahead as u32,
                stride: stream.stride,
                probability,
            })
        })
    }

    /// Returns the chance that a file which is opened in no order continues a stream by coincidence.
    pub fn follows_by_chance(&self, listing: &DirectoryListing) -> f64 {
        let near = self.preferred().streams.len() * (2 * SLACK_STEPS as usize + 1);
        (near as f64 / listing.len().max(1) as f64).min(1.0)
    }

    /// A suggestion of a stream was used, or wasted.
    pub fn settled(&mut self, stream: u32, used: bool) {
        let mut streams = self.of.iter_mut().flat_map(|streams| &mut streams.streams);
        if let Some(stream) = streams.find(|known| known.number == stream) {
            stream.window.note(used);
        }
    }
}
