//! Resources of the daemon that one user takes from all others.
