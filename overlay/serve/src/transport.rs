//! A client's connection, as hyper sees it.
//!
//! Resident content leaves a plain HTTP/1.1 connection by `sendfile(2)`. The body of such a response is a part of a
//! mapping of the content file ([`Mapped`]), which is never read: the connection knows the mapping by its address
//! ([`Windows`]) and sends from the file instead. So no page fault can meet a file that was cut meanwhile, and no byte is
//! copied to this process.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use memmap2::Mmap;
use parking_lot::Mutex;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::Sleep;

use crate::http2_activity::{Http2Activity, SentFrames};

/// The most bytes of one `sendfile` call. The call reads from the device if the page cache does not have the bytes.
const SEND_BYTES: usize = 1 << 20;

/// The whole of a file that does not change while this exists, mapped.
pub struct Mapped {
    map: Mmap,
    file: Arc<File>,
}

impl Mapped {
    /// Maps a file of at least one byte.
    ///
    /// # Errors
    /// Those of `mmap(2)`.
    pub fn new(file: Arc<File>) -> io::Result<Self> {
        // SAFETY: nothing reads the mapping: its addresses stand for ranges of the file.
        let map = unsafe { Mmap::map(&*file)? };
        Ok(Self { map, file })
    }

    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }
}

/// What keeps a mapping, and with it the content file, as it is.
pub trait MappedOwner: Send + Sync + 'static {
    fn mapped(&self) -> Option<&Mapped>;
}

/// The mapped bodies that a connection is about to send.
#[derive(Clone, Default)]
pub struct Windows(Arc<Mutex<Vec<MappedWindow>>>);

struct MappedWindow {
    from: usize,
    bytes: usize,
    file: Arc<File>,
    offset: u64,
}

impl Windows {
    /// Returns a part of a mapped file as a body. `None` if nothing is mapped, or the part is not inside the mapping.
    pub fn lend<T: MappedOwner>(&self, lender: &Arc<T>, offset: u64, bytes: u64) -> Option<Bytes> {
        let mapped = lender.mapped()?;
        let start = usize::try_from(offset).ok()?;
        let range = start..start.checked_add(usize::try_from(bytes).ok()?)?;
        let from = mapped.map.get(range.clone())?.as_ptr() as usize;
        self.0.lock().push(MappedWindow { from, bytes: range.len(), file: mapped.file.clone(), offset });
        Some(Bytes::from_owner(LentBytes { windows: self.clone(), lender: lender.clone(), range, from }))
    }

    /// Returns the file that a buffer stands for, with the offset in it.
    fn find(&self, buffer: &[u8]) -> Option<(Arc<File>, u64)> {
        let at = buffer.as_ptr() as usize;
        let windows = self.0.lock();
        let window = windows.iter().find(|window| (window.from..window.from + window.bytes).contains(&at))?;
        Some((window.file.clone(), window.offset + (at - window.from) as u64))
    }
}

/// A body that stands for a part of a file.
struct LentBytes<T: MappedOwner> {
    windows: Windows,
    lender: Arc<T>,
    range: Range<usize>,
    from: usize,
}

impl<T: MappedOwner> AsRef<[u8]> for LentBytes<T> {
    fn as_ref(&self) -> &[u8] {
        self.lender.mapped().and_then(|mapped| mapped.map.get(self.range.clone())).unwrap_or_default()
    }
}

impl<T: MappedOwner> Drop for LentBytes<T> {
    fn drop(&mut self) {
        let mut windows = self.windows.0.lock();
        // The same part may be lent twice: each of them takes one away.
        let same = |window: &MappedWindow| (window.from, window.bytes) == (self.from, self.range.len());
        if let Some(at) = windows.iter().position(same) {
            windows.swap_remove(at);
        }
    }
}

/// A TCP connection without TLS.
pub(crate) struct Plain {
    stream: TokioIo<TcpStream>,
    windows: Windows,
}

impl Plain {
    pub fn new(stream: TcpStream, windows: Windows) -> Self {
        Self { stream: TokioIo::new(stream), windows }
    }

    fn poll_sendfile(
        &self,
        cx: &mut Context<'_>,
        (file, offset): (&File, u64),
        bytes: usize,
    ) -> Poll<io::Result<usize>> {
        let stream = self.stream.inner();
        loop {
            ready!(stream.poll_write_ready(cx))?;
            let sent = stream.try_io(Interest::WRITABLE, || {
                let mut at = offset;
                Ok(rustix::fs::sendfile(stream, file, Some(&mut at), bytes.min(SEND_BYTES))?)
            });
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Hyper takes 0 for a closed connection, and that is how this one must end.
                sent => return Poll::Ready(sent),
            }
        }
    }
}

impl Read for Plain {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl Write for Plain {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        match self.windows.find(buffer) {
            Some((file, offset)) => self.poll_sendfile(cx, (&file, offset), buffer.len()),
            None => Pin::new(&mut self.stream).poll_write(cx, buffer),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        for (at, buffer) in buffers.iter().enumerate() {
            let Some((file, offset)) = self.windows.find(buffer) else { continue };
            return match at {
                0 => self.poll_sendfile(cx, (&file, offset), buffer.len()),
                _ => Pin::new(&mut self.stream).poll_write_vectored(cx, &buffers[..at]),
            };
        }
        Pin::new(&mut self.stream).poll_write_vectored(cx, buffers)
    }
}

/// What a client sends first by HTTP/2 (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A connection that ends if the client does not say in time which HTTP it speaks, or takes nothing for a while. What
/// comes after the first bytes has other limits.
pub(crate) struct Patient<T> {
    inner: T,
    /// Until the client has said which HTTP it speaks.
    greeting: Option<Greeting>,
    patience: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
    activity: Http2Activity,
    /// If the connection is one of HTTP/2.
    frames: Option<SentFrames>,
}

struct Greeting {
    /// Bytes that were those of the preface.
    matched: usize,
    until: Pin<Box<Sleep>>,
}

impl<T> Patient<T> {
    /// `activity` is told that the connection is one of HTTP/2, and what is sent then. `is_http2`: that is known already.
    pub fn new(inner: T, (greeting, patience): (Duration, Duration), activity: Http2Activity, is_http2: bool) -> Self {
        let greeting = Greeting { matched: 0, until: Box::pin(tokio::time::sleep(greeting)) };
        let frames = is_http2.then(|| SentFrames::new(activity.clone()));
        Self { inner, greeting: Some(greeting), patience, waiting: None, activity, frames }
    }

    fn watch<R>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if outcome.is_ready() {
            self.waiting = None;
            return outcome;
        }
        let patience = self.patience;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        match waiting.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: Read + Unpin> Read for Patient<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let Some(greeting) = &mut this.greeting else { return Pin::new(&mut this.inner).poll_read(cx, buffer) };
        // By itself: a cursor does not show what was read into it.
        let mut first = [MaybeUninit::uninit(); PREFACE.len()];
        let most = buffer.remaining().min(PREFACE.len() - greeting.matched);
        let mut first = ReadBuf::uninit(&mut first[..most]);
        match Pin::new(&mut this.inner).poll_read(cx, first.unfilled()) {
            Poll::Pending => match greeting.until.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
                Poll::Pending => Poll::Pending,
            },
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) => {
                let read = first.filled();
                let is_preface = !read.is_empty() && PREFACE[greeting.matched..].starts_with(read);
                greeting.matched += read.len();
                if is_preface && greeting.matched == PREFACE.len() {
                    this.frames.get_or_insert_with(|| SentFrames::new(this.activity.clone()));
                    this.activity.begin();
                }
                if !is_preface || greeting.matched == PREFACE.len() {
                    this.greeting = None;
                }
                buffer.put_slice(read);
                Poll::Ready(Ok(()))
            }
        }
    }
}

impl<T: Write + Unpin> Write for Patient<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write(cx, buffer);
        if let (Some(frames), Poll::Ready(Ok(sent))) = (&mut self.frames, &outcome) {
            frames.sent(&buffer[..*sent]);
        }
        self.watch(cx, outcome)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_flush(cx);
        self.watch(cx, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.watch(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write_vectored(cx, buffers);
        if let (Some(frames), Poll::Ready(Ok(sent))) = (&mut self.frames, &outcome) {
            let mut left = *sent;
            for buffer in buffers {
                let here = left.min(buffer.len());
                frames.sent(&buffer[..here]);
                left -= here;
            }
        }
        self.watch(cx, outcome)
    }
}
