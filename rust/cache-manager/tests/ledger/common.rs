//! Small ledgers and requests, and the shortest way through a forward.

use block_hash::{Algo, Chain, ExtraInputs, ExtraKeys, Token};
use block_pool::GroupId;
use cache_manager::{
    CopyEnd, Ledger, LedgerConfig, LedgerError, NewSequence, OnDuplicate, PrefixQuery, SlotId,
};
use radix_tree::NamespaceKey;

/// Tokens a page in most tests.
pub(crate) const PAGE: u32 = 4;

/// Only full blocks are found, as most tests count them.
pub(crate) fn config(pages: u32) -> LedgerConfig {
    LedgerConfig { partial_reuse: false, ..LedgerConfig::new(PAGE, pages) }
}

pub(crate) fn private(pages: u32) -> LedgerConfig {
    LedgerConfig { on_duplicate: OnDuplicate::Private, ..config(pages) }
}

/// A prompt in the namespace of `salt`, hashed.
pub(crate) fn salted(tokens: &[Token], salt: &str, page_size: u32) -> NewSequence {
    let namespace = NamespaceKey { salt: salt.into(), ..NamespaceKey::default() };
    let chain = Chain::new(Algo::AHash64, &namespace.root(None));
    let mut request = NewSequence::new(tokens.to_vec(), 1 << 20, namespace, chain);
    request.hash_prompt(page_size);
    request
}

pub(crate) fn prompt(tokens: &[Token]) -> NewSequence {
    salted(tokens, "", PAGE)
}

/// What a prompt would reuse is asked so.
pub(crate) fn query(request: NewSequence) -> PrefixQuery {
    let NewSequence { tokens, namespace, extras, chain, .. } = request;
    PrefixQuery { tokens, namespace, extras, chain }
}

/// A prompt whose decode steps verify so many drafts.
pub(crate) fn drafting(tokens: &[Token], drafts: u32) -> NewSequence {
    NewSequence { drafts, ..prompt(tokens) }
}

/// A prompt some of whose tokens stand for others.
pub(crate) fn overridden(tokens: &[Token], overrides: &[(i64, i128)]) -> NewSequence {
    let mut request = prompt(tokens);
    request.extras =
        ExtraKeys::new(&ExtraInputs { overrides, ..ExtraInputs::default() }).expect("valid overrides");
    request.chain.clear();
    request.hash_prompt(PAGE);
    request
}

pub(crate) fn claim(ledger: &mut Ledger, request: NewSequence) -> SlotId {
    ledger.claim(request).map_err(|refused| refused.error).expect("the claim is valid")
}

/// Claims `tokens` and computes all of them.
pub(crate) fn computed(ledger: &mut Ledger, tokens: &[Token]) -> SlotId {
    let slot = claim(ledger, prompt(tokens));
    forward(ledger, slot);
    slot
}

/// Computes what the request has left, and delivers it.
pub(crate) fn forward(ledger: &mut Ledger, slot: SlotId) {
    ledger.alloc(&[slot], &[]).expect("there is room");
    copy_pages(ledger);
    ledger.close_step();
    ledger.step(&[slot], &[], None).expect("the step is out");
}

/// Takes the page copies that go before the next forward, as (source, destination) of all groups.
pub(crate) fn copy_pages(ledger: &mut Ledger) -> Vec<(u32, u32)> {
    let groups: Vec<GroupId> = ledger.pools().groups().collect();
    let copies = groups.into_iter().flat_map(|group| ledger.take_page_copies(group));
    copies.map(|copy| (copy.source.0, copy.destination.0)).collect()
}

/// The copies ended well.
pub(crate) fn finish_copies(ledger: &mut Ledger, ids: &[u64]) -> Result<Vec<SlotId>, LedgerError> {
    let ended: Vec<_> = ids.iter().map(|&id| (id, CopyEnd::Done)).collect();
    ledger.end_copies(&ended)
}

/// Tokens of `request` that the cache serves now.
pub(crate) fn hit(ledger: &mut Ledger, request: NewSequence) -> u32 {
    let slot = claim(ledger, request);
    ledger.alloc(&[slot], &[]).expect("there is room");
    let cached = ledger.position(slot).expect("the slot is claimed").cached;
    ledger.release(&[slot]).expect("the slot is claimed");
    cached
}

/// The page ids of the request's row.
pub(crate) fn row(ledger: &Ledger, slot: SlotId) -> Vec<u32> {
    ledger.pages(slot, GroupId::FIRST).expect("the slot is claimed").iter().map(|page| page.0).collect()
}
