"""Hashing a 32k-token prompt into its chain of block hashes, beside the yardstick of every comparison."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest

from conftest import Row
from pagekeeper import hash_blocks, hash_blocks_batch
from pagekeeper.params import HashAlgorithm
from workbench import LONG, prompts

pytestmark = pytest.mark.benchmark(group="hashing", timer=time.thread_time)


def test_yardstick_sha256_of_128_kib_by_hashlib(row: Row) -> None:
    """The yardstick: tells how fast this machine is just now."""
    data = bytes(128 * 1024)
    row.time(lambda: hashlib.sha256(data).digest(), unit="µs", rounds=300)


@pytest.mark.parametrize("algo", ["ahash64", "sha256"])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=["int32", "int64"])
def test_hash_blocks_as_a_list(
    row: Row, dtype: type[np.integer], page_size: int, algo: HashAlgorithm
) -> None:
    """One sequence, a list of `bytes` back."""
    tokens = next(prompts(LONG)).astype(dtype)
    row.time(lambda: hash_blocks(tokens, page_size, algo=algo), unit="ns/token", units=LONG, rounds=100)


@pytest.mark.parametrize("algo", ["ahash64", "sha256"])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=["int32", "int64"])
def test_hash_blocks_as_an_array(
    row: Row, dtype: type[np.integer], page_size: int, algo: HashAlgorithm
) -> None:
    """One sequence through the batch form, one array back."""
    batch = [next(prompts(LONG)).astype(dtype)]
    row.time(lambda: hash_blocks_batch(batch, page_size, algo=algo), unit="ns/token", units=LONG, rounds=100)
