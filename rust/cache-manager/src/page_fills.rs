//! Page fills: pages that are zeroed before they are used.
//!
//! A state begins with zeros.
//! Where groups share a slab a page may lie on bytes of another group's, which read as its own may be anything, also
//! what no mask takes out of a sum. So a page that comes to a group by way of a huge page that another group had is
//! zeroed once, before the forward that it was taken for. The engine carries this out, or the manager in its pools.
//! A page that is let go before that is not zeroed: its bytes may be another group's by then.

use crate::config::LedgerConfig;
use crate::ledger::Ledger;
use block_pool::{GroupId, PageId};
use memory::Array;
use std::collections::HashSet;

/// The page holds another group's bytes.
const FOREIGN: u8 = 1;
/// The page is on the list of those to be zeroed.
const PLANNED: u8 = 2;

/// Which group's KV the huge pages of a slab hold, and which pages wait to be zeroed. Memory follows use.
#[derive(Default)]
pub(crate) struct Fills {
    /// Each group's pages, as far as any was taken.
    groups: Vec<Pages>,
    /// The group that each huge page was last used by; `None` before the first.
    users: Vec<Option<GroupId>>,
    /// Planned and not taken; each page once.
    planned: Vec<(GroupId, PageId)>,
}

/// What is known of the pages of a group of a shared slab.
struct Pages {
    /// Pages in a huge page; 0 if nothing is shared.
    ratio: u32,
    /// What holds of each page.
    states: Array<u8>,
}

impl Fills {
    pub(crate) fn new(config: &LedgerConfig) -> Fills {
        let ratio = |pages| if config.huge_pages.is_some() { pages } else { 0 };
        let groups = config.groups.iter();
        let pages = groups.map(|group| Pages { ratio: ratio(group.pages), states: Array::with_capacity(0) });
        Fills { groups: pages.collect(), ..Fills::default() }
    }

    /// A group takes a page.
    pub(crate) fn taken(&mut self, group: GroupId, page: PageId) {
        let Pages { ratio, states } = &mut self.groups[group.index()];
        if *ratio == 0 {
            return;
        }
        let huge = page.0 / *ratio;
        let inside = (huge * *ratio) as usize..(huge * *ratio + *ratio) as usize;
        states.extend_by(inside.end.saturating_sub(states.len()), 0);
        let huge = huge as usize;
        if self.users.len() <= huge {
            self.users.resize(huge + 1, None);
        }
        if self.users[huge].replace(group).is_some_and(|before| before != group) {
            states[inside].iter_mut().for_each(|state| *state |= FOREIGN);
        }
        if states[page.index()] & FOREIGN != 0 {
            self.plan(group, page);
        }
    }

    /// A page is to be zeroed, whatever it holds.
    pub(crate) fn plan(&mut self, group: GroupId, page: PageId) {
        let states = &mut self.groups[group.index()].states;
        states.extend_by((page.index() + 1).saturating_sub(states.len()), 0);
        if std::mem::replace(&mut states[page.index()], PLANNED) & PLANNED == 0 {
            self.planned.push((group, page));
        }
    }

    /// The pages of a group to zero, of those that somebody holds.
    fn take(&mut self, group: GroupId, is_held: impl Fn(PageId) -> bool) -> Vec<PageId> {
        let states = &mut self.groups[group.index()].states;
        let planned = self.planned.extract_if(.., |(of, _)| *of == group);
        let mut taken = Vec::new();
        for (_, page) in planned {
            // If it is let go, whoever takes it next will have it zeroed.
            states[page.index()] = if is_held(page) { 0 } else { FOREIGN };
            if is_held(page) {
                taken.push(page);
            }
        }
        taken
    }

    /// A copy fills pages that were just taken: zeros would come behind it. If it fails they are what they were.
    pub(crate) fn copied_to(&mut self, pages: impl Iterator<Item = (GroupId, PageId)>) {
        if self.planned.is_empty() {
            return;
        }
        let pages: HashSet<_> = pages.collect();
        for (group, page) in self.planned.extract_if(.., |planned| pages.contains(planned)) {
            self.groups[group.index()].states[page.index()] = FOREIGN;
        }
    }
}

impl Ledger {
    /// The pages of a group that must be zeroed before the next forward, and before page copies of any group. They are
    /// given once.
    pub fn take_page_fills(&mut self, group: GroupId) -> Vec<PageId> {
        let pool = &self.pools[group];
        self.fills.take(group, |page| pool.refs(page) > 0 || pool.pins(page) > 0)
    }

    /// Pages of a group that wait to be taken and zeroed.
    pub fn planned_page_fills(&self, group: GroupId) -> impl Iterator<Item = PageId> {
        let pool = &self.pools[group];
        let held = move |page: &PageId| pool.refs(*page) > 0 || pool.pins(*page) > 0;
        self.fills.planned.iter().filter(move |(of, _)| *of == group).map(|&(_, page)| page).filter(held)
    }
}
