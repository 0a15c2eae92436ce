"""The cache as a resource manager: prepared, fitted to a token budget, updated, freed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

import pagekeeper as pk
from model.engine import claimed, manager, prefilled, request

PROMPT = list(range(100, 200))


@dataclass
class Request:
    """An engine's request."""

    context: pk.TextContext
    chunk_tokens: int = 1000
    new_tokens: Sequence[int] = ()
    keeps_chunk: bool = False


@dataclass
class Batch:
    context_requests: list[Request] = field(default_factory=list)
    generation_requests: list[Request] = field(default_factory=list)


def prompts(kv: pk.PagedKVCacheManager, *lengths: int) -> Batch:
    """Requests without anything in common, whose prompts are planned whole."""
    tokens = [[1000 * number + token for token in range(length)] for number, length in enumerate(lengths)]
    batch = Batch([Request(request(prompt)) for prompt in tokens])
    pk.KVCacheResourceManager(kv).prepare_resources(batch)
    return batch


def chunks(batch: Batch) -> list[int]:
    assert [one.chunk_tokens for one in batch.context_requests] == [
        one.context.active_length for one in batch.context_requests
    ]
    return [one.chunk_tokens for one in batch.context_requests]


def test_an_iteration_claims_plans_delivers_and_frees() -> None:
    kv = manager(pages=10)
    resources = pk.KVCacheResourceManager(kv)
    one, other = Request(request(PROMPT[:10]), chunk_tokens=6), Request(request(PROMPT[50:55]))
    batch = Batch([one, other])
    transfers = resources.prepare_resources(batch)
    assert [transfer.is_complete() for transfer in transfers] == [True, True]
    assert (one.chunk_tokens, other.chunk_tokens) == (6, 5)
    other.new_tokens = [7]
    resources.update_resources(batch)
    assert (one.context.processed_length, len(other.context)) == (6, 6)
    batch = Batch([one], [other])
    one.chunk_tokens = 100
    resources.prepare_resources(batch)
    one.new_tokens, other.new_tokens = [8], [9]
    resources.update_resources(batch)
    assert (one.context.processed_length, other.context.processed_length) == (10, 6)
    assert resources.free_resources(one) is None
    assert resources.free_resources(other) is None
    assert kv.block_count().free == 10


def test_what_does_not_fit_is_claimed_by_nobody() -> None:
    kv = manager(pages=3)
    running = Request(prefilled(kv, PROMPT[:8]))
    running.context.update(1)
    new = Request(request(PROMPT[50:58]))
    with pytest.raises(pk.InsufficientBlocksError):
        pk.KVCacheResourceManager(kv).prepare_resources(Batch([new, running]))
    assert new.context.slot is None
    kv.verify()


def test_rejected_drafts_are_dropped_when_results_come() -> None:
    kv = manager(pages=10)
    resources = pk.KVCacheResourceManager(kv)
    one = Request(request(PROMPT[:8], num_draft_tokens=3), new_tokens=[1])
    resources.prepare_resources(Batch([one]))
    resources.update_resources(Batch([one]))
    resources.prepare_resources(Batch([], [one]))
    one.new_tokens = [2, 3]  # one of three drafts was right
    resources.update_resources(Batch([], [one]))
    assert (one.context.processed_length, len(one.context)) == (10, 11)


def test_what_is_pinned_at_the_end_stays_until_it_is_unpinned() -> None:
    kv = manager(pages=4)
    one = Request(prefilled(kv, PROMPT[:8]))
    pin = pk.KVCacheResourceManager(kv).free_resources(one, pin_on_release=True)
    assert kv.block_count().free == 2
    assert pin is not None
    kv.unpin(pin)
    assert kv.block_count().free == 4


def test_a_batch_within_its_budget_stays_as_it_is() -> None:
    kv = manager(pages=40)
    batch = prompts(kv, 10, 10)
    batch.generation_requests = [Request(prefilled(kv, PROMPT[:3], num_draft_tokens=2))]
    batch.generation_requests[0].context.update(1)
    kv.alloc(batch.generation_requests[0].context)
    assert pk.KVCacheResourceManager(kv).fit_token_budget(batch, 23) == 23
    assert chunks(batch) == [10, 10]


@pytest.mark.parametrize(("budget", "warned"), [(6, False), (5, True)])
def test_a_batch_without_prompts_stays_as_it_is(
    budget: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kv = manager(pages=40)
    first, second = (prefilled(kv, range(start, start + 3), num_draft_tokens=2) for start in (0, 50))
    for ctx in (first, second):
        ctx.update(1)
    kv.alloc([first, second])
    before = kv.fingerprint()
    with caplog.at_level(logging.WARNING, "pagekeeper"):
        batch = Batch([], [Request(first), Request(second)])
        assert pk.KVCacheResourceManager(kv).fit_token_budget(batch, budget) == 6
    assert (bool(caplog.records), kv.fingerprint()) == (warned, before)


def test_chunks_at_the_end_of_the_batch_are_cut_at_a_block_first() -> None:
    kv = manager(pages=40)
    batch = prompts(kv, 14, 14)
    assert pk.KVCacheResourceManager(kv).fit_token_budget(batch, 25) == 22  # 11 of the last: 8
    assert chunks(batch) == [14, 8]


def test_each_chunk_keeps_a_block_of_progress() -> None:
    kv = manager(pages=40)
    batch = prompts(kv, 14, 14)
    assert pk.KVCacheResourceManager(kv).fit_token_budget(batch, 13) == 12
    assert chunks(batch) == [8, 4]


def test_progress_ends_at_a_block_also_where_a_chunk_begins_within_one() -> None:
    kv = manager(pages=40)
    one = Request(claimed(kv, PROMPT[:14]), chunk_tokens=6)
    resources = pk.KVCacheResourceManager(kv)
    for _ in range(2):
        resources.prepare_resources(Batch([one]))
        if one.context.processed_length == 0:
            resources.update_resources(Batch([one]))
    assert resources.fit_token_budget(Batch([one]), 1) == 2  # tokens 6 and 7
    assert one.context.active_length == 2


def test_chunks_that_end_their_prompt_are_cut_before_others() -> None:
    kv = manager(pages=40)
    last = Request(request(PROMPT[:12]))
    middle = Request(request(PROMPT[50:90]), chunk_tokens=12)
    batch = Batch([last, middle])
    resources = pk.KVCacheResourceManager(kv)
    resources.prepare_resources(batch)
    assert resources.fit_token_budget(batch, 20) == 20
    assert chunks(batch) == [8, 12]


def test_what_must_not_be_cut_is_left_and_nobody_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    kv = manager(pages=40)
    batch = prompts(kv, 12, 12)
    batch.context_requests[1].keeps_chunk = True
    with caplog.at_level(logging.WARNING, "pagekeeper"):
        assert pk.KVCacheResourceManager(kv).fit_token_budget(batch, 10) == 16
    assert chunks(batch) == [4, 12]
    assert "computes 16 tokens, over the budget of 10" in caplog.text


def test_without_chunked_prefill_it_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    kv = manager(pages=40)
    batch = prompts(kv, 12)
    with caplog.at_level(logging.WARNING, "pagekeeper"):
        assert pk.KVCacheResourceManager(kv, chunked_prefill=False).fit_token_budget(batch, 10) == 12
    assert chunks(batch) == [12]
    assert caplog.records


def test_the_numbers_are_those_of_the_manager() -> None:
    kv = manager(pages=10)
    one = Request(claimed(kv, PROMPT[:14], max_new_tokens=8))
    resources = pk.KVCacheResourceManager(kv)
    assert resources.get_max_resource_count() == 10
    assert resources.get_needed_resource_to_completion(one) == 6
    assert resources.get_request_kv_block_budget(one) == (6, 10)


def test_it_is_made_of_a_manager() -> None:
    with pytest.raises(TypeError, match=r"kv: got None, must be a PagedKVCacheManager"):
        pk.KVCacheResourceManager(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"chunked_prefill: got 1"):
        pk.KVCacheResourceManager(manager(), chunked_prefill=1)  # type: ignore[arg-type]


def test_a_dummy_cache_has_what_is_asked() -> None:
    resources = pk.KVCacheResourceManager(pk.DummyKVCache())
    one = Request(request(PROMPT[:4]))
    assert resources.get_max_resource_count() == 1
    assert resources.get_needed_resource_to_completion(one) == 0
    assert resources.get_request_kv_block_budget(one) is None
    assert resources.fit_token_budget(Batch([one]), 1) == 0
    assert resources.free_resources(one) is None
