"""Cross attention: pages for what an encoder made, taken once and shared by forks (MGR-11).

Pages have 4 tokens. What an encoder was given is named by an item on the first token.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute
from model.grouped import grouped, rows, used
from pagekeeper.connectors import NullConnector
from pagekeeper.params import CrossAttention, FullAttention, MultiKVCacheParams, Recurrent, SlidingWindow
from pagekeeper.planning import plan_cache

AUDIO, OTHER_AUDIO = [(bytes([1]) * 32, 0, 1)], [(bytes([2]) * 32, 0, 1)]
PAGES = {"full": 40, "cross": 10}


def manager(pages: Any = PAGES, *, others: dict[str, Any] | None = None, **options: Any) -> Any:
    kinds = {"full": FullAttention(), "cross": CrossAttention()} | (others or {})
    return grouped(kinds, pages, **options)


def asked(kv: Any, tokens: Any = range(10), encoder: int | None = 9, **options: Any) -> pk.TextContext:
    return claimed(kv, tokens, encoder_length=encoder, **options)


def reused(kv: Any, tokens: Any, encoder: int | None, **options: Any) -> int:
    ctx = asked(kv, tokens, encoder, **options)
    kv.alloc(ctx)
    kv.release(ctx)
    return ctx.cached_prefix_length


# Pages


def test_the_first_forward_takes_pages_for_the_encoders_tokens_and_no_later_one_does() -> None:
    kv = manager()
    ctx = asked(kv)
    assert used(kv) == {"full": 0, "cross": 0}
    kv.alloc(ctx, num_tokens=4)
    assert rows(kv, ctx) == {"full": [1], "cross": [1, 2, 3]}
    kv.step(ctx)
    compute(kv, ctx)
    for token in range(20):
        ctx.update(token)
        compute(kv, ctx)
    assert used(kv) == {"full": 8, "cross": 3}
    assert rows(kv, ctx)["cross"] == [1, 2, 3]
    assert kv.take_page_fills("cross").tolist() == []
    kv.verify()
    kv.release(ctx)
    assert used(kv) == {"full": 0, "cross": 0}


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (4, 1), (5, 2), (40, 10)])
def test_pages_are_as_many_as_the_encoders_tokens_need(length: int, pages: int) -> None:
    kv = manager()
    kv.alloc(asked(kv, encoder=length))
    assert used(kv)["cross"] == pages


def test_a_request_without_an_encoder_takes_none() -> None:
    kv = manager()
    ctx = asked(kv, encoder=None)
    kv.alloc(ctx)
    assert rows(kv, ctx) == {"full": [1, 2, 3], "cross": []}


def test_a_request_is_refused_as_a_whole_where_its_encoders_tokens_have_no_room() -> None:
    kv = manager({"full": 40, "cross": 5})
    kv.alloc(asked(kv))
    ctx = asked(kv)
    before = kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc(ctx)
    assert (refused.value.needed, refused.value.free) == (3, 2)
    assert kv.fingerprint() == before


def test_more_of_an_encoders_tokens_than_there_is_room_for_are_refused_for_good() -> None:
    kv = manager({"full": 40, "cross": 5})
    kv.alloc(asked(kv, encoder=20))
    with pytest.raises(pk.RequestTooLargeError):
        kv.alloc(asked(kv, encoder=21))


def test_a_preempted_request_takes_its_pages_again() -> None:
    kv = manager()
    ctx = asked(kv)
    kv.alloc(ctx)
    kv.preempt(ctx)
    assert used(kv) == {"full": 0, "cross": 0}
    kv.alloc(ctx)
    assert used(kv) == {"full": 3, "cross": 3}


def test_dropped_tokens_leave_the_encoders_pages() -> None:
    kv = manager()
    ctx = asked(kv)
    compute(kv, ctx)
    ctx.truncate(6)
    assert rows(kv, ctx) == {"full": [1, 2], "cross": [1, 2, 3]}
    kv.verify()


def test_padding_has_no_page_of_an_encoder() -> None:
    kv = manager()
    ctx = asked(kv, [1])
    kv.alloc_dummy(ctx)
    assert used(kv)["cross"] == 0
    (tables,) = kv.runtime_inputs([[ctx]])["cross"].cross
    assert (tables.encoder_lens.tolist(), tables.block_table[0].any()) == ([0], False)


def test_an_encoder_is_refused_where_no_layer_reads_it() -> None:
    kv = grouped({"full": FullAttention()})
    with pytest.raises(ValueError, match="encoder_length=9: must be None: no group is of cross attention"):
        asked(kv)


@pytest.mark.parametrize("length", [0, -1, 2**31, 1.5, "9", True])
def test_a_length_that_is_none_is_refused(length: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="encoder_length"):
        pk.TextContext("a", [1], encoder_length=length)


def test_an_engines_own_request_says_how_long_its_encoders_output_is() -> None:
    kv = manager()
    slot = kv.claim(SimpleNamespace(request_id="a", tokens=[1, 2], encoder_length=9))
    kv.alloc(np.array([slot], np.int32))
    assert used(kv) == {"full": 1, "cross": 3}


def test_an_encoders_pages_may_lie_in_memory_that_groups_share() -> None:
    shape: dict[str, Any] = {"dtype": "float32", "head_dim": 8, "num_layers": 1, "page_size": 4}
    full = pk.MHAKVCacheParams(**shape, n_kv_heads=1)
    cross = pk.MHAKVCacheParams(**shape, n_kv_heads=2, kind=CrossAttention())
    params = MultiKVCacheParams({"full": full, "cross": cross})
    # Pages of 256 and 512 bytes: two of the first in a huge page, of which one is the null one.
    kv = pk.PagedKVCacheManager(params, available_bytes=7 * 512, max_batch_size=2, allocate_pools=False)
    ctx = asked(kv)
    compute(kv, ctx)
    assert kv.block_count() == pk.BlockCount(6 - 2 - 3, 6)
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(asked(kv, range(50, 53), encoder=5))
    kv.verify()
    kv.release(ctx)
    kv.alloc(asked(kv, range(50, 53), encoder=20))
    kv.verify()


# Forks


def test_beams_share_all_pages_of_the_encoder() -> None:
    kv = manager()
    ctx = asked(kv)
    compute(kv, ctx)
    beams = [kv.fork(ctx) for _ in range(3)]
    assert used(kv) == {"full": 3, "cross": 3}
    for token, beam in enumerate([ctx, *beams]):
        beam.update(token)
    kv.alloc([ctx, *beams])
    # The block that is partly filled is copied for all but one.
    assert used(kv) == {"full": 6, "cross": 3}
    assert [rows(kv, beam)["cross"] for beam in beams] == [[1, 2, 3]] * 3
    assert [beam.encoder_length for beam in beams] == [9] * 3
    assert len(kv.take_page_copies("cross")) == 0
    kv.verify()
    kv.take_page_copies("full")
    kv.release([ctx, *beams[:2]])
    assert used(kv)["cross"] == 3
    kv.release(beams[2])
    assert used(kv)["cross"] == 0


# Reuse


def test_blocks_are_shared_by_those_who_name_the_same_input_of_the_encoder() -> None:
    kv = manager()
    ctx = asked(kv, mm_items=AUDIO)
    compute(kv, ctx)
    kv.release(ctx)
    assert reused(kv, range(10), 9, mm_items=AUDIO) == 9  # two blocks, and of the tail all but the last
    assert reused(kv, range(10), 9, mm_items=OTHER_AUDIO) == 0


@pytest.mark.parametrize(
    ("encoder", "items"),
    [(9, []), (None, AUDIO), (9, [(bytes(32), 1, 2)])],
    ids=["none", "no encoder", "later"],
)
def test_who_does_not_name_it_neither_reads_nor_stores(encoder: int | None, items: Any) -> None:
    kv = manager()
    for _ in range(2):
        ctx = asked(kv, encoder=encoder, mm_items=items)
        compute(kv, ctx)
        assert ctx.cached_prefix_length == 0
        kv.release(ctx)
    assert kv.metrics()["cached_blocks"] == 0


def test_who_loses_the_token_that_names_it_is_private_from_then_on() -> None:
    kv = manager()
    ctx = asked(kv, mm_items=AUDIO)
    compute(kv, ctx)
    ctx.truncate(0)
    for token in range(10):
        ctx.update(token)
    compute(kv, ctx)
    kv.release(ctx)
    assert kv.metrics()["cached_blocks"] == 2  # of before
    assert reused(kv, range(10), None) == 0
    assert reused(kv, range(10), 9, mm_items=AUDIO) == 8


def test_without_an_encoder_prompts_are_shared_as_ever() -> None:
    kv = manager()
    ctx = asked(kv, encoder=None)
    compute(kv, ctx)
    kv.release(ctx)
    assert reused(kv, range(10), None) == 9
    assert reused(kv, range(10), 9) == 0


def test_an_encoders_pages_shorten_no_hit_beside_windows_and_states() -> None:
    others = {"window": SlidingWindow(6), "states": Recurrent(8, save_last_snapshot=False)}
    kv = manager({"full": 40, "cross": 10, "window": 20, "states": 10}, others=others)
    ctx = asked(kv, range(20), mm_items=AUDIO)
    while ctx.processed_length < 20:
        kv.alloc(ctx, num_tokens=kv.chunk_tokens(ctx))
        for name in kv.params:
            kv.take_page_copies(name)
        kv.step(ctx)
    kv.release(ctx)
    kv.verify()
    assert reused(kv, range(20), 9, mm_items=AUDIO) == 16


# Schedulers


def test_an_encoders_pages_are_needed_once() -> None:
    kv = manager()
    ctx = asked(kv, max_new_tokens=10, beam_width=2)
    assert kv.get_needed_blocks_one_step(ctx).tolist() == [4, 3]  # the last block of the prompt for each beam
    assert kv.get_remaining_blocks_to_completion(ctx, group="cross") == 3
    kv.alloc(ctx)
    assert kv.get_needed_blocks_one_step(ctx, group="cross") == 0
    assert kv.get_remaining_blocks_to_completion(ctx, group="cross") == 0


def test_an_encoder_may_be_what_a_request_has_no_room_for() -> None:
    kv = manager({"full": 40, "cross": 5})
    fits, too_long = asked(kv, max_new_tokens=10), asked(kv, encoder=21, max_new_tokens=10)
    assert kv.get_request_kv_block_budget(fits) == (5, 40)
    assert kv.get_request_kv_block_budget(too_long) == (6, 5)


def test_a_plan_does_not_promise_what_an_encoder_may_take() -> None:
    with pytest.raises(ValueError, match="encoder_length: missing"):
        plan_cache(manager().params, 1 << 20, 4)
    assert plan_cache(manager().params, 1 << 20, 4, encoder_length=9).pages(1)["cross"] == 3


# Tables


def test_tables_have_the_encoders_pages_and_lengths() -> None:
    kv = manager()
    batch = [asked(kv, range(3)), asked(kv, range(5), encoder=None), asked(kv, range(2), encoder=4)]
    kv.alloc(batch)
    for form in ("max", "vllm", "flashinfer"):
        inputs = kv.runtime_inputs([batch], form=form)["cross"]
        (tables,) = inputs.cross
        assert len(inputs) == 1
        assert tables.block_table[:, :4].tolist() == [[1, 2, 3, 0], [0] * 4, [4, 0, 0, 0]]
        assert tables.block_table.dtype == np.int32
        assert tables.encoder_lens.tolist() == [9, 0, 4]
        assert tables.query_start_loc.tolist() == [0, 3, 8, 10]
        assert (tables.max_query_len, tables.max_encoder_len) == (5, 9)
        with pytest.raises(KeyError, match=r"tables `cross\[0\]`"):
            inputs[0]
    assert kv.slot_mapping(batch[0], np.arange(9), group="cross").tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12]


def test_attention_over_an_encoders_pages_equals_dense_attention() -> None:
    torch = pytest.importorskip("torch")
    from pagekeeper.reference import paged_attention, write_kv

    kv = manager(allocate_pools=True, n_kv_heads=2, head_dim=4)
    layer = kv.get_buffers(0, group="cross")
    layer.fill_(torch.nan)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    batch = [asked(kv, range(3)), asked(kv, range(5), encoder=6)]
    key, value = random(15, 2, 4), random(15, 2, 4)
    kv.alloc(batch)
    (tables,) = kv.runtime_inputs([batch])["cross"].cross
    write_kv(layer, key, value, tables)
    kv.step(batch, new_tokens=[1, 2])
    batch.append(kv.fork(batch[0]))
    kv.alloc(batch)
    (tables,) = kv.runtime_inputs([batch])["cross"].cross
    query = random(3, 4, 4)
    found = paged_attention(query, layer, tables)
    for row, encoded in enumerate([slice(0, 9), slice(9, 15), slice(0, 9)]):
        for head in range(4):
            scores = key[encoded, head // 2] @ query[row, head] / 2  # the square root of 4
            expected = scores.softmax(0) @ value[encoded, head // 2]
            assert torch.allclose(found[row, head], expected, atol=1e-6)


def test_an_encoders_pages_are_no_blocks_for_other_tiers() -> None:
    class Recorder(NullConnector):
        pages: Any = None

        def offload(self, block_ids: Any, *rest: Any) -> Any:
            self.pages = block_ids
            return super().offload(block_ids, *rest)

    tier = Recorder()
    kv = manager(write_policy="selective", selective_min_hits=1, connector=tier)
    first, second = (asked(kv, range(13), mm_items=AUDIO) for _ in range(2))
    compute(kv, first, second, num_tokens=4)
    compute(kv, first)
    kv.alloc(second)  # goes on from blocks that were stored since, and holds the encoder's pages already
    kv.poll_transfers()
    assert second.cached_prefix_length == 8
    assert rows(kv, second)["full"][1:3] == [2, 3]
    assert tier.pages == [[2, 3], []]
