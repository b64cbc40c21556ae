//! Objects that are swapped in the pool between a check and its use.
