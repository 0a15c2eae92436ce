"""What a cache is: the shape of its pages, which of them a request keeps, and how it behaves.

Parameters check themselves when they are made, so that whoever receives them need not. Torch is not needed.
"""

from pagekeeper.params.attention import MHAKVCacheParams, MLAKVCacheParams
from pagekeeper.params.base import (
    CommonKVCacheParams,
    EvictionPolicy,
    HashAlgorithm,
    KVCacheParams,
    OnDuplicate,
    Priority,
    WritePolicy,
)
from pagekeeper.params.checks import parse_priority, whole_number
from pagekeeper.params.companions import IndexerKCache, KVCacheQuantizationConfig
from pagekeeper.params.encodings import cache_dtype_for_encoding
from pagekeeper.params.groups import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    GroupKind,
    KVCacheGroupId,
    Recurrent,
    Scratch,
    SlidingWindow,
)
from pagekeeper.params.layout import PageLayout, PageRegion
from pagekeeper.params.multi import MemoryLayout, MultiKVCacheParams
from pagekeeper.params.states import RecurrentKVCacheParams, RecurrentState

__all__ = [
    "ChunkedLocal",
    "CommonKVCacheParams",
    "CrossAttention",
    "EvictionPolicy",
    "FullAttention",
    "GroupKind",
    "HashAlgorithm",
    "IndexerKCache",
    "KVCacheGroupId",
    "KVCacheParams",
    "KVCacheQuantizationConfig",
    "MHAKVCacheParams",
    "MLAKVCacheParams",
    "MemoryLayout",
    "MultiKVCacheParams",
    "OnDuplicate",
    "PageLayout",
    "PageRegion",
    "Priority",
    "Recurrent",
    "RecurrentKVCacheParams",
    "RecurrentState",
    "Scratch",
    "SlidingWindow",
    "WritePolicy",
    "cache_dtype_for_encoding",
    "parse_priority",
    "whole_number",
]
