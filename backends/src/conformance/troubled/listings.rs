//! Listings of a directory in which some names stay, and other names are made and removed.

use std::collections::BTreeSet;

use crate::conformance::context::Outcome;
use crate::conformance::ensure;
use crate::{ErrorKind, Expected, FileKind};

use super::{TroubledCase, excused, list};

const STAYING: usize = 60;

pub(super) async fn work(stage: TroubledCase) -> Outcome {
    let staying: Vec<String> = (0..STAYING).map(|n| format!("staying-{n:03}")).collect();
    for name in &staying {
        make(&stage, name).await?;
    }
    stage.trouble(400);
    let mut round = 0;
    while stage.goes_on(round) {
        round += 1;
        let passing = format!("passing-{}", round % 3);
        make(&stage, &passing).await?;
        match stage.call("list", list(&*stage.setting.troubled, &stage.dir)).await? {
            Ok(entries) => {
                let names: Vec<_> = entries.iter().map(|entry| &entry.name[..]).collect();
                let once: BTreeSet<_> = names.iter().copied().collect();
                ensure!(once.len() == names.len(), "a name is twice in a listing of {}", names.len());
                for name in &staying {
                    ensure!(once.contains(name.as_bytes()), "{name} is missing in a listing of {}", names.len());
                }
                let others =
                    once.iter().filter(|name| !name.starts_with(b"staying-") && !name.starts_with(b"passing-"));
                ensure!(others.count() == 0, "a listing has names that were never made");
            }
            Err(error) => excused("list", &error)?,
        }
        let path = stage.path(&passing);
        match stage.soundly(|| stage.setting.sound.remove(&path, &Expected::Anything)).await {
            Err(error) if !error.is(ErrorKind::NotFound) => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}

async fn make(stage: &TroubledCase, name: &str) -> Outcome {
    let (path, attrs) = (stage.path(name), stage.attrs());
    match stage.soundly(|| stage.setting.sound.mknod(&path, FileKind::File, 0, &attrs)).await {
        Err(error) if !error.is(ErrorKind::Exists) => Err(error.into()),
        _ => Ok(()),
    }
}
