//! Members in etcd: each node keeps a key with a lease, and watches those of the others. By the JSON gateway of etcd 3.4 and
//! later: its own client needs a compiler for protocol buffers on the machine that builds.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use forebay_cluster::{Member, MemberSource};
use futures::FutureExt;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{interval, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::peers::Peers;
use crate::signed::{sign, verify};

/// A node that does not renew its lease for this long is no member any more.
const LEASE: Duration = Duration::from_secs(10);
/// How often a node renews its lease.
const RENEW_EVERY: Duration = Duration::from_secs(3);
/// The longest time of a call, a third of the lease: so a second server can be asked before the lease ends.
const CALL: Duration = Duration::from_secs(3);
/// The pause before the next server is asked.
const PAUSE: Duration = Duration::from_secs(1);
/// How long events are collected before the list is read again.
const EVENTS_TOGETHER: Duration = Duration::from_millis(300);
/// What the server says when it ends a watch.
const CANCELED: &[u8] = b"\"canceled\":true";
/// The most bytes of a list of members.
const LIST_BYTES: usize = 16 << 20;

/// Where the members are kept.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EtcdSettings {
    /// URLs of the servers of one etcd cluster.
    pub endpoints: Vec<String>,
    /// The name of the cluster of nodes: several can share one etcd.
    #[serde(default = "default_name")]
    pub name: String,
}

fn default_name() -> String {
    "default".to_owned()
}

impl EtcdSettings {
    /// # Errors
    /// What is wrong with the settings.
    pub fn check(&self) -> Result<(), String> {
        if self.endpoints.is_empty() {
            return Err("[etcd] endpoints: at least one URL, such as http://10.0.0.1:2379".to_owned());
        }
        for url in &self.endpoints {
            let known = ["http://", "https://"].iter().any(|scheme| url.starts_with(scheme));
            if !known || reqwest::Url::parse(url).is_err() {
                return Err(format!("[etcd] endpoints: {url} is no URL such as http://10.0.0.1:2379"));
            }
        }
        Ok(())
    }

    fn prefix(&self) -> String {
        format!("/forebay/{}/members/", self.name)
    }
}

/// Looks for [`CANCELED`] in the text of a watch, which comes in pieces.
#[derive(Debug, Default)]
struct WatchEnd {
    /// The last bytes of the text, fewer than are looked for.
    last: Vec<u8>,
}

impl WatchEnd {
    /// Takes the next piece. Returns whether the server has ended the watch.
    fn is_in(&mut self, piece: &[u8]) -> bool {
        self.last.extend_from_slice(piece);
        let found = self.last.windows(CANCELED.len()).any(|text| text == CANCELED);
        self.last.drain(..self.last.len().saturating_sub(CANCELED.len() - 1));
        found
    }
}

/// The members in etcd, for one node.
pub struct EtcdMembers {
    settings: EtcdSettings,
    own: Member,
    peers: Arc<Peers>,
    /// How many records were refused last, and the key of the first one.
    refused: parking_lot::Mutex<(usize, String)>,
}

/// A connection to one server, with a lease.
struct LeaseSession<'a> {
    members: &'a EtcdMembers,
    endpoint: &'a str,
    lease: String,
    /// The token under which this node's record is signed.
    token: String,
}

#[derive(Deserialize)]
struct StoredMembers {
    header: RevisionHeader,
    #[serde(default)]
    kvs: Vec<StoredKey>,
}

#[derive(Deserialize)]
struct RevisionHeader {
    revision: String,
}

#[derive(Deserialize)]
struct StoredKey {
    key: String,
    value: String,
}

impl EtcdMembers {
    pub fn new(settings: EtcdSettings, own: Member, peers: Arc<Peers>) -> Self {
        Self { settings, own, peers, refused: parking_lot::Mutex::default() }
    }

    /// The token of the cluster, which may be another one after the peers file was read again.
    fn token(&self) -> String {
        self.peers.cluster.load().settings.token.clone()
    }

    /// Keeps this node a member, and follows the others, until `stop`; then it leaves. While no server answers, the last
    /// list stays.
    pub async fn follow(self, stop: CancellationToken) {
        let mut is_told = false;
        for endpoint in self.settings.endpoints.iter().cycle() {
            let begun = timeout(CALL, LeaseSession::begin(&self, endpoint));
            let Some(begun) = stop.run_until_cancelled(begun).await else { return };
            let why = match begun.map_err(|_| late()).and_then(|begun| begun) {
                Ok(session) => {
                    tracing::info!(endpoint, "this node is a member in etcd");
                    is_told = false;
                    match stop.run_until_cancelled(session.keep()).await {
                        Some(why) => why,
                        None => {
                            let _ = session.call("/v3/lease/revoke", &json!({ "ID": session.lease })).await;
                            return;
                        }
                    }
                }
                Err(why) => why,
            };
            match is_told {
                true => tracing::debug!(endpoint, "etcd: {why}"),
                false => tracing::warn!(endpoint, "etcd: {why}; the members stay as they are, and it is asked again"),
            }
            is_told = true;
            if stop.run_until_cancelled(sleep(PAUSE)).await.is_none() {
                return;
            }
        }
    }
}

fn late() -> String {
    "no answer in time".to_owned()
}

fn encoded(text: &str) -> String {
    STANDARD.encode(text)
}

impl<'a> LeaseSession<'a> {
    async fn begin(members: &'a EtcdMembers, endpoint: &'a str) -> Result<Self, String> {
        let mut session = Self { members, endpoint, lease: String::new(), token: members.token() };
        let granted = session.call("/v3/lease/grant", &json!({ "TTL": LEASE.as_secs().to_string() })).await?;
        session.lease = granted["ID"].as_str().ok_or("an answer without a lease")?.to_owned();
        session.put_own(&session.token).await?;
        Ok(session)
    }

    async fn put_own(&self, token: &str) -> Result<(), String> {
        let EtcdMembers { settings, own, .. } = self.members;
        let key = format!("{}{}", settings.prefix(), own.id);
        let value = sign(token, &settings.name, own)?;
        let put = json!({ "key": encoded(&key), "value": encoded(&value), "lease": self.lease });
        self.call("/v3/kv/put", &put).await.map(drop)
    }

    async fn call(&self, path: &str, body: &Value) -> Result<Value, String> {
        let answer = async {
            let mut response = self.send(path, body).await?;
            let mut bytes = Vec::new();
            while let Some(piece) = response.chunk().await.map_err(|e| e.to_string())? {
                bytes.extend_from_slice(&piece);
                if bytes.len() > LIST_BYTES {
                    return Err(format!("{path}: an answer of more than {LIST_BYTES} bytes"));
                }
            }
            serde_json::from_slice(&bytes).map_err(|e| format!("{path}: {e}"))
        };
        timeout(CALL, answer).await.map_err(|_| late())?
    }

    async fn send(&self, path: &str, body: &Value) -> Result<reqwest::Response, String> {
        let url = format!("{}{path}", self.endpoint.trim_end_matches('/'));
        let request =
            self.members.peers.http.post(url).header("content-type", "application/json").body(body.to_string());
        let response = request.send().await.map_err(|e| e.to_string())?;
        match response.status().is_success() {
            true => Ok(response),
            false => Err(format!("{path}: {}", response.status())),
        }
    }

    /// Renews the lease, and takes each change of the members. Returns why that ended.
    async fn keep(&self) -> String {
        match self.renew_and_watch().await {
            Ok(never) => match never {},
            Err(why) => why,
        }
    }

    async fn renew_and_watch(&self) -> Result<Infallible, String> {
        let revision = self.take_all().await?;
        let prefix = self.members.settings.prefix();
        // The last byte is a slash; the one after it ends the range.
        let end = format!("{}0", prefix.trim_end_matches('/'));
        let first = revision.parse::<i64>().map_err(|e| e.to_string())? + 1;
        let range = json!({ "key": encoded(&prefix), "range_end": encoded(&end), "start_revision": first.to_string() });
        let watch = timeout(CALL, self.send("/v3/watch", &json!({ "create_request": range }))).await;
        let mut watch = watch.map_err(|_| late())??;
        let (mut renew, mut end_of_watch) = (interval(RENEW_EVERY), WatchEnd::default());
        let mut signed_by = self.token.clone();
        loop {
            tokio::select! {
                _ = renew.tick() => {
                    let kept = self.call("/v3/lease/keepalive", &json!({ "ID": self.lease })).await?;
                    if kept["result"]["TTL"].as_str().is_none_or(|ttl| ttl == "0") {
                        return Err("the lease has ended".to_owned());
                    }
                    let token = self.members.token();
                    if token != signed_by {
                        self.put_own(&token).await?;
                        self.take_all().await?;
                        signed_by = token;
                    }
                }
                // Whatever it says, the list is read again: once for all events that come together.
                event = watch.chunk() => {
                    let mut has_ended = |event: reqwest::Result<Option<Bytes>>| {
                        let event = event.map_err(|e| e.to_string())?;
                        match event.is_none_or(|event| end_of_watch.is_in(&event)) {
                            true => Err("the watch has ended".to_owned()),
                            false => Ok(()),
                        }
                    };
                    has_ended(event)?;
                    sleep(EVENTS_TOGETHER).await;
                    while let Some(event) = watch.chunk().now_or_never() {
                        has_ended(event)?;
                    }
                    self.take_all().await?;
                }
            }
        }
    }

    /// Takes all members that are in etcd now. Returns the revision.
    async fn take_all(&self) -> Result<String, String> {
        let prefix = self.members.settings.prefix();
        let end = format!("{}0", prefix.trim_end_matches('/'));
        let range = json!({ "key": encoded(&prefix), "range_end": encoded(&end) });
        let answer = self.call("/v3/kv/range", &range).await?;
        let answer: StoredMembers = serde_json::from_value(answer).map_err(|e| e.to_string())?;
        let (mut members, token) = (Vec::new(), self.members.token());
        let mut refused = (0, String::new());
        for stored in answer.kvs {
            match member_in(&self.members.settings, &token, &stored) {
                Some(member) => members.push(member),
                None if refused.0 == 0 => refused = (1, stored.key),
                None => refused.0 += 1,
            }
        }
        // Once, not after each change in etcd.
        let before = std::mem::replace(&mut *self.members.refused.lock(), refused.clone());
        if refused.0 > 0 && refused != before {
            let (count, key) = refused;
            tracing::warn!(key, "etcd: {count} records are of no member, or have the code of another token");
        }
        self.members.peers.take_members(MemberSource::Etcd, members);
        Ok(answer.header.revision)
    }
}

/// Returns the member in a key, if a node with the token has written it: any client of etcd can write there.
fn member_in(settings: &EtcdSettings, token: &str, stored: &StoredKey) -> Option<Member> {
    let key = String::from_utf8(STANDARD.decode(&stored.key).ok()?).ok()?;
    let member = verify(token, &settings.name, &STANDARD.decode(&stored.value).ok()?)?;
    let is_own_key = key.strip_prefix(settings.prefix().as_str())? == member.id.as_str();
    (is_own_key && member.address.parse::<std::net::SocketAddr>().is_ok()).then_some(member)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    #[test]
    fn the_end_of_a_watch_is_seen_in_whatever_pieces_it_comes() {
        let text = b"{\"result\":{\"created\":true}}\n{\"result\":{\"canceled\":true}}\n";
        for length in 1..=text.len() {
            let mut end = WatchEnd::default();
            assert!(!end.is_in(b"{\"result\":{\"events\":[]}}\n"));
            let seen = text.chunks(length).filter(|piece| end.is_in(piece)).count();
            assert_eq!(seen, 1, "in pieces of {length} bytes");
            assert!(!end.is_in(b"{\"result\":{}}"), "{length}");
        }
    }

    #[test]
    fn only_members_under_their_own_name_are_taken() {
        let settings = EtcdSettings { endpoints: Vec::new(), name: "c".to_owned() };
        let stored = |key: &str, value: &str| StoredKey { key: encoded(key), value: encoded(value) };
        let record = |json: &str| sign(TOKEN, "c", &serde_json::from_str(json).unwrap()).unwrap();
        let unsigned = r#"{"id":"a","address":"10.0.0.1:7","role":"cache"}"#;
        let good = record(unsigned);
        let member = |key: &str, value: &str| member_in(&settings, TOKEN, &stored(key, value));
        assert_eq!(member("/forebay/c/members/a", &good).unwrap().address, "10.0.0.1:7");
        for (key, value) in [
            ("b", &*good),
            ("a", "{}"),
            ("a", unsigned),
            ("a", &record(r#"{"id":"a","address":"host/path?x:7"}"#)),
            ("a b", r#"{"id":"a b","address":"10.0.0.1:7"}"#),
        ] {
            assert!(member(&format!("/forebay/c/members/{key}"), value).is_none(), "{key} {value}");
        }
        assert!(member("/forebay/other/members/a", &good).is_none());
        assert!(member_in(&settings, "another token 01", &stored("/forebay/c/members/a", &good)).is_none());
    }
}
