"""Block hashes for whoever is not the manager: routers, tests, other processes.

The functions are native. A block is `page_size` consecutive tokens of one sequence; its hash covers its
tokens, what else tells it apart, and the hash of the block before it, so it names the whole prefix.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from pagekeeper._native import hash_blocks, hash_blocks_batch

if TYPE_CHECKING:
    from pagekeeper.params import CommonKVCacheParams

__all__ = ["hash_blocks", "hash_blocks_batch", "resolve_seed"]

_log = logging.getLogger("pagekeeper")
_process_seed: str | None = None


def resolve_seed(params: CommonKVCacheParams) -> str | None:
    """The seed that a cache hashes with, as 64 hexadecimal characters; None is no seed.

    It is the cache's own, or for the SHA family one that this process draws once. The log shows its
    fingerprint: the first 8 hexadecimal digits of the seed's SHA-256.
    """
    seed = params.kv_hash_seed
    if not params.enable_prefix_caching or (seed is None and params.kv_hash_algo == "ahash64"):
        return None
    if seed is None:
        seed = _seed_of_this_process()
    import hashlib  # loads a library that few caches need

    fingerprint = hashlib.sha256(bytes.fromhex(seed)).hexdigest()[:8]
    _log.info("block hashes are seeded; fingerprint of the seed: %s", fingerprint)
    return seed


def _seed_of_this_process() -> str:
    global _process_seed
    if _process_seed is None:
        _process_seed = os.urandom(32).hex()
    return _process_seed
