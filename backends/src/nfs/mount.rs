//! Finds the root handle of an export by portmapper and mount protocol.

use nfs3_client::nfs3_types::mount::{self, dirpath, mountstat3};
use nfs3_client::nfs3_types::nfs3::nfs_fh3;
use nfs3_client::nfs3_types::portmap::{IPPROTO_TCP, PMAP_PORT};
use nfs3_client::nfs3_types::rpc::opaque_auth;
use nfs3_client::nfs3_types::xdr_codec::Opaque;
use nfs3_client::{MountClient, MountError, PortmapError, PortmapperClient};
use tokio::time::timeout;

use crate::{Error, ErrorKind, Result, Side};

use super::connections::unreachable;
use super::credentials::Credentials;
use super::failure::Cause;
use super::limits::RPC_TIMEOUT;
use super::url::ExportLocation;
use super::wire::Wire;

/// The most exports that an error message lists.
const SHOWN_EXPORTS: usize = 20;

/// The result of a mount.
pub(super) struct MountedExport {
    pub(super) handle: nfs_fh3,
    /// The names that lead from the mounted directory to the pool's root.
    pub(super) below: Vec<Vec<u8>>,
}

/// Mounts the longest part of the path that the server allows.
pub(super) async fn mount(location: &ExportLocation, credentials: &Credentials) -> Result<MountedExport> {
    let mut wire = connect(location, mount_port(location).await?, credentials).await?;
    let names: Vec<_> = location.path.split(|b| *b == b'/').filter(|name| !name.is_empty()).collect();
    let mut denied = None;
    for length in (0..=names.len()).rev() {
        let path = [b"/", &names[..length].join(&b'/')[..]].concat();
        match mount_one(&mut wire, location, credentials, &path).await? {
            Ok(handle) => {
                let below = names[length..].iter().map(|name| name.to_vec()).collect();
                return Ok(MountedExport { handle, below });
            }
            Err(status) => drop(denied.get_or_insert(status)),
        }
    }
    Err(refused(&mut wire, location, denied.unwrap_or(mountstat3::MNT3ERR_NOENT)).await)
}

async fn mount_one(
    wire: &mut Wire,
    location: &ExportLocation,
    credentials: &Credentials,
    path: &[u8],
) -> Result<std::result::Result<nfs_fh3, mountstat3>> {
    let mut client = MountClient::new_with_auth(&mut *wire, credentials.myself().clone(), opaque_auth::default());
    let what = || format!("mount {}", location.url());
    match timeout(RPC_TIMEOUT, client.mnt(dirpath(Opaque::borrowed(path)))).await {
        Ok(Ok(mounted)) => Ok(Ok(nfs_fh3 { data: mounted.fhandle.0 })),
        Ok(Err(MountError::Denied(status))) => Ok(Err(status)),
        Ok(Err(MountError::Rpc(error))) => Err(Cause::from(&error).told(what())),
        Err(_) => Err(Cause::silence(RPC_TIMEOUT).told(what())),
    }
}

async fn connect(location: &ExportLocation, port: u16, credentials: &Credentials) -> Result<Wire> {
    let connected = Wire::connect(&location.host, port, credentials.is_root()).await;
    connected.map_err(|error| unreachable(&location.host, port, &error).told(format!("mount {}", location.url())))
}

async fn mount_port(location: &ExportLocation) -> Result<u16> {
    if let Some(port) = location.mount_port {
        return Ok(port);
    }
    let what = || format!("query the portmapper for the mount service of {}", location.url());
    let connected = Wire::connect(&location.host, PMAP_PORT, false).await;
    let mut wire = connected.map_err(|error| {
        let cause = unreachable(&location.host, PMAP_PORT, &error);
        cause.told(what()).context("if there is no portmapper, give the port by mountport=N")
    })?;
    let mut client = PortmapperClient::new(&mut wire);
    match timeout(RPC_TIMEOUT, client.getport(mount::PROGRAM, mount::VERSION, IPPROTO_TCP)).await {
        Ok(Ok(port)) => Ok(port),
        Ok(Err(PortmapError::Rpc(error))) => Err(Cause::from(&error).told(what())),
        Ok(Err(error)) => {
            let why = format!("{}: {error}; the server must offer NFS version 3 over TCP", what());
            Err(Error::new(ErrorKind::Unavailable, Side::Pool, why))
        }
        Err(_) => Err(Cause::silence(RPC_TIMEOUT).told(what())),
    }
}

/// Why nothing could be mounted, and which exports could be.
async fn refused(wire: &mut Wire, location: &ExportLocation, status: mountstat3) -> Error {
    let (kind, remedy) = match status {
        mountstat3::MNT3ERR_PERM | mountstat3::MNT3ERR_ACCES => (
            ErrorKind::PermissionDenied,
            "the server does not let this machine mount it; add it to the export's clients",
        ),
        mountstat3::MNT3ERR_NOENT | mountstat3::MNT3ERR_INVAL => {
            (ErrorKind::NotFound, "the server has no such export; name one that it has")
        }
        mountstat3::MNT3ERR_NOTDIR => (ErrorKind::NotDirectory, "it is not a directory; name one"),
        mountstat3::MNT3ERR_NAMETOOLONG => (ErrorKind::NameTooLong, "name an export with a shorter path"),
        mountstat3::MNT3ERR_NOTSUPP => (ErrorKind::Unsupported, "the server must offer NFS version 3"),
        mountstat3::MNT3ERR_IO | mountstat3::MNT3ERR_SERVERFAULT | mountstat3::MNT3_OK => {
            (ErrorKind::Unavailable, "see the server's log")
        }
    };
    let mut client = MountClient::new(&mut *wire);
    let exports = match timeout(RPC_TIMEOUT, client.export()).await {
        Ok(Ok(exports)) => exports.into_inner(),
        _ => Vec::new(),
    };
    let names: Vec<_> =
        exports.iter().take(SHOWN_EXPORTS).map(|export| export.ex_dir.0.escape_ascii().to_string()).collect();
    let known = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
    let path = location.shown_path();
    Error::new(kind, Side::Pool, format!("mount {path} of {}: {status}: {remedy}{known}", location.host))
}
