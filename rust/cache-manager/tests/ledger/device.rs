//! A device that runs late: bytes of pages, a compute stream, and a mover beside it.
//!
//! Every cell holds one token's KV, a number that depends on the namespace and on every token up to it.
//! So a wrong page, a stale page and a page written too early all show as a wrong number.

use block_hash::Token;
use block_pool::{GroupId, PageId, Step};
use cache_manager::{CopyJob, GroupKind, LedgerConfig, PageCopy};
use std::collections::VecDeque;

/// The KV of the token after the prefix whose last KV is `before`.
pub(crate) fn kv_after(before: u64, token: Token) -> u64 {
    let mixed = (before ^ u64::from(token.cast_unsigned())).wrapping_add(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

/// One request's part of a forward, as launched: what it was told, and what is right.
pub(crate) struct Work {
    /// KV of every token up to the last that is computed.
    pub(crate) kv: Vec<u64>,
    /// Tokens computed: the last ones.
    pub(crate) computed: usize,
    /// Where its KV lies in each group.
    pub(crate) groups: Vec<Cells>,
}

/// What a request was told of a group's memory.
pub(crate) struct Cells {
    /// Page of each block, from the block table.
    pub(crate) row: Vec<u32>,
    /// Cells of the computed tokens, from the slot mapping.
    pub(crate) written: Vec<usize>,
    /// Cells of drafts, wrong ones among them, that the forward and the drafter write and nobody reads.
    pub(crate) guessed: Vec<usize>,
}

/// Whether the token at position `query` reads the one at `key`, by the definition of each kind.
fn reads(kind: GroupKind, query: usize, key: usize) -> bool {
    match kind {
        GroupKind::Full => key <= query,
        GroupKind::Window { window, sinks } => {
            key <= query && (key < sinks as usize || query - key < window as usize)
        }
        GroupKind::Chunked { chunk } => key <= query && query / chunk as usize == key / chunk as usize,
        GroupKind::Recurrent(_) | GroupKind::Scratch | GroupKind::Cross => {
            unreachable!("its pages have no cells of tokens")
        }
    }
}

/// A forward, with the page copies that go before it.
struct Forward {
    step: Step,
    copies: Vec<PageCopy>,
    batch: Vec<Work>,
}

/// What a rejected draft leaves behind, and another group's KV.
const WRONG: u64 = 0x0BAD;

pub(crate) struct Device {
    page_size: usize,
    kinds: Vec<GroupKind>,
    /// Of each group.
    cells: Vec<Vec<u64>>,
    /// Where groups share a slab: cells of each group in a huge page, and the group that wrote to each huge page last.
    shared: Option<(Vec<usize>, Vec<usize>)>,
    /// Forwards launched and not run yet, one a step.
    stream: VecDeque<Forward>,
    /// Every forward up to this step has run: its fence is signalled.
    fence: Step,
}

impl Device {
    pub(crate) fn new(config: &LedgerConfig) -> Device {
        let page_size = config.page_size as usize;
        let kinds = config.groups.iter().map(|group| group.kind).collect();
        let pages = config.groups.iter().map(|group| group.pages as usize);
        let (cells, shared) = match config.huge_pages.map(|huge| huge as usize + 1) {
            None => (pages.map(|pages| vec![0; (pages + 1) * page_size]).collect(), None),
            Some(huge) => {
                let cells = pages.clone().map(|ratio| vec![0; huge * ratio * page_size]).collect();
                (cells, Some((pages.map(|ratio| ratio * page_size).collect(), vec![0; huge])))
            }
        };
        Device { page_size, kinds, cells, shared, stream: VecDeque::new(), fence: Step(0) }
    }

    pub(crate) fn widen_windows(&mut self) {
        for kind in &mut self.kinds {
            if let GroupKind::Window { window, .. } = kind {
                *window += 1;
            }
        }
    }

    pub(crate) fn fence(&self) -> Step {
        self.fence
    }

    pub(crate) fn has_work(&self) -> bool {
        !self.stream.is_empty()
    }

    pub(crate) fn launch(&mut self, step: Step, copies: Vec<PageCopy>, batch: Vec<Work>) {
        self.stream.push_back(Forward { step, copies, batch });
    }

    /// Runs the oldest forward launched: copies pages in order, writes the KV of all computed tokens and
    /// drafts, then reads of every row what its computed tokens read.
    pub(crate) fn run_one(&mut self) -> Result<(), String> {
        let Some(Forward { step, copies, batch }) = self.stream.pop_front() else { return Ok(()) };
        for PageCopy { group, source, destination, .. } in copies {
            let kv = self.page(group, source).to_vec();
            let start = destination.index() * self.page_size;
            (start..).zip(kv).for_each(|(cell, kv)| self.write(group.index(), cell, kv));
        }
        for work in &batch {
            let computed = &work.kv[work.kv.len() - work.computed..];
            for (group, told) in work.groups.iter().enumerate() {
                told.guessed.iter().for_each(|&cell| self.write(group, cell, WRONG));
                told.written.iter().zip(computed).for_each(|(&cell, &kv)| self.write(group, cell, kv));
            }
        }
        for work in &batch {
            for group in 0..self.kinds.len() {
                self.read(work, GroupId(group as u8)).map_err(|what| {
                    format!("the forward of step {} reads wrong KV in group {group} at {what}", step.0)
                })?;
            }
        }
        self.fence = step;
        Ok(())
    }

    /// Writes one token's KV. In a slab that groups share, it lies where other groups had theirs.
    fn write(&mut self, group: usize, cell: usize, kv: u64) {
        if let Some((in_huge, writers)) = &mut self.shared {
            let huge = cell / in_huge[group];
            if std::mem::replace(&mut writers[huge], group) != group {
                for (other, &count) in in_huge.iter().enumerate().filter(|&(other, _)| other != group) {
                    self.cells[other][huge * count..][..count].fill(WRONG);
                }
            }
        }
        self.cells[group][cell] = kv;
    }

    fn read(&self, work: &Work, group: GroupId) -> Result<(), String> {
        let kind = self.kinds[group.index()];
        let len = work.kv.len();
        for (token, &kv) in work.kv.iter().enumerate() {
            if !(len - work.computed..len).any(|query| reads(kind, query, token)) {
                continue;
            }
            let page = PageId(work.groups[group.index()].row[token / self.page_size]);
            if self.page(group, page)[token % self.page_size] != kv {
                return Err(format!("token {token} on {page}"));
            }
        }
        Ok(())
    }

    fn page(&self, group: GroupId, page: PageId) -> &[u64] {
        &self.cells[group.index()][page.index() * self.page_size..][..self.page_size]
    }
}

struct Copy {
    job: CopyJob,
    /// The KV that the pages held, or were about to hold, when the copy was asked for.
    expected: Vec<u64>,
    begun: bool,
}

impl Copy {
    fn check(&self, device: &Device) -> Result<(), String> {
        let cells = self.job.pages.iter().flat_map(|&page| device.page(GroupId::FIRST, page));
        match cells.zip(&self.expected).position(|(found, expected)| found != expected) {
            Some(token) => Err(format!("copy {} moves wrong KV at its token {token}", self.job.id.0)),
            None => Ok(()),
        }
    }
}

/// Copies pages away, each after the fence that its job names. A copy may read a page at any moment
/// between its begin and its end, so that the bytes are checked at both.
pub(crate) struct Mover {
    /// Off in the broken variant.
    waits_for_fences: bool,
    copies: Vec<Copy>,
}

impl Mover {
    pub(crate) fn new(waits_for_fences: bool) -> Mover {
        Mover { waits_for_fences, copies: Vec::new() }
    }

    /// Copies asked for and not ended.
    pub(crate) fn len(&self) -> usize {
        self.copies.len()
    }

    pub(crate) fn ask(&mut self, job: CopyJob, expected: Vec<u64>) {
        self.copies.push(Copy { job, expected, begun: false });
    }

    /// Begins the copy that `choose` picks among those that may.
    pub(crate) fn begin_one(
        &mut self,
        device: &Device,
        choose: impl FnOnce(usize) -> usize,
    ) -> Result<(), String> {
        let waits = self.waits_for_fences;
        let may_begin = |copy: &&mut Copy| !copy.begun && (!waits || copy.job.after <= device.fence);
        let mut ready: Vec<_> = self.copies.iter_mut().filter(may_begin).collect();
        if ready.is_empty() {
            return Ok(());
        }
        let copy = ready.swap_remove(choose(ready.len()));
        copy.begun = true;
        copy.check(device)
    }

    /// Ends the copy that `choose` picks among those begun, for the ledger to be told.
    pub(crate) fn end_one(
        &mut self,
        device: &Device,
        choose: impl FnOnce(usize) -> usize,
    ) -> Result<Option<u64>, String> {
        let begun: Vec<usize> = (0..self.copies.len()).filter(|&index| self.copies[index].begun).collect();
        let Some(&index) = begun.get(choose(begun.len())) else { return Ok(None) };
        let copy = self.copies.swap_remove(index);
        copy.check(device)?;
        Ok(Some(copy.job.id.0))
    }
}
