//! Which cached page of a priority level goes next.

use std::str::FromStr;
use thiserror::Error;

/// How the next victim is chosen among the cached pages of the lowest occupied priority level.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum EvictionPolicy {
    /// The page released longest ago.
    #[default]
    PriorityLru,
    /// Pages that were never hit go before pages that were ([`Pool::mark_reused`]), each in the order of
    /// release, so that a scan of prompts that come once does not drive out what is used again. Once pages
    /// that were hit are over a third of the level, the page released longest ago goes, hit or not.
    ///
    /// [`Pool::mark_reused`]: crate::Pool::mark_reused
    PrioritySlru,
}

/// A name that is no eviction policy.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("eviction policy {0:?}: must be 'priority_lru' or 'priority_slru'")]
pub struct PolicyError(pub String);

impl FromStr for EvictionPolicy {
    type Err = PolicyError;

    fn from_str(name: &str) -> Result<EvictionPolicy, PolicyError> {
        match name {
            "priority_lru" => Ok(EvictionPolicy::PriorityLru),
            "priority_slru" => Ok(EvictionPolicy::PrioritySlru),
            _ => Err(PolicyError(name.to_owned())),
        }
    }
}
