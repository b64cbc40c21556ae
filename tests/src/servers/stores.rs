//! Servers of read-only pools, on loopback: Azurite, fake-gcs-server, nginx with index pages or with WebDAV, and
//! Python's own web server.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;

use bytes::Bytes;
use object_store::azure::{AzureAuthorizer, AzureCredential, MicrosoftAzureBuilder};
use object_store::client::{HttpClient, HttpConnector, HttpRequestBody, ReqwestConnector};
use object_store::path::Path as Key;
use object_store::{Attribute, AttributeValue, Attributes, ClientOptions, ObjectStore};
use tempfile::TempDir;

use super::started::{answers, end, free_port, spawn, wait_until};

const BUCKET: &str = "pool";
const ACCOUNT: &str = "forebay";
/// `forebay-secret-of-the-tests`
const ACCOUNT_KEY: &str = "Zm9yZWJheS1zZWNyZXQtb2YtdGhlLXRlc3Rz";

/// The server program and its configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Azurite,
    FakeGcs,
    /// With index pages.
    Nginx,
    /// With WebDAV and no index pages.
    NginxDav,
    /// Without index pages and without WebDAV.
    NginxBare,
    Python,
}

/// One server with an empty pool. It ends when this value is dropped.
pub struct StoreServer {
    kind: Kind,
    dir: TempDir,
    port: u16,
    child: Option<Child>,
    /// The client that puts objects into Azurite.
    azure: Option<Arc<dyn ObjectStore>>,
    http: HttpClient,
}

impl StoreServer {
    pub async fn start(kind: Kind) -> Self {
        let dir = tempfile::Builder::new().prefix("forebay-store-").tempdir_in("/var/tmp").unwrap();
        for name in ["files", "data", "coming"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let http = ReqwestConnector::default().connect(&ClientOptions::new().with_allow_http(true)).unwrap();
        let mut server = Self { kind, dir, port: free_port(), child: None, azure: None, http };
        server.resume();
        match kind {
            Kind::Azurite => server.azure = Some(server.azure().await),
            Kind::FakeGcs => {
                let bucket = format!(r#"{{"name":"{BUCKET}"}}"#);
                server.google("/storage/v1/b?project=tests", "application/json", bucket.into()).await.unwrap();
            }
            _ => {}
        }
        server
    }

    /// Starts the server, or starts it again after a kill, on the same port and data.
    pub fn resume(&mut self) {
        let at = |name: &str| self.dir.path().join(name).to_str().unwrap().to_owned();
        let port = self.port.to_string();
        let mut command;
        match self.kind {
            Kind::Azurite => {
                command = Command::new(tool("azurite-blob"));
                command
                    .env("AZURITE_ACCOUNTS", format!("{ACCOUNT}:{ACCOUNT_KEY}"))
                    .args(["--blobHost", "127.0.0.1", "--blobPort", &port, "--location", &at("data")])
                    .args(["--silent", "--disableTelemetry", "--skipApiVersionCheck"]);
            }
            Kind::FakeGcs => {
                command = Command::new(tool("fake-gcs-server"));
                command
                    .args(["-scheme", "http", "-host", "127.0.0.1", "-port", &port, "-public-host", "127.0.0.1"])
                    .args(["-backend", "memory", "-log-level", "error"]);
            }
            Kind::Nginx | Kind::NginxDav | Kind::NginxBare => {
                fs::write(at("nginx.conf"), self.nginx()).unwrap();
                command = Command::new("/usr/sbin/nginx");
                command.args(["-c", &at("nginx.conf"), "-p", &at("data"), "-e", &at("errors")]);
            }
            Kind::Python => {
                command = Command::new("python3");
                command.args(["-m", "http.server", "--bind", "127.0.0.1", "--directory", &at("files"), &port]);
            }
        }
        let log = self.dir.path().join("log");
        self.child = Some(spawn(command, &log));
        let port = self.port;
        wait_until(&format!("{:?}", self.kind), &log, || answers(port).is_some());
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            end(&mut child);
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self, prefix: &str) -> String {
        self.url_by(prefix, self.port)
    }

    /// Returns the URL with another port, on which a proxy forwards the requests.
    pub fn url_by(&self, prefix: &str, port: u16) -> String {
        match self.kind {
            Kind::Azurite => format!("az://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{port}/{ACCOUNT}"),
            Kind::FakeGcs => format!("gs://{BUCKET}/{prefix}?anonymous=true&endpoint=http://127.0.0.1:{port}"),
            _ => format!("http://127.0.0.1:{port}/{prefix}"),
        }
    }

    /// Returns the environment variables with a client's credentials.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let variables: &[(&str, &str)] = match self.kind {
            Kind::Azurite => &[("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT), ("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)],
            _ => &[],
        };
        variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    /// Returns whether listings of the server omit names that begin with a dot.
    pub fn hides_dots(&self) -> bool {
        matches!(self.kind, Kind::Nginx | Kind::NginxDav)
    }

    /// Returns the directory with a web server's files.
    pub fn files(&self) -> PathBuf {
        self.dir.path().join("files")
    }

    /// Makes or replaces an object; a file is replaced atomically.
    pub async fn put(&self, path: &str, content: Bytes) -> Result<(), String> {
        if matches!(self.kind, Kind::Azurite | Kind::FakeGcs) {
            return self.put_with(path, content, &[]).await;
        }
        let (coming, file) = (self.dir.path().join("coming").join(unique_name()), self.files().join(path));
        let put = || {
            fs::create_dir_all(file.parent().unwrap())?;
            fs::write(&coming, &content)?;
            fs::rename(&coming, &file)
        };
        put().map_err(|error| error.to_string())
    }

    /// Makes or replaces an object with metadata.
    pub async fn put_with(&self, key: &str, content: Bytes, metadata: &[(&str, &str)]) -> Result<(), String> {
        let Some(azure) = &self.azure else {
            let metadata: BTreeMap<_, _> = metadata.iter().copied().collect();
            let about = serde_json::json!({ "name": key, "metadata": metadata });
            let kind = "content-type: application";
            let mut body =
                format!("--part\r\n{kind}/json\r\n\r\n{about}\r\n--part\r\n{kind}/octet-stream\r\n\r\n").into_bytes();
            body.extend_from_slice(&content);
            body.extend_from_slice(b"\r\n--part--\r\n");
            let path = format!("/upload/storage/v1/b/{BUCKET}/o?uploadType=multipart");
            return self.google(&path, "multipart/related; boundary=part", body.into()).await;
        };
        let key = Key::parse(key).map_err(|error| error.to_string())?;
        let named = |name: &str| Attribute::Metadata(name.to_owned().into());
        let attributes: Attributes =
            metadata.iter().map(|(name, value)| (named(name), AttributeValue::from((*value).to_owned()))).collect();
        azure.put_opts(&key, content.into(), attributes.into()).await.map(drop).map_err(|error| error.to_string())
    }

    async fn google(&self, path: &str, kind: &str, body: Bytes) -> Result<(), String> {
        let request = http::Request::post(format!("http://127.0.0.1:{}{path}", self.port)).header("content-type", kind);
        let request = request.body(HttpRequestBody::from(body)).map_err(|error| error.to_string())?;
        let answer = self.http.execute(request).await.map_err(|error| error.to_string())?;
        if answer.status().is_success() { Ok(()) } else { Err(format!("{answer:?}")) }
    }

    fn nginx(&self) -> String {
        let (root, port) = (self.dir.path().display(), self.port);
        let (load, say) = match self.kind {
            Kind::NginxDav => {
                ("load_module /usr/lib/nginx/modules/ngx_http_dav_ext_module.so;", "dav_ext_methods PROPFIND OPTIONS;")
            }
            Kind::Nginx => ("", "autoindex on;"),
            _ => ("", ""),
        };
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let temporary = temporary.map(|name| format!("{name}_temp_path {root}/data/{name};")).join("\n");
        format!(
            "{load}
            user root;
            daemon off;
            master_process off;
            pid {root}/pid;
            events {{ worker_connections 256; }}
            http {{
                access_log off;
                types {{ text/html html; }}
                default_type application/octet-stream;
                {temporary}
                server {{
                    listen 127.0.0.1:{port};
                    root {root}/files;
                    location / {{ {say} }}
                }}
            }}"
        )
    }

    async fn azure(&self) -> Arc<dyn ObjectStore> {
        let endpoint = format!("http://127.0.0.1:{}/{ACCOUNT}", self.port);
        let options = ClientOptions::new().with_allow_http(true);
        let key = object_store::azure::AzureAccessKey::try_new(ACCOUNT_KEY).unwrap();
        let mut request = http::Request::put(format!("{endpoint}/{BUCKET}?restype=container"))
            .header("content-length", "0")
            .body(HttpRequestBody::empty())
            .unwrap();
        AzureAuthorizer::new(&AzureCredential::AccessKey(key), ACCOUNT).try_authorize(&mut request).unwrap();
        let answer = self.http.execute(request).await.unwrap();
        assert!(answer.status().is_success(), "{answer:?}");
        let builder = MicrosoftAzureBuilder::new().with_account(ACCOUNT).with_access_key(ACCOUNT_KEY);
        let builder = builder.with_container_name(BUCKET).with_endpoint(endpoint).with_client_options(options);
        Arc::new(builder.build().unwrap())
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn tool(name: &str) -> PathBuf {
    std::env::var_os("FOREBAY_TOOLS").map(PathBuf::from).unwrap_or_default().join(name)
}

fn unique_name() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed).to_string()
}
