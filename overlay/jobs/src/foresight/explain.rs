//! Explains why a file is cached, how probable its use is, and what would evict it.

use forebay_api::foresight::{Explanation, ReaderJob};
use forebay_api::operator::{ContentState, TypedPath};
use forebay_api::paths;
use forebay_backends::{PoolPath, Result};
use forebay_engine::{Ino, blocking};

use crate::Jobs;
use crate::JobsInner;

/// Profiles that are searched, the most recent ones first: each must be read from the catalog.
const PROFILES_MAX: usize = 256;

impl Jobs {
    /// Explains a file.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is no regular file.
    pub async fn explain(&self, path: &PoolPath) -> Result<Explanation> {
        let ino = self.inner.engine.resolve(path).await?;
        self.inner.engine.check_is_file(ino)?;
        let inner = self.inner.clone();
        blocking(move || inner.explain(ino)).await
    }
}

impl JobsInner {
    fn explain(&self, ino: Ino) -> Result<Explanation> {
        let (file, kept) = self.engine.describe(ino)?;
        let ahead = self.foresight.staged_for(ino);
        let next = self.foresight.access_predictor.why(ino);
        let why = match (&file.lease_owner, &ahead) {
            (Some(owner), _) => format!("staged for {owner}"),
            (None, Some(why)) => format!("fetched ahead for a running job: {why}"),
            (None, None) if next.is_some() => format!("fetched ahead of its reader: {}", next.unwrap_or_default()),
            (None, None) if file.state == ContentState::Dirty => "written in the mount, and not in the pool yet".into(),
            (None, None) if file.resident_bytes > 0 => "a program read or wrote it".into(),
            (None, None) => "not resident: no program has read it since it was evicted, or ever".into(),
        };
        let goes = match kept {
            Some(kept) => kept.to_owned(),
            None if ahead.is_some() => "is evicted last of all clean files, until the job ends".into(),
            None => {
                format!("is evicted when space is needed and the policy `{}` chooses it", self.engine.policy().evictor)
            }
        };
        let path = self.engine.path_of(ino).map(|path| paths::encode(path.as_bytes()));
        let read_by = path.map_or_else(|| Ok(Vec::new()), |path| self.readers(&path))?;
        Ok(Explanation { file, why, goes, read_by })
    }

    fn readers(&self, path: &TypedPath) -> Result<Vec<ReaderJob>> {
        let mut heads = Vec::new();
        self.engine.catalog().profiles(|head| {
            heads.push(head);
            Ok(true)
        })?;
        heads.sort_unstable_by_key(|head| std::cmp::Reverse(head.last_seen_unix));
        let mut readers = Vec::new();
        for head in heads.into_iter().take(PROFILES_MAX) {
            let Some(profile) = self.engine.catalog().profile(&head.signature)? else { continue };
            let Some(file) = profile.files().find(|file| file.path == path) else { continue };
            readers.push(ReaderJob {
                profile: head.signature.id(),
                signature: head.signature.as_str().to_owned(),
                used: file.used,
                seen: file.seen,
                probability: file.probability,
                last_seen_unix: file.last_seen_unix,
            });
        }
        readers.sort_by(|a, b| b.probability.total_cmp(&a.probability));
        Ok(readers)
    }
}
