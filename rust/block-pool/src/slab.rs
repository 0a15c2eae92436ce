//! Slabs: memory that the pages of one or more groups tile.

use crate::ids::GroupId;
use crate::policy::EvictionPolicy;
use crate::pool::Pool;
use thiserror::Error;

/// A group in a slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// The group.
    pub group: GroupId,
    /// Its pages in a huge page of the slab.
    pub ratio: u32,
    /// Which of its cached pages goes next.
    pub policy: EvictionPolicy,
}

/// A slab to be made: `huge_pages` usable huge pages and the null huge page, which come in one size, and the
/// groups that share them. The pages of a group are numbered by where they lie: huge page `h` holds the pages
/// `h * ratio .. (h + 1) * ratio`. A group alone in its slab has it all: a plain pool, whose only null page is
/// page 0.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlabShape {
    /// Usable huge pages.
    pub huge_pages: u32,
    /// The groups, at least one.
    pub members: Vec<Member>,
}

/// Why slabs cannot be made.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ShapeError {
    /// Groups that are not numbered from 0 without a gap, each in one slab.
    #[error("the groups of all slabs are {given:?}: must be 0, 1, 2 … each once")]
    Groups {
        /// What was given, in order.
        given: Vec<u8>,
    },
    /// A huge page that holds no page of a group.
    #[error("group {group}: a huge page must hold at least 1 of its pages, not 0")]
    Ratio {
        /// The group.
        group: u8,
    },
    /// Page ids that do not fit.
    #[error("group {group}: {huge_pages} huge pages of {ratio} pages are more than an int32 can number")]
    TooMany {
        /// The group.
        group: u8,
        /// Usable huge pages.
        huge_pages: u32,
        /// Pages in each.
        ratio: u32,
    },
}

impl SlabShape {
    /// Checks a slab that is to be made alone.
    ///
    /// # Errors
    /// As for [`Pools::new`](crate::Pools::new).
    pub fn check(&self) -> Result<(), ShapeError> {
        Self::check_all(std::slice::from_ref(self))
    }

    /// Checks slabs that are to be made together.
    pub(crate) fn check_all(shapes: &[SlabShape]) -> Result<(), ShapeError> {
        let mut given: Vec<u8> =
            shapes.iter().flat_map(|shape| &shape.members).map(|member| member.group.0).collect();
        given.sort_unstable();
        if given.iter().enumerate().any(|(at, &group)| usize::from(group) != at) {
            return Err(ShapeError::Groups { given });
        }
        for shape in shapes {
            for &Member { group: GroupId(group), ratio, .. } in &shape.members {
                let huge_pages = shape.huge_pages;
                if ratio == 0 {
                    return Err(ShapeError::Ratio { group });
                }
                if (u64::from(huge_pages) + 1) * u64::from(ratio) > u64::from(Pool::MAX_PAGES) + 1 {
                    return Err(ShapeError::TooMany { group, huge_pages, ratio });
                }
            }
        }
        Ok(())
    }
}

/// A slab as it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slab {
    pub(crate) groups: Vec<GroupId>,
    pub(crate) huge_pages: u32,
    /// Huge pages that some group has, or had: those with the least numbers from 1 on. Of a slab with one group
    /// none: its pool knows.
    pub(crate) claimed: u32,
}

impl Slab {
    /// The groups whose pages tile it.
    pub fn groups(&self) -> &[GroupId] {
        &self.groups
    }

    /// Usable huge pages; of a group that is alone, its pages.
    pub fn huge_pages(&self) -> u32 {
        self.huge_pages
    }

    /// Whether groups share it.
    pub fn is_shared(&self) -> bool {
        self.groups.len() > 1
    }
}
