"""Parameters of a group of layers, from what each of them keeps and what is wished of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from pagekeeper.dtypes import DType
from pagekeeper.models.keeps import Keep, KeysAndValues, Latents, States
from pagekeeper.params import (
    IndexerKCache,
    KVCacheParams,
    KVCacheQuantizationConfig,
    MHAKVCacheParams,
    MLAKVCacheParams,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
)
from pagekeeper.params.base import CommonArguments

__all__ = ["Wishes", "params_of_group"]


@dataclass(frozen=True)
class Wishes:
    """What is asked of a cache beside what the model says; None leaves it to the model.

    `ssm_dtype` is `state_dtype` of tensors called "ssm".
    """

    degree: int
    dtype: DType | None
    quantization: KVCacheQuantizationConfig | None
    indexer_dtype: DType
    state_dtype: DType | None
    snapshot_interval: int | None
    ssm_dtype: DType | None = None

    def of_model(self, kv_dtype: DType, dtype: DType, ssm_dtype: DType) -> Wishes:
        """The same with a model's types where none was asked for."""
        return replace(
            self,
            dtype=self.dtype or kv_dtype,
            state_dtype=self.state_dtype or dtype,
            ssm_dtype=self.state_dtype or ssm_dtype,
        )


def params_of_group(keeps: Sequence[Keep], wishes: Wishes, common: CommonArguments) -> KVCacheParams:
    """The parameters of one shard of a group whose layers keep `keeps`.

    Raises:
        ValueError: heads do not divide among the shards, or a value is not allowed.
    """
    match keeps[0]:
        case KeysAndValues():
            return _keys_and_values(cast(Sequence[KeysAndValues], keeps), wishes, common)
        case Latents():
            return _latents(cast(Sequence[Latents], keeps), wishes, common)
        case States():
            return _states(keeps[0], len(keeps), wishes, common)


def _keys_and_values(
    keeps: Sequence[KeysAndValues], wishes: Wishes, common: CommonArguments
) -> KVCacheParams:
    return MHAKVCacheParams(
        dtype=wishes.dtype or DType.bfloat16,
        n_kv_heads=[keep.heads for keep in keeps],
        head_dim=[keep.head_dim for keep in keeps],
        num_layers=len(keeps),
        kind=keeps[0].kind,
        kvcache_quant_config=_quantization(wishes),
        allow_kv_head_replication=True,
        **common,
    ).shard(wishes.degree)


def _latents(keeps: Sequence[Latents], wishes: Wishes, common: CommonArguments) -> KVCacheParams:
    indexed = [keep.index_head_dim is not None for keep in keeps]
    indexer = None
    if any(indexed):
        indexer = IndexerKCache(
            head_dim=max(keep.index_head_dim or 0 for keep in keeps),
            dtype=wishes.indexer_dtype,
            layer_mask=None if all(indexed) else indexed,
        )
    return MLAKVCacheParams(
        dtype=wishes.dtype or DType.bfloat16,
        kv_lora_rank=keeps[0].kv_lora_rank,
        qk_rope_head_dim=keeps[0].qk_rope_head_dim,
        num_q_heads=keeps[0].query_heads,
        num_layers=len(keeps),
        kind=keeps[0].kind,
        kvcache_quant_config=_quantization(wishes),
        indexer=indexer,
        **common,
    ).shard(wishes.degree)


def _states(states: States, num_layers: int, wishes: Wishes, common: CommonArguments) -> KVCacheParams:
    return RecurrentKVCacheParams(
        states=[
            RecurrentState(
                tensor.name,
                tensor.shape(wishes.degree),
                (wishes.ssm_dtype if tensor.name == "ssm" else wishes.state_dtype) or DType.bfloat16,
            )
            for tensor in states.tensors
        ],
        num_layers=num_layers,
        kind=Recurrent(wishes.snapshot_interval),
        **common,
    )


def _quantization(wishes: Wishes) -> KVCacheQuantizationConfig | None:
    if wishes.quantization is None and wishes.dtype is DType.float4_e2m1fn:
        return KVCacheQuantizationConfig.nvfp4()
    return wishes.quantization
