//! Authorizes requests to an S3 bucket.

use async_trait::async_trait;
use http::Request;
use object_store::aws::{AwsAuthorizer, AwsCredentialProvider};
use object_store::client::HttpRequestBody;

use crate::ErrorKind;
use crate::store::attach::CredentialHistory;
use crate::store::client::StoreRefusal;
use crate::store::dialect::Dialect;

/// Signatures by AWS's rules.
#[derive(Debug)]
pub(super) struct Access {
    /// `None`: requests are anonymous.
    pub(super) credentials: Option<AwsCredentialProvider>,
    pub(super) history: CredentialHistory,
    pub(super) region: String,
    pub(super) requester_pays: bool,
}

#[async_trait]
impl Dialect for Access {
    async fn authorize(&self, request: &mut Request<HttpRequestBody>) -> Result<(), StoreRefusal> {
        let Some(credentials) = &self.credentials else { return Ok(()) };
        let denied = |error: &object_store::Error| {
            StoreRefusal::local(ErrorKind::PermissionDenied, format!("no credentials: {error}"))
        };
        let credential = self.history.note(credentials.get_credential().await, denied)?;
        AwsAuthorizer::new(&credential, "s3", &self.region)
            .with_request_payer(self.requester_pays)
            .try_authorize(request, None)
            .map_err(|error| denied(&error))
    }
}
