//! The expectations of the predictors after an open, before they are combined.

use super::accuracy::Accuracy;
use super::asked::AskedFor;
use super::association::{self, Association};
use super::listing::DirectoryListing;
use super::predictor::{Predictor, Why};
use super::reader::{Reader, Trust};
use super::track::Track;
use super::{SUGGESTIONS_MAX, Suggestion, sequence};
use crate::plan::PROBABILITY_MIN;

/// A sibling counts as wasted if it is not used within the opens that it takes to open this many times the files of the
/// directory.
const SIBLINGS_AWAITED: usize = 2;

/// A suggestion before the selection.
#[derive(Debug)]
pub(super) struct SuggestionCandidate {
    pub suggestion: Suggestion,
    /// The stream, for [`Predictor::Sequence`].
    pub stream: u32,
    /// Opens of its reader after which it was wrong.
    pub awaited_touches: u64,
}

/// The state that the predictors use.
pub(super) struct Sources<'a> {
    pub reader: &'a mut Reader,
    pub track: &'a mut Track,
    pub association: &'a mut Association,
    pub asked: &'a AskedFor,
    /// Of each predictor, over all readers.
    pub accuracy: &'a [Accuracy; 5],
}

impl Sources<'_> {
    /// Returns what is expected after the open of `file`, in any order; a file may be expected for two reasons.
    /// `follows`: the open continued a sequence in the directory.
    pub fn candidates(
        mut self,
        file: u64,
        listing: Option<&DirectoryListing>,
        follows: bool,
    ) -> Vec<SuggestionCandidate> {
        let mut out = Vec::new();
        if let Some(listing) = listing.filter(|_| follows) {
            self.sequence(listing, &mut out);
        }
        self.epoch(&mut out);
        self.association(file, &mut out);
        self.set(&mut out);
        if let Some(listing) = listing.filter(|_| !self.reader.epochs.is_epoch()) {
            self.siblings(listing, &mut out);
        }
        out
    }

    fn trust(&self, predictor: Predictor) -> Trust {
        let of_mount = self.accuracy[predictor.index()].share(predictor.assumed_accuracy());
        self.reader.trust(predictor, of_mount)
    }

    fn is_free(&self, file: u64) -> bool {
        !self.asked.contains(file) && !self.reader.epochs.is_touched(file)
    }

    fn sequence(&self, listing: &DirectoryListing, out: &mut Vec<SuggestionCandidate>) {
        let trust = self.trust(Predictor::Sequence);
        let next = self.track.sequence.next(listing, trust.accuracy);
        let next = next.filter(|next| self.is_free(next.file) && !self.track.is_touched(next.file));
        let candidates = next.map(|next| {
            let why = Why::Sequence { steps: next.ahead, stride: next.stride };
            let suggestion = Suggestion { file: next.file, probability: next.probability, why };
            SuggestionCandidate { suggestion, stream: next.stream, awaited_touches: sequence::AWAITED_TOUCHES }
        });
        take(trust, candidates, out);
    }

    fn epoch(&self, out: &mut Vec<SuggestionCandidate>) {
        let trust = self.trust(Predictor::Epoch);
        let next = self.reader.epochs.next(trust.accuracy).into_iter().filter(|next| self.is_free(next.file));
        let candidates = next.map(|next| {
            let why = Why::Epoch { places: next.ahead };
            let suggestion = Suggestion { file: next.file, probability: next.probability, why };
            SuggestionCandidate { suggestion, stream: 0, awaited_touches: sequence::AWAITED_TOUCHES }
        });
        take(trust, candidates, out);
    }

    fn association(&mut self, file: u64, out: &mut Vec<SuggestionCandidate>) {
        let trust = self.trust(Predictor::Association);
        let followers = self.association.followers(file).to_vec();
        let candidates = followers.into_iter().filter(|follower| {
            // Excludes recent files: associated files are opened together again and again in one epoch.
            !self.asked.contains(follower.file) && !self.reader.is_recent(follower.file)
        });
        let candidates = candidates.map(|follower| {
            let why = Why::Association { times: follower.times };
            let probability = follower.probability * trust.accuracy;
            let suggestion = Suggestion { file: follower.file, probability, why };
            SuggestionCandidate { suggestion, stream: 0, awaited_touches: association::AWAITED_TOUCHES }
        });
        take(trust, candidates, out);
    }

    fn set(&mut self, out: &mut Vec<SuggestionCandidate>) {
        let trust = self.trust(Predictor::Set);
        let asked = self.asked;
        let free = |file: u64| !asked.contains(file);
        let rest = self.reader.epochs.rest(trust.accuracy, trust.most.min(SUGGESTIONS_MAX), free);
        let awaited_touches = self.reader.epochs.awaited_touches();
        let candidates = rest.into_iter().map(|file| {
            let suggestion = Suggestion { file, probability: trust.accuracy, why: Why::Set };
            SuggestionCandidate { suggestion, stream: 0, awaited_touches }
        });
        take(trust, candidates, out);
    }

    fn siblings(&mut self, listing: &DirectoryListing, out: &mut Vec<SuggestionCandidate>) {
        let trust = self.trust(Predictor::Siblings);
        let Some(others) = self.track.others(listing, trust.accuracy) else { return };
        if others.probability < PROBABILITY_MIN && !trust.probes {
            return;
        }
        let (asked, epochs) = (self.asked, &self.reader.epochs);
        let free = |file: u64| !asked.contains(file) && !epochs.is_touched(file);
        let wanted = others.wanted.min(trust.most).min(SUGGESTIONS_MAX);
        let untouched = self.track.untouched(listing, wanted, free);
        let awaited_touches = self.track.opens_for(SIBLINGS_AWAITED * listing.len(), self.reader.touches());
        let candidates = untouched.into_iter().map(|file| {
            let why = Why::Siblings { opened: others.opened, of: others.of };
            let suggestion = Suggestion { file, probability: others.probability, why };
            SuggestionCandidate { suggestion, stream: 0, awaited_touches }
        });
        take(trust, candidates, out);
    }
}

/// Takes the candidates that are probable enough; from a predictor that probes, any candidate.
fn take(trust: Trust, candidates: impl Iterator<Item = SuggestionCandidate>, out: &mut Vec<SuggestionCandidate>) {
    let probable =
        |candidate: &SuggestionCandidate| trust.probes || candidate.suggestion.probability >= PROBABILITY_MIN;
    out.extend(candidates.filter(probable).take(trust.most));
}
