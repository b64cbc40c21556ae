//! The bodies of responses.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::Stream;
use futures::stream::BoxStream;
use http_body::{Frame, SizeHint};

use crate::http2_activity::OpenResponse;

/// The body of a response.
pub struct ReplyBody {
    inner: BodyKind,
    count: Option<ByteCount>,
    /// By HTTP/2, what the connection is told.
    watch: Option<OpenResponse>,
}

/// Counts the bytes of a body, and tells the sum when the body ends, sent or not.
struct ByteCount {
    bytes: u64,
    tell: Option<Box<dyn FnOnce(u64) + Send>>,
}

impl Drop for ByteCount {
    fn drop(&mut self) {
        if let Some(tell) = self.tell.take() {
            tell(self.bytes);
        }
    }
}

enum BodyKind {
    /// All at once.
    Full(Option<Bytes>),
    /// Piece by piece. An error ends the connection, so that the client sees that the body is not complete.
    Pieces { pieces: BoxStream<'static, io::Result<Bytes>>, left: Option<u64> },
}

impl ReplyBody {
    pub fn empty() -> Self {
        BodyKind::Full(None).into()
    }

    /// A body that is there as a whole.
    pub fn full(bytes: Bytes) -> Self {
        BodyKind::Full((!bytes.is_empty()).then_some(bytes)).into()
    }

    /// A body of pieces whose sum is `length`; `None` if it is not known.
    pub fn pieces(pieces: impl Stream<Item = io::Result<Bytes>> + Send + 'static, length: Option<u64>) -> Self {
        BodyKind::Pieces { pieces: Box::pin(pieces), left: length }.into()
    }

    /// The same body. When it ends, `tell` gets the number of bytes that the connection took.
    pub fn counted(self, tell: impl FnOnce(u64) + Send + 'static) -> Self {
        Self { count: Some(ByteCount { bytes: 0, tell: Some(Box::new(tell)) }), ..self }
    }

    /// The same body. The connection is told what is given of it, and when it ends.
    pub fn watched(self, response: OpenResponse) -> Self {
        Self { watch: Some(response), ..self }
    }
}

impl From<BodyKind> for ReplyBody {
    fn from(inner: BodyKind) -> Self {
        Self { inner, count: None, watch: None }
    }
}

macro_rules! from_bytes {
    ($($whole:ty),*) => {$(
        impl From<$whole> for ReplyBody {
            fn from(bytes: $whole) -> Self {
                Self::full(bytes.into())
            }
        }
    )*};
}

from_bytes!(Bytes, Vec<u8>, String, &'static str, &'static [u8]);

impl http_body::Body for ReplyBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        let next = match &mut this.inner {
            BodyKind::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            BodyKind::Pieces { pieces, left } => match pieces.as_mut().poll_next(cx) {
                Poll::Ready(Some(Ok(piece))) => {
                    *left = left.map(|left| left.saturating_sub(piece.len() as u64));
                    Poll::Ready(Some(Ok(Frame::data(piece))))
                }
                Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error))),
                Poll::Ready(None) => Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            },
        };
        if let Some(watch) = &mut this.watch {
            match next.is_pending() {
                true => watch.waits(),
                false => watch.wanted(),
            }
        }
        if let Poll::Ready(Some(Ok(frame))) = &next {
            let bytes = frame.data_ref().map_or(0, |data| data.len() as u64);
            if let Some(count) = &mut this.count {
                count.bytes += bytes;
            }
            if let Some(watch) = &mut this.watch {
                watch.given(bytes);
            }
        }
        next
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            BodyKind::Full(bytes) => bytes.is_none(),
            BodyKind::Pieces { left, .. } => *left == Some(0),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            BodyKind::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            BodyKind::Pieces { left: Some(left), .. } => SizeHint::with_exact(*left),
            BodyKind::Pieces { left: None, .. } => SizeHint::default(),
        }
    }
}
