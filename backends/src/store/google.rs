//! Google's store: the requests of S3 with other credentials, and with generations. Generations distinguish contents
//! where ETags, which are checksums, do not.

use std::sync::Arc;

use async_trait::async_trait;
use http::{HeaderMap, HeaderName, HeaderValue, Request, header};
use object_store::client::HttpRequestBody;
use object_store::gcp::{GcpCredentialProvider, GoogleCloudStorageBuilder, GoogleConfigKey};

use crate::{ErrorKind, Result};

use super::Bucket;
use super::attach::{self, CredentialHistory, Environment, StoreUrl};
use super::client::{StoreRefusal, StoreRequest};
use super::dialect::{Dialect, translate_metadata};
use super::requests::Same;

const ENDPOINT: &str = "https://storage.googleapis.com";
const GENERATION: HeaderName = HeaderName::from_static("x-goog-generation");
const IF_GENERATION_MATCH: HeaderName = HeaderName::from_static("x-goog-if-generation-match");
const INSTEAD: &str = "set GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT to a file with them, or say \
                       `anonymous=true` of a public bucket";

#[derive(Debug)]
struct Google {
    /// `None`: requests are anonymous.
    credentials: Option<GcpCredentialProvider>,
    history: CredentialHistory,
}

/// Attaches `gs://BUCKET[/PREFIX]`.
pub(super) fn attach(text: &str, environment: &Environment) -> Result<Bucket> {
    let known = "endpoint, anonymous, ca, uid, gid, mode, dir-mode";
    let named = StoreUrl::parse(text, "gs://BUCKET/PREFIX", INSTEAD, known, |_, _| false)?;
    let mut builder = GoogleCloudStorageBuilder::new();
    for (name, value) in environment.iter().filter(|(name, _)| name.starts_with("GOOGLE_")) {
        // A variable that the builder does not know belongs to other programs; the settings of connections follow
        // below.
        match name.to_ascii_lowercase().parse() {
            Ok(GoogleConfigKey::Client(_) | GoogleConfigKey::Bucket) | Err(_) => {}
            Ok(key) => builder = builder.with_config(key, value),
        }
    }
    let set = |key| builder.get_config_value(&key);
    let anonymous = named.options.anonymous || set(GoogleConfigKey::SkipSignature).as_deref() == Some("true");
    let told = named.options.endpoint.clone().or_else(|| set(GoogleConfigKey::BaseUrl));
    let endpoint = attach::endpoint(text, told.as_deref().unwrap_or(ENDPOINT), INSTEAD)?;
    let options = attach::client_options(text, named.options.ca.as_deref(), &endpoint)?;
    let http = attach::connect(text, named.options.ca.as_deref(), &endpoint)?;
    let credentials = match anonymous {
        true => None,
        false => {
            let store = builder
                .with_bucket_name(&named.bucket)
                .with_client_options(options)
                .with_retry(attach::credential_retries())
                .build();
            Some(Arc::clone(store.map_err(|error| attach::wrong(text, error))?.credentials()))
        }
    };
    let bucket_url = format!("{endpoint}/{}", named.bucket);
    Ok(named.reached(http, bucket_url, Box::new(Google { credentials, history: CredentialHistory::default() })))
}

#[async_trait]
impl Dialect for Google {
    async fn authorize(&self, request: &mut Request<HttpRequestBody>) -> Result<(), StoreRefusal> {
        // Without this header the store decompresses objects that it keeps compressed, and the size differs from that
        // of the object.
        request.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        let Some(credentials) = &self.credentials else { return Ok(()) };
        let credential =
            self.history.note(credentials.get_credential().await, |error| attach::no_credentials(error, INSTEAD))?;
        if !credential.bearer.is_empty() {
            let mut value = HeaderValue::try_from(format!("Bearer {}", credential.bearer)).map_err(|_| {
                StoreRefusal::local(ErrorKind::PermissionDenied, format!("the credentials make no sense: {INSTEAD}"))
            })?;
            value.set_sensitive(true);
            request.headers_mut().insert(header::AUTHORIZATION, value);
        }
        Ok(())
    }

    fn translate(&self, headers: &mut HeaderMap) {
        translate_metadata(headers, "x-goog-meta-");
        if let Some(generation) = headers.get(GENERATION).cloned() {
            headers.insert(header::ETAG, generation);
        }
    }

    fn tells_empty_prefixes(&self) -> bool {
        false
    }

    fn only<'a>(&self, same: &Same<'_>, call: StoreRequest<'a>) -> Result<StoreRequest<'a>, StoreRefusal> {
        if same.etag.parse::<u64>().is_ok() { call.header(IF_GENERATION_MATCH, same.etag) } else { Ok(call) }
    }
}
