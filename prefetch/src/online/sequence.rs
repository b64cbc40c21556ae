//! A reader goes through a directory in the order of its names: forward, backward, or by every so many-th of them.
//!
//! A job reads with several processes, so there may be several such streams in one directory. Each is told from the
//! others by where it stands; that one file is left out, or opened a little before or after its turn, as a pool of
//! workers does, does not end it. Where names have more than one order, streams are looked for in each of them, and those
//! of the order count that accounts for more of the last opens. Who has gone through a directory in an order and begins
//! the next one where that order begins goes through that one in the same way.

use std::collections::VecDeque;

use super::listing::{Listing, Order};

/// Streams of one reader in one directory; of more, those that moved last are known.
const STREAMS_MAX: usize = 8;

/// The last opens, in which a new stream is looked for: four of each of eight streams.
const RECENT_MAX: usize = 32;

/// Positions from one file to the next of a stream, at most: a job of a thousand ranks of which each takes every
/// thousandth file is a large one.
const STRIDE_MAX: i64 = 1024;

/// Steps by which a file may be out of turn: loaders have up to eight workers for one order (AMP and the kernel's
/// readahead look as far for a request that was overtaken).
const SLACK_STEPS: i64 = 8;

/// The last opens by which an order is preferred to another, about so many.
const ORDER_OPENS: f64 = 32.0;

/// Equal steps that make a stream.
const STEPS_MIN: u64 = 3;

/// Steps of one directory that count in the next, at most: what a reader does in one is no promise for all that it
/// will open.
const HABIT_STEPS_MAX: u64 = 16;

/// How much of the opens an order is taken to account for that follows from habit alone.
const HABIT_SCORE: f64 = 0.5;

/// Suggestions ahead of a stream: at first, and at most. The kernel's readahead doubles in the same way; 64 files of one
/// stream keep any pool busy.
const WINDOW_FIRST: u32 = 2;
const WINDOW_MAX: u32 = 64;

/// Suggestions of all streams of a reader together that may be outstanding.
pub(super) const OUTSTANDING_MAX: usize = STREAMS_MAX * WINDOW_MAX as usize;

/// Opens by its reader after which a suggestion was wrong: all streams at their largest window, each with its turn.
pub(super) const AWAITED_TOUCHES: u64 = OUTSTANDING_MAX as u64;

/// How far ahead to suggest. Doubles when as many suggestions were used, halves when one was wasted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    size: u32,
    /// Since the size has changed.
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

    /// The size, for a predictor of whose suggestions the share `accuracy` is used.
    pub fn files(&self, accuracy: f64) -> i64 {
        (f64::from(self.size) * accuracy).ceil() as i64
    }
}

/// That a pattern which held for `steps` steps holds for `ahead` more (Laplace's rule of succession).
pub(super) fn goes_on(steps: u64, ahead: i64) -> f64 {
    let steps = steps as f64 + 1.0;
    steps / (steps + ahead as f64)
}

/// A file and where it stands.
#[derive(Debug, Clone, Copy)]
struct Place {
    file: u64,
    /// `None` until there is a listing with it.
    position: Option<i64>,
}

#[derive(Debug)]
struct Stream {
    number: u32,
    /// The farthest file that it has reached.
    last: Place,
    stride: i64,
    steps: u64,
    window: Window,
    /// Not by habit alone.
    is_seen: bool,
}

/// How a reader goes through directories.
#[derive(Debug, Clone, Copy)]
pub(super) struct Habit {
    /// `None` where that directory has one order only.
    order: Option<Order>,
    stride: i64,
    steps: u64,
    window: Window,
}

/// What a stream expects.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Next {
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
    order: Order,
    /// The one that moved last stands last.
    streams: Vec<Stream>,
    recent: VecDeque<Place>,
    made: u32,
    version: u64,
    /// Whether the last open continued one.
    follows: bool,
    /// How many of the last opens did.
    score: f64,
}

impl Streams {
    fn of(order: Order) -> Self {
        Self { order, streams: Vec::new(), recent: VecDeque::new(), made: 0, version: 0, follows: false, score: 0.0 }
    }

    /// Notes an open of a file that was not opened in this pass before.
    fn touched(&mut self, file: u64, listing: &Listing) {
        self.refresh(listing);
        let place = Place { file, position: listing.place(file, self.order) };
        self.follows = self.follow(place) || self.begin(place);
        self.score += (f64::from(u8::from(self.follows)) - self.score) / ORDER_OPENS;
        self.push_recent(place);
    }

    fn push_recent(&mut self, place: Place) {
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(place);
    }

    /// In another listing, files stand in other positions.
    fn refresh(&mut self, listing: &Listing) {
        if self.version != listing.version {
            self.version = listing.version;
            self.recent.iter_mut().for_each(|place| place.position = listing.place(place.file, self.order));
            self.streams
                .iter_mut()
                .for_each(|stream| stream.last.position = listing.place(stream.last.file, self.order));
        }
    }

    /// Moves the stream on that expects this file, or one near it.
    fn follow(&mut self, place: Place) -> bool {
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

    /// Begins a stream if three files before this one lead to it in equal steps. Of several such steps it is the
    /// smallest: among streams that are side by side there are many that are none.
    fn begin(&mut self, place: Place) -> bool {
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

    /// A number for a stream that no other one has, of any order.
    fn number(&mut self) -> u32 {
        self.made = self.made.wrapping_add(1);
        self.made.wrapping_mul(Order::ALL.len() as u32).wrapping_add(self.order.index() as u32)
    }

    /// Begins the first stream in a directory that is read as the one before, if it was entered with the file `first`
    /// where such a stream begins, and the last open is on its way.
    fn begin_by_habit(&mut self, first: u64, habit: Habit, listing: &Listing) {
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
    of: [Streams; Order::ALL.len()],
    /// The order that accounts for most.
    preferred: Order,
}

impl Default for Sequence {
    fn default() -> Self {
        Self { of: Order::ALL.map(Streams::of), preferred: Order::Natural }
    }
}

impl Sequence {
    /// Notes an open while there is no listing.
    pub fn touched_unlisted(&mut self, file: u64) {
        self.of.iter_mut().for_each(|streams| streams.push_recent(Place { file, position: None }));
    }

    /// Notes an open of a file that was not opened in this pass before; true if it continues a stream. `entered`: with
    /// which file the reader began here, and how it went through the directory before.
    pub fn touched(&mut self, file: u64, listing: &Listing, entered: Option<(u64, Habit)>) -> bool {
        let orders = listing.orders();
        orders.iter().for_each(|order| self.of[order.index()].touched(file, listing));
        if let Some((first, habit)) = entered {
            let alike = orders.iter().filter(|order| orders.len() == 1 || habit.order.is_none_or(|of| of == **order));
            alike.for_each(|order| self.of[order.index()].begin_by_habit(first, habit, listing));
        }
        // Of two that are equal, the natural one.
        let score = |order: &Order| self.of[order.index()].score;
        let best = |best: Order, order: &Order| if score(order) > score(&best) { *order } else { best };
        self.preferred = orders.iter().fold(Order::Natural, best);
        self.preferred().follows
    }

    fn preferred(&self) -> &Streams {
        &self.of[self.preferred.index()]
    }

    /// How the reader will go through the next directory, if the last open here was in an order that was seen, or if
    /// habit leaves nothing here to be seen.
    pub fn habit(&self, listing: &Listing) -> Option<Habit> {
        let streams = self.preferred();
        let last = streams.streams.last().filter(|_| streams.follows)?;
        let is_at_the_end = || listing.at(last.last.position? + last.stride, streams.order);
        let order = (listing.orders().len() > 1).then_some(streams.order);
        let (stride, window) = (last.stride, last.window);
        let habit = Habit { order, stride, steps: last.steps.min(HABIT_STEPS_MAX), window };
        (last.is_seen || is_at_the_end().is_none()).then_some(habit)
    }

    /// What comes after the open that was noted last, if it continued a stream. `accuracy`: what share of these
    /// suggestions is used.
    pub fn next<'a>(&'a self, listing: &'a Listing, accuracy: f64) -> impl Iterator<Item = Next> + 'a {
        let streams = self.preferred();
        let stream = streams.streams.last();
        let window = stream.map_or(0, |stream| stream.window.files(accuracy));
        (1..=window).filter_map(move |ahead| {
            let stream = stream?;
            let file = listing.at(stream.last.position? + ahead * stream.stride, streams.order)?;
            let probability = accuracy * goes_on(stream.steps, ahead);
            Some(Next { file, stream: stream.number, ahead: ahead as u32, stride: stream.stride, probability })
        })
    }

    /// The chance that a file which is opened in no order continues a stream, among so many files.
    pub fn follows_by_chance(&self, listing: &Listing) -> f64 {
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
