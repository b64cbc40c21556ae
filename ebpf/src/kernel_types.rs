//! The offsets of fields in the running kernel: read from its BTF (`Documentation/bpf/btf.rst`).

use std::collections::{HashMap, HashSet};

use crate::ObserverError;

const MAGIC: u16 = 0xeb9f;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_TYPEDEF: u32 = 8;
/// The prefix of the type names of tracepoint handlers.
const TRACEPOINT: &[u8] = b"btf_trace_";
/// Types that only name or qualify another: typedef, volatile, const, restrict, type tag.
const KINDS_SEEN_THROUGH: [u32; 5] = [8, 9, 10, 11, 18];
/// The depth to which nested structures are searched.
const DEPTH: u32 = 8;

/// The types of a kernel.
pub struct KernelTypes {
    data: Vec<u8>,
    strings: usize,
    /// The start of each type; type 1 is the first.
    types: Vec<usize>,
    structs: HashMap<Vec<u8>, u32>,
    tracepoints: HashSet<Vec<u8>>,
}

impl KernelTypes {
    /// The types of the running kernel.
    ///
    /// # Errors
    /// The kernel has no BTF, or it cannot be parsed.
    pub fn running() -> Result<Self, ObserverError> {
        const PATH: &str = "/sys/kernel/btf/vmlinux";
        let data = std::fs::read(PATH).map_err(|e| ObserverError::Kernel(format!("{PATH}: {e}")))?;
        Self::parse(data)
    }

    fn parse(data: Vec<u8>) -> Result<Self, ObserverError> {
        let broken = || ObserverError::Kernel("the kernel's BTF cannot be read".into());
        let word = |at: usize| -> Option<u32> { Some(u32::from_ne_bytes(data.get(at..at + 4)?.try_into().ok()?)) };
        let magic = data.get(..2).and_then(|b| b.try_into().ok()).map(u16::from_ne_bytes);
        if magic != Some(MAGIC) {
            return Err(broken());
        }
        let header = |field: usize| word(field).map(|value| value as usize).ok_or_else(broken);
        let len = header(4)?;
        let (type_off, type_len, str_off) = (len + header(8)?, header(12)?, len + header(16)?);
        let (mut types, mut structs, mut tracepoints) = (Vec::new(), HashMap::new(), HashSet::new());
        let mut at = type_off;
        while at < type_off + type_len {
            let info = word(at + 4).ok_or_else(broken)?;
            let (kind, members) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
            types.push(at);
            if kind == KIND_STRUCT || kind == KIND_TYPEDEF {
                let name = name_at(&data, str_off + word(at).ok_or_else(broken)? as usize).ok_or_else(broken)?;
                if kind == KIND_STRUCT {
                    structs.entry(name.to_vec()).or_insert(types.len() as u32);
                } else if let Some(name) = name.strip_prefix(TRACEPOINT) {
                    tracepoints.insert(name.to_vec());
                }
            }
            at += 12
                + match kind {
                    1 | 14 | 17 => 4,
                    3 => 12,
                    KIND_STRUCT | KIND_UNION | 15 | 19 => 12 * members,
                    6 | 13 => 8 * members,
                    2 | 7..=12 | 16 | 18 => 0,
                    _ => return Err(broken()),
                };
        }
        Ok(Self { strings: str_off, data, types, structs, tracepoints })
    }

    /// Whether the kernel has a structure of this name.
    pub fn has(&self, structure: &str) -> bool {
        self.structs.contains_key(structure.as_bytes())
    }

    /// The value of an enumerator, in any enumeration.
    ///
    /// # Errors
    /// The kernel has no enumerator of this name.
    pub fn enumerator(&self, name: &str) -> Result<u32, ObserverError> {
        for &at in &self.types {
            let Some(info) = self.word(at + 4).filter(|info| info >> 24 & 0x1f == KIND_ENUM) else { continue };
            for member in 0..(info & 0xffff) as usize {
                let at = at + 12 + 8 * member;
                let (Some(named), Some(value)) = (self.word(at), self.word(at + 4)) else { continue };
                if name_at(&self.data, self.strings + named as usize) == Some(name.as_bytes()) {
                    return Ok(value);
                }
            }
        }
        Err(ObserverError::Kernel(format!("this kernel has no {name}")))
    }

    /// The offset of `path` in `structure`, in bytes. `path` descends into structures with `.`, and into unnamed ones
    /// without.
    ///
    /// # Errors
    /// The kernel has no such field.
    pub fn offset(&self, structure: &str, path: &str) -> Result<u32, ObserverError> {
        let missing = || ObserverError::Kernel(format!("this kernel has no {structure}.{path}"));
        let mut id = *self.structs.get(structure.as_bytes()).ok_or_else(missing)?;
        let mut bits = 0;
        for name in path.split('.') {
            let (offset, member) = self.member(id, name.as_bytes(), DEPTH).ok_or_else(missing)?;
            bits += offset;
            id = member;
        }
        if bits % 8 == 0 { Ok(bits / 8) } else { Err(missing()) }
    }

    /// Whether typed programs can be attached to a tracepoint.
    pub fn has_tracepoint(&self, name: &str) -> bool {
        self.tracepoints.contains(name.as_bytes())
    }

    fn word(&self, at: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(self.data.get(at..at + 4)?.try_into().ok()?))
    }

    /// The offset in bits, and the type, of a member.
    fn member(&self, id: u32, name: &[u8], depth: u32) -> Option<(u32, u32)> {
        let depth = depth.checked_sub(1)?;
        let at = *self.types.get((id as usize).checked_sub(1)?)?;
        let info = self.word(at + 4)?;
        let kind = info >> 24 & 0x1f;
        if KINDS_SEEN_THROUGH.contains(&kind) {
            return self.member(self.word(at + 8)?, name, depth);
        }
        if kind != KIND_STRUCT && kind != KIND_UNION {
            return None;
        }
        let has_bitfields = info >> 31 == 1;
        for member in 0..(info & 0xffff) as usize {
            let at = at + 12 + 12 * member;
            let (member_name, inner, offset) = (self.word(at)?, self.word(at + 4)?, self.word(at + 8)?);
            let offset = if has_bitfields { offset & 0x00ff_ffff } else { offset };
            let member_name = name_at(&self.data, self.strings + member_name as usize)?;
            if member_name == name {
                return Some((offset, inner));
            }
            if member_name.is_empty()
                && let Some((more, found)) = self.member(inner, name, depth)
            {
                return Some((offset + more, found));
            }
        }
        None
    }
}

fn name_at(data: &[u8], at: usize) -> Option<&[u8]> {
    let rest = data.get(at..)?;
    rest.get(..rest.iter().position(|&b| b == 0)?)
}
