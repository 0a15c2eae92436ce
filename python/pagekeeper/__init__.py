"""PageKeeper: KV-cache memory for LLM serving.

Plans, pages, shares and evicts the key-value cache of a serving stack, and feeds its kernels their tables.
Start with `PagedKVCacheManager`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagekeeper._native import TextContext
    from pagekeeper.cache_config import KVCacheConfig
    from pagekeeper.connector_config import KVConnectorConfig, KVConnectorType
    from pagekeeper.connectors import BlockKey, KVConnector
    from pagekeeper.context import RequestID, TokenBuffer
    from pagekeeper.counts import BlockCount, ByteCount, PrefixReuseSummary
    from pagekeeper.dtypes import DType
    from pagekeeper.dummy import DummyKVCache
    from pagekeeper.errors import (
        CacheTooSmallError,
        InsufficientBlocksError,
        KVLoadFailed,
        KVLoadRefused,
        LedgerCorruptError,
        RequestTooLargeError,
    )
    from pagekeeper.events import BlockIndex, EventSnapshot
    from pagekeeper.hashing import hash_blocks, hash_blocks_batch
    from pagekeeper.manager import PagedKVCacheManager
    from pagekeeper.params import (
        ChunkedLocal,
        EvictionPolicy,
        FullAttention,
        KVCacheGroupId,
        KVCacheParams,
        MHAKVCacheParams,
        MLAKVCacheParams,
        MultiKVCacheParams,
        SlidingWindow,
        cache_dtype_for_encoding,
    )
    from pagekeeper.planning import (
        MemoryPlanner,
        ModelConfig,
        ModelConfigWithKVCache,
        PagedMemoryPlanner,
        calculate_max_num_blocks,
    )
    from pagekeeper.planning.load import load_kv_manager
    from pagekeeper.resource_manager import KVCacheResourceManager
    from pagekeeper.retention import RetentionConfig, TokenRangeRetention
    from pagekeeper.tables import KVCacheInputs
    from pagekeeper.transfers import CompletedTransfer, KVConnectorTransfer

# Where each public name is. Modules are loaded when a name of theirs is first used, so that
# `import pagekeeper` costs next to nothing.
_HOMES = {
    "BlockCount": "counts",
    "BlockIndex": "events",
    "BlockKey": "connectors",
    "ByteCount": "counts",
    "CacheTooSmallError": "errors",
    "ChunkedLocal": "params",
    "CompletedTransfer": "transfers",
    "DType": "dtypes",
    "DummyKVCache": "dummy",
    "EventSnapshot": "events",
    "EvictionPolicy": "params",
    "FullAttention": "params",
    "InsufficientBlocksError": "errors",
    "KVCacheConfig": "cache_config",
    "KVCacheGroupId": "params",
    "KVCacheInputs": "tables",
    "KVCacheParams": "params",
    "KVCacheResourceManager": "resource_manager",
    "KVConnector": "connectors",
    "KVConnectorConfig": "connector_config",
    "KVConnectorTransfer": "transfers",
    "KVConnectorType": "connector_config",
    "KVLoadFailed": "errors",
    "KVLoadRefused": "errors",
    "LedgerCorruptError": "errors",
    "MHAKVCacheParams": "params",
    "MLAKVCacheParams": "params",
    "MemoryPlanner": "planning",
    "ModelConfig": "planning",
    "ModelConfigWithKVCache": "planning",
    "MultiKVCacheParams": "params",
    "PagedKVCacheManager": "manager",
    "PagedMemoryPlanner": "planning",
    "PrefixReuseSummary": "counts",
    "RequestID": "context",
    "RequestTooLargeError": "errors",
    "RetentionConfig": "retention",
    "SlidingWindow": "params",
    "TextContext": "_native",
    "TokenBuffer": "context",
    "TokenRangeRetention": "retention",
    "cache_dtype_for_encoding": "params",
    "calculate_max_num_blocks": "planning",
    "hash_blocks": "hashing",
    "hash_blocks_batch": "hashing",
    "load_kv_manager": "planning.load",
}

__all__ = [
    "BlockCount",
    "BlockIndex",
    "BlockKey",
    "ByteCount",
    "CacheTooSmallError",
    "ChunkedLocal",
    "CompletedTransfer",
    "DType",
    "DummyKVCache",
    "EventSnapshot",
    "EvictionPolicy",
    "FullAttention",
    "InsufficientBlocksError",
    "KVCacheConfig",
    "KVCacheGroupId",
    "KVCacheInputs",
    "KVCacheParams",
    "KVCacheResourceManager",
    "KVConnector",
    "KVConnectorConfig",
    "KVConnectorTransfer",
    "KVConnectorType",
    "KVLoadFailed",
    "KVLoadRefused",
    "LedgerCorruptError",
    "MHAKVCacheParams",
    "MLAKVCacheParams",
    "MemoryPlanner",
    "ModelConfig",
    "ModelConfigWithKVCache",
    "MultiKVCacheParams",
    "PagedKVCacheManager",
    "PagedMemoryPlanner",
    "PrefixReuseSummary",
    "RequestID",
    "RequestTooLargeError",
    "RetentionConfig",
    "SlidingWindow",
    "TextContext",
    "TokenBuffer",
    "TokenRangeRetention",
    "cache_dtype_for_encoding",
    "calculate_max_num_blocks",
    "hash_blocks",
    "hash_blocks_batch",
    "load_kv_manager",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("pagekeeper")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pagekeeper' has no attribute {name!r}")
    value = getattr(import_module(f"pagekeeper.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
