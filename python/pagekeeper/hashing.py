"""Block hashes for whoever is not the manager: routers, tests, other processes.

The functions are native. A block is `page_size` consecutive tokens of one sequence; its hash covers its
tokens, what else tells it apart, and the hash of the block before it, so it names the whole prefix.
"""

from __future__ import annotations

import os

from pagekeeper._native import hash_blocks, hash_blocks_batch

__all__ = ["hash_blocks", "hash_blocks_batch", "process_seed"]

_process_seed: str | None = None


def process_seed() -> str:
    """The seed (64 hexadecimal characters) that this process drew for caches that name none."""
    global _process_seed
    if _process_seed is None:
        _process_seed = os.urandom(32).hex()
    return _process_seed
