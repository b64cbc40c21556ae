//! Azure's store: its own listings, and other header names for the features that S3 has too.

use std::sync::Arc;

use async_trait::async_trait;
use http::{HeaderMap, Method, Request};
use object_store::azure::{AzureAuthorizer, AzureConfigKey, AzureCredentialProvider, MicrosoftAzureBuilder};
use object_store::client::HttpRequestBody;
use percent_encoding::percent_decode_str;
use serde::Deserialize;

use crate::{ErrorKind, Result, Time};

use super::Bucket;
use super::attach::{self, CredentialHistory, Environment, StoreUrl};
use super::client::{Client, StoreRefusal, StoreRequest};
use super::dialect::{Dialect, translate_metadata};
use super::requests::{ListRequest, ListedObject, Page, SIZE_MAX, garbled, parse};

const INSTEAD: &str = "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or say `anonymous=true` of a public \
                       container";
/// Empty pages that are skipped in a row: the store ends a page where one of its servers ends.
const EMPTY_PAGES_MAX: usize = 1_000;

#[derive(Debug)]
struct Azure {
    account: String,
    /// `None`: requests are anonymous.
    credentials: Option<AzureCredentialProvider>,
    history: CredentialHistory,
}

/// Attaches `az://CONTAINER[/PREFIX]`.
pub(super) fn attach(text: &str, environment: &Environment) -> Result<Bucket> {
    let known = "account, endpoint, anonymous, ca, uid, gid, mode, dir-mode";
    let mut account = None;
    let named = StoreUrl::parse(text, "az://CONTAINER/PREFIX", INSTEAD, known, |name, value| {
        let ours = name == "account";
        if ours {
            account = Some(value.to_owned());
        }
        ours
    })?;
    let mut builder = MicrosoftAzureBuilder::new();
    for (name, value) in environment.iter().filter(|(name, _)| name.starts_with("AZURE_")) {
        // A variable that the builder does not know belongs to other programs; the settings of connections follow
        // below.
        match name.to_ascii_lowercase().parse() {
            Ok(AzureConfigKey::Client(_) | AzureConfigKey::ContainerName | AzureConfigKey::UseEmulator) | Err(_) => {}
            Ok(key) => builder = builder.with_config(key, value),
        }
    }
    let set = |key| builder.get_config_value(&key);
    let anonymous = named.options.anonymous || set(AzureConfigKey::SkipSignature).as_deref() == Some("true");
    let account = account.or_else(|| set(AzureConfigKey::AccountName)).ok_or_else(|| {
        attach::wrong(text, "no account: set AZURE_STORAGE_ACCOUNT_NAME, or say `account=NAME` in the URL")
    })?;
    let told = named.options.endpoint.clone().or_else(|| set(AzureConfigKey::Endpoint));
    let told = told.unwrap_or_else(|| format!("https://{account}.blob.core.windows.net"));
    let endpoint = attach::endpoint(text, &told, INSTEAD)?;
    let options = attach::client_options(text, named.options.ca.as_deref(), &endpoint)?;
    let http = attach::connect(text, named.options.ca.as_deref(), &endpoint)?;
    let credentials = match anonymous {
        true => None,
        false => {
            let store = builder
                .with_account(&account)
                .with_container_name(&named.bucket)
                .with_endpoint(endpoint.clone())
                .with_client_options(options)
                .with_retry(attach::credential_retries())
                .build();
            Some(Arc::clone(store.map_err(|error| attach::wrong(text, error))?.credentials()))
        }
    };
    let bucket_url = format!("{endpoint}/{}", named.bucket);
    Ok(named.reached(http, bucket_url, Box::new(Azure { account, credentials, history: CredentialHistory::default() })))
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListBlobsAnswer {
    blobs: Blobs,
    next_marker: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Blobs {
    blob: Vec<Blob>,
    blob_prefix: Vec<Prefix>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Blob {
    name: EncodedName,
    properties: Properties,
    metadata: Option<Metadata>,
}

#[derive(Debug, Deserialize)]
struct Properties {
    #[serde(rename = "Last-Modified")]
    last_modified: String,
    #[serde(rename = "Etag")]
    etag: String,
    #[serde(rename = "Content-Length")]
    content_length: u64,
}

#[derive(Debug, Deserialize)]
struct Metadata {
    #[serde(rename = "hdi_isfolder")]
    folder: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Prefix {
    name: EncodedName,
}

/// A name, percent-encoded if XML cannot represent it.
#[derive(Debug, Deserialize)]
struct EncodedName {
    #[serde(rename = "@Encoded", default)]
    encoded: bool,
    #[serde(rename = "$text", default)]
    text: String,
}

impl EncodedName {
    fn decoded(self) -> String {
        match self.encoded {
            true => percent_decode_str(&self.text).decode_utf8_lossy().into_owned(),
            false => self.text,
        }
    }
}

#[async_trait]
impl Dialect for Azure {
    async fn authorize(&self, request: &mut Request<HttpRequestBody>) -> Result<(), StoreRefusal> {
        let Some(credentials) = &self.credentials else { return Ok(()) };
        let denied = |error: &object_store::Error| attach::no_credentials(error, INSTEAD);
        let credential = self.history.note(credentials.get_credential().await, denied)?;
        AzureAuthorizer::new(&credential, &self.account).try_authorize(request).map_err(|error| denied(&error))
    }

    fn tells_empty_prefixes(&self) -> bool {
        false
    }

    fn translate(&self, headers: &mut HeaderMap) {
        translate_metadata(headers, "x-ms-meta-");
    }

    async fn page(&self, client: &Client, asked: &ListRequest<'_>) -> Result<Page, StoreRefusal> {
        let mut token = asked.token.map(str::to_owned);
        for _ in 0..EMPTY_PAGES_MAX {
            let page = page(client, asked, token.as_deref()).await?;
            if page.next.is_none() || !page.objects.is_empty() || !page.prefixes.is_empty() {
                return Ok(page);
            }
            token = page.next;
        }
        Err(StoreRefusal::local(ErrorKind::Unavailable, "a listing of nothing but empty pages".to_owned()))
    }
}

async fn page(client: &Client, asked: &ListRequest<'_>, token: Option<&str>) -> Result<Page, StoreRefusal> {
    let mut call = StoreRequest::new(Method::GET, "")
        .query("restype", "container")
        .query("comp", "list")
        .query("include", "metadata")
        .query("maxresults", asked.most.to_string())
        .query("prefix", asked.prefix);
    if asked.delimited {
        call = call.query("delimiter", "/");
    }
    if let Some(token) = token {
        call = call.query("marker", token);
    }
    let told: ListBlobsAnswer = parse(&client.send(call).await?)?;
    let objects = told.blobs.blob.into_iter().map(|blob| {
        let modified = httpdate::parse_http_date(&blob.properties.last_modified).map_err(garbled)?;
        let etag = blob.properties.etag;
        Ok(ListedObject {
            key: blob.name.decoded(),
            // Headers quote the ETag.
            etag: if etag.starts_with('"') { etag } else { format!("\"{etag}\"") },
            size: blob.properties.content_length.min(SIZE_MAX),
            last_modified: Time::from(modified),
            revision: 0,
            folder: blob.metadata.is_some_and(|metadata| metadata.folder.as_deref() == Some("true")),
        })
    });
    Ok(Page {
        objects: objects.collect::<Result<_, StoreRefusal>>()?,
        prefixes: told.blobs.blob_prefix.into_iter().map(|prefix| prefix.name.decoded()).collect(),
        next: told.next_marker.filter(|token| !token.is_empty()),
    })
}

#[cfg(test)]
mod tests {
    use super::super::client::StoreAnswer;
    use super::*;

    #[test]
    fn names_keep_the_spaces_at_their_ends() {
        let body = "<EnumerationResults><Blobs><Blob><Name> a </Name><Properties>\
                    <Last-Modified>Wed, 01 Jan 2020 00:00:00 GMT</Last-Modified><Etag>e</Etag>\
                    <Content-Length>3</Content-Length></Properties></Blob><BlobPrefix><Name> d/</Name></BlobPrefix></Blobs>\
                    <NextMarker/></EnumerationResults>";
        let answer = StoreAnswer { headers: HeaderMap::new(), body: body.into(), retries: 0 };
        let told: ListBlobsAnswer = parse(&answer).unwrap();
        let blobs: Vec<_> = told.blobs.blob.into_iter().map(|blob| blob.name.decoded()).collect();
        let prefixes: Vec<_> = told.blobs.blob_prefix.into_iter().map(|prefix| prefix.name.decoded()).collect();
        assert_eq!((blobs, prefixes), (vec![" a ".to_owned()], vec![" d/".to_owned()]));
    }
}
