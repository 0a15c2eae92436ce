"""How block hashes are asked for: forms of input, refusals, namespaces, extra keys, batches."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pagekeeper as pk
from model.engine import manager

TOKENS = [5, 0, 2**31 - 1, 151_643, 9, 1, 2, 3, 4]
ALGORITHMS: list[Any] = ["ahash64", "sha256", "sha256_64"]
CONTENT = bytes(range(32))


def test_a_block_has_eight_or_thirty_two_canonical_bytes() -> None:
    widths = {algo: len(pk.hash_blocks(TOKENS, 4, algo=algo)[0]) for algo in ALGORITHMS}
    assert widths == {"ahash64": 8, "sha256": 32, "sha256_64": 8}


def test_a_trailing_partial_block_has_no_hash() -> None:
    assert [len(pk.hash_blocks(TOKENS[:n], 4)) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_hash_names_the_whole_prefix(algo: Any) -> None:
    one = pk.hash_blocks([1, 2, 3, 4], 2, algo=algo, seed=CONTENT)
    other = pk.hash_blocks([9, 2, 3, 4], 2, algo=algo, seed=CONTENT)
    assert one[0] != other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_longer_sequence_only_adds_hashes(algo: Any) -> None:
    whole = pk.hash_blocks(TOKENS, 2, algo=algo, seed=CONTENT)
    for length in range(len(TOKENS)):
        assert pk.hash_blocks(TOKENS[:length], 2, algo=algo, seed=CONTENT) == whole[: length // 2]


# Forms of tokens (HASH-8)


FORMS: dict[str, Any] = {
    "int32": np.array(TOKENS, np.int32),
    "uint32": np.array(TOKENS, np.uint32),
    "int64": np.array(TOKENS, np.int64),
    "strided": np.repeat(np.array(TOKENS, np.int32), 3)[::3],
    "reversed view": np.array(TOKENS[::-1], np.int64)[::-1],
    "big-endian int32": np.array(TOKENS, ">i4"),
    "big-endian int64": np.array(TOKENS, ">i8"),
    "read-only": np.frombuffer(np.array(TOKENS, np.int32).tobytes(), np.int32),
    "tuple": tuple(TOKENS),
    "numpy scalars": [np.int64(token) for token in TOKENS],
    "torch int64": torch.tensor(TOKENS),
    "torch scalars": [torch.tensor(token) for token in TOKENS],
}


@pytest.mark.parametrize("form", FORMS)
def test_equal_tokens_hash_alike_in_every_form(form: str) -> None:
    assert pk.hash_blocks(FORMS[form], 4) == pk.hash_blocks(TOKENS, 4)


def test_negative_tokens_are_legal_and_differ_from_each_other() -> None:
    hashes = [pk.hash_blocks([token], 1)[0] for token in (-1, -2, -(2**31), 0, 2**31 - 1)]
    assert len(set(hashes)) == 5
    assert pk.hash_blocks(np.array([-1], np.int64), 1) == pk.hash_blocks([-1], 1)


@pytest.mark.parametrize(
    ("tokens", "index"),
    [
        ([1, 2**31], 1),
        ([1, 2, -(2**31) - 1], 2),
        ([2**63], 0),
        ([2**64, 1], 0),
        ([1, 1.0], 1),
        ([True, 1], 0),
        ([1, True], 1),  # Python's hash() is that of [1, 1]
        ([2**61 - 1, 5], 0),  # Python's hash() is that of [0, 5]
        ([1, None], 1),
        ([1, "2"], 1),
        (np.array([1, 2**31], np.int64), 1),
        (np.array([1, 2, 2**31], np.uint32), 2),
        (np.array([1, -(2**31) - 1], ">i8"), 1),
    ],
)
def test_what_is_no_token_is_refused_with_its_index(tokens: Any, index: int) -> None:
    with pytest.raises(ValueError, match=rf"\b{index}\b"):
        pk.hash_blocks(tokens, 1)


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([1.0, 2.0]),
        np.array([True, False]),
        np.array([[1, 2], [3, 4]]),
        np.array(7),
        "1234",
        7,
        None,
    ],
    ids=["floats", "bools", "two axes", "no axis", "text", "number", "none"],
)
def test_what_is_no_sequence_of_tokens_is_refused(tokens: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        pk.hash_blocks(tokens, 1)


# Settings


@pytest.mark.parametrize("page_size", [0, -4])
def test_a_block_has_at_least_one_token(page_size: int) -> None:
    with pytest.raises(ValueError, match="page_size"):
        pk.hash_blocks(TOKENS, page_size)


def test_an_unknown_algorithm_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="sha256_64"):
        pk.hash_blocks(TOKENS, 4, algo="md5")  # type: ignore[arg-type]


def test_a_seed_may_be_bytes_or_hex() -> None:
    assert pk.hash_blocks(TOKENS, 4, seed=CONTENT) == pk.hash_blocks(TOKENS, 4, seed=CONTENT.hex())
    assert pk.hash_blocks(TOKENS, 4, seed=CONTENT) != pk.hash_blocks(TOKENS, 4)


@pytest.mark.parametrize("seed", [b"", b"short", "ab", "x" * 64, 7], ids=repr)
def test_a_seed_of_another_size_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed"):
        pk.hash_blocks(TOKENS, 4, seed=seed)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_hashing_goes_on_from_a_parent(algo: Any) -> None:
    whole = pk.hash_blocks(TOKENS[:8], 4, algo="sha256" if algo == "sha256_64" else algo)
    width = {"ahash64": 8, "sha256": 32, "sha256_64": 8}[algo]
    rest = pk.hash_blocks(TOKENS[4:8], 4, algo=algo, parent=whole[0])
    assert rest == [whole[1][:width]]


@pytest.mark.parametrize(
    ("algo", "length"), [("ahash64", 32), ("sha256", 8), ("sha256_64", 8), ("ahash64", 0)]
)
def test_a_parent_of_the_wrong_size_is_refused(algo: Any, length: int) -> None:
    with pytest.raises(ValueError, match="parent"):
        pk.hash_blocks(TOKENS, 4, algo=algo, parent=bytes(length))


# Namespaces (HASH-4, HASH-6)


NAMESPACES: list[dict[str, Any]] = [
    {},
    {"salt": "a"},
    {"salt": "ab"},
    {"salt": "1"},
    {"lora_id": "a"},
    {"lora_id": "ab"},
    {"lora_id": "1"},
    {"lora_id": 1},
    {"lora_id": -1},
    {"lora_id": "a", "lora_generation": 1},
    {"lora_id": 1, "lora_generation": 1},
    {"salt": "a", "lora_id": "b"},
    {"salt": "b", "lora_id": "a"},
    {"salt": "org_1", "lora_id": "2345"},
    {"salt": "org_12345", "lora_id": "x"},
]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_no_two_namespaces_share_a_hash(algo: Any) -> None:
    hashes = [pk.hash_blocks(TOKENS, 4, algo=algo, seed=CONTENT, **keys)[1] for keys in NAMESPACES]
    assert len(set(hashes)) == len(NAMESPACES)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_an_empty_salt_is_no_salt(algo: Any) -> None:
    plain = pk.hash_blocks(TOKENS, 4, algo=algo, seed=CONTENT)
    assert pk.hash_blocks(TOKENS, 4, algo=algo, seed=CONTENT, salt="") == plain


# Extra keys (HASH-6, HASH-9)


EXTRAS: list[dict[str, Any]] = [
    {},
    {"mm_items": [(CONTENT, 1, 2)]},
    {"mm_items": [(CONTENT, 2, 2)]},
    {"mm_items": [(CONTENT, 1, 3)]},
    {"mm_items": [(CONTENT[::-1], 1, 2)]},
    {"prompt_embeds": [(CONTENT, 1, 2)]},
    {"extra_ids": [0, 5]},
    {"extra_ids": [0, 0, 5]},
    {"extra_ids": [0, 6]},
    {"overrides": [(1, 2**31)]},
    {"overrides": [(2, 2**31)]},
    {"overrides": [(1, 5)]},
    {"overrides": [(1, 2**64 - 1)]},
    {"overrides": [(1, -(2**63))]},
]


def padded(keys: dict[str, Any]) -> dict[str, Any]:
    """Extra ids with one entry a token."""
    ids = keys.get("extra_ids")
    return keys if ids is None else {"extra_ids": ids + [0] * (len(TOKENS) - len(ids))}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_no_two_extra_keys_share_a_hash(algo: Any) -> None:
    hashes = [pk.hash_blocks(TOKENS, 4, algo=algo, seed=CONTENT, **padded(keys))[0] for keys in EXTRAS]
    assert len(set(hashes)) == len(EXTRAS)


@pytest.mark.parametrize("keys", EXTRAS[1:], ids=str)
def test_extra_keys_change_no_block_before_the_first_that_they_touch(keys: dict[str, Any]) -> None:
    shifted = {
        name: [0] * 4 + value if name == "extra_ids" else [tuple(shift(entry)) for entry in value]
        for name, value in keys.items()
    }
    plain, changed = pk.hash_blocks(TOKENS, 4), pk.hash_blocks(TOKENS, 4, **padded(shifted))
    assert changed[0] == plain[0]
    assert changed[1] != plain[1]


def shift(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same item or override, four tokens later."""
    if isinstance(entry[0], bytes):
        return entry[0], entry[1] + 4, entry[2]
    return entry[0] + 4, entry[1]


def test_an_item_enters_a_block_by_its_place_in_the_block() -> None:
    item = [(CONTENT, 0, 1)]
    plain = [7] * 8
    first = pk.hash_blocks(plain, 4, mm_items=item)
    second = pk.hash_blocks(plain, 4, mm_items=[(CONTENT, 4, 1)], parent=None)
    again = pk.hash_blocks(plain[4:], 4, mm_items=item, parent=pk.hash_blocks(plain, 4)[0])
    assert first[0] != second[0]
    assert second[1] == again[0]


def test_an_override_within_int32_is_the_token_it_puts_in() -> None:
    assert pk.hash_blocks([1, 0, 3, 4], 4, overrides=[(1, -7)]) == pk.hash_blocks([1, -7, 3, 4], 4)


@pytest.mark.parametrize("index", [-1, 9, 10**9])
def test_an_override_outside_the_sequence_is_ignored(index: int) -> None:
    assert pk.hash_blocks(TOKENS, 4, overrides=[(index, 7)]) == pk.hash_blocks(TOKENS, 4)


WRONG_EXTRAS: dict[str, dict[str, Any]] = {
    "two overrides of one token": {"overrides": [(1, 5), (1, 6)]},
    "an override beyond 64 bits": {"overrides": [(1, 2**64)]},
    "an override below 64 bits": {"overrides": [(1, -(2**63) - 1)]},
    "a short content hash": {"mm_items": [(b"short", 0, 1)]},
    "an item without tokens": {"mm_items": [(CONTENT, 0, 0)]},
    "an item before the first token": {"mm_items": [(CONTENT, -1, 2)]},
    "a short digest": {"prompt_embeds": [(b"short", 0, 1)]},
    "a negative extra id": {"extra_ids": [-1] * 9},
}


@pytest.mark.parametrize("wrong", WRONG_EXTRAS)
def test_wrong_extra_keys_are_refused_by_name(wrong: str) -> None:
    (name,) = WRONG_EXTRAS[wrong]
    with pytest.raises(ValueError, match=name.rstrip("s")):
        pk.hash_blocks(TOKENS, 4, **WRONG_EXTRAS[wrong])


# Batches (HASH-10)


@pytest.mark.parametrize(("algo", "width"), [("ahash64", 8), ("sha256", 32), ("sha256_64", 8)])
def test_a_batch_gives_each_sequence_its_own_hashes(algo: Any, width: int) -> None:
    sequences: list[Any] = [TOKENS, [], [1, 2, 3], TOKENS[:4], np.arange(20)]
    hashes, offsets = pk.hash_blocks_batch(sequences, 4, algo=algo, seed=CONTENT)
    assert hashes.dtype == np.uint8
    assert hashes.shape == (8, width)
    assert offsets.tolist() == [0, 2, 2, 2, 3, 8]
    for tokens, (start, end) in zip(sequences, itertools.pairwise(offsets), strict=True):
        assert [block.tobytes() for block in hashes[start:end]] == pk.hash_blocks(
            tokens, 4, algo=algo, seed=CONTENT
        )


def test_an_empty_batch_has_no_hashes() -> None:
    hashes, offsets = pk.hash_blocks_batch([], 4)
    assert (hashes.shape, offsets.tolist()) == ((0, 8), [0])


def test_a_wrong_token_in_a_batch_is_named_by_sequence_and_index() -> None:
    with pytest.raises(ValueError, match=r"\b1\b.*\b2\b"):
        pk.hash_blocks_batch([TOKENS, [1, 2, 2**31]], 4)


@pytest.mark.parametrize("wrong", [5, b"a"], ids=repr)
def test_a_salt_that_is_no_text_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^salt: got \w+, must be a str"):
        pk.hash_blocks(TOKENS, 4, salt=wrong)


def hash_much(tokens: Any) -> Callable[[], object]:
    return lambda: pk.hash_blocks_batch([tokens], 1, algo="sha256")


def claim_much(tokens: Any) -> Callable[[], object]:
    kv = manager(page_size=1, kv_hash_algo="sha256")
    ctx = pk.TextContext("a", tokens)
    return lambda: kv.claim(ctx)


def probe_much(tokens: Any) -> Callable[[], object]:
    kv = manager(page_size=1, kv_hash_algo="sha256")
    return lambda: kv.probe_prefix_match_length(tokens)


@pytest.mark.alone
@pytest.mark.parametrize("prepare", [hash_much, claim_much, probe_much])
def test_other_threads_run_while_much_is_hashed(prepare: Callable[[Any], Callable[[], object]]) -> None:
    call = prepare(np.zeros(2_000_000, np.int32))  # a hash a token: some hundred milliseconds
    began, ended = threading.Event(), threading.Event()
    times: list[float] = []

    def work() -> None:
        began.set()
        times.append(time.perf_counter())
        call()
        times.append(time.perf_counter())
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    began.wait()
    ticks = []
    while not ended.wait(0.001):
        ticks.append(time.perf_counter())
    worker.join()
    start, end = times
    margin = (end - start) / 4  # in the first quarter tokens are copied, in the last arrays are made
    assert [tick for tick in ticks if start + margin < tick < end - margin]
