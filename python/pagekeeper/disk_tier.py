"""The disk tier's directory: found by a configuration, and what its blocks are blocks of."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pagekeeper._native import DiskDirectory

if TYPE_CHECKING:
    from pagekeeper.params import KVCacheParams

__all__ = ["disk_directory", "revise"]


def disk_directory(
    params: KVCacheParams, model_name: str | None, weights_revision: str | None
) -> DiskDirectory | None:
    """The directory of the disk tier that `params` ask for, locked; None is no disk tier.

    Args:
        params: parameters of the cache.
        model_name: which model's KV the blocks are.
        weights_revision: which weights' of it.

    Raises:
        ValueError: a named directory without a name of the model; a directory that holds another store.
        OSError: the directory is in use, or the system refuses.
    """
    config = params.kv_connector_config
    if config is None or config.type != "rust_tiered":
        return None
    named = config.disk_offload_dir
    if config.disk_offload_max_gb == 0 or (named is None and config.disk_offload_max_gb is None):
        return None
    if named is not None and model_name is None:
        raise ValueError(
            f"kv_connector_config.disk_offload_dir={named!r}: needs model_name, which says whose KV it "
            "keeps; without a directory the disk tier ends with the process"
        )
    return DiskDirectory(
        None if named is None else Path(named) / f"rank-{config.disk_rank}",
        parent=tempfile.gettempdir(),
        fingerprint=_fingerprint(params, model_name or "", weights_revision or ""),
        page_size=params.page_size,
        block_bytes=params.bytes_per_page,
        seed=params.kv_hash_seed,
    )


def revise(
    disk: DiskDirectory, params: KVCacheParams, model_name: str | None, weights_revision: str | None
) -> None:
    """The blocks of `disk`, all of which were forgotten, are of these weights from now on.

    Raises:
        OSError: the system refuses.
    """
    disk.revise(_fingerprint(params, model_name or "", weights_revision or ""))


def _fingerprint(params: KVCacheParams, model_name: str, weights_revision: str) -> dict[str, str]:
    """What has to agree before one cache may use the blocks of another."""
    regions = params.page_layout.regions
    return {
        "model": model_name,
        "weights_revision": weights_revision,
        "dtype": " + ".join(region.dtype for region in regions),
        "page_size": str(params.page_size),
        "page_shape": " + ".join(" x ".join(map(str, region.shape)) for region in regions),
        "hash": f"{params.kv_hash_algo}, format 1",
        "shards": "1",
    }
