//! Attaches a store from a URL and the environment: what all kinds have in common.
//!
//! `gs://BUCKET[/PREFIX][?OPTION=VALUE&...]`, `az://CONTAINER[/PREFIX][?...]`, `http://HOST[:PORT]/PATH[?...]`, `https://...`
//!
//! | option | of | environment | default |
//! |---|---|---|---|
//! | `endpoint` | gs | `GOOGLE_BASE_URL` | Google's |
//! | `endpoint` | az | `AZURE_STORAGE_ENDPOINT` | that of the account |
//! | `account` | az | `AZURE_STORAGE_ACCOUNT_NAME` | |
//! | `anonymous` | gs, az | `GOOGLE_SKIP_SIGNATURE`, `AZURE_SKIP_SIGNATURE` | `false` |
//! | `ca` (a PEM file) | all | | the system's |
//! | `uid`, `gid`, `mode`, `dir-mode` of objects without attributes | all | | the daemon's, 644, 755 |

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use object_store::client::{Certificate, HttpClient};
use object_store::{BackoffConfig, ClientOptions, RetryConfig};
use rand::seq::SliceRandom;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::Policy;
use url::Url;

use crate::{Error, ErrorKind, Result, Side, Time};

use super::Bucket;
use super::client::{Client, StoreRefusal, without_secrets};
use super::dialect::Dialect;
use super::metadata::Defaults;

pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest pause in the middle of an answer.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// The time limit for credentials: without configured credentials, the cloud's metadata server is asked, which does
/// not exist everywhere.
const CREDENTIALS_TIMEOUT: Duration = Duration::from_secs(10);
const CREDENTIALS_RETRIES: usize = 2;

/// The variables with settings that a URL does not contain, by name.
pub type Environment = BTreeMap<String, String>;

/// The variables of this process that concern stores.
pub fn environment() -> Environment {
    let matters =
        |name: &str| ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|kind| name.starts_with(kind)) || name == "HOME";
    let text = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    std::env::vars_os().filter_map(text).filter(|(name, _)| matters(name)).collect()
}

/// Leaves out the options: a wrong one may be a secret in the wrong place.
pub(crate) fn wrong(url: &str, why: impl std::fmt::Display) -> Error {
    let place = url.split('?').next().unwrap_or_default();
    Error::new(ErrorKind::InvalidInput, Side::Application, format!("{place}: {why}"))
}

/// Refuses a URL with credentials; `instead` names the right place for them.
pub(crate) fn without_credentials(url: &Url, instead: &str) -> Result<()> {
    if url.username().is_empty() && url.password().is_none() {
        return Ok(());
    }
    let place = format!("{}://...", url.scheme());
    Err(wrong(&place, format!("credentials do not belong in a URL: {instead}")))
}

/// The host of a URL and the prefix of its keys: empty, or with a slash at its end.
pub(crate) fn bucket_and_root(text: &str, url: &Url, wanted: &str) -> Result<(String, String)> {
    let bucket = url.host_str().filter(|bucket| !bucket.is_empty());
    let bucket = bucket.ok_or_else(|| wrong(text, format!("no bucket: {wanted} is needed")))?.to_owned();
    let root = percent_encoding::percent_decode_str(url.path().trim_matches('/'))
        .decode_utf8()
        .map_err(|_| wrong(text, "the prefix is not UTF-8"))?;
    Ok((bucket, if root.is_empty() { String::new() } else { format!("{root}/") }))
}

/// The options that all kinds of stores accept in a URL.
#[derive(Debug)]
pub(crate) struct StoreOptions {
    pub(crate) endpoint: Option<String>,
    pub(crate) anonymous: bool,
    pub(crate) ca: Option<PathBuf>,
    pub(crate) defaults: Defaults,
}

impl StoreOptions {
    pub(crate) fn new() -> Self {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let defaults = Defaults { uid, gid, file_mode: 0o644, dir_mode: 0o755, time: Time::now(), believed: true };
        Self { endpoint: None, anonymous: false, ca: None, defaults }
    }

    /// Takes an option of the URL `text`; returns `false` if another part must take it.
    pub(crate) fn take(&mut self, text: &str, name: &str, value: &str) -> Result<bool> {
        let number = |radix, max: u32| {
            let number = u32::from_str_radix(value, radix).ok().filter(|number| *number <= max);
            number.ok_or_else(|| wrong(text, format!("{name} cannot be {value:?}")))
        };
        match name {
            "endpoint" => self.endpoint = Some(value.to_owned()),
            "anonymous" => self.anonymous = truth(text, name, value)?,
            "ca" => self.ca = Some(PathBuf::from(value)),
            "uid" => self.defaults.uid = number(10, u32::MAX - 1)?,
            "gid" => self.defaults.gid = number(10, u32::MAX - 1)?,
            "mode" => self.defaults.file_mode = number(8, 0o7777)?,
            "dir-mode" => self.defaults.dir_mode = number(8, 0o7777)?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

pub(crate) fn truth(text: &str, name: &str, value: &str) -> Result<bool> {
    match value {
        "" | "true" | "1" | "yes" => Ok(true),
        "false" | "0" | "no" => Ok(false),
        _ => Err(wrong(text, format!("{name} is true or false, not {value:?}"))),
    }
}

pub(crate) fn unknown(text: &str, name: &str, known: &str) -> Error {
    wrong(text, format!("unknown option {name}; known: {known}"))
}

/// Checks for `http://` or `https://` and a host, without credentials in it or as options, and removes a slash at the
/// end.
pub(crate) fn endpoint(text: &str, endpoint: &str, instead: &str) -> Result<String> {
    let lacks = || wrong(text, "the endpoint lacks http:// or https://");
    let url = Url::parse(endpoint).map_err(|_| lacks())?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(lacks());
    }
    without_credentials(&url, instead)
        .map_err(|_| wrong(text, format!("credentials do not belong into the endpoint: {instead}")))?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err(wrong(text, format!("the endpoint has options, which may be credentials: {instead}")));
    }
    Ok(endpoint.trim_end_matches('/').to_owned())
}

/// The certificates of a PEM file.
pub(super) fn certificates<T, E: std::fmt::Display>(
    text: &str,
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<Vec<T>, E>,
) -> Result<Vec<T>> {
    let bad = |why: &dyn std::fmt::Display| wrong(text, format!("CA bundle {}: {why}", path.display()));
    let pem = std::fs::read(path).map_err(|error| bad(&error))?;
    parse(&pem).map_err(|error| bad(&error))
}

/// The settings of connections to the issuer of credentials for an endpoint. `ca`: a PEM file with certificates to
/// trust in addition to the system's.
pub(crate) fn client_options(text: &str, ca: Option<&Path>, endpoint: &str) -> Result<ClientOptions> {
    let mut options = ClientOptions::new()
        .with_connect_timeout(CONNECT_TIMEOUT)
        .with_read_timeout(READ_TIMEOUT)
        // A large part takes long over a slow line.
        .with_timeout_disabled()
        .with_allow_http(endpoint.starts_with("http://"));
    for certificate in ca.map_or(Ok(Vec::new()), |ca| certificates(text, ca, Certificate::from_pem_bundle))? {
        options = options.with_root_certificate(certificate);
    }
    Ok(options)
}

/// Uses all addresses of a server alike: a large store has many.
struct AnyAddress;

impl Resolve for AnyAddress {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let mut found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            found.shuffle(&mut rand::rng());
            let found: Addrs = Box::new(found.into_iter());
            Ok(found)
        })
    }
}

/// A client for signed requests. It follows no redirections: another host must not get a token, and a redirection may
/// turn a removal into a read. `ca`: as for [`client_options`].
pub(crate) fn connect(text: &str, ca: Option<&Path>, endpoint: &str) -> Result<HttpClient> {
    let mut builder = reqwest::Client::builder()
        .user_agent(concat!("forebay/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        .https_only(!endpoint.starts_with("http://"))
        .http1_only()
        // A body is what the server stores, and as long.
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate()
        .dns_resolver(Arc::new(AnyAddress))
        .redirect(Policy::none());
    if let Some(ca) = ca {
        builder = builder.tls_certs_merge(certificates(text, ca, reqwest::Certificate::from_pem_bundle)?);
    }
    Ok(HttpClient::new(builder.build().map_err(|error| wrong(text, no_http_client(&error)))?))
}

/// Says why there is no HTTP client, and the remedy. In practice, there is one reason: no certificate of the system can
/// be read.
pub fn no_http_client(error: &dyn std::error::Error) -> String {
    let causes = causes(error);
    format!("no HTTP client ({causes}): install ca-certificates, or name a file of certificates in SSL_CERT_FILE")
}

/// An error with its causes.
pub(super) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// How often credentials are requested, and for how long.
pub(super) fn credential_retries() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig::default(),
        max_retries: CREDENTIALS_RETRIES,
        retry_timeout: CREDENTIALS_TIMEOUT,
    }
}

/// `remedy` names the places that credentials can come from.
pub(super) fn no_credentials(error: &object_store::Error, remedy: &str) -> StoreRefusal {
    tracing::debug!("no credentials: {error}");
    StoreRefusal::local(ErrorKind::PermissionDenied, format!("no credentials were found: {remedy}"))
}

/// Whether requests have ever had credentials.
#[derive(Debug, Default)]
pub(crate) struct CredentialHistory {
    had_some: AtomicBool,
}

impl CredentialHistory {
    /// The credentials for a request. `denied` makes the error if there are none.
    ///
    /// # Errors
    /// `Unavailable` if there were credentials before, and their issuer does not answer: nothing was denied.
    pub(crate) fn note<T>(
        &self,
        answer: object_store::Result<T>,
        denied: impl FnOnce(&object_store::Error) -> StoreRefusal,
    ) -> Result<T, StoreRefusal> {
        let error = match answer {
            Ok(credential) => {
                self.had_some.store(true, Ordering::Relaxed);
                return Ok(credential);
            }
            Err(error) => error,
        };
        let why = without_secrets(&causes(&error));
        if !self.had_some.load(Ordering::Relaxed) || is_denial(&why) {
            return Err(denied(&error));
        }
        // The provider has sent its request several times.
        let why = format!("the credentials could not be renewed: {why}");
        Err(StoreRefusal::local(ErrorKind::Unavailable, why).at_once())
    }
}

/// Whether the issuer of credentials has refused them: `object_store` tells the status of its answer only in the text of
/// the error.
fn is_denial(text: &str) -> bool {
    let Some((_, status)) = text.split_once("status code: ") else { return false };
    let digits = status.get(..3).and_then(|digits| digits.parse::<u16>().ok());
    digits.is_some_and(|status| (400..500).contains(&status) && !matches!(status, 408 | 425 | 429))
}

/// The content of a URL, except for the protocol.
#[derive(Debug)]
pub(super) struct StoreUrl {
    /// The URL as given: without secrets.
    pub(super) text: String,
    pub(super) bucket: String,
    pub(super) root: String,
    pub(super) options: StoreOptions,
}

impl StoreUrl {
    /// `own` takes the options that only this kind has; `known` lists all of them.
    pub(super) fn parse(
        text: &str,
        wanted: &str,
        instead: &str,
        known: &str,
        mut own: impl FnMut(&str, &str) -> bool,
    ) -> Result<Self> {
        let url = Url::parse(text).map_err(|error| wrong(text, error))?;
        without_credentials(&url, instead)?;
        let (bucket, root) = bucket_and_root(text, &url, wanted)?;
        let mut options = StoreOptions::new();
        for (name, value) in url.query_pairs() {
            if !own(&name, &value) && !options.take(text, &name, &value)? {
                return Err(unknown(text, &name, known));
            }
        }
        Ok(Self { text: text.to_owned(), bucket, root, options })
    }

    /// The store at `bucket_url`.
    pub(super) fn reached(self, http: HttpClient, bucket_url: String, dialect: Box<dyn Dialect>) -> Bucket {
        let scheme = self.text.split("://").next().unwrap_or_default();
        let name = format!("{scheme}://{}/{}", self.bucket, self.root);
        let client = Client::new(http, self.bucket, bucket_url, dialect);
        Bucket::new(Arc::new(client), name, self.root, self.options.defaults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_that_cannot_be_renewed_are_not_denied() {
        let answer = |text: &str| -> object_store::Result<()> {
            Err(object_store::Error::Generic { store: "test", source: text.to_owned().into() })
        };
        let denied = |error: &object_store::Error| no_credentials(error, "set them");
        let (down, no) =
            ("Server returned non-2xx status code: 500: x", "Server returned non-2xx status code: 401: no");
        let history = CredentialHistory::default();
        assert!(
            history.note(answer(down), denied).unwrap_err().is(ErrorKind::PermissionDenied),
            "there never were any"
        );
        history.note(Ok(()), denied).unwrap();
        for text in [down, "connection refused", "Server returned non-2xx status code: 429: "] {
            assert!(history.note(answer(text), denied).unwrap_err().is(ErrorKind::Unavailable), "{text}");
        }
        assert!(history.note(answer(no), denied).unwrap_err().is(ErrorKind::PermissionDenied));
    }
}
