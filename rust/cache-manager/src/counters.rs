//! What the ledger counts. A failed call moves nothing but `failed_allocs`.

use crate::histogram::Histogram;
use crate::misses::MissReason;

/// Monotonic counters since the ledger was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Requests claimed.
    pub claims: u64,
    /// Of these, requests that were forked off another.
    pub forks: u64,
    /// Requests released.
    pub releases: u64,
    /// Requests preempted.
    pub preemptions: u64,
    /// Calls of `alloc` that were refused for want of room.
    pub failed_allocs: u64,
    /// Requests whose first admission succeeded.
    pub admissions: u64,
    /// Prompt tokens of these, counted once a request.
    pub prompt_tokens: u64,
    /// Prompt blocks of these, a partial last one included.
    pub context_blocks: u64,
    /// Of the context blocks, those found in the cache at first admission.
    pub reused_blocks: u64,
    /// Tokens found in the cache at first admission.
    pub reused_tokens: u64,
    /// Tokens found later in a prompt's life: published by a sibling meanwhile, or found again after a
    /// preemption.
    pub late_reused_tokens: u64,
    /// Times that a request went on from a part of a block.
    pub partial_hits: u64,
    /// Tokens of these parts, which are among the reused tokens.
    pub partial_tokens: u64,
    /// Partly filled blocks that were stored.
    pub stored_tails: u64,
    /// Blocks of these prompts that no request had stored, before the block of the last token.
    pub missed_never_stored: u64,
    /// Blocks missed likewise because the first of them was evicted.
    pub missed_evicted: u64,
    /// Blocks missed likewise because another block owns the hash of the first of them.
    pub missed_collision: u64,
    /// Blocks missed likewise because a window or a chunk lacks what it reads at the end of the first of them.
    pub missed_window: u64,
    /// Blocks missed likewise because a state at the end of the first of them is not stored.
    pub missed_no_snapshot: u64,
    /// Pages handed out.
    pub pages_allocated: u64,
    /// Of these, pages that had never been handed out.
    pub pages_allocated_new: u64,
    /// Pages copied because a request writes to what others read.
    pub page_copies: u64,
    /// Cached blocks that were evicted to hand out their page.
    pub evictions: u64,
    /// Blocks published.
    pub published_blocks: u64,
    /// Publications that adopted the page of a twin.
    pub adopted_blocks: u64,
    /// Publications that stayed private because a twin is stored.
    pub private_blocks: u64,
    /// Look-ups and publications that met another block with the same hash.
    pub collisions: u64,
    /// Stored blocks that `truncate_prefix` forgot.
    pub truncated_blocks: u64,
    /// Copies started.
    pub copies_started: u64,
    /// Copies finished well.
    pub copies_finished: u64,
    /// Copies that failed.
    pub copies_failed: u64,
    /// Copies that were declined before anything moved.
    pub copies_refused: u64,
    /// Blocks that came from other tiers.
    pub loaded_blocks: u64,
    /// Tokens that need no forward because their KV came from other tiers.
    pub loaded_tokens: u64,
    /// Times the prefix cache was reset.
    pub resets: u64,
    /// Cached blocks that resets forgot.
    pub reset_blocks: u64,
    /// Results that came for a request released, preempted or truncated meanwhile.
    pub dropped_results: u64,
    /// Requests suspended.
    pub suspensions: u64,
    /// Of these, requests that came back with their KV.
    pub resumptions: u64,
    /// Of these, requests whose KV was lost because a copy failed or was cancelled.
    pub suspensions_lost: u64,
    /// Steps from the forward that wrote a block to its eviction.
    pub residency: Histogram,
    /// Steps from the last use of a block that nobody held to its next hit.
    pub reuse_gap: Histogram,
}

impl Counters {
    /// Counts `blocks` of a prompt that were missed at first admission, the first of them for `reason`.
    pub(crate) fn missed(&mut self, reason: MissReason, blocks: u32) {
        let counter = match reason {
            MissReason::NeverStored | MissReason::OtherNamespace => &mut self.missed_never_stored,
            MissReason::Evicted => &mut self.missed_evicted,
            MissReason::Collision => &mut self.missed_collision,
            MissReason::Window => &mut self.missed_window,
            MissReason::NoSnapshot => &mut self.missed_no_snapshot,
        };
        *counter += u64::from(blocks);
    }

    /// `(name, histogram)` of every histogram.
    pub fn histograms(&self) -> [(&'static str, Histogram); 2] {
        [("residency_steps", self.residency), ("reuse_gap_steps", self.reuse_gap)]
    }

    /// `(name, value)` of every counter.
    pub fn named(&self) -> [(&'static str, u64); 40] {
        [
            ("claims", self.claims),
            ("forks", self.forks),
            ("releases", self.releases),
            ("preemptions", self.preemptions),
            ("failed_allocs", self.failed_allocs),
            ("admissions", self.admissions),
            ("prompt_tokens", self.prompt_tokens),
            ("context_blocks", self.context_blocks),
            ("reused_blocks", self.reused_blocks),
            ("reused_tokens", self.reused_tokens),
            ("late_reused_tokens", self.late_reused_tokens),
            ("partial_hits", self.partial_hits),
            ("partial_tokens", self.partial_tokens),
            ("stored_tails", self.stored_tails),
            ("missed_never_stored", self.missed_never_stored),
            ("missed_evicted", self.missed_evicted),
            ("missed_collision", self.missed_collision),
            ("missed_window", self.missed_window),
            ("missed_no_snapshot", self.missed_no_snapshot),
            ("pages_allocated", self.pages_allocated),
            ("pages_allocated_new", self.pages_allocated_new),
            ("page_copies", self.page_copies),
            ("evictions", self.evictions),
            ("published_blocks", self.published_blocks),
            ("adopted_blocks", self.adopted_blocks),
            ("private_blocks", self.private_blocks),
            ("collisions", self.collisions),
            ("truncated_blocks", self.truncated_blocks),
            ("copies_started", self.copies_started),
            ("copies_finished", self.copies_finished),
            ("copies_failed", self.copies_failed),
            ("copies_refused", self.copies_refused),
            ("loaded_blocks", self.loaded_blocks),
            ("loaded_tokens", self.loaded_tokens),
            ("resets", self.resets),
            ("reset_blocks", self.reset_blocks),
            ("dropped_results", self.dropped_results),
            ("suspensions", self.suspensions),
            ("resumptions", self.resumptions),
            ("suspensions_lost", self.suspensions_lost),
        ]
    }
}
