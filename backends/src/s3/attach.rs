//! Attaches a bucket from a URL and the environment.
//!
//! `s3://BUCKET[/PREFIX][?OPTION=VALUE&...]`
//!
//! | option | environment | default |
//! |---|---|---|
//! | `endpoint` | `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` | Amazon's of the region |
//! | `region` | `AWS_REGION`, `AWS_DEFAULT_REGION`, the profile | `us-east-1` |
//! | `path-style` (`true`, `false`) | `AWS_VIRTUAL_HOSTED_STYLE_REQUEST` | `true` with an endpoint, else `false` |
//! | `requester-pays` | `AWS_REQUEST_PAYER` | `false` |
//! | `anonymous` | `AWS_SKIP_SIGNATURE` | `false` |
//! | `profile` | `AWS_PROFILE` | `default` |
//! | `ca` (a PEM file) | `AWS_CA_BUNDLE` | the system's |
//! | `uid`, `gid`, `mode`, `dir-mode` of objects without attributes | | the daemon's, 644, 755 |
//!
//! Credentials: `AWS_ACCESS_KEY_ID` and its companions, the profile in `~/.aws/credentials` and `~/.aws/config`, a
//! web identity, the container's, the instance's.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use configparser::ini::Ini;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::HttpClient;
use url::Url;

use crate::Result;
use crate::store::attach::{self as common, CredentialHistory, truth, wrong};
use crate::store::{Bucket, Environment};

use super::access::Access;
use super::client::Client;
use super::metadata::Defaults;

const INSTEAD: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile";

/// The content of a URL.
#[derive(Debug)]
pub(super) struct Attached {
    http: HttpClient,
    bucket: String,
    /// `https://HOST/BUCKET` or `https://BUCKET.HOST`.
    bucket_url: String,
    access: Access,
    /// The prefix of all keys of the pool: empty, or with a slash at its end.
    root: String,
    defaults: Defaults,
    /// Without secrets.
    pub(super) url: String,
}

impl Attached {
    pub(super) fn bucket(self) -> Bucket {
        let name = format!("s3://{}/{}", self.bucket, self.root);
        let client = Client::new(self.http, self.bucket, self.bucket_url, Box::new(self.access));
        Bucket::new(Arc::new(client), name, self.root, self.defaults)
    }
}

/// Checks that a URL can name a pool, without contacting a server.
///
/// # Errors
/// `InvalidInput`, with the reason.
pub fn check(url: &str, environment: &Environment) -> Result<()> {
    attach(url, environment).map(drop)
}

pub(super) fn attach(text: &str, environment: &Environment) -> Result<Attached> {
    let url = Url::parse(text).map_err(|error| wrong(text, error))?;
    common::without_credentials(&url, INSTEAD)?;
    let (bucket, root) = common::bucket_and_root(text, &url, "s3://BUCKET/PREFIX")?;
    let options = S3Options::parse(text, &url)?;

    let mut builder = AmazonS3Builder::new();
    let from_env = options.profile.is_none() && environment.contains_key("AWS_ACCESS_KEY_ID");
    // A session token is valid only with the keys that it was issued with.
    let foreign = |name: &str| name == "AWS_SESSION_TOKEN" && !from_env;
    let variables = environment.iter().filter(|(name, _)| name.starts_with("AWS_") && !foreign(name));
    for (name, value) in variables {
        // A variable that the builder does not know belongs to other programs.
        if let Ok(key) = name.to_ascii_lowercase().parse() {
            builder = builder.with_config(key, value);
        }
    }
    let set = |builder: &AmazonS3Builder, key| builder.get_config_value(&key);
    let mut region = options.region.clone().or_else(|| set(&builder, AmazonS3ConfigKey::Region));
    let endpoint = options
        .common
        .endpoint
        .clone()
        .or_else(|| set(&builder, AmazonS3ConfigKey::S3Endpoint))
        .or_else(|| set(&builder, AmazonS3ConfigKey::Endpoint));
    let told = |key| set(&builder, key).is_some_and(|value| matches!(value.as_str(), "true" | "1" | "requester"));
    let virtual_hosted = set(&builder, AmazonS3ConfigKey::VirtualHostedStyleRequest).map(|value| value == "true");
    let path_style = options.path_style.or(virtual_hosted.map(|hosted| !hosted)).unwrap_or(endpoint.is_some());
    let requester_pays = options.requester_pays || told(AmazonS3ConfigKey::RequestPayer);
    let anonymous = options.common.anonymous || told(AmazonS3ConfigKey::SkipSignature);

    if !from_env && let Some(profile) = AwsProfile::find(text, environment, options.profile.as_deref())? {
        if let Some((key, secret)) = profile.keys {
            builder = builder.with_access_key_id(key).with_secret_access_key(secret);
            if let Some(token) = profile.token {
                builder = builder.with_token(token);
            }
        }
        region = region.or(profile.region);
    }
    let region = region.unwrap_or_else(|| "us-east-1".to_owned());
    let endpoint = endpoint.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
    let endpoint = common::endpoint(text, &endpoint, INSTEAD)?;
    let bucket_url = match (path_style, endpoint.split_once("://")) {
        (false, Some((scheme, host))) => format!("{scheme}://{bucket}.{host}"),
        _ => format!("{endpoint}/{bucket}"),
    };
    let ca = options.common.ca.clone().or_else(|| environment.get("AWS_CA_BUNDLE").map(PathBuf::from));
    let http = common::connect(text, ca.as_deref(), &endpoint)?;
    let options_of_issuer = common::client_options(text, ca.as_deref(), &endpoint)?;
    let store = builder
        .with_bucket_name(&bucket)
        .with_region(&region)
        .with_endpoint(endpoint)
        .with_client_options(options_of_issuer)
        .build()
        .map_err(|error| wrong(text, error))?;
    let credentials = (!anonymous).then(|| Arc::clone(store.credentials()));
    let access = Access { credentials, history: CredentialHistory::default(), region, requester_pays };
    let defaults = options.common.defaults;
    Ok(Attached { http, bucket, bucket_url, access, root, defaults, url: text.to_owned() })
}

#[derive(Debug)]
struct S3Options {
    common: common::StoreOptions,
    region: Option<String>,
    path_style: Option<bool>,
    requester_pays: bool,
    profile: Option<String>,
}

impl S3Options {
    fn parse(text: &str, url: &Url) -> Result<Self> {
        let common = common::StoreOptions::new();
        let mut options = Self { common, region: None, path_style: None, requester_pays: false, profile: None };
        for (name, value) in url.query_pairs() {
            match name.as_ref() {
                "region" => options.region = Some(value.into_owned()),
                "path-style" => options.path_style = Some(truth(text, &name, &value)?),
                "requester-pays" => options.requester_pays = truth(text, &name, &value)?,
                "profile" => options.profile = Some(value.into_owned()),
                _ if options.common.take(text, &name, &value)? => {}
                _ => {
                    let known = "endpoint, region, path-style, requester-pays, anonymous, profile, ca, uid, gid, mode, \
                                 dir-mode";
                    return Err(common::unknown(text, &name, known));
                }
            }
        }
        Ok(options)
    }
}

/// The settings of a profile of the AWS tools.
#[derive(Default)]
struct AwsProfile {
    keys: Option<(String, String)>,
    token: Option<String>,
    region: Option<String>,
}

impl AwsProfile {
    /// `Ok(None)` if the files do not exist; an error if neither file has the profile that was named.
    fn find(url: &str, environment: &Environment, named: Option<&str>) -> Result<Option<Self>> {
        let named = named.or(environment.get("AWS_PROFILE").map(String::as_str));
        let name = named.unwrap_or("default");
        let home = environment.get("HOME").map(PathBuf::from).unwrap_or_default();
        let file = |variable: &str, default: &str| {
            environment.get(variable).map_or_else(|| home.join(".aws").join(default), PathBuf::from)
        };
        let credentials = (file("AWS_SHARED_CREDENTIALS_FILE", "credentials"), name.to_owned());
        let section = if name == "default" { name.to_owned() } else { format!("profile {name}") };
        let config = (file("AWS_CONFIG_FILE", "config"), section);
        let mut profile = Self::default();
        let mut found = false;
        for (path, section) in [credentials, config] {
            let Some(section) = Self::section(url, &path, &section)? else { continue };
            found = true;
            let get = |key| section.get(key).cloned().flatten();
            if profile.keys.is_none() {
                profile.keys = get("aws_access_key_id").zip(get("aws_secret_access_key"));
                profile.token = get("aws_session_token");
            }
            profile.region = profile.region.or_else(|| get("region"));
        }
        match (found, named) {
            (true, _) => Ok(Some(profile)),
            (false, None) => Ok(None),
            (false, Some(name)) => Err(wrong(url, format!("no profile {name} in ~/.aws/credentials or ~/.aws/config"))),
        }
    }

    fn section(url: &str, path: &Path, name: &str) -> Result<Option<HashMap<String, Option<String>>>> {
        if !path.exists() {
            return Ok(None);
        }
        let mut file = Ini::new_cs().load(path).map_err(|error| wrong(url, format!("{}: {error}", path.display())))?;
        Ok(file.remove(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attach(url: &str) -> Result<Attached> {
        super::attach(url, &Environment::new())
    }

    fn error(url: &str) -> String {
        attach(url).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn urls_say_where_the_keys_are() {
        let attached =
            attach("s3://bucket/some/prefix/?endpoint=http://127.0.0.1:1&region=here&uid=7&mode=600").unwrap();
        assert_eq!(attached.root, "some/prefix/");
        assert_eq!(attached.bucket_url, "http://127.0.0.1:1/bucket");
        assert_eq!(attached.access.region, "here");
        assert_eq!((attached.defaults.uid, attached.defaults.file_mode), (7, 0o600));
        let hosted = attach("s3://bucket?endpoint=https://example.org/&path-style=false").unwrap();
        assert_eq!((hosted.root.as_str(), hosted.bucket_url.as_str()), ("", "https://bucket.example.org"));
    }

    #[test]
    fn what_is_wrong_with_a_url_is_said() {
        assert!(error("s3:///prefix").contains("no bucket"));
        assert!(error("s3://bucket?colour=red").contains("unknown option colour"));
        assert!(error("s3://bucket?path-style=maybe").contains("path-style"));
        assert!(error("s3://bucket?endpoint=example.org").contains("lacks http"));
        assert!(error("s3://bucket?ca=/no/such.pem&endpoint=https://h").contains("/no/such.pem"));
        assert!(error("s3://bucket?profile=nobodys").contains("no profile nobodys"));
        let secret = error("s3://key:secret@bucket");
        assert!(secret.contains("do not belong") && !secret.contains("secret@"), "{secret}");
    }

    #[tokio::test]
    async fn credentials_come_from_the_environment_or_a_profile() {
        let home = tempfile::tempdir().unwrap();
        let credentials = home.path().join("credentials");
        std::fs::write(&credentials, "[default]\naws_access_key_id = A\naws_secret_access_key = B\n[other]\naws_access_key_id = C\naws_secret_access_key = D\nregion = there\n").unwrap();
        let mut environment = Environment::new();
        environment.insert("AWS_SHARED_CREDENTIALS_FILE".into(), credentials.to_str().unwrap().into());
        let key = async |url: &str, environment: &Environment| {
            let attached = super::attach(url, environment).unwrap();
            let key = attached.access.credentials.unwrap().get_credential().await.unwrap().key_id.clone();
            (key, attached.access.region)
        };
        assert_eq!(key("s3://bucket", &environment).await, ("A".into(), "us-east-1".into()));
        assert_eq!(key("s3://bucket?profile=other", &environment).await, ("C".into(), "there".into()));
        environment.insert("AWS_PROFILE".into(), "other".into());
        environment.insert("AWS_REGION".into(), "here".into());
        assert_eq!(key("s3://bucket", &environment).await, ("C".into(), "here".into()));
        environment.insert("AWS_ACCESS_KEY_ID".into(), "E".into());
        environment.insert("AWS_SECRET_ACCESS_KEY".into(), "F".into());
        assert_eq!(key("s3://bucket", &environment).await, ("E".into(), "here".into()));
    }
}
