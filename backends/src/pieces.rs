//! Checks of the content stream that [`Pool::put`](crate::Pool::put) receives.

use crate::{Error, ErrorKind, Piece, Result, Side};

/// Checks that pieces ascend, do not overlap and end within the object.
#[derive(Debug)]
pub(crate) struct PieceOrder {
    size: u64,
    end_of_last: u64,
}

impl PieceOrder {
    pub(crate) fn new(size: u64) -> Self {
        Self { size, end_of_last: 0 }
    }

    /// `InvalidInput` if `piece` overlaps the one before it or ends beyond the object.
    pub(crate) fn check(&mut self, piece: &Piece) -> Result<()> {
        let end = piece.offset.checked_add(piece.data.len() as u64).filter(|end| *end <= self.size);
        let (Some(end), true) = (end, piece.offset >= self.end_of_last) else {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                Side::Application,
                format!(
                    "content piece of {} bytes at {} does not fit an object of {} bytes filled up to {}",
                    piece.data.len(),
                    piece.offset,
                    self.size,
                    self.end_of_last
                ),
            ));
        };
        self.end_of_last = end;
        Ok(())
    }
}
