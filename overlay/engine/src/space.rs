//! Space in the fast pool.
//!
//! | module | does |
//! |---|---|
//! | `eviction` | reserves space, and evicts clean content by the policy |
//! | `order` | the eviction policy, and the uses that it does not know yet |
//! | `write_throttle` | keeps passthrough writers below the hard limit |
//! | `owner_room` | room for what a user changes, by its share and its quotas |
//! | `room` | lets writers wait while the flush can make space |

pub mod eviction;
pub mod order;
pub mod owner_room;
pub mod room;
pub mod write_throttle;
