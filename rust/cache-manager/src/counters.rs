//! What the ledger counts. A failed call moves nothing but `failed_allocs`.

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
    /// Copies started.
    pub copies_started: u64,
    /// Copies finished.
    pub copies_finished: u64,
    /// Times the prefix cache was reset.
    pub resets: u64,
    /// Results that came for a request released, preempted or truncated meanwhile.
    pub dropped_results: u64,
}

impl Counters {
    /// `(name, value)` of every counter.
    pub fn named(&self) -> [(&'static str, u64); 23] {
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
            ("pages_allocated", self.pages_allocated),
            ("pages_allocated_new", self.pages_allocated_new),
            ("page_copies", self.page_copies),
            ("evictions", self.evictions),
            ("published_blocks", self.published_blocks),
            ("adopted_blocks", self.adopted_blocks),
            ("private_blocks", self.private_blocks),
            ("collisions", self.collisions),
            ("copies_started", self.copies_started),
            ("copies_finished", self.copies_finished),
            ("resets", self.resets),
            ("dropped_results", self.dropped_results),
        ]
    }
}
