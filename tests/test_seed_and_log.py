"""The seed of block hashes (HASH-5), and what the logger `pagekeeper` says (API-7)."""

import hashlib
import logging
import subprocess
import sys
from typing import Any

import pytest

import pagekeeper as pk
from model.engine import SEED, manager, prefilled

PROMPT = list(range(10, 30))


@pytest.mark.parametrize("algo", ["ahash64", "sha256", "sha256_64"])
def test_a_seed_that_was_given_is_the_caches(algo: Any) -> None:
    assert manager(kv_hash_algo=algo, kv_hash_seed=SEED).hash_seed == SEED


def test_ahash64_has_no_seed_unless_one_is_given() -> None:
    assert manager(kv_hash_algo="ahash64").hash_seed is None


def test_a_cache_that_hashes_nothing_has_no_seed() -> None:
    assert manager(kv_hash_algo="sha256", enable_prefix_caching=False).hash_seed is None


def test_the_sha_family_shares_one_seed_of_the_process() -> None:
    seeds = [manager(kv_hash_algo=algo).hash_seed for algo in ("sha256", "sha256_64", "sha256")]
    assert seeds[0] == seeds[1] == seeds[2]
    assert seeds[0] is not None
    assert len(bytes.fromhex(seeds[0])) == 32


def test_every_process_draws_another_seed() -> None:
    program = """
from pagekeeper import MHAKVCacheParams, PagedKVCacheManager
params = MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=1, num_layers=1, kv_hash_algo="sha256")
print(PagedKVCacheManager(params, total_num_pages=1, max_batch_size=1, allocate_pools=False).hash_seed)
"""
    command = [sys.executable, "-c", program]
    other = subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip()
    assert len(bytes.fromhex(other)) == 32
    assert other != manager(kv_hash_algo="sha256").hash_seed


def test_the_seed_of_the_process_gives_the_caches_hashes() -> None:
    kv = manager(kv_hash_algo="sha256")
    hashes = kv.commit_and_get_block_hashes(prefilled(kv, PROMPT))
    assert hashes == pk.hash_blocks(PROMPT, 4, algo="sha256", seed=kv.hash_seed)
    assert hashes != pk.hash_blocks(PROMPT, 4, algo="sha256")


def test_the_log_shows_a_fingerprint_of_the_seed_and_not_the_seed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagekeeper"):
        manager(kv_hash_algo="sha256", kv_hash_seed=SEED)
    fingerprint = hashlib.sha256(bytes.fromhex(SEED)).hexdigest()[:8]
    assert f"block hashes are seeded; fingerprint of the seed: {fingerprint}" in caplog.messages
    assert SEED not in caplog.text


def test_the_log_tells_the_size_of_a_new_cache(caplog: pytest.LogCaptureFixture) -> None:
    params = pk.MHAKVCacheParams(dtype="float32", n_kv_heads=2, head_dim=4, num_layers=3, page_size=4)
    with caplog.at_level(logging.INFO, logger="pagekeeper"):
        pk.PagedKVCacheManager(
            params, total_num_pages=8, max_batch_size=1, allocate_pools=False, model_name="tiny"
        )
    # 3 layers x key and value x 4 tokens x 2 heads x 4 values x 4 bytes = 768
    said = "cache of tiny: 8 pages of 4 tokens, 768 bytes a page; prefix caching with ahash64"
    assert caplog.messages == [said]


def test_the_log_tells_that_prefix_caching_is_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagekeeper"):
        manager(enable_prefix_caching=False)
    assert caplog.messages[-1].endswith("prefix caching off")


def test_every_message_is_of_the_logger_of_the_package(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        manager(kv_hash_algo="sha256")
    assert {record.name for record in caplog.records} == {"pagekeeper"}
