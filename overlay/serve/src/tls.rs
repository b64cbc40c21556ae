//! The certificate that clients see. It can be replaced while connections go on.

use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{ServerConfig, version};

/// A certificate chain and its key.
#[derive(Debug)]
pub struct Certificate(ArcSwap<CertifiedKey>);

impl Certificate {
    /// Reads PEM files.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn read(chain: &Path, key: &Path) -> Result<Arc<Self>, String> {
        Ok(Arc::new(Self(ArcSwap::from_pointee(load(chain, key)?))))
    }

    /// Reads the files again. Connections that are open keep what they have.
    ///
    /// # Errors
    /// As [`Self::read`]; then the certificate stays as it was.
    pub fn reload(&self, chain: &Path, key: &Path) -> Result<(), String> {
        self.0.store(Arc::new(load(chain, key)?));
        Ok(())
    }

    /// Returns the TLS configuration of a listener: TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1.
    ///
    /// # Errors
    /// Those of the library.
    pub fn config(self: &Arc<Self>) -> Result<Arc<ServerConfig>, String> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[&version::TLS13, &version::TLS12])
            .map_err(|e| format!("TLS: {e}"))?
            .with_no_client_auth()
            .with_cert_resolver(self.clone());
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

fn load(chain: &Path, key: &Path) -> Result<CertifiedKey, String> {
    let (chain_at, key_at) = (chain.display(), key.display());
    let certificates = CertificateDer::pem_file_iter(chain)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|e| format!("certificate {chain_at}: {e}"))?;
    if certificates.is_empty() {
        return Err(format!("certificate {chain_at}: no certificate is in it"));
    }
    let key = PrivateKeyDer::from_pem_file(key).map_err(|e| format!("key {key_at}: {e}"))?;
    let certified = CertifiedKey::from_der(certificates, key, &aws_lc_rs::default_provider())
        .map_err(|e| format!("key {key_at}: it does not fit the certificate {chain_at}: {e}"))?;
    Ok(certified)
}
