//! The stored form of a profile: columns of variable-length numbers, and sorted paths that share prefixes, compressed.
//! Designed for 10^4 profiles of 10^4 files, of which one is loaded when its job starts.

use std::io::Read;

use super::{FILES_MAX, PATH_BYTES_MAX, Parts, Profile, RUNS_MAX, RememberedFile, RememberedRun, all};
use crate::signature::{
    Invocation, PARAMETERS_MAX, Parameter, ParameterPlace, Parameters, Unit, WORD_BYTES_MAX, WORDS_MAX,
};

/// The first byte: the version of the layout.
const VERSION: u8 = 1;

/// The level of zstd: higher levels take longer and hardly reduce the size.
const COMPRESSION_LEVEL: i32 = 9;

/// The most bytes of an unpacked profile: paths of up to 128 MiB, and up to 80 bytes for the rest of each of 2^20
/// files.
const UNPACKED_BYTES_MAX: u64 = 256 << 20;

/// The reason why bytes are no profile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the profile is of version {0}, and this program knows version {VERSION}")]
    Version(u8),
    #[error("the profile cannot be unpacked: {0}")]
    Packed(String),
    #[error("the profile is cut off, or has bytes too many")]
    Length,
    #[error("the profile is damaged: {0}")]
    Damaged(&'static str),
}

impl Profile {
    /// Encodes the profile: about 8 bytes for a file with a regular name.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.invocation(&self.example);
        out.number(self.runs.len() as u64);
        for run in &self.runs {
            out.run(run);
        }
        out.files(&self.files);
        let mut packed = vec![VERSION];
        match zstd::bulk::compress(&out.0, COMPRESSION_LEVEL) {
            Ok(bytes) => packed.extend(bytes),
            // Compression fails only for lack of memory; the stored value is then empty and cannot be decoded.
            Err(_) => packed.clear(),
        }
        packed
    }

    /// Decodes the result of `encode`. Anything else is an error; memory is bounded by the limits of a profile.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let (&version, packed) = bytes.split_first().ok_or(DecodeError::Length)?;
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let failed = |error: std::io::Error| DecodeError::Packed(error.to_string());
        let mut unpacked = Vec::new();
        let decoder = zstd::stream::read::Decoder::with_buffer(packed).map_err(failed)?.single_frame();
        decoder.take(UNPACKED_BYTES_MAX).read_to_end(&mut unpacked).map_err(failed)?;
        let mut from = ByteReader(&unpacked);
        let example = from.invocation()?;
        let runs = (0..from.length(RUNS_MAX, "runs")?).map(|_| from.run()).collect::<Result<Vec<_>, _>>()?;
        let files = from.files(all(runs.len()))?;
        if from.0.is_empty() { Ok(Self { example, runs, files }) } else { Err(DecodeError::Length) }
    }
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    /// Writes seven bits to a byte, the lowest first; the top bit says that another byte follows (LEB128).
    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// Writes a number with the sign as its lowest bit, so that small negative numbers are short too.
    fn signed(&mut self, value: i64) {
        self.number((value << 1 ^ value >> 63) as u64);
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
    }

    fn invocation(&mut self, of: &Invocation) {
        self.number(of.user.into());
        self.number(of.account.is_some().into());
        self.text(of.account.as_deref().unwrap_or_default());
        self.number(of.words.len() as u64);
        of.words.iter().for_each(|word| self.text(word));
        self.number(of.array_index.is_some().into());
        self.number(of.array_index.unwrap_or_default());
    }

    fn run(&mut self, run: &RememberedRun) {
        self.number(run.ended_unix);
        self.number(run.parameters.len() as u64);
        for parameter in run.parameters.iter() {
            self.number(match parameter.place {
                ParameterPlace::ArrayIndex => 0,
                ParameterPlace::Argument(number) => u64::from(number) + 1,
            });
            self.number(parameter.number.into());
            self.number(parameter.unit as u64);
            self.signed(parameter.value);
            self.number(parameter.width.into());
        }
    }

    /// Writes each column by itself: similar values stand together, which compresses well.
    fn files(&mut self, files: &[RememberedFile]) {
        self.number(files.len() as u64);
        let mut before: &str = "";
        let mut suffixes = String::new();
        for file in files {
            let shared = shared(before, &file.path);
            self.number(shared as u64);
            self.number((file.path.len() - shared) as u64);
            suffixes.push_str(&file.path[shared..]);
            before = &file.path;
        }
        self.0.extend_from_slice(suffixes.as_bytes());
        files.iter().for_each(|file| self.0.push(file.used));
        files.iter().for_each(|file| self.number(file.size_bytes));
        let mut rank = 0;
        for file in files {
            self.signed(i64::from(file.rank) - rank);
            rank = i64::from(file.rank);
        }
        for file in files {
            let Some(parts) = &file.parts else {
                self.number(0);
                continue;
            };
            self.number(parts.part_bytes.max(1));
            parts.bits.iter().for_each(|word| self.number(*word));
        }
    }
}

/// Returns the length of the common prefix, in whole characters.
fn shared(one: &str, other: &str) -> usize {
    let mut length = one.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
    while !other.is_char_boundary(length) {
        length -= 1;
    }
    length
}

struct ByteReader<'a>(&'a [u8]);

impl<'a> ByteReader<'a> {
    fn number(&mut self) -> Result<u64, DecodeError> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first().ok_or(DecodeError::Length)?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(DecodeError::Damaged("a number is too long"))
    }

    fn signed(&mut self) -> Result<i64, DecodeError> {
        let value = self.number()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// Reads a number of elements: at most `limit`, each of which takes at least one byte.
    fn length(&mut self, limit: usize, what: &'static str) -> Result<usize, DecodeError> {
        match usize::try_from(self.number()?) {
            Ok(length) if length <= limit && length <= self.0.len() => Ok(length),
            Ok(length) if length <= limit => Err(DecodeError::Length),
            _ => Err(DecodeError::Damaged(what)),
        }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(DecodeError::Length)?;
        self.0 = rest;
        Ok(taken)
    }

    fn small<T: TryFrom<u64>>(&mut self, what: &'static str) -> Result<T, DecodeError> {
        T::try_from(self.number()?).map_err(|_| DecodeError::Damaged(what))
    }

    fn flag(&mut self) -> Result<bool, DecodeError> {
        Ok(self.number()? != 0)
    }

    fn text(&mut self) -> Result<String, DecodeError> {
        let length = self.length(WORD_BYTES_MAX, "a word is too long")?;
        let text = std::str::from_utf8(self.take(length)?);
        text.map(Into::into).map_err(|_| DecodeError::Damaged("a word is no text"))
    }

    fn invocation(&mut self) -> Result<Invocation, DecodeError> {
        let user = self.small("the user")?;
        let account = self.flag()?;
        let text = self.text()?;
        let count = self.length(WORDS_MAX, "too many words")?;
        let words = (0..count).map(|_| self.text()).collect::<Result<_, _>>()?;
        let array = self.flag()?;
        let index = self.number()?;
        Ok(Invocation { user, account: account.then_some(text), words, array_index: array.then_some(index) })
    }

    fn run(&mut self) -> Result<RememberedRun, DecodeError> {
        let ended_unix = self.number()?;
        let count = self.length(PARAMETERS_MAX, "too many parameters")?;
        let parameters = (0..count).map(|_| self.parameter()).collect::<Result<_, _>>()?;
        Ok(RememberedRun { ended_unix, parameters: Parameters::from_vec(parameters) })
    }

    fn parameter(&mut self) -> Result<Parameter, DecodeError> {
        let place = match self.number()? {
            0 => ParameterPlace::ArrayIndex,
            number => ParameterPlace::Argument(
                u16::try_from(number - 1).map_err(|_| DecodeError::Damaged("an argument's number"))?,
            ),
        };
        let number = self.small("a number's place")?;
        let units = [Unit::Count, Unit::Month, Unit::Day, Unit::Hour, Unit::Minute, Unit::Second];
        let unit = *units.get(self.small::<usize>("a unit")?).ok_or(DecodeError::Damaged("a unit"))?;
        Ok(Parameter { place, number, unit, value: self.signed()?, width: self.small("a width")? })
    }

    fn files(&mut self, runs: u8) -> Result<Vec<RememberedFile>, DecodeError> {
        let count = self.length(FILES_MAX, "too many files")?;
        let mut lengths = Vec::with_capacity(count);
        for _ in 0..count {
            lengths.push((self.length(PATH_BYTES_MAX, "a path")?, self.length(PATH_BYTES_MAX, "a path")?));
        }
        let mut files: Vec<RememberedFile> = Vec::with_capacity(count);
        for (shared, own) in lengths {
            let path = {
                let before = files.last().map_or("", |file| &file.path);
                let shared = before.get(..shared).ok_or(DecodeError::Damaged("a path's beginning"))?;
                let own = self.take(own)?;
                let own = std::str::from_utf8(own).map_err(|_| DecodeError::Damaged("a path is no text"))?;
                let path: Box<str> = [shared, own].concat().into();
                if path.is_empty() || path.len() > PATH_BYTES_MAX || *path <= *before {
                    return Err(DecodeError::Damaged("the order of the paths"));
                }
                path
            };
            files.push(RememberedFile { path, size_bytes: 0, rank: 0, used: 0, parts: None });
        }
        let used = self.take(count)?;
        for (file, &used) in files.iter_mut().zip(used) {
            if used == 0 || used & !runs != 0 {
                return Err(DecodeError::Damaged("the runs of a file"));
            }
            file.used = used;
        }
        for file in &mut files {
            file.size_bytes = self.number()?;
        }
        let mut rank = 0_i64;
        for file in &mut files {
            rank = rank.checked_add(self.signed()?).ok_or(DecodeError::Damaged("a rank"))?;
            file.rank = u32::try_from(rank).map_err(|_| DecodeError::Damaged("a rank"))?;
        }
        for file in &mut files {
            let part_bytes = self.number()?;
            if part_bytes > 0 {
                let mut bits = [0; 4];
                for word in &mut bits {
                    *word = self.number()?;
                }
                file.parts = Some(Box::new(Parts { part_bytes, bits }));
            }
        }
        Ok(files)
    }
}
