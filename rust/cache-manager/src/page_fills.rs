//! Page fills: pages that are zeroed before they are used.
//!
//! A state begins with zeros.
//! Where groups share a slab a page may lie on bytes of another group's, which read as its own may be anything, also
//! what no mask takes out of a sum. So a page that comes to a group by way of a huge page that another group had is
//! zeroed once, before the forward that it was taken for. The engine carries this out, or the manager in its pools.

use crate::config::LedgerConfig;
use crate::ledger::Ledger;
use block_pool::{GroupId, PageId};

/// Which group's KV the huge pages of a slab hold, and which pages wait to be zeroed.
#[derive(Default)]
pub(crate) struct Fills {
    /// Pages of each group in a huge page; empty if nothing is shared.
    ratios: Vec<u32>,
    /// The group that each huge page was last used by; `None` before the first.
    users: Vec<Option<GroupId>>,
    /// Whether each page of a group holds another group's bytes.
    foreign: Vec<Vec<bool>>,
    /// Planned and not taken.
    planned: Vec<(GroupId, PageId)>,
}

impl Fills {
    pub(crate) fn new(config: &LedgerConfig) -> Fills {
        let Some(huge_pages) = config.huge_pages else { return Fills::default() };
        let ratios: Vec<u32> = config.groups.iter().map(|group| group.pages).collect();
        let huge = huge_pages as usize + 1;
        Fills {
            users: vec![None; huge],
            foreign: ratios.iter().map(|&ratio| vec![false; huge * ratio as usize]).collect(),
            ratios,
            planned: Vec::new(),
        }
    }

    /// A group takes a page.
    pub(crate) fn taken(&mut self, group: GroupId, page: PageId) {
        let Some(&ratio) = self.ratios.get(group.index()) else { return };
        let huge = (page.0 / ratio) as usize;
        let before = self.users[huge].replace(group);
        let foreign = &mut self.foreign[group.index()];
        if before.is_some_and(|before| before != group) {
            let ratio = ratio as usize;
            foreign[huge * ratio..(huge + 1) * ratio].fill(true);
        }
        if std::mem::take(&mut foreign[page.index()]) {
            self.plan(group, page);
        }
    }

    /// A page is to be zeroed.
    pub(crate) fn plan(&mut self, group: GroupId, page: PageId) {
        if !self.planned.contains(&(group, page)) {
            self.planned.push((group, page));
        }
    }
}

impl Ledger {
    /// The pages of a group that must be zeroed before the next forward, and before page copies. They are given once.
    pub fn take_page_fills(&mut self, group: GroupId) -> Vec<PageId> {
        self.fills.planned.extract_if(.., |(of, _)| *of == group).map(|(_, page)| page).collect()
    }

    /// Page fills of a group that wait to be taken.
    pub fn planned_page_fills(&self, group: GroupId) -> usize {
        self.fills.planned.iter().filter(|(of, _)| *of == group).count()
    }
}
