//! Blocks and pages as a connector is told of them: flat lists for one group, one list a group for several.

use crate::tokens::pages_from;
use block_pool::{GroupId, PageId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::ops::Range;
use tiered_connector::job::TierKey;

/// A `BlockKey`.
struct Key(TierKey);

impl<'py> FromPyObject<'_, 'py> for Key {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Key> {
        let (hash, guard): (Bound<'_, PyBytes>, Bound<'_, PyBytes>) = given.extract()?;
        let (Some(hash), Ok(guard)) = (hash.as_bytes().first_chunk(), guard.as_bytes().try_into()) else {
            return Err(PyValueError::new_err(format!(
                "a BlockKey has a hash of 8 or 32 bytes and a guard of 16, not {} and {}",
                hash.as_bytes().len(),
                guard.as_bytes().len()
            )));
        };
        Ok(Key(TierKey { hash: u64::from_be_bytes(*hash), guard }))
    }
}

/// What was given for each of so many groups.
fn lists<'py>(given: &Bound<'py, PyAny>, groups: usize, name: &str) -> PyResult<Vec<Bound<'py, PyAny>>> {
    if groups == 1 {
        return Ok(vec![given.clone()]);
    }
    let lists: Vec<Bound<'py, PyAny>> = given.extract()?;
    if lists.len() != groups {
        return Err(PyValueError::new_err(format!(
            "{name}: {} lists, must be one for each of {groups} groups",
            lists.len()
        )));
    }
    Ok(lists)
}

/// The keys of each group.
pub(crate) fn keys_of(given: &Bound<'_, PyAny>, groups: usize) -> PyResult<Vec<Vec<TierKey>>> {
    let of_group = |list: Bound<'_, PyAny>| -> PyResult<Vec<TierKey>> {
        Ok(list.extract::<Vec<Key>>()?.into_iter().map(|Key(key)| key).collect())
    };
    lists(given, groups, "block_hashes")?.into_iter().map(of_group).collect()
}

/// Blocks with their pages, group by group.
#[derive(Default)]
pub(crate) struct Blocks {
    pub(crate) blocks: Vec<(TierKey, PageId)>,
    ends: Vec<usize>,
}

impl Blocks {
    /// From the arguments `block_ids` and `block_hashes`, for groups with pools of so many pages.
    pub(crate) fn new(
        block_ids: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
        pools: &[usize],
    ) -> PyResult<Blocks> {
        let keys = keys_of(block_hashes, pools.len())?;
        let mut blocks = Blocks::default();
        for ((ids, keys), &pool) in lists(block_ids, pools.len(), "block_ids")?.iter().zip(keys).zip(pools) {
            let pages = pages_from(ids, "block_ids")?;
            if pages.len() != keys.len() {
                return Err(PyValueError::new_err(format!(
                    "{} block_ids for {} block_hashes: must be one page a block",
                    pages.len(),
                    keys.len()
                )));
            }
            if let Some(page) = pages.iter().find(|&&page| page as usize >= pool) {
                return Err(PyValueError::new_err(format!(
                    "block_ids: there is no page {page} in a pool of {pool}"
                )));
            }
            blocks.blocks.extend(keys.into_iter().zip(pages.into_iter().map(PageId)));
            blocks.ends.push(blocks.blocks.len());
        }
        Ok(blocks)
    }

    /// Each group with its part of the blocks.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (GroupId, Range<usize>)> {
        let first = |group: usize| group.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.ends.iter().enumerate().map(move |(group, &end)| (GroupId(group as u8), first(group)..end))
    }

    /// The pages alone.
    pub(crate) fn pages(&self) -> Vec<u32> {
        self.blocks.iter().map(|(_, page)| page.0).collect()
    }
}
