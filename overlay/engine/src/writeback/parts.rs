//! The content of a file with spilled ranges, as parts for one upload.

use std::ops::Range;
use std::sync::Arc;

use forebay_backends::{Part, Piece, Pieces, Result};
use forebay_cache::{CHUNK_BYTES, Content, ContentId};
use futures::{StreamExt, stream};

use super::written_meanwhile;
use crate::node::Node;
use crate::{Inner, blocking};

impl Inner {
    /// Returns the content of a file with spilled ranges as parts: those that were sent, and what is in the content file.
    /// The caller holds the flush lock.
    pub(crate) fn parts_of(
        self: &Arc<Self>,
        node: &Node,
        content: &Arc<Content>,
        size: u64,
    ) -> Result<Vec<Part<'static>>> {
        let id = ContentId(content.id);
        let spilled = self.catalog.spilled(id)?;
        let file = node.state.lock().record.file;
        if !file.is_spilled() || file.content() != Some(id) {
            // It was emptied since, and its ranges with it.
            return Err(written_meanwhile());
        }
        let (mut parts, mut at) = (Vec::new(), 0);
        let here = |range: Range<u64>| Part::Here {
            len: range.end - range.start,
            content: self.range_pieces(content.clone(), range),
        };
        for range in spilled.ranges().iter().filter(|range| range.offset < size) {
            if range.offset > at {
                parts.push(here(at..range.offset));
            }
            parts.push(Part::Sent(range.part.clone()));
            at = range.range().end;
        }
        if at < size {
            parts.push(here(at..size));
        }
        Ok(parts)
    }

    /// Returns the bytes of a range of a content file. Their offsets count from the start of the range.
    pub(crate) fn range_pieces(self: &Arc<Self>, content: Arc<Content>, range: Range<u64>) -> Pieces<'static> {
        let inner = self.clone();
        stream::try_unfold(range.start, move |at| {
            let (inner, content, range) = (inner.clone(), content.clone(), range.clone());
            async move {
                if at >= range.end {
                    blocking(move || inner.catalog.check_written_back(&content)).await?;
                    return Ok(None);
                }
                let len = (range.end - at).min(CHUNK_BYTES);
                let data = inner.read_for_pool(ContentId(content.id), &content.file, at, len).await?;
                Ok(Some((Piece { offset: at - range.start, data }, at + len)))
            }
        })
        .boxed()
    }
}
