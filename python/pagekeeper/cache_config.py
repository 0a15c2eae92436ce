"""How a cache is to behave and how it is sized: what operators set, whatever the model.

A configuration made in Python is what its arguments say, and nothing else. `KVCacheConfig.from_args` reads a
command line, the environment and a file too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field, ValidationError, model_validator

from pagekeeper.config_model import (
    Configuration,
    Parser,
    Unit,
    flag,
    named,
    one_of,
    optional,
    refusal,
    told,
)
from pagekeeper.connector_config import KVConnectorConfig
from pagekeeper.dtypes import DeviceLike, DType, DTypeLike
from pagekeeper.errors import hidden, shown
from pagekeeper.params import (
    EvictionPolicy,
    FullAttention,
    HashAlgorithm,
    IndexerKCache,
    KVCacheParams,
    KVCacheQuantizationConfig,
    MemoryLayout,
    MHAKVCacheParams,
    MLAKVCacheParams,
    MultiKVCacheParams,
    OnDuplicate,
    Priority,
    WritePolicy,
    cache_dtype_for_encoding,
    parse_priority,
    whole_number,
)
from pagekeeper.params.base import CommonArguments, parse_seed
from pagekeeper.params.checks import finite_number, integer
from pagekeeper.params.groups import AttentionKind
from pagekeeper.params.multi import parse_share_list, shares_in_text

if TYPE_CHECKING:
    from typing import Self, Unpack

    from pagekeeper.models import HuggingFaceModel

__all__ = ["IndexerFormat", "KVCacheConfig", "KVCacheFormat", "StateFormat"]

KVCacheFormat: TypeAlias = Literal["float32", "bfloat16", "float8_e4m3fn", "float4_e2m1fn"]
IndexerFormat: TypeAlias = Literal["bfloat16", "float8_e4m3fn", "float4_e2m1fn"]
StateFormat: TypeAlias = Literal["bfloat16", "float32"]

_FULL = FullAttention()


class KVCacheConfig(Configuration, frozen=True):
    """How a cache is to behave, and how it is sized.

    Configurations are frozen; equal ones hash alike. Numbers may be numpy's; a bool and a string are none.

    Args:
        kv_cache_page_size: tokens in a block, and in the page that holds its KV. `to_params` makes it larger
            where a kernel needs that.
        enable_prefix_caching: whether a request may reuse blocks that earlier requests computed.
        enable_partial_reuse: whether it may go on from the first tokens of a block too.
        copy_on_partial_reuse: whether it gets a copy of such a block. If not, it takes the block's own page,
            if nobody uses it: the block is lost then.
        store_partial_tails: whether the last block of a request is cached though it is not full.
        enable_dp_cross_replica_prefix_copy: whether a request may reuse blocks that another replica has.
            There is one replica so far: nothing comes from another, whatever this says.
        kv_cache_format: element type of keys and values, whatever the model's. None is the model's.
        indexer_kv_cache_format: element type of the keys of a sparse-attention indexer. None is bfloat16,
            whatever `kv_cache_format` says.
        state_pool_dtype: element type of recurrent states. None is the model's. With float32 drafts follow
            the plain state exactly; so far requests of such models have none.
        kv_cache_hash_algo: how blocks are identified. "ahash64" is the fastest and not cryptographic;
            "sha256" is; "sha256_64" keeps the first 64 bits of it.
        kv_cache_hash_seed: 64 hexadecimal digits, the same wherever hashes are to be equal. None is no seed
            for "ahash64" and a random one in each process for the SHA family. It is a secret: printed forms
            and messages leave it out.
        on_duplicate: what happens to a request that computed a block which is cached by then: "adopt" moves
            it to the cached page, "private" leaves it on its own.
        eviction_policy: which cached block goes first. Both go by priority; "priority_slru" then takes what
            was never hit before what was.
        default_retention_priority: priority of blocks that no request says anything of, 0 (evicted first) to
            100, or "low" (20), "medium" (35), "high" (80).
        device_memory_utilization: part of the device's free memory that weights, activations and the cache
            may take together.
        max_tokens: most tokens that the pool has pages for. None is as many as fit. Caches of several groups
            take no notice, but for a warning.
        layout: how several groups of layers get their memory: "jenga" lets them share it, "paged" gives each
            its own, "auto" is "jenga".
        window_size_shares: with "paged", how they divide it: a number for each group, groups of states first,
            then windows ascending, then those that read all tokens. None is equal shares.
        kv_connector_config: where blocks go beyond the device: a `KVConnectorConfig`, a mapping of its
            fields, or the name of its type. "rust_tiered" needs `enable_prefix_caching`. None is nowhere.
        write_policy: when blocks go there: "write_through" when they are published; "selective" those of a
            high priority then, others when they were hit often; "on_evict" shortly before they are evicted.
        selective_min_hits: for "selective", the hit at which a block goes.
        selective_min_priority: for "selective", the priority from which a block goes without a hit. None is
            no such priority.
        secondary_offload_min_priority: for "on_evict", the priority from which a block goes.
        event_buffer_max_size: most events kept until somebody takes them. 0 records none.
        attention_dp_events_gather_period_ms: how often the events of all replicas are gathered. There is one
            replica so far, and any period but the default is refused.

    Raises:
        pydantic.ValidationError: a `ValueError`. A value is not allowed, fields do not go together, or a
            field is unknown. The message says which, and what is allowed.

    >>> KVCacheConfig(kv_cache_page_size=64).to_params(
    ...     dtype="bfloat16", n_kv_heads=8, head_dim=128, num_layers=32
    ... ).page_size
    64
    """

    kv_cache_page_size: Annotated[int, Unit("tokens")] = 128
    enable_prefix_caching: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    store_partial_tails: bool = True
    enable_dp_cross_replica_prefix_copy: bool = True
    kv_cache_format: KVCacheFormat | None = None
    indexer_kv_cache_format: IndexerFormat | None = None
    state_pool_dtype: StateFormat | None = None
    kv_cache_hash_algo: HashAlgorithm = "ahash64"
    kv_cache_hash_seed: str | None = Field(default=None, repr=False)
    on_duplicate: OnDuplicate = "adopt"
    eviction_policy: EvictionPolicy = EvictionPolicy.PRIORITY_LRU
    default_retention_priority: Annotated[int, Unit("priority")] = 35
    device_memory_utilization: Annotated[float, Unit("part of 1")] = 0.9
    max_tokens: Annotated[int | None, Unit("tokens")] = None
    layout: MemoryLayout = "auto"
    window_size_shares: Annotated[tuple[float, ...] | None, Unit("parts")] = None
    kv_connector_config: KVConnectorConfig | None = None
    write_policy: WritePolicy = "write_through"
    selective_min_hits: Annotated[int, Unit("hits")] = 2
    selective_min_priority: Annotated[int | None, Unit("priority")] = None
    secondary_offload_min_priority: Annotated[int, Unit("priority")] = 35
    event_buffer_max_size: Annotated[int, Unit("events")] = 0
    attention_dp_events_gather_period_ms: Annotated[int, Unit("ms")] = 5

    if TYPE_CHECKING:  # what may be given is wider than what is kept

        def __init__(
            self,
            *,
            kv_cache_page_size: int = 128,
            enable_prefix_caching: bool = True,
            enable_partial_reuse: bool = True,
            copy_on_partial_reuse: bool = True,
            store_partial_tails: bool = True,
            enable_dp_cross_replica_prefix_copy: bool = True,
            kv_cache_format: KVCacheFormat | None = None,
            indexer_kv_cache_format: IndexerFormat | None = None,
            state_pool_dtype: StateFormat | None = None,
            kv_cache_hash_algo: HashAlgorithm = "ahash64",
            kv_cache_hash_seed: str | None = None,
            on_duplicate: OnDuplicate = "adopt",
            eviction_policy: EvictionPolicy | str = EvictionPolicy.PRIORITY_LRU,
            default_retention_priority: Priority = 35,
            device_memory_utilization: float = 0.9,
            max_tokens: int | None = None,
            layout: MemoryLayout = "auto",
            window_size_shares: Sequence[float] | None = None,
            kv_connector_config: KVConnectorConfig | Mapping[str, object] | str | None = None,
            write_policy: WritePolicy = "write_through",
            selective_min_hits: int = 2,
            selective_min_priority: Priority | None = None,
            secondary_offload_min_priority: Priority = 35,
            event_buffer_max_size: int = 0,
            attention_dp_events_gather_period_ms: int = 5,
        ) -> None: ...

    @classmethod
    def from_args(cls, argv: Sequence[str] | None = None, **given: Any) -> Self:
        """The configuration that a command line, the environment and a file give together.

        Each field is taken from the first place that has it::

            Python arguments     from_args(kv_cache_page_size=64)
            flags                --kv-cache-page-size 64
            the environment      PAGEKEEPER_KV_CACHE_PAGE_SIZE=64
            a file               --config FILE, YAML or JSON
            the default

        Args:
            argv: the command line, without the program's name. None is that of the process.
            given: fields, as for `KVCacheConfig`.

        Raises:
            TypeError: `argv` is no list of strings.
            ValueError: a flag, a key of the file or a field is unknown, a file cannot be read, or a value is
                not allowed. The message says which, what is allowed, and where the value comes from.
        """
        config, rest = cls.from_known_args(argv, **given)
        if rest:
            from pagekeeper.config_sources import unknown_flags

            raise ValueError(unknown_flags(cls, rest))
        return config

    @classmethod
    def from_known_args(cls, argv: Sequence[str] | None = None, **given: Any) -> tuple[Self, list[str]]:
        """As `from_args`, for programs that have flags of their own: these are given back in their order.

        Raises:
            ValueError: as `from_args`, but for unknown flags.
        """
        from pagekeeper.config_sources import read

        return read(cls, argv, given)

    def to_params(
        self,
        *,
        n_kv_heads: int | None = None,
        head_dim: int,
        num_layers: int,
        dtype: DTypeLike | None = None,
        quantization_encoding: str | None = None,
        devices: DeviceLike | Sequence[DeviceLike] = "cpu",
        data_parallel_degree: int = 1,
        is_mla: bool = False,
        num_q_heads: int | None = None,
        qk_rope_head_dim: int = 0,
        kind: AttentionKind = _FULL,
        kvcache_quant_config: KVCacheQuantizationConfig | None = None,
        indexer_head_dim: int | None = None,
        allow_kv_head_replication: bool = False,
        page_size: int = 1,
    ) -> MHAKVCacheParams | MLAKVCacheParams:
        """The parameters of a cache of attention layers that behaves so.

        Args:
            n_kv_heads: KV heads in each layer. Latents have none.
            head_dim: values of a key or value; of latents, those of the latent and its key part together.
            num_layers: layers whose KV one page holds.
            dtype: element type that the model asks for; `kv_cache_format` goes before it.
            quantization_encoding: encoding of the weights, which says it if there is no `dtype`, as in
                `cache_dtype_for_encoding`.
            devices: where the pages live.
            data_parallel_degree: copies of the cache; 1 for now.
            is_mla: whether the layers keep latents.
            num_q_heads: query heads of each layer. Latents need them.
            qk_rope_head_dim: of latents, how many of `head_dim` are the key part with the position.
            kind: which tokens the layers read.
            kvcache_quant_config: scales of quantized KV. None is NVFP4's for float4_e2m1fn, and none for
                other types.
            indexer_head_dim: values of the keys of a sparse-attention indexer. None has none.
            allow_kv_head_replication: whether one head may lie on several shards.
            page_size: tokens that pages of the kernel have at least: a page has a multiple of it, which is
                `kv_cache_page_size` if that is one.

        Raises:
            ValueError: a value is not allowed, or a page size that is no multiple; the message says which.
        """
        common: dict[str, Any] = {
            "dtype": self._dtype(dtype, quantization_encoding),
            "num_layers": num_layers,
            "kind": kind,
            "devices": devices,
            "data_parallel_degree": data_parallel_degree,
            "indexer": None if indexer_head_dim is None else self._indexer(indexer_head_dim),
            **self.common_arguments(page_size),
        }
        fp4 = common["dtype"] is DType.float4_e2m1fn
        common["kvcache_quant_config"] = kvcache_quant_config or (
            KVCacheQuantizationConfig.nvfp4() if fp4 else None
        )
        if is_mla:
            if num_q_heads is None:
                raise ValueError("num_q_heads=None: must be given with is_mla=True")
            rope = whole_number(qk_rope_head_dim, "qk_rope_head_dim", 0)
            width = whole_number(head_dim, "head_dim", rope + 1)
            return MLAKVCacheParams(
                kv_lora_rank=width - rope, qk_rope_head_dim=rope, num_q_heads=num_q_heads, **common
            )
        if n_kv_heads is None:
            raise ValueError("n_kv_heads=None: must be given, but with is_mla=True")
        return MHAKVCacheParams(
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            allow_kv_head_replication=allow_kv_head_replication,
            **common,
        )

    def to_model_params(
        self, model: HuggingFaceModel, *, page_size: int = 1, **wishes: Any
    ) -> KVCacheParams | MultiKVCacheParams:
        """The parameters of a model's cache that behaves so.

        Args:
            model: what a Hugging Face configuration says.
            page_size: as for `to_params`.
            wishes: further arguments of `HuggingFaceModel.to_params`: shards, devices, drafts.

        Raises:
            TypeError: an argument is unknown.
            ValueError: a value is not allowed.
        """
        params = model.to_params(
            dtype=self.kv_cache_format,
            indexer_dtype=self.indexer_kv_cache_format or DType.bfloat16,
            state_dtype=self.state_pool_dtype,
            **{**self.common_arguments(page_size), **wishes},
        )
        if not isinstance(params, MultiKVCacheParams):
            return params
        return self.to_multi_params(params)

    def to_multi_params(
        self, groups: Mapping[str, KVCacheParams], **common: Unpack[CommonArguments]
    ) -> MultiKVCacheParams:
        """One cache of several groups, with the layout and the shares that are configured.

        Args:
            groups: their parameters by name.
            common: arguments that all groups have, as in `MultiKVCacheParams`.

        Raises:
            ValueError: groups differ where they may not, or there is not one share for each.
        """
        return MultiKVCacheParams(
            groups, layout=self.layout, window_size_shares=self.window_size_shares, **common
        )

    def common_arguments(self, page_size: int = 1) -> CommonArguments:
        """The arguments of any parameters that are configured here, for those that are made by hand.

        Args:
            page_size: as for `to_params`.

        Raises:
            ValueError: the page size is no multiple.
        """
        return {
            "page_size": self._page_size(page_size),
            "enable_prefix_caching": self.enable_prefix_caching,
            "enable_partial_reuse": self.enable_partial_reuse,
            "copy_on_partial_reuse": self.copy_on_partial_reuse,
            "store_partial_tails": self.store_partial_tails,
            "kv_hash_algo": self.kv_cache_hash_algo,
            "kv_hash_seed": self.kv_cache_hash_seed,
            "on_duplicate": self.on_duplicate,
            "eviction_policy": self.eviction_policy,
            "default_retention_priority": self.default_retention_priority,
            "event_buffer_max_size": self.event_buffer_max_size,
            "write_policy": self.write_policy,
            "selective_min_hits": self.selective_min_hits,
            "selective_min_priority": self.selective_min_priority,
            "secondary_offload_min_priority": self.secondary_offload_min_priority,
            "kv_connector_config": self.kv_connector_config,
            "max_tokens": self.max_tokens,
        }

    def _page_size(self, least: int) -> int:
        least = whole_number(least, "page_size")
        size = max(self.kv_cache_page_size, least)
        if size % least:
            raise ValueError(
                f"kv_cache_page_size={size}: must be a multiple of page_size={least}, as the kernel's pages "
                f"are (try {size // least * least} or {-(-size // least) * least})"
            )
        return size

    def _dtype(self, dtype: DTypeLike | None, encoding: str | None) -> DType:
        if dtype is not None and self.kv_cache_format is None:
            return DType.parse(dtype)
        return cache_dtype_for_encoding(encoding, self.kv_cache_format)

    def _indexer(self, head_dim: int) -> IndexerKCache:
        return IndexerKCache(head_dim=head_dim, dtype=self.indexer_kv_cache_format or DType.bfloat16)

    @classmethod
    def parsers(cls) -> Mapping[str, Parser]:
        """What reads each field."""
        return _PARSERS

    @model_validator(mode="after")
    def _need_prefix_caching(self) -> Self:
        connector = self.kv_connector_config
        if connector is not None and connector.type == "rust_tiered" and not self.enable_prefix_caching:
            raise refusal(
                "enable_prefix_caching=False: must be True for kv_connector_config.type='rust_tiered', which "
                "keeps blocks that later requests reuse",
                "enable_prefix_caching",
                "kv_connector_config",
            )
        return self


def _seed(value: object, name: str) -> str | None:
    try:
        return parse_seed(value)
    except ValueError as error:
        raise ValueError(f"{name}={hidden(value)}: {error}") from None


def _utilization(value: object, name: str) -> float:
    part = finite_number(value)
    if not 0 < part <= 1:
        raise ValueError(f"{name}={shown(value)}: must be a number above 0 and up to 1")
    return part


def _shares(value: object, name: str) -> tuple[float, ...]:
    """Shares as a list, or as text: "0.4,0.6"."""
    given = shares_in_text(value) if isinstance(value, str) else value
    try:
        return parse_share_list(given)
    except ValueError as error:
        raise ValueError(f"{name}={shown(value)}: {error}") from None


def _connector(value: object, name: str) -> KVConnectorConfig | None:
    if value is None or (isinstance(value, str) and value == "null"):
        return None
    if not isinstance(value, KVConnectorConfig | Mapping | str):
        raise ValueError(
            f"{name}={told(value)}: must be a KVConnectorConfig, a mapping of its fields, the name of its "
            "type, or None"
        )
    try:
        return KVConnectorConfig.of(value)
    except ValidationError as error:
        raise ValueError("; ".join(f"{name}.{refused['msg']}" for refused in error.errors())) from None


def _gather_period(value: object, name: str) -> int:
    if integer(value) != 5:
        raise ValueError(
            f"{name}={shown(value)}: must be 5: there is one replica, no others' events to gather"
        )
    return 5


_PRIORITY = named(parse_priority)
_PARSERS: dict[str, Parser] = {
    "kv_cache_page_size": whole_number,
    "enable_prefix_caching": flag,
    "enable_partial_reuse": flag,
    "copy_on_partial_reuse": flag,
    "store_partial_tails": flag,
    "enable_dp_cross_replica_prefix_copy": flag,
    "kv_cache_format": optional(one_of(*get_args(KVCacheFormat))),
    "indexer_kv_cache_format": optional(one_of(*get_args(IndexerFormat))),
    "state_pool_dtype": optional(one_of(*get_args(StateFormat))),
    "kv_cache_hash_algo": one_of(*get_args(HashAlgorithm)),
    "kv_cache_hash_seed": _seed,
    "on_duplicate": one_of(*get_args(OnDuplicate)),
    "eviction_policy": one_of(*(policy.value for policy in EvictionPolicy)),
    "default_retention_priority": _PRIORITY,
    "device_memory_utilization": _utilization,
    "max_tokens": optional(whole_number),
    "layout": one_of(*get_args(MemoryLayout)),
    "window_size_shares": optional(_shares),
    "kv_connector_config": _connector,
    "write_policy": one_of(*get_args(WritePolicy)),
    "selective_min_hits": whole_number,
    "selective_min_priority": optional(_PRIORITY),
    "secondary_offload_min_priority": _PRIORITY,
    "event_buffer_max_size": partial(whole_number, least=0),
    "attention_dp_events_gather_period_ms": _gather_period,
}
