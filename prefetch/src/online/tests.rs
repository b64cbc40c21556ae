//! Promises of the predictors together.

mod behaviour;
mod measure;
mod play;
mod properties;
