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
            each(serde_json::from_slice(value).map_err(|e| corrupt(cf::PROFILES).with_source(e))?)
        })
    }

    pub fn profile_head(&self, signature: &Signature) -> Result<Option<ProfileHead>> {
        let value = self.raw(&key(b'h', signature))?;
        value.map(|v| serde_json::from_slice(&v).map_err(|e| corrupt(cf::PROFILES).with_source(e))).transpose()
    }

    pub fn profile(&self, signature: &Signature) -> Result<Option<Profile>> {
        let value = self.raw(&key(b'p', signature))?;
        value.map(|v| Profile::decode(&v).map_err(|e| corrupt(cf::PROFILES).with_source(e))).transpose()
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
