"""The one door to a manager (PLAN-6): what it checks, and what it gives."""

from typing import Any
from unittest.mock import MagicMock

import pytest

import pagekeeper as pk
from model.engine import compute
from pagekeeper.params import MHAKVCacheParams, MultiKVCacheParams
from test_planning import FULL, SHAPE, SLIDING, groups

GIVEN: dict[str, Any] = {
    "max_batch_size": 4,
    "max_seq_len": 48,
    "available_cache_memory": 25_600,
    "allocate_pools": False,
}


def load(params: Any = FULL, **given: Any) -> Any:
    return pk.load_kv_manager(params, **(GIVEN | given))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEKEEPER_KV_LAYOUT", "PAGEKEEPER_WINDOW_SIZE_SHARES"):
        monkeypatch.delenv(name, raising=False)


def test_what_is_given_reaches_the_manager() -> None:
    kv = load(model_name="m", weights_revision="r", max_num_input_tokens=16)
    assert (kv.params, kv.block_count().total) == (FULL, 99)
    assert (kv.max_batch_size, kv.max_seq_len, kv.max_num_input_tokens) == (4, 48, 16)
    assert (kv.model_name, kv.weights_revision) == ("m", "r")


def test_the_arguments_may_stand_in_the_order_of_the_contract() -> None:
    kv = pk.load_kv_manager(FULL, 4, 48, None, 25_600, False, "m", "r", 16, 32, "auto", allocate_pools=False)
    assert (kv.model_name, kv.max_num_input_tokens) == ("m", 32)


def test_it_makes_pools_unless_told_otherwise() -> None:
    pytest.importorskip("torch")
    assert pk.load_kv_manager(FULL, 4, 48, None, 2560).pages_view().shape == (10, 256)


def test_a_cache_with_tiers_is_loaded_with_them() -> None:
    pytest.importorskip("torch")
    tiers = {"type": "rust_tiered", "host_offload_max_gb": 2**-20}
    params = MHAKVCacheParams(**SHAPE, num_layers=1, kv_connector_config=tiers)
    kv = pk.load_kv_manager(params, 4, 48, None, 2560)
    assert kv.host_byte_count().total == 1024
    kv.shutdown()


def test_the_manager_serves_the_longest_request() -> None:
    kv = load()
    ctx = pk.TextContext("a", list(range(47)))
    kv.claim(ctx)
    compute(kv, ctx, new_tokens=[7])
    assert len(ctx) == kv.max_seq_len
    kv.verify()


def test_no_parameters_give_a_cache_that_holds_nothing() -> None:
    kv = pk.load_kv_manager(None, None, None)
    assert isinstance(kv, pk.DummyKVCache)
    assert kv.claim(pk.TextContext("a", [1])) == 0


def test_mocks_give_mocks() -> None:
    assert isinstance(pk.load_kv_manager(MagicMock(), 4, 48), MagicMock)


def test_devices_without_memory_give_a_mock_of_a_manager() -> None:
    params = MHAKVCacheParams(**SHAPE, num_layers=1, devices=["meta"])
    kv = pk.load_kv_manager(params, 4, 48)
    assert isinstance(kv, pk.PagedKVCacheManager)
    assert isinstance(kv.alloc, MagicMock)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"available_cache_memory": None}, "available_cache_memory: missing"),
        ({"available_cache_memory": 0}, "available_cache_memory=0: must be a whole number from 1"),
        ({"available_cache_memory": -1}, "available_cache_memory=-1: must be a whole number from 1"),
        ({"available_cache_memory": 1.5}, r"available_cache_memory=1\.5: must be a whole number"),
        ({"available_cache_memory": [2**20, 0]}, "available_cache_memory=0: must be a whole number from 1"),
        ({"available_cache_memory": []}, r"available_cache_memory=\[\]: must have the bytes of one device"),
        ({"max_batch_size": None}, "max_batch_size: missing"),
        ({"max_batch_size": 0}, "max_batch_size=0: must be a whole number from 1"),
        ({"max_batch_size": -4}, "max_batch_size=-4: must be a whole number from 1"),
        ({"max_seq_len": None}, "max_seq_len: missing"),
        ({"max_seq_len": 0}, "max_seq_len=0: must be a whole number from 1"),
        ({"max_seq_len": -1}, "max_seq_len=-1: must be a whole number from 1 to 16777216"),
        ({"max_seq_len": 2**24 + 1}, "max_seq_len=16777217: must be a whole number from 1 to 16777216"),
        ({"max_seq_len": 2**31 - 1}, "max_seq_len=2147483647: must be a whole number from 1 to 16777216"),
        ({"length_mix": {2**24 + 1: 1}}, "length_mix=16777217: must be a whole number from 1 to 16777216"),
        ({"max_num_input_tokens": 0}, "max_num_input_tokens=0: must be a whole number from 1"),
        ({"max_num_input_tokens": -1}, "max_num_input_tokens=-1: must be a whole number from 1"),
        ({"num_draft_tokens": -1}, "num_draft_tokens=-1: must be a whole number from 0"),
        ({"num_draft_tokens": 256}, "num_draft_tokens=256: must be a whole number from 0 to 255"),
        ({"page_size_multiple_of": 0}, "page_size_multiple_of=0: must be a whole number from 1"),
        ({"page_size_multiple_of": -16}, "page_size_multiple_of=-16: must be a whole number from 1"),
        (
            {"page_size_multiple_of": 128},
            r"page_size=16: must be a multiple of page_size_multiple_of=128, as .* \(try 128\)",
        ),
        (
            {"page_size_multiple_of": 5},
            r"page_size=16: must be a multiple of page_size_multiple_of=5, .*\(try 15 or 20\)",
        ),
        ({"is_di_enabled": True}, "is_di_enabled=True: must be False"),
        ({"layout": "heap"}, "layout='heap': must be one of 'auto', 'jenga', 'paged'"),
        ({"max_seq_len": 99 * 16 + 1}, "max_seq_len=1585: one request takes more than there is"),
    ],
)
def test_what_is_missing_or_out_of_range_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(**given)


@pytest.mark.parametrize("bad", [3, "full", [FULL], MHAKVCacheParams])
def test_other_things_than_parameters_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"params: got \w+, must be parameters of a cache, or None"):
        load(bad)


@pytest.mark.parametrize(
    ("of_params", "asked", "variable", "shared"),
    [
        ("auto", "auto", None, True),
        ("paged", "auto", None, False),
        ("auto", "paged", None, False),
        ("auto", "auto", "paged", False),
        ("paged", "auto", "jenga", False),
        ("paged", "jenga", "paged", True),
    ],
)
def test_groups_share_memory_unless_somebody_says_otherwise(
    of_params: Any, asked: Any, variable: str | None, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("PAGEKEEPER_KV_LAYOUT", variable)
    kv = load(groups(of_params), layout=asked, available_cache_memory=51_200)
    assert (kv._memory.huge_pages is not None) == shared


def test_an_unknown_layout_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKEEPER_KV_LAYOUT", "heap")
    with pytest.raises(
        ValueError, match="PAGEKEEPER_KV_LAYOUT='heap': must be one of 'auto', 'jenga', 'paged'"
    ):
        load(groups("auto"))


def test_one_group_has_its_memory_alone_whatever_the_layout() -> None:
    assert load(layout="jenga").block_count().total == 99


def test_shares_are_of_the_windows_as_they_were_given_though_long_ones_are_none() -> None:
    """The window of 64 tokens reads all of 48; its share is the first one still."""
    members = {"full": FULL, "sliding": SLIDING}
    params = MultiKVCacheParams(members, layout="paged", window_size_shares=(0.25, 0.75))
    kv = load(params, available_cache_memory=51_200)
    assert [kv.block_count(group=name).total for name in members] == [149, 24]
    assert kv.params["sliding"].kind.type == "full"


def test_a_request_that_does_not_fit_one_of_the_groups_is_refused_with_all_of_them() -> None:
    with pytest.raises(pk.CacheTooSmallError) as refused:
        load(groups(shares=(0.02, 0.98)), available_cache_memory=51_200)
    # Of 51,200 bytes the window has 1,024, a page of 512 beside the null one; 48 tokens need three.
    assert "'full'" in str(refused.value)
    assert "3 of 1 of 'sliding'" in str(refused.value)
    assert refused.value.needed == 4 * 512 * 50
    assert refused.value.max_seq_len_that_fits == 16
