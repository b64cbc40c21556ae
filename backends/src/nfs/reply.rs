//! Checks the structure of answers before the library parses them.
//!
//! The library allocates memory for each length that it reads, before it looks for the bytes: four bytes of an answer
//! could make it request 16 GiB, and a process whose allocation fails aborts. So every length in an answer is
//! compared with the rest of the answer. The lengths of file handles are also checked, because handles are kept.

use nfs3_client::nfs3_types::mount;
use nfs3_client::nfs3_types::nfs3::{self, NFS3_FHSIZE};

/// The program and procedure of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RpcProcedure {
    program: u32,
    procedure: u32,
}

impl RpcProcedure {
    /// Parses a whole request, including the length of the record in front.
    pub(super) fn of(request: &[u8]) -> Self {
        let word = |at: usize| request.get(at..at + 4).map_or(0, word_of);
        Self { program: word(16), procedure: word(24) }
    }

    /// The structure after the status of a call that was carried out; empty if it contains no lengths.
    fn shape(self) -> &'static [XdrItem] {
        use XdrItem::{Bytes, Handle, Numbers, Optional, Repeated, Words};
        const ATTRIBUTES: XdrItem = Optional(&[Words(21)]);
        const MADE: &[XdrItem] = &[Optional(&[Handle])];
        match (self.program, self.procedure) {
            (nfs3::PROGRAM, 3) => &[Handle],
            (nfs3::PROGRAM, 5) => &[ATTRIBUTES, Bytes],
            (nfs3::PROGRAM, 6) => &[ATTRIBUTES, Words(2), Bytes],
            (nfs3::PROGRAM, 8..=11) => MADE,
            (nfs3::PROGRAM, 16) => &[ATTRIBUTES, Words(2), Repeated(&[Words(2), Bytes, Words(2)])],
            (nfs3::PROGRAM, 17) => {
                &[ATTRIBUTES, Words(2), Repeated(&[Words(2), Bytes, Words(2), ATTRIBUTES, Optional(&[Bytes])])]
            }
            (mount::PROGRAM, 1) => &[Handle, Numbers],
            _ => &[],
        }
    }
}

/// One item in an answer.
#[derive(Debug, Clone, Copy)]
enum XdrItem {
    /// So many four-byte numbers.
    Words(usize),
    /// A length, and so many bytes.
    Bytes,
    /// Like `Bytes`, for a file handle.
    Handle,
    /// A length, and so many four-byte numbers.
    Numbers,
    /// 1 and the items, or 0.
    Optional(&'static [XdrItem]),
    /// 1 and the items, any number of times, and then 0.
    Repeated(&'static [XdrItem]),
}

/// Checks that the lengths in an answer fit the answer. The library checks the rest.
///
/// # Errors
/// A description of the mistake.
pub(super) fn check(asked: RpcProcedure, answer: &[u8]) -> Result<(), String> {
    let mut rest = answer;
    let _number = take_word(&mut rest)?;
    if take_word(&mut rest)? != 1 {
        return Err("it is no answer".to_owned());
    }
    let accepted = take_word(&mut rest)? == 0;
    if !accepted {
        return Ok(());
    }
    look_at(&[XdrItem::Words(1), XdrItem::Bytes], &mut rest)?;
    let carried_out = take_word(&mut rest)? == 0;
    if !carried_out || rest.is_empty() {
        return Ok(());
    }
    // A list of exports has no status in front.
    if (asked.program, asked.procedure) == (mount::PROGRAM, 5) {
        return look_at(&[XdrItem::Repeated(&[XdrItem::Bytes, XdrItem::Repeated(&[XdrItem::Bytes])])], &mut rest);
    }
    let shape = asked.shape();
    if shape.is_empty() || take_word(&mut rest)? != 0 {
        return Ok(());
    }
    look_at(shape, &mut rest)
}

fn look_at(parts: &[XdrItem], rest: &mut &[u8]) -> Result<(), String> {
    for part in parts {
        match *part {
            XdrItem::Words(count) => drop(take(rest, 4 * count)?),
            XdrItem::Bytes => drop(take_bytes(rest)?),
            XdrItem::Handle => {
                let length = take_bytes(rest)?;
                if !(1..=NFS3_FHSIZE).contains(&length) {
                    return Err(format!("a file handle has 1 to {NFS3_FHSIZE} bytes, not {length}"));
                }
            }
            XdrItem::Numbers => {
                let count = take_word(rest)? as usize;
                take(rest, count.saturating_mul(4))?;
            }
            XdrItem::Optional(parts) => {
                if is_more(rest)? {
                    look_at(parts, rest)?;
                }
            }
            XdrItem::Repeated(parts) => {
                while is_more(rest)? {
                    look_at(parts, rest)?;
                }
            }
        }
    }
    Ok(())
}

fn is_more(rest: &mut &[u8]) -> Result<bool, String> {
    match take_word(rest)? {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(format!("{other} instead of 0 or 1")),
    }
}

/// Takes a length and the bytes, which are padded to a multiple of four. Returns the length.
fn take_bytes(rest: &mut &[u8]) -> Result<usize, String> {
    let length = take_word(rest)? as usize;
    take(rest, length.next_multiple_of(4))?;
    Ok(length)
}

fn take_word(rest: &mut &[u8]) -> Result<u32, String> {
    take(rest, 4).map(word_of)
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], String> {
    let Some((taken, left)) = rest.split_at_checked(length) else {
        return Err(format!("{length} bytes are to follow, and {} do", rest.len()));
    };
    *rest = left;
    Ok(taken)
}

/// A number from four bytes.
fn word_of(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |word, byte| (word << 8) | u32::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOKUP: RpcProcedure = RpcProcedure { program: nfs3::PROGRAM, procedure: 3 };
    const READDIR: RpcProcedure = RpcProcedure { program: nfs3::PROGRAM, procedure: 16 };
    const MNT: RpcProcedure = RpcProcedure { program: mount::PROGRAM, procedure: 1 };
    const EXPORT: RpcProcedure = RpcProcedure { program: mount::PROGRAM, procedure: 5 };
    /// The head of an answer to a call that was accepted and carried out.
    const HEAD: [u32; 6] = [7, 1, 0, 0, 0, 0];

    fn answer(words: &[u32]) -> Vec<u8> {
        HEAD.iter().chain(words).flat_map(|word| word.to_be_bytes()).collect()
    }

    #[test]
    fn lengths_of_what_is_there_are_sound() {
        assert_eq!(check(LOOKUP, &answer(&[0, 5, 0, 0, 0, 0])), Ok(()));
        assert_eq!(check(LOOKUP, &answer(&[2, 0])), Ok(()), "a status of failure has no handle");
        assert_eq!(check(READDIR, &answer(&[0, 0, 1, 2, 1, 0, 9, 3, 0, 0, 1, 0, 1])), Ok(()));
        assert_eq!(check(MNT, &answer(&[0, 4, 1, 1, 1])), Ok(()));
        assert_eq!(check(EXPORT, &answer(&[1, 4, 0, 1, 3, 0, 0, 0])), Ok(()));
        assert_eq!(check(EXPORT, &answer(&[0])), Ok(()));
        assert_eq!(check(RpcProcedure { program: nfs3::PROGRAM, procedure: 1 }, &answer(&[0, u32::MAX])), Ok(()));
    }

    #[test]
    fn lengths_beyond_the_end_are_found() {
        let far = u32::MAX;
        for (asked, words) in [
            (LOOKUP, &[0, far, 0, 0][..]),
            (LOOKUP, &[0, 68, 0, 0]),
            (READDIR, &[0, 0, 1, 2, 1, 0, 9, far, 0, 0]),
            (READDIR, &[0, 0, 1, 2, 2]),
            (MNT, &[0, 4, 1, far]),
            (EXPORT, &[1, far]),
            (EXPORT, &[1, 4, 0, 1, far]),
        ] {
            assert!(check(asked, &answer(words)).is_err(), "{asked:?} {words:?}");
        }
        let mut verifier = answer(&[]);
        verifier[16] = 0xff;
        assert!(check(LOOKUP, &verifier).is_err());
        let mut call = answer(&[]);
        call[7] = 0;
        assert!(check(LOOKUP, &call).is_err());
    }

    #[test]
    fn handles_have_the_length_of_handles() {
        for (length, sound) in [(0_u32, false), (1, true), (64, true), (65, false)] {
            let words = [&[0, length][..], &vec![0; length.div_ceil(4) as usize]].concat();
            assert_eq!(check(LOOKUP, &answer(&words)).is_ok(), sound, "{length}");
        }
    }
}
