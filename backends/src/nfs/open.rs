//! Opens a pool: the requests that are made once.

use nfs3_client::nfs3_types::nfs3::{
    CREATE3args, FSF3_LINK, FSF3_SYMLINK, FSINFO3args, FSINFO3resok, GETATTR3args, LOOKUP3args, Nfs3Option,
    PATHCONF3args, REMOVE3args, SETATTR3args, SYMLINK3args, createhow3, diropargs3, fattr3, nfs_fh3, nfsstat3,
    nfstime3, sattr3, set_mtime, symlinkdata3,
};

use crate::unfinished::unique_name;
use crate::{
    Capabilities, ConditionalPut, Error, ErrorKind, ListingSupport, Objects, PoolPath, Renames, Result, Side, Versions,
};

use super::attributes::{option, stat_of};
use super::calls::RpcClient;
use super::connections::Connections;
use super::credentials::{Credentials, Owner};
use super::failure::{NfsCall, NfsFailure, Outcome};
use super::handles::Directory;
use super::limits::MAX_TRANSFER_BYTES;
use super::mount::mount;
use super::session::{Session, Sizes};
use super::url::ExportLocation;

/// The limit that is assumed for a server that reports none.
const USUAL_NAME_MAX: u32 = 255;
/// The smallest size of a READ or WRITE, whatever the server says.
const MIN_TRANSFER_BYTES: u32 = 4_096;

impl Session {
    pub(super) async fn open(url: &str) -> Result<Self> {
        let location = ExportLocation::parse(url)?;
        let credentials = Credentials::of_process();
        let mounted = mount(&location, &credentials).await?;
        let connections = Connections::new(location.host.clone(), location.nfs_port, credentials.is_root());
        let calls = RpcClient::new(location.url(), connections, credentials);
        let path = PoolPath::root();
        let call = NfsCall::new("open", &path);
        let told = |failure: NfsFailure| call.failed(failure).context(location.url());
        let mut handle = mounted.handle;
        let mut raw = attributes(&calls, &handle, &[]).await.map_err(told)?;
        for name in mounted.below {
            let owner = Owner { uid: raw.uid, gid: raw.gid };
            let what = diropargs3 { dir: handle, name: name[..].into() };
            let found = calls.call(&LOOKUP3args { what }, &[owner]).await.map_err(|failure| match failure {
                NfsFailure::Status(nfsstat3::NFS3ERR_NOENT) => {
                    missing(&location, &name, "it does not exist; create it")
                }
                other => told(other),
            })?;
            handle = found.object;
            raw = attributes(&calls, &handle, &[owner]).await.map_err(told)?;
        }
        let stat = stat_of(&raw, raw.fsid);
        if stat.kind != crate::FileKind::Directory {
            let why = format!("{}: it is not a directory; name one", location.url());
            return Err(Error::new(ErrorKind::NotDirectory, Side::Pool, why));
        }
        let owner = Owner::from(&stat);
        let info = calls.call(&FSINFO3args { fsroot: handle.clone() }, &[owner]).await.map_err(told)?;
        let name_max = match calls.call(&PATHCONF3args { object: handle.clone() }, &[owner]).await {
            Ok(conf) => conf.name_max.min(USUAL_NAME_MAX),
            Err(NfsFailure::Status(_)) => USUAL_NAME_MAX,
            Err(failure) => return Err(told(failure)),
        };
        let directory = Directory::new(handle, &stat);
        let rights = probe(&calls, &directory).await.map_err(told)?;
        if rights == Rights::Squashed {
            calls.set_squashed();
        }
        let mut can = capabilities(&info, name_max, rights);
        if can.objects.symlinks && rights != Rights::ReadOnly {
            can.objects.symlink_times = symlink_times(&calls, &directory).await.map_err(told)?;
        }
        Ok(Self::new(calls, location, (directory, raw.fsid), sizes(&info), can))
    }
}

async fn attributes(calls: &RpcClient, object: &nfs_fh3, owners: &[Owner]) -> Outcome<fattr3> {
    calls.call(&GETATTR3args { object: object.clone() }, owners).await.map(|found| found.obj_attributes)
}

fn missing(location: &ExportLocation, name: &[u8], why: &str) -> Error {
    let what = format!("open {}: {}: {why}", location.url(), name.escape_ascii());
    Error::new(ErrorKind::NotFound, Side::Pool, what)
}

/// The rights of this process on the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rights {
    /// Those of root.
    Root,
    /// The server maps root to the user `nobody`.
    Squashed,
    /// Those of an ordinary user.
    User,
    /// Nothing can be changed.
    ReadOnly,
}

/// Determines the rights by means of a temporary file.
async fn probe(calls: &RpcClient, root: &Directory) -> Outcome<Rights> {
    let name = unique_name();
    let place = || diropargs3 { dir: root.handle.clone(), name: name[..].into() };
    let attributes = sattr3 { mode: Nfs3Option::Some(0o600), ..sattr3::default() };
    let is_root = calls.credentials().is_root();
    // With the identity of this process alone, because the server's treatment of it is to be found out.
    let made = match calls.call(&CREATE3args { where_: place(), how: createhow3::GUARDED(attributes) }, &[]).await {
        Ok(made) => made,
        Err(NfsFailure::Status(nfsstat3::NFS3ERR_ROFS)) => return Ok(Rights::ReadOnly),
        Err(failure) if failure.is_denied() => return Ok(if is_root { Rights::Squashed } else { Rights::User }),
        // The server is full or has another temporary problem: each call will find out for itself.
        Err(NfsFailure::Status(_)) => return Ok(if is_root { Rights::Root } else { Rights::User }),
        Err(failure) => return Err(failure),
    };
    let made = match option(made.obj_attributes) {
        Some(raw) => Ok(raw.uid),
        None => calls.call(&LOOKUP3args { what: place() }, &[]).await.map(|found| {
            // No further request is made to a server that never returns attributes.
            option(found.obj_attributes).map_or(0, |raw| raw.uid)
        }),
    };
    match calls.call(&REMOVE3args { object: place() }, &[]).await {
        // A file that cannot be removed does no harm.
        Ok(_) | Err(NfsFailure::Lost(_) | NfsFailure::Status(_)) => {}
        Err(failure) => return Err(failure),
    }
    Ok(match (is_root, made?) {
        (false, _) => Rights::User,
        (true, 0) => Rights::Root,
        (true, _) => Rights::Squashed,
    })
}

/// Determines by means of a temporary symlink whether the server sets the times of symlinks.
async fn symlink_times(calls: &RpcClient, root: &Directory) -> Outcome<bool> {
    let name = unique_name();
    let place = || diropargs3 { dir: root.handle.clone(), name: name[..].into() };
    let owners = [root.owner];
    let symlink = symlinkdata3 { symlink_attributes: sattr3::default(), symlink_data: b"nowhere"[..].into() };
    let made = match calls.call(&SYMLINK3args { where_: place(), symlink }, &owners).await {
        Ok(made) => option(made.obj),
        Err(NfsFailure::Status(_)) => return Ok(false),
        Err(failure) => return Err(failure),
    };
    let mut kept = false;
    if let Some(object) = made {
        // Far from the present, so that no clock comes near it.
        let time = nfstime3 { seconds: 1_000_000_000, nseconds: 0 };
        let new_attributes = sattr3 { mtime: set_mtime::SET_TO_CLIENT_TIME(time), ..sattr3::default() };
        let args = SETATTR3args { object: object.clone(), new_attributes, guard: Nfs3Option::None };
        kept = match calls.call(&args, &owners).await {
            Ok(_) => attributes(calls, &object, &owners).await?.mtime.seconds == 1_000_000_000,
            Err(NfsFailure::Status(_)) => false,
            Err(failure) => return Err(failure),
        };
    }
    match calls.call(&REMOVE3args { object: place() }, &owners).await {
        Ok(_) | Err(NfsFailure::Lost(_) | NfsFailure::Status(_)) => Ok(kept),
        Err(failure) => Err(failure),
    }
}

fn sizes(info: &FSINFO3resok) -> Sizes {
    let usable = |max: u32| max.clamp(MIN_TRANSFER_BYTES, MAX_TRANSFER_BYTES);
    Sizes {
        read_bytes: usable(info.rtmax),
        write_bytes: usable(info.wtmax),
        file_bytes: info.maxfilesize.min(i64::MAX as u64),
    }
}

fn capabilities(info: &FSINFO3resok, name_max: u32, rights: Rights) -> Capabilities {
    let delta = u64::from(info.time_delta.seconds) * 1_000_000_000 + u64::from(info.time_delta.nseconds);
    Capabilities {
        local: false,
        read_only: rights == Rights::ReadOnly,
        objects: Objects {
            symlinks: info.properties & FSF3_SYMLINK != 0,
            symlink_times: false,
            hard_links: info.properties & FSF3_LINK != 0,
            special_files: rights == Rights::Root,
            xattrs: false,
            owners: rights == Rights::Root,
            sparse: true,
        },
        renames: Renames::Atomic { exchange: false },
        listings: ListingSupport::Whole,
        listed_contents: false,
        versions: Versions { confirmed_by_reads: false, alone: false, of_directories: true, outlive_mounts: true },
        streams: false,
        ranged_write: true,
        parts_ahead: None,
        conditional_put: ConditionalPut::Checked,
        layouts: false,
        time_granularity_ns: u32::try_from(delta).unwrap_or(u32::MAX).max(1),
        name_max,
        path_max: None,
    }
}
