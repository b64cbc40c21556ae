//! The bodies of responses.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::Stream;
use futures::stream::BoxStream;
use http_body::{Frame, SizeHint};

/// The body of a response.
pub struct Body(Inner);

enum Inner {
    /// All at once.
    Full(Option<Bytes>),
    /// Piece by piece. An error ends the connection, so that the client sees that the body is not complete.
    Pieces { pieces: BoxStream<'static, io::Result<Bytes>>, left: Option<u64> },
}

impl Body {
    pub fn empty() -> Self {
        Self(Inner::Full(None))
    }

    /// A body of pieces whose sum is `length`; `None` if it is not known.
    pub fn pieces(pieces: impl Stream<Item = io::Result<Bytes>> + Send + 'static, length: Option<u64>) -> Self {
        Self(Inner::Pieces { pieces: Box::pin(pieces), left: length })
    }
}

impl<T: Into<Bytes>> From<T> for Body {
    fn from(bytes: T) -> Self {
        let bytes = bytes.into();
        Self(Inner::Full((!bytes.is_empty()).then_some(bytes)))
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut self.get_mut().0 {
            Inner::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Inner::Pieces { pieces, left } => match pieces.as_mut().poll_next(cx) {
                Poll::Ready(Some(Ok(piece))) => {
                    *left = left.map(|left| left.saturating_sub(piece.len() as u64));
                    Poll::Ready(Some(Ok(Frame::data(piece))))
                }
                Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error))),
                Poll::Ready(None) => Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Inner::Full(bytes) => bytes.is_none(),
            Inner::Pieces { left, .. } => *left == Some(0),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Inner::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Inner::Pieces { left: Some(left), .. } => SizeHint::with_exact(*left),
            Inner::Pieces { left: None, .. } => SizeHint::default(),
        }
    }
}
