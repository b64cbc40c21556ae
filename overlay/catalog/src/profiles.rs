//! Profiles of jobs: a head that describes the profile, and the profile itself, which is read only when it is needed.

use forebay_backends::Result;
use forebay_prefetch::profile::Profile;
use forebay_prefetch::signature::Signature;
use serde::{Deserialize, Serialize};

use super::{Catalog, cf, corrupt, failed};

/// The most profiles that are kept: the most recently seen ones.
const PROFILES_MAX: usize = 10_000;
/// The most bytes of these profiles.
const PROFILES_BYTES: u64 = 1 << 30;

/// The description of a profile. It is JSON, so that other versions of this program can read it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfileHead {
    pub signature: Signature,
    /// Runs that were folded into the profile, including those that it has forgotten.
    pub runs: u64,
    pub files: u64,
    /// Size of the stored profile.
    pub encoded_bytes: u64,
    /// Seconds since 1970.
    pub last_seen_unix: u64,
    /// Bytes that were staged ahead for its runs, and how many of them were used: the last run weighs most.
    pub staged_bytes: f64,
    pub used_bytes: f64,
}

/// Returns a profile, or its head. One that only another version can read counts as absent: the next run replaces it.
fn readable<T, E: std::fmt::Display>(key: &[u8], read: std::result::Result<T, E>) -> Option<T> {
    if let Err(error) = &read {
        tracing::warn!(%error, "the profile {} is not understood", key.escape_ascii());
    }
    read.ok()
}

fn key(kind: u8, signature: &Signature) -> Vec<u8> {
    [[kind].as_slice(), signature.as_str().as_bytes()].concat()
}

impl Catalog {
    /// The heads of all profiles, in the order of their signatures.
    pub fn profiles(&self, mut each: impl FnMut(ProfileHead) -> Result<bool>) -> Result<()> {
        self.scan(cf::PROFILES, b"h", |key, value| {
            if key.first() != Some(&b'h') {
                return Ok(false);
            }
            readable(key, serde_json::from_slice(value)).map_or(Ok(true), &mut each)
        })
    }

    pub fn profile_head(&self, signature: &Signature) -> Result<Option<ProfileHead>> {
        let key = key(b'h', signature);
        Ok(self.raw(&key)?.and_then(|value| readable(&key, serde_json::from_slice(&value))))
    }

    pub fn profile(&self, signature: &Signature) -> Result<Option<Profile>> {
        let key = key(b'p', signature);
        Ok(self.raw(&key)?.and_then(|value| readable(&key, Profile::decode(&value))))
    }

    fn raw(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.db.get_cf(self.family(cf::PROFILES)?, key).map_err(|e| failed("read the catalog", e))
    }

    /// Stores a profile, and deletes the least recently seen profiles that exceed the limits.
    pub fn put_profile(&self, head: &mut ProfileHead, profile: &Profile) -> Result<()> {
        let encoded = profile.encode();
        head.encoded_bytes = encoded.len() as u64;
        let text = serde_json::to_vec(head).map_err(|e| corrupt(cf::PROFILES).with_source(e))?;
        let mut batch = self.batch();
        batch.put_raw(cf::PROFILES, &key(b'p', &head.signature), &encoded);
        batch.put_raw(cf::PROFILES, &key(b'h', &head.signature), &text);
        self.write(batch)?;
        self.prune_profiles()
    }

    pub fn delete_profile(&self, signature: &Signature) -> Result<()> {
        let mut batch = self.batch();
        batch.delete_raw(cf::PROFILES, &key(b'p', signature));
        batch.delete_raw(cf::PROFILES, &key(b'h', signature));
        self.write(batch)
    }

    fn prune_profiles(&self) -> Result<()> {
        let mut kept = Vec::new();
        self.profiles(|head| {
            kept.push((head.last_seen_unix, head.encoded_bytes, head.signature));
            Ok(true)
        })?;
        kept.sort_unstable_by_key(|(seen, ..)| std::cmp::Reverse(*seen));
        let mut bytes = 0;
        for (at, (_, encoded_bytes, signature)) in kept.into_iter().enumerate() {
            bytes += encoded_bytes;
            if at > 0 && (at >= PROFILES_MAX || bytes > PROFILES_BYTES) {
                self.delete_profile(&signature)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Durability;
    use super::*;
    use forebay_prefetch::signature::Invocation;

    #[test]
    fn a_record_that_cannot_be_read_hides_no_other_profile_and_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let invocation = |word: &str| Invocation { words: vec![word.into()], ..Invocation::default() };
        let put = |word: &str| {
            let invocation = invocation(word);
            let mut head = ProfileHead {
                signature: invocation.signature(),
                runs: 1,
                files: 0,
                encoded_bytes: 0,
                last_seen_unix: 1,
                staged_bytes: 0.0,
                used_bytes: 0.0,
            };
            catalog.put_profile(&mut head, &Profile::new(&invocation)).unwrap();
            head.signature
        };
        let seen = || {
            let mut seen = Vec::new();
            let all = catalog.profiles(|head| {
                seen.push(head.signature);
                Ok(true)
            });
            all.map(|()| seen).unwrap()
        };
        let damaged = put("a");
        let mut batch = catalog.batch();
        batch.put_raw(cf::PROFILES, &key(b'h', &damaged), b"{}");
        batch.put_raw(cf::PROFILES, &key(b'p', &damaged), b"of another version");
        catalog.write(batch).unwrap();
        let other = put("b");
        assert_eq!(seen(), [other]);
        assert!(catalog.profile_head(&damaged).unwrap().is_none() && catalog.profile(&damaged).unwrap().is_none());
        put("a");
        assert_eq!(seen().len(), 2);
        assert!(catalog.profile(&damaged).unwrap().is_some());
    }
}
