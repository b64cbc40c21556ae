//! Access control: bearer tokens and signed URLs.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_backends::PoolPath;
use hmac::{Hmac, Mac};
use http::{HeaderMap, header};
use serde::Deserialize;
use sha2::{Digest, Sha256};

/// Shorter secrets can be guessed.
const SECRET_CHARS_MIN: usize = 16;
/// The most bytes of an access file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The names of the parts of a signed URL's query.
const EXPIRES: &str = "expires";
const SIGNATURE: &str = "signature";

/// A file with access rules, as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct AccessFile {
    #[serde(default)]
    signing_key: Option<String>,
    #[serde(default)]
    token: Vec<TokenEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct TokenEntry {
    name: String,
    secret: String,
    /// What the bearer may read: this path and everything below it.
    #[serde(default)]
    path: String,
    /// Whether the bearer may purge, prefetch and change the origin's content there.
    #[serde(default)]
    admin: bool,
}

/// Access rules. By default, every client may read every path, and no client may purge or prefetch.
#[derive(Default)]
pub struct AccessRules {
    signing_key: Option<Vec<u8>>,
    /// By the hash of the secret: so the time of a comparison tells nothing about a secret.
    tokens: HashMap<[u8; 32], Token>,
}

struct Token {
    name: String,
    path: PoolPath,
    admin: bool,
}

/// What a request may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// `name`: that of the token, for the log. `left`: how long it is allowed, if that ends.
    Allowed { name: Option<String>, left: Option<Duration> },
    /// No token, or an unknown one: a client may come back with another one.
    Unknown,
    /// The token or the signature is not for this.
    Refused(&'static str),
}

impl AccessRules {
    /// Reads a file that only its owner may read.
    ///
    /// # Errors
    /// Names the file, what is wrong in it, and the remedy. Secrets are not repeated.
    pub fn read(file: &Path) -> Result<Self, String> {
        let at = file.display();
        let opened = File::open(file).map_err(|e| format!("access file {at}: {e}"))?;
        let mode = opened.metadata().map_err(|e| format!("access file {at}: {e}"))?.mode();
        if mode & 0o077 != 0 {
            return Err(format!("access file {at}: other users may read it; chmod 600 {at}"));
        }
        let mut text = String::new();
        opened.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(|e| format!("access file {at}: {e}"))?;
        Self::parse(&text).map_err(|why| format!("access file {at}: {why}"))
    }

    fn parse(text: &str) -> Result<Self, String> {
        // The error of the parser would repeat the line, with the secret in it.
        let file: AccessFile = toml::from_str(text).map_err(|e| e.message().to_owned())?;
        if file.signing_key.is_none() && file.token.is_empty() {
            return Err("it has neither signing-key nor [[token]]: nobody could read".into());
        }
        let long_enough = |secret: &str| secret.chars().count() >= SECRET_CHARS_MIN;
        if file.signing_key.as_deref().is_some_and(|key| !long_enough(key)) {
            return Err(format!("signing-key: at least {SECRET_CHARS_MIN} characters"));
        }
        let mut tokens = HashMap::new();
        for entry in file.token {
            if !long_enough(&entry.secret) {
                return Err(format!("token {}: secret: at least {SECRET_CHARS_MIN} characters", entry.name));
            }
            let path = PoolPath::parse(entry.path.trim_matches('/').as_bytes())
                .ok_or_else(|| format!("token {}: path: {} is not a path in the pool", entry.name, entry.path))?;
            let token = Token { name: entry.name, path, admin: entry.admin };
            if let Some(other) = tokens.insert(hash(&entry.secret), token) {
                return Err(format!("token {}: another token has the same secret", other.name));
            }
        }
        Ok(Self { signing_key: file.signing_key.map(String::into_bytes), tokens })
    }

    /// Whether everyone may read everything.
    pub fn is_open(&self) -> bool {
        self.signing_key.is_none() && self.tokens.is_empty()
    }

    /// Decides about reading a path. `query_counts`: what is read depends on the query, too, so that a signature must be one
    /// of the whole query.
    pub fn may_read(
        &self,
        headers: &HeaderMap,
        path: &PoolPath,
        (query, query_counts): (Option<&str>, bool),
        now: SystemTime,
    ) -> Verdict {
        if self.is_open() {
            return Verdict::Allowed { name: None, left: None };
        }
        if let Some(signed) = query.and_then(Signed::parse) {
            let left = signed.left(now);
            let is_of = |key: &[u8]| signed.is_of(key, path, &signed.rest);
            let is_of_path = |key: &[u8]| !query_counts && signed.is_of(key, path, "");
            return match self.signing_key.as_deref().is_some_and(|key| is_of(key) || is_of_path(key)) {
                false => Verdict::Refused("the signature is not for this path and query"),
                true if left.is_zero() => Verdict::Refused("the time of the signed URL is over"),
                true => Verdict::Allowed { name: None, left: Some(left) },
            };
        }
        self.by_token(headers, path, false)
    }

    /// Decides about purging or prefetching a path and everything below it, and about changing it at an origin.
    pub fn may_manage(&self, headers: &HeaderMap, path: &PoolPath) -> Verdict {
        self.by_token(headers, path, true)
    }

    fn by_token(&self, headers: &HeaderMap, path: &PoolPath, manage: bool) -> Verdict {
        let Some(token) = bearer(headers).and_then(|secret| self.tokens.get(&hash(secret))) else {
            return Verdict::Unknown;
        };
        let inside = path.components().map(Some).chain(std::iter::repeat(None)).zip(token.path.components());
        match () {
            () if inside.into_iter().any(|(name, wanted)| name != Some(wanted)) => {
                Verdict::Refused("the token is not for this path")
            }
            () if manage && !token.admin => Verdict::Refused("the token may read only"),
            () => Verdict::Allowed { name: Some(token.name.clone()), left: None },
        }
    }

    /// Whether a query has parts with the names of those that [`Self::sign`] adds.
    pub fn is_reserved(query: &str) -> bool {
        query.split('&').any(is_ours)
    }

    /// Returns the query that allows to read a path with this query for a while; `None` without a signing key.
    pub fn sign(&self, path: &PoolPath, query: &str, valid: Duration, now: SystemTime) -> Option<String> {
        let key = self.signing_key.as_deref()?;
        let expires = now.duration_since(UNIX_EPOCH).unwrap_or_default().saturating_add(valid).as_secs();
        let code = mac(key, path, expires, query).finalize().into_bytes();
        let more = if query.is_empty() { String::new() } else { format!("{query}&") };
        Some(format!("{more}{EXPIRES}={expires}&{SIGNATURE}={}", hex(&code)))
    }
}

fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret).into()
}

/// Returns bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, secret) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim())
}

/// Whether a text has a signed URL in it, perhaps escaped in the query of another URL. Such a URL is as good as a token until its
/// time is over.
pub(crate) fn has_signature(text: &[u8]) -> bool {
    let text = text.to_ascii_lowercase();
    ["signature=", "signature%3d", "signature%253d"]
        .iter()
        .any(|sign| text.windows(sign.len()).any(|part| part == sign.as_bytes()))
}

/// Whether a part of a query is one of those that sign it.
fn is_ours(part: &str) -> bool {
    part.split_once('=').is_some_and(|(name, _)| name == EXPIRES || name == SIGNATURE)
}

/// The code of a path, as its bytes, of the moment until which it may be read, and of the rest of the query, as it is.
fn mac(key: &[u8], path: &PoolPath, expires: u64, query: &str) -> Hmac<Sha256> {
    // A key of any length is allowed.
    let mut mac =
        <Hmac<Sha256> as Mac>::new_from_slice(key).unwrap_or_else(|_| <Hmac<Sha256> as Mac>::new(&Default::default()));
    for name in path.components() {
        mac.update(b"/");
        mac.update(name);
    }
    mac.update(b"\n");
    mac.update(expires.to_string().as_bytes());
    if !query.is_empty() {
        // No name has this byte, so that a query cannot be taken for the end of a path.
        mac.update(b"\0");
        mac.update(query.as_bytes());
    }
    mac
}

struct Signed {
    expires: u64,
    code: Vec<u8>,
    /// The query without both.
    rest: String,
}

impl Signed {
    /// Returns the signature of a query. One that cannot be read is one of nothing, and matches no path.
    fn parse(query: &str) -> Option<Self> {
        let get = |name: &str| {
            query.split('&').find_map(|part| part.split_once('=').filter(|(key, _)| *key == name)).map(|(_, v)| v)
        };
        let signature = get(SIGNATURE)?;
        let expires = get(EXPIRES).and_then(|text| text.parse().ok()).unwrap_or(0);
        let digits: Option<Vec<u8>> = signature
            .as_bytes()
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
            .collect();
        let rest: Vec<&str> = query.split('&').filter(|part| !is_ours(part)).collect();
        Some(Self { expires, code: digits.unwrap_or_default(), rest: rest.join("&") })
    }

    fn is_of(&self, key: &[u8], path: &PoolPath, query: &str) -> bool {
        mac(key, path, self.expires, query).verify_slice(&self.code).is_ok()
    }

    /// Returns how long the URL may still be used, in whole seconds.
    fn left(&self, now: SystemTime) -> Duration {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Duration::from_secs(self.expires.saturating_sub(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        signing-key = "a key of thirty-two bytes, or so"
        [[token]]
        name = "reader"
        secret = "sixteen letters!"
        path = "/data/public"
        [[token]]
        name = "operator"
        secret = "seventeen letters"
        admin = true
    "#;

    fn path(text: &str) -> PoolPath {
        PoolPath::parse(text.as_bytes()).unwrap()
    }

    fn with_token(secret: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, format!("Bearer {secret}").parse().unwrap());
        headers
    }

    #[test]
    fn a_token_is_for_its_path_and_what_lies_below() {
        let access = AccessRules::parse(FILE).unwrap();
        let now = SystemTime::now();
        let reader = with_token("sixteen letters!");
        let read = |headers: &HeaderMap, at: &str| access.may_read(headers, &path(at), (None, true), now);
        let allowed = |name: &str| Verdict::Allowed { name: Some(name.into()), left: None };
        assert_eq!(read(&reader, "data/public"), allowed("reader"));
        assert_eq!(read(&reader, "data/public/a/b"), allowed("reader"));
        for outside in ["data", "data/publication", "other/data/public", "data/private/data/public"] {
            assert!(matches!(read(&reader, outside), Verdict::Refused(_)), "{outside}");
        }
        assert_eq!(read(&with_token("sixteen letters?"), "data/public"), Verdict::Unknown);
        assert_eq!(read(&HeaderMap::new(), "data/public"), Verdict::Unknown);
        assert!(matches!(access.may_manage(&reader, &path("data/public")), Verdict::Refused(_)));
        assert_eq!(access.may_manage(&with_token("seventeen letters"), &path("x")), allowed("operator"));
        assert_eq!(AccessRules::default().may_manage(&HeaderMap::new(), &path("x")), Verdict::Unknown);
    }

    #[test]
    fn a_signed_url_is_for_one_path_and_one_time() {
        let access = AccessRules::parse(FILE).unwrap();
        let now = SystemTime::now();
        let query = access.sign(&path("data/a b"), "", Duration::from_secs(60), now).unwrap();
        let none = HeaderMap::new();
        let Verdict::Allowed { name: None, left: Some(left) } =
            access.may_read(&none, &path("data/a b"), (Some(&query), true), now)
        else {
            panic!("{query}")
        };
        assert_eq!(left.as_secs(), 60);
        let later = now + Duration::from_secs(61);
        assert!(matches!(access.may_read(&none, &path("data/a b"), (Some(&query), true), later), Verdict::Refused(_)));
        assert!(matches!(access.may_read(&none, &path("data/b"), (Some(&query), true), now), Verdict::Refused(_)));
        let longer = query.replacen("expires=", "expires=9", 1);
        for forged in
            [longer.as_str(), "expires=99999999999&signature=", "signature=zz", "signature=é", "signature=abc"]
        {
            assert!(
                matches!(access.may_read(&none, &path("data/a b"), (Some(forged), true), now), Verdict::Refused(_)),
                "{forged}"
            );
        }
        let another = AccessRules::parse(&FILE.replace("a key of", "the key of")).unwrap();
        assert!(matches!(another.may_read(&none, &path("data/a b"), (Some(&query), true), now), Verdict::Refused(_)));
    }

    #[test]
    fn a_signature_is_one_of_the_query_where_the_query_counts() {
        let access = AccessRules::parse(FILE).unwrap();
        let now = SystemTime::now();
        let sign = |query: &str| access.sign(&path("get"), query, Duration::from_secs(60), now).unwrap();
        let may = |query: &str, query_counts: bool| {
            let verdict = access.may_read(&HeaderMap::new(), &path("get"), (Some(query), query_counts), now);
            matches!(verdict, Verdict::Allowed { .. })
        };
        let (bare, with) = (sign(""), sign("id=1"));
        assert!(may(&bare, true) && may(&with, true) && may(&with, false));
        for query in [format!("id=2&{bare}"), format!("{bare}&id=2")] {
            assert!(!may(&query, true) && may(&query, false), "{query}");
        }
        for query in [with.replace("id=1", "id=2"), with.replace("id=1&", ""), format!("{with}&id=2")] {
            assert!(!may(&query, true) && !may(&query, false), "{query}");
        }
        // What is signed as a query is not the end of a path.
        let query = access.sign(&path("a"), "7", Duration::from_secs(60), now).unwrap();
        let expires = query.split(['=', '&']).nth(2).unwrap();
        let forged = query.replace(&format!("7&expires={expires}"), "expires=7");
        let verdict =
            access.may_read(&HeaderMap::new(), &path(&format!("a\n{expires}")), (Some(&forged), true), UNIX_EPOCH);
        assert!(matches!(verdict, Verdict::Refused(_)));
        assert!(AccessRules::is_reserved("a=1&expires=2") && !AccessRules::is_reserved("expires&asignature=1"));
    }

    #[test]
    fn a_signed_url_is_seen_in_a_text() {
        for text in [
            "http://node/a?expires=1&signature=00",
            "http://node/a?Signature=00",
            "http://x/?to=http%3A%2F%2Fnode%2Fa%3Fsignature%3d00",
            "http://y/?to=http%3A%2F%2Fx%2F%3Fto%3D..signature%253D00",
        ] {
            assert!(has_signature(text.as_bytes()), "{text}");
        }
        assert!(!has_signature(b"http://node/signature?of=1"));
    }

    #[test]
    fn a_wrong_file_is_refused_without_its_secrets() {
        for (text, said) in [
            ("", "nobody could read"),
            ("signing-key = \"short\"", "at least 16 characters"),
            ("[[token]]\nname = \"a\"\nsecret = \"tooshort\"", "token a: secret"),
            ("[[token]]\nname = \"a\"\nsecret = \"0123456789abcdef\"\npath = \"/../x\"", "token a: path"),
            ("[[token]]\nname = \"a\"\nsecret = \"0123456789abcdef\"\ncolour = 1", "colour"),
        ] {
            let why = AccessRules::parse(text).err().unwrap();
            assert!(why.contains(said) && !why.contains("0123456789abcdef") && !why.contains("tooshort"), "{why}");
        }
    }
}
