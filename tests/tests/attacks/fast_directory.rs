//! A fast directory that another user prepared or can change.
