//! A device that runs late: the bytes of its pages, and a stream of forwards, each of which runs in its own time.

use crate::kv::POISON;
use block_pool::{PageId, Step};
use cache_manager::PageCopy;
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

/// One request's part of a forward, as launched: what it was told, and what is right.
pub(crate) struct Work {
    /// The page of each block.
    pub(crate) row: Vec<PageId>,
    /// Cells of the computed tokens.
    pub(crate) written: Vec<usize>,
    /// KV of every token that the forward reads; the computed ones are the last.
    pub(crate) kv: Vec<u64>,
    /// Cells of drafts, which the forward and the drafter write and nobody reads.
    pub(crate) guessed: Vec<usize>,
}

/// A forward, with the page copies that go before it.
pub(crate) struct Forward {
    pub(crate) step: Step,
    /// When it runs.
    pub(crate) at: u64,
    pub(crate) copies: Vec<PageCopy>,
    pub(crate) batch: Vec<Work>,
}

pub(crate) struct Device {
    page_size: usize,
    cells: Cells,
    /// Forwards launched and not run yet.
    stream: VecDeque<Forward>,
    /// The newest step whose forward was launched.
    launched: Step,
}

/// A cell for each token of each page. Threads that copy reach them too.
#[derive(Clone)]
pub(crate) struct Cells(Arc<[UnsafeCell<u64>]>);

// SAFETY: numbers. Who may use which when is what the simulator checks: a page that is being copied is used by
// nobody else.
unsafe impl Send for Cells {}
// SAFETY: as above.
unsafe impl Sync for Cells {}

impl Cells {
    /// Where the first page begins.
    pub(crate) fn start(&self) -> NonNull<u64> {
        NonNull::from(&*self.0).cast()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

impl Device {
    pub(crate) fn new(pages: u32, page_size: u32) -> Device {
        let page_size = page_size as usize;
        let cells = (0..(pages as usize + 1) * page_size).map(|_| UnsafeCell::new(POISON));
        let cells = Cells(cells.collect());
        Device { page_size, cells, stream: VecDeque::new(), launched: Step(0) }
    }

    pub(crate) fn cells(&self) -> &Cells {
        &self.cells
    }

    /// Bytes of all pages.
    pub(crate) fn bytes(&self) -> usize {
        self.cells.len() * size_of::<u64>()
    }

    /// Puts a forward behind the others. It does not run before them.
    pub(crate) fn launch(&mut self, mut forward: Forward) {
        forward.at = forward.at.max(self.stream.back().map_or(0, |before| before.at));
        self.launched = forward.step;
        self.stream.push_back(forward);
    }

    pub(crate) fn launched(&self) -> Step {
        self.launched
    }

    /// When the next forward runs.
    pub(crate) fn next_at(&self) -> Option<u64> {
        self.stream.front().map(|forward| forward.at)
    }

    /// Whether the fence of `step` is passed: its forward was launched and has run, and all before it.
    pub(crate) fn has_run(&self, step: Step) -> bool {
        step <= self.launched && self.stream.front().is_none_or(|forward| forward.step > step)
    }

    /// The last step whose fence is passed.
    pub(crate) fn last_run(&self) -> Step {
        self.stream.front().map_or(self.launched, |forward| Step(forward.step.0 - 1))
    }

    /// Runs the next forward: copies pages in order, writes the KV of all computed tokens and drafts, then reads
    /// every row, the blocks that were hit among them.
    pub(crate) fn run_one(&mut self) -> Result<(), String> {
        let Some(Forward { step, copies, batch, .. }) = self.stream.pop_front() else { return Ok(()) };
        for PageCopy { source, destination, .. } in copies {
            let source = self.page(source).to_vec();
            self.page_mut(destination).copy_from_slice(&source);
        }
        for Work { written, kv, guessed, .. } in &batch {
            for &cell in guessed {
                *self.cell_mut(cell) = POISON;
            }
            for (&cell, &kv) in written.iter().zip(&kv[kv.len() - written.len()..]) {
                *self.cell_mut(cell) = kv;
            }
        }
        for work in &batch {
            for (token, &kv) in work.kv.iter().enumerate() {
                let page = work.row[token / self.page_size];
                if self.page(page)[token % self.page_size] != kv {
                    let step = step.0;
                    return Err(format!(
                        "the forward of step {step} reads wrong KV at token {token}, {page}"
                    ));
                }
            }
        }
        Ok(())
    }

    fn cell_mut(&mut self, cell: usize) -> &mut u64 {
        let (page, at) = (cell / self.page_size, cell % self.page_size);
        &mut self.page_mut(PageId(page as u32))[at]
    }

    pub(crate) fn page(&self, page: PageId) -> &[u64] {
        let cells = &self.cells.0[page.index() * self.page_size..][..self.page_size];
        // SAFETY: inside the cells; nobody writes to the page while this thread reads it.
        unsafe { NonNull::slice_from_raw_parts(NonNull::from(cells).cast(), cells.len()).as_ref() }
    }

    pub(crate) fn page_mut(&mut self, page: PageId) -> &mut [u64] {
        let cells = &self.cells.0[page.index() * self.page_size..][..self.page_size];
        // SAFETY: inside the cells; nobody else uses the page while this thread writes to it.
        unsafe { NonNull::slice_from_raw_parts(NonNull::from(cells).cast(), cells.len()).as_mut() }
    }
}
