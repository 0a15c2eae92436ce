//! A device that runs late: the bytes of its pages, and a stream of forwards, each of which runs in its own time.

use crate::kv::POISON;
use block_pool::{PageId, Step};
use std::collections::VecDeque;

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
    pub(crate) copies: Vec<(PageId, PageId)>,
    pub(crate) batch: Vec<Work>,
}

pub(crate) struct Device {
    page_size: usize,
    cells: Vec<u64>,
    /// Forwards launched and not run yet.
    stream: VecDeque<Forward>,
    /// The newest step whose forward was launched.
    launched: Step,
}

impl Device {
    pub(crate) fn new(pages: u32, page_size: u32) -> Device {
        let page_size = page_size as usize;
        let cells = vec![POISON; (pages as usize + 1) * page_size];
        Device { page_size, cells, stream: VecDeque::new(), launched: Step(0) }
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

    /// Runs the next forward: copies pages in order, writes the KV of all computed tokens and drafts, then reads
    /// every row, the blocks that were hit among them.
    pub(crate) fn run_one(&mut self) -> Result<(), String> {
        let Some(Forward { step, copies, batch, .. }) = self.stream.pop_front() else { return Ok(()) };
        for (source, destination) in copies {
            let start = source.index() * self.page_size;
            self.cells.copy_within(start..start + self.page_size, destination.index() * self.page_size);
        }
        for Work { written, kv, guessed, .. } in &batch {
            for &cell in guessed {
                self.cells[cell] = POISON;
            }
            for (&cell, &kv) in written.iter().zip(&kv[kv.len() - written.len()..]) {
                self.cells[cell] = kv;
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

    pub(crate) fn page(&self, page: PageId) -> &[u64] {
        &self.cells[page.index() * self.page_size..][..self.page_size]
    }

    pub(crate) fn page_mut(&mut self, page: PageId) -> &mut [u64] {
        &mut self.cells[page.index() * self.page_size..][..self.page_size]
    }
}
