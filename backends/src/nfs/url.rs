//! `nfs://server/export?nfsport=N&mountport=N`.

use crate::{Error, ErrorKind, PoolPath, Result, Side};

const NFS_PORT: u16 = 2049;

/// The location of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ExportLocation {
    /// A name or an address; IPv6 addresses without brackets.
    pub(super) host: String,
    /// 2049 unless the URL gives one.
    pub(super) nfs_port: u16,
    /// `None`: the server's portmapper is asked.
    pub(super) mount_port: Option<u16>,
    /// Absolute, without a trailing `/` except for the root: an export, or a directory in one.
    pub(super) path: Vec<u8>,
}

impl ExportLocation {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let refused = |why: &str| {
            let shape = "write nfs://SERVER/EXPORT?nfsport=N&mountport=N, the ports where they are not the usual ones";
            Error::new(
                ErrorKind::InvalidInput,
                Side::Application,
                format!("{}: {why}; {shape}", crate::open::shown(text)),
            )
        };
        let url = url::Url::parse(text).map_err(|error| refused(&error.to_string()))?;
        if url.scheme() != "nfs" {
            return Err(refused("it does not start with nfs://"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(refused("NFS with AUTH_SYS has neither user names nor passwords"));
        }
        if url.fragment().is_some() {
            return Err(refused("write # in a path as %23"));
        }
        let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| refused("it names no server"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let mut location = Self { host, nfs_port: url.port().unwrap_or(NFS_PORT), mount_port: None, path: Vec::new() };
        for (key, value) in url.query_pairs() {
            if !["nfsport", "mountport"].contains(&&*key) {
                return Err(refused(&format!("{key} is not known")));
            }
            let port = || value.parse().ok().filter(|port| *port != 0);
            let port: u16 = port().ok_or_else(|| refused(&format!("{key} is no port from 1 to 65535")))?;
            match &*key {
                "nfsport" => location.nfs_port = port,
                _ => location.mount_port = Some(port),
            }
        }
        let path = unescape(url.path());
        let relative = path.strip_prefix(b"/").unwrap_or(&path);
        let relative = relative.strip_suffix(b"/").unwrap_or(relative);
        if PoolPath::parse(relative).is_none() {
            return Err(refused("its path has an empty part, or one that is `.` or `..`"));
        }
        location.path = [b"/", relative].concat();
        Ok(location)
    }

    /// The export, or the directory in one, in readable form.
    pub(super) fn shown_path(&self) -> String {
        self.path.escape_ascii().to_string()
    }

    pub(super) fn url(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let mut url = format!("nfs://{host}{}", escape(&self.path));
        let nfs_port = (self.nfs_port != NFS_PORT).then(|| format!("nfsport={}", self.nfs_port));
        let mount_port = self.mount_port.map(|port| format!("mountport={port}"));
        for (n, port) in nfs_port.into_iter().chain(mount_port).enumerate() {
            url.push(if n == 0 { '?' } else { '&' });
            url.push_str(&port);
        }
        url
    }
}

/// `%` and two hexadecimal digits stand for a byte.
fn unescape(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digit = |n: usize| bytes.get(at + n).and_then(|digit| char::from(*digit).to_digit(16));
        match (bytes[at], digit(1), digit(2)) {
            (b'%', Some(high), Some(low)) => {
                plain.push((high * 16 + low) as u8);
                at += 3;
            }
            (byte, ..) => {
                plain.push(byte);
                at += 1;
            }
        }
    }
    plain
}

fn escape(path: &[u8]) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(byte);
    let one = |byte| if plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    path.iter().copied().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_says_where() {
        let location = ExportLocation::parse("nfs://server/a/b%20c/?mountport=7&nfsport=8").unwrap();
        assert_eq!((&location.host[..], location.nfs_port, location.mount_port), ("server", 8, Some(7)));
        assert_eq!(location.path, b"/a/b c");
        assert_eq!(location.url(), "nfs://server/a/b%20c?nfsport=8&mountport=7");
        let plain = ExportLocation::parse("nfs://[::1]").unwrap();
        assert_eq!(
            (&plain.host[..], plain.nfs_port, plain.mount_port, &plain.path[..]),
            ("::1", 2049, None, &b"/"[..])
        );
        assert_eq!(plain.url(), "nfs://[::1]/");
        assert_eq!(ExportLocation::parse("nfs://s/%ff").unwrap().path, b"/\xff");
    }

    #[test]
    fn a_wrong_url_is_told_with_the_right_shape() {
        let wrong = [
            "server:/export",
            "http://server/export",
            "nfs:///export",
            "nfs://user@server/export",
            "nfs://server/a//b",
            "nfs://server/e?nfsport=0",
            "nfs://server/e?nfsport=70000",
            "nfs://server/e?vers=4",
            "nfs://server/e#f",
            "nfs://server/a%2F%2Fb",
        ];
        for text in wrong {
            let error = ExportLocation::parse(text).unwrap_err();
            assert_eq!((error.kind(), error.side()), (ErrorKind::InvalidInput, Side::Application), "{text}");
            let (told, shown) = (error.to_string(), crate::open::shown(text));
            assert!(told.contains("nfs://SERVER/EXPORT") && told.contains(&shown), "{error}");
        }
    }
}
