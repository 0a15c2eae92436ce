"""The disk tier's directory: found by a configuration, and what its blocks are blocks of."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pagekeeper._native import DiskDirectory

if TYPE_CHECKING:
    from pagekeeper.groups import Groups

__all__ = ["disk_directories", "revise"]


def disk_directories(
    groups: Groups, model_name: str | None, weights_revision: str | None
) -> list[DiskDirectory]:
    """The directories of the disk tier that `groups` ask for, locked, one a group; none is no disk tier.

    Args:
        groups: the groups of the cache.
        model_name: which model's KV the blocks are.
        weights_revision: which weights' of it.

    Raises:
        ValueError: a named directory without a name of the model; a directory that holds another store.
        OSError: a directory is in use, or the system refuses.
    """
    params = groups.params[0]
    config = params.kv_connector_config
    if config is None or config.type != "rust_tiered":
        return []
    named = config.disk_offload_dir
    if config.disk_offload_max_gb == 0 or (named is None and config.disk_offload_max_gb is None):
        return []
    if named is not None and model_name is None:
        raise ValueError(
            f"kv_connector_config.disk_offload_dir={named!r}: needs model_name, which says whose KV it "
            "keeps; without a directory the disk tier ends with the process"
        )
    directories: list[DiskDirectory] = []
    try:
        for number, (group, fingerprint) in enumerate(
            zip(groups.params, _fingerprints(groups, model_name, weights_revision), strict=True)
        ):
            name = f"rank-{config.disk_rank}" + (f"-group-{number}" if number else "")
            directories.append(
                DiskDirectory(
                    None if named is None else Path(named) / name,
                    parent=tempfile.gettempdir(),
                    fingerprint=fingerprint,
                    page_size=params.page_size,
                    block_bytes=group.bytes_per_page,
                    seed=(directories and directories[0].seed) or params.kv_hash_seed,
                )
            )
    except BaseException:
        for directory in directories:
            directory.close()
        raise
    return directories


def revise(
    disk: list[DiskDirectory], groups: Groups, model_name: str | None, weights_revision: str | None
) -> None:
    """The blocks of `disk`, all of which were forgotten, are of these weights from now on.

    Raises:
        OSError: the system refuses.
    """
    for directory, fingerprint in zip(disk, _fingerprints(groups, model_name, weights_revision), strict=True):
        directory.revise(fingerprint)


def _fingerprints(
    groups: Groups, model_name: str | None, weights_revision: str | None
) -> list[dict[str, str]]:
    """What has to agree before one cache may use the blocks of another, for each group."""
    fingerprints = []
    for number, params in enumerate(groups.params):
        regions = params.page_layout.regions
        fingerprint = {
            "model": model_name or "",
            "weights_revision": weights_revision or "",
            "dtype": " + ".join(region.dtype for region in regions),
            "page_size": str(params.page_size),
            "page_shape": " + ".join(" x ".join(map(str, region.shape)) for region in regions),
            "hash": f"{params.kv_hash_algo}, format 1",
            "shards": "1",
        }
        if not groups.is_plain:
            fingerprint["group"] = f"{number + 1} of {len(groups.params)}, {params.kind}"
        fingerprints.append(fingerprint)
    return fingerprints
