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

/// The page holds another group's bytes.
const FOREIGN: u8 = 1;
/// The page is on the list of those to be zeroed.
const PLANNED: u8 = 2;

/// Which group's KV the huge pages of a slab hold, and which pages wait to be zeroed. Memory follows use.
#[derive(Default)]
pub(crate) struct Fills {
    groups: Vec<Pages>,
    /// The group that each huge page was last used by; `None` before the first.
    users: Vec<Option<GroupId>>,
    /// Planned and not taken; each page once.
    planned: Vec<(GroupId, PageId)>,
}

/// What is known of the pages of a group of a shared slab.
struct Pages {
    /// Pages in a huge page.
    ratio: u32,
    /// What holds of each page.
    states: Array<u8>,
}

impl Fills {
    pub(crate) fn new(config: &LedgerConfig) -> Fills {
        let groups = config.groups.iter().filter(|_| config.huge_pages.is_some());
        let pages = groups.map(|group| Pages { ratio: group.pages, states: Array::with_capacity(0) });
        Fills { groups: pages.collect(), ..Fills::default() }
    }

    /// A group takes a page.
    pub(crate) fn taken(&mut self, group: GroupId, page: PageId) {
        let Some(Pages { ratio, states }) = self.groups.get_mut(group.index()) else { return };
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
        let state = &mut states[page.index()];
        if *state & FOREIGN != 0 {
            if *state & PLANNED == 0 {
                self.planned.push((group, page));
            }
            *state = PLANNED;
        }
    }

    /// A page is to be zeroed, whatever it holds.
    pub(crate) fn plan(&mut self, group: GroupId, page: PageId) {
        if !self.planned.contains(&(group, page)) {
            self.planned.push((group, page));
        }
    }

    /// The pages of a group to zero, of those that somebody holds.
    fn take(&mut self, group: GroupId, is_held: impl Fn(PageId) -> bool) -> Vec<PageId> {
        let planned = self.planned.extract_if(.., |(of, _)| *of == group);
        let mut taken = Vec::new();
        for (_, page) in planned {
            if let Some(Pages { states, .. }) = self.groups.get_mut(group.index()) {
                // If it is let go, whoever takes it next will have it zeroed.
                states[page.index()] = if is_held(page) { 0 } else { FOREIGN };
            }
            if is_held(page) {
                taken.push(page);
            }
        }
        taken
    }
}

impl Ledger {
    /// The pages of a group that must be zeroed before the next forward, and before page copies of any group. They are
    /// given once.
    pub fn take_page_fills(&mut self, group: GroupId) -> Vec<PageId> {
        let pool = &self.pools[group];
        self.fills.take(group, |page| pool.refs(page) > 0 || pool.pins(page) > 0)
    }

    /// Page fills of a group that wait to be taken.
    pub fn planned_page_fills(&self, group: GroupId) -> usize {
        let pool = &self.pools[group];
        let held = |page| pool.refs(page) > 0 || pool.pins(page) > 0;
        self.fills.planned.iter().filter(|&&(of, page)| of == group && held(page)).count()
    }
}
