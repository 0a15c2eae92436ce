//! What a request holds in one group.

use block_pool::PageId;

/// A page for each block, from the first on. A block that the group does not need any more has the null page: a
/// placeholder, which is no page.
#[derive(Clone, Default, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Row {
    pub(crate) pages: Vec<PageId>,
    /// Changes when a page is replaced; pages that are appended do not count.
    pub(crate) version: u32,
    /// Blocks before this one are sinks or placeholders.
    pub(crate) from: u32,
}

impl Row {
    /// The page of a block; `None` for a placeholder and where there is none.
    #[inline]
    pub(crate) fn page(&self, block: usize) -> Option<PageId> {
        self.pages.get(block).copied().filter(|&page| page != PageId::NULL)
    }

    /// The pages that are held, with their blocks.
    pub(crate) fn held(&self) -> impl DoubleEndedIterator<Item = (usize, PageId)> + Clone + '_ {
        self.pages.iter().copied().enumerate().filter(|&(_, page)| page != PageId::NULL)
    }

    /// The first `blocks` blocks, for another request.
    pub(crate) fn fork(&self, blocks: usize) -> Row {
        Row { pages: self.pages[..blocks].to_vec(), version: 0, from: self.from }
    }

    /// Puts a page, or a placeholder, in the place of another.
    #[inline]
    pub(crate) fn replace(&mut self, block: usize, page: PageId) -> PageId {
        self.version += 1;
        std::mem::replace(&mut self.pages[block], page)
    }
}
