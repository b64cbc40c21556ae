//! What the predictors promise together.

mod behaviour;
mod measure;
mod play;
mod properties;
