//! Rights that change while another user has an object open or cached.
