//! The file that says who the members are, and what this node is among them.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_cluster::{Confinement, Member, NodeId, Placement, Placing, Role};
use serde::Deserialize;

use crate::etcd::EtcdSettings;

/// A shorter token can be guessed.
const TOKEN_CHARS_MIN: usize = 16;
/// The daemon gives up the right to listen on lower ports.
const PORT_MIN: u16 = 1024;
/// The most bytes of the file, and of the file with the token.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The file, as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PeerFile {
    /// The identity of this node; its host name if missing.
    node: Option<NodeId>,
    /// Where this node answers.
    listen: SocketAddr,
    /// The address by which other nodes reach it, if that is another one.
    advertise: Option<SocketAddr>,
    /// What this node is there for, unless the list of members says so.
    #[serde(default)]
    role: Role,
    token_file: PathBuf,
    #[serde(default)]
    placement: Placement,
    /// The only nodes that may have content of the pool; all if missing.
    confine_to: Option<BTreeSet<NodeId>>,
    #[serde(default)]
    member: Vec<MemberEntry>,
    etcd: Option<EtcdSettings>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct MemberEntry {
    node: NodeId,
    address: SocketAddr,
    #[serde(default)]
    role: Role,
}

/// What the file says.
#[derive(Debug, Clone)]
pub struct PeerSettings {
    /// This node, as others see it.
    pub own: Member,
    pub listen: SocketAddr,
    pub token: String,
    pub placing: Placing,
    /// The list in the file, and this node.
    pub members: Vec<Member>,
    pub etcd: Option<EtcdSettings>,
}

impl PeerSettings {
    /// Reads the file. `host`: the name of this machine.
    ///
    /// # Errors
    /// Names the file, what is wrong in it, and the remedy. The token is not repeated.
    pub fn read(file: &Path, host: &str) -> Result<Self, String> {
        let text = text_of(file, false).map_err(|why| format!("peers file {}: {why}", file.display()))?;
        Self::parse(&text, host, file.parent().unwrap_or(Path::new("/")))
            .map_err(|why| format!("peers file {}: {why}", file.display()))
    }

    fn parse(text: &str, host: &str, dir: &Path) -> Result<Self, String> {
        let file: PeerFile = toml::from_str(text).map_err(|e| e.to_string().trim_end().to_owned())?;
        let this = match file.node {
            Some(node) => node,
            None => NodeId::new(host).map_err(|e| format!("the host name: {e}; give node = \"NAME\""))?,
        };
        let token_file = dir.join(&file.token_file);
        let token = text_of(&token_file, true).map_err(|why| format!("token-file {}: {why}", token_file.display()))?;
        let token = token.trim().to_owned();
        if token.chars().count() < TOKEN_CHARS_MIN || !token.chars().all(|c| c.is_ascii_graphic()) {
            let at = token_file.display();
            return Err(format!(
                "token-file {at}: a token has at least {TOKEN_CHARS_MIN} letters, digits or signs, as those of `openssl rand -hex 32`"
            ));
        }
        let advertise = file.advertise.unwrap_or(file.listen);
        let mut own = Member { id: this.clone(), address: advertise.to_string(), role: file.role };
        let mut members: Vec<Member> = Vec::new();
        for MemberEntry { node, address, role } in file.member {
            if members.iter().any(|member| member.id == node) {
                return Err(format!("[[member]]: {node} is there twice"));
            }
            members.push(Member { id: node, address: address.to_string(), role });
        }
        match members.iter().find(|member| member.id == this) {
            Some(member) => own = member.clone(),
            None => members.push(own.clone()),
        }
        if own.address.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_unspecified()) {
            return Err(format!("listen: other nodes cannot reach {}; give advertise = \"ADDRESS:PORT\"", own.address));
        }
        if file.listen.port() < PORT_MIN {
            return Err(format!("listen: port {}: choose one from {PORT_MIN} on, such as 7410", file.listen.port()));
        }
        if let Some(etcd) = &file.etcd {
            etcd.check()?;
        }
        let confine_to = file.confine_to.map_or_else(Confinement::default, Confinement::to);
        let placing = Placing { placement: file.placement, confine_to };
        Ok(Self { own, listen: file.listen, token, placing, members, etcd: file.etcd })
    }
}

/// Returns the text of a file. `secret`: only its owner may read it.
fn text_of(file: &Path, secret: bool) -> Result<String, String> {
    let opened = File::open(file).map_err(|e| e.to_string())?;
    let mode = opened.metadata().map_err(|e| e.to_string())?.mode();
    if secret && mode & 0o077 != 0 {
        return Err(format!("other users may read it; chmod 600 {}", file.display()));
    }
    let mut text = String::new();
    opened.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(|e| e.to_string())?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn parsed(text: &str, token: &str, mode: u32) -> Result<PeerSettings, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        fs::write(&file, token).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        PeerSettings::parse(text, "here", dir.path())
    }

    const TOKEN: &str = "0123456789abcdef\n";

    #[test]
    fn this_node_is_a_member_whether_the_list_names_it_or_not() {
        let alone = parsed("listen = \"127.0.0.1:7410\"\ntoken-file = \"token\"\n", TOKEN, 0o600).unwrap();
        assert_eq!((alone.members.len(), alone.own.id.as_str()), (1, "here"));
        let text = "listen = \"127.0.0.1:7410\"\ntoken-file = \"token\"\nplacement = \"dedicated\"\n\
                    [[member]]\nnode = \"here\"\naddress = \"10.0.0.1:7410\"\nrole = \"cache\"\n\
                    [[member]]\nnode = \"there\"\naddress = \"10.0.0.2:7410\"\n";
        let two = parsed(text, TOKEN, 0o600).unwrap();
        assert_eq!((two.members.len(), two.own.role), (2, Role::Cache));
        assert_eq!(two.placing.placement, Placement::Dedicated);
    }

    #[test]
    fn what_is_wrong_is_named_and_the_token_is_not() {
        let good = "listen = \"127.0.0.1:7410\"\ntoken-file = \"token\"\n";
        for (text, token, mode, told) in [
            (good, TOKEN, 0o644, "chmod 600"),
            (good, "short", 0o600, "at least 16"),
            ("token-file = \"token\"\n", TOKEN, 0o600, "listen"),
            ("listen = \"host:1\"\ntoken-file = \"token\"\n", TOKEN, 0o600, "listen"),
            ("listen = \"127.0.0.1:7410\"\ntoken-file = \"none\"\n", TOKEN, 0o600, "none: No such file"),
            (&format!("{good}[[member]]\nnode = \"a b\"\naddress = \"10.0.0.1:1\"\n"), TOKEN, 0o600, "identity"),
            (&format!("{good}placement = \"some\"\n"), TOKEN, 0o600, "placement"),
            (&format!("{good}members = 1\n"), TOKEN, 0o600, "members"),
            ("listen = \"127.0.0.1:80\"\ntoken-file = \"token\"\n", TOKEN, 0o600, "from 1024 on"),
            (&format!("{good}[etcd]\nendpoints = []\n"), TOKEN, 0o600, "endpoints"),
            (&format!("{good}[etcd]\nendpoints = [\"10.0.0.1:1\"]\n"), TOKEN, 0o600, "no URL"),
            ("listen = \"0.0.0.0:7410\"\ntoken-file = \"token\"\n", TOKEN, 0o600, "advertise"),
            (
                &format!("{good}{}", "[[member]]\nnode = \"a\"\naddress = \"10.0.0.1:1\"\n".repeat(2)),
                TOKEN,
                0o600,
                "twice",
            ),
        ] {
            let why = parsed(text, token, mode).unwrap_err();
            assert!(why.contains(told) && !why.contains("0123456789"), "{text}: {why}");
        }
    }
}
