//! Records of members in etcd, with a code that only a node with the cluster's token can make. A client sends the token to
//! each member, so a record of any other client of etcd must not become one.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use forebay_cluster::{Member, Role};
use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// What the code is for: the token makes no other codes that could be taken for it.
const PURPOSE: &str = "forebay member 1";

/// A member as it is stored.
#[derive(Serialize, Deserialize)]
struct SignedMember {
    #[serde(flatten)]
    member: Member,
    #[serde(default)]
    code: String,
}

/// HMAC-SHA256 under the token over the cluster's name in etcd, and all that a record says.
fn mac(token: &str, cluster: &str, member: &Member) -> Hmac<Sha256> {
    // A key of any length is allowed.
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(token.as_bytes())
        .unwrap_or_else(|_| <Hmac<Sha256> as Mac>::new(&Default::default()));
    let role = match member.role {
        Role::Compute => "compute",
        Role::Cache => "cache",
    };
    for text in [PURPOSE, cluster, member.id.as_str(), &member.address, role] {
        mac.update(&(text.len() as u64).to_le_bytes());
        mac.update(text.as_bytes());
    }
    mac
}

/// Returns the record of a member of a cluster.
///
/// # Errors
/// Those of the encoder.
pub(crate) fn sign(token: &str, cluster: &str, member: &Member) -> Result<String, String> {
    let code = STANDARD.encode(mac(token, cluster, member).finalize().into_bytes());
    serde_json::to_string(&SignedMember { member: member.clone(), code }).map_err(|e| e.to_string())
}

/// Returns the member of a record, if a node with the token has made the record.
pub(crate) fn verify(token: &str, cluster: &str, record: &[u8]) -> Option<Member> {
    let SignedMember { member, code } = serde_json::from_slice(record).ok()?;
    let code = STANDARD.decode(code).ok()?;
    mac(token, cluster, &member).verify_slice(&code).is_ok().then_some(member)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    #[test]
    fn a_record_counts_only_as_a_node_with_the_token_has_made_it() {
        let member: Member = serde_json::from_str(r#"{"id":"a","address":"10.0.0.1:7","role":"cache"}"#).unwrap();
        let record = sign(TOKEN, "c", &member).unwrap();
        assert_eq!(verify(TOKEN, "c", record.as_bytes()), Some(member.clone()));
        assert_eq!(verify("0123456789abcdeg", "c", record.as_bytes()), None);
        assert_eq!(verify(TOKEN, "other", record.as_bytes()), None);
        let unsigned = serde_json::to_string(&member).unwrap();
        let changed = |from: &str, to: &str| {
            assert!(record.contains(from), "{record}");
            record.replacen(from, to, 1)
        };
        for forged in [
            unsigned,
            changed("10.0.0.1:7", "10.0.0.2:7"),
            changed("cache", "compute"),
            changed("\"a\"", "\"b\""),
            changed("\"code\":\"", "\"code\":\"AA"),
            changed("\"code\":\"", "\"code\":\"\",\"more\":\""),
        ] {
            assert_eq!(verify(TOKEN, "c", forged.as_bytes()), None, "{forged}");
        }
    }
}
