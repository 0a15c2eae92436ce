"""Stores that earlier versions have made are read by this one."""

import json
import shutil
from pathlib import Path

import pytest

from fixtures.make_store import HERE, PROMPT, content, open_cache
from pagekeeper import RequestID, TextContext
from pagekeeper.doctor import examine

STORES = sorted(HERE.glob("store-format-*"))


@pytest.fixture(params=STORES, ids=lambda path: path.name)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(request.param, tmp_path / "kv"))


def test_a_store_of_an_earlier_version_gives_its_blocks_byte_for_byte(directory: Path) -> None:
    kv, memory = open_cache(directory)
    ctx = TextContext(request_id=RequestID(), tokens=PROMPT)
    kv.claim(ctx)
    transfer = kv.alloc(ctx)
    transfer.synchronize(10)
    assert kv.poll_transfers() == [ctx.request_id]
    kv.alloc(ctx)
    assert ctx.cached_prefix_length == 8
    (row,) = kv.get_cache_indices(ctx)
    for block in range(2):
        assert (memory[row[block]] == content(block, memory.shape[1])).all()
    kv.shutdown()


def test_a_store_of_an_earlier_version_is_sound(directory: Path) -> None:
    (store,) = examine(directory).stores
    assert (store.status, store.blocks, store.checked_blocks, store.problems) == ("sound", 2, 2, [])
    assert (store.fingerprint["model"], store.fingerprint["weights_revision"]) == ("fixture", "1")


def test_the_present_format_has_a_fixture(tmp_path: Path) -> None:
    kv, _ = open_cache(tmp_path)
    kv.shutdown()
    present = json.loads((tmp_path / "rank-0" / "manifest.json").read_text())["format"]
    assert f"store-format-{present}" in [store.name for store in STORES]
