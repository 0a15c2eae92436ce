"""`pagekeeper doctor`: what it says of stores that are sound, damaged, open, or none."""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from pagekeeper import (
    KVConnectorConfig,
    MHAKVCacheParams,
    PagedKVCacheManager,
    RequestID,
    TextContext,
)
from pagekeeper.cli.app import app
from pagekeeper.doctor import Examination, StoreReport, Wiped

SEED = "5a" * 32
BLOCKS = 6
BLOCK_BYTES = 1024
SLOT_BYTES = 4096


def open_cache(directory: Path) -> PagedKVCacheManager:
    params = MHAKVCacheParams(
        dtype="float32",
        n_kv_heads=1,
        head_dim=8,
        num_layers=1,
        page_size=16,
        kv_hash_seed=SEED,
        kv_connector_config=KVConnectorConfig(
            type="rust_tiered",
            host_offload_max_gb=2**-10,
            disk_offload_dir=directory,
            disk_offload_max_gb=2**-13,
        ),
    )
    assert params.bytes_per_page == BLOCK_BYTES
    memory = np.ones((9, BLOCK_BYTES), np.uint8)
    return PagedKVCacheManager(
        params,
        total_num_pages=8,
        max_batch_size=1,
        buffers=[memory],
        model_name="small",
        weights_revision="7",
    )


def serve(kv: PagedKVCacheManager) -> None:
    """A prompt of so many blocks and a token, and the end of its writes."""
    ctx = TextContext(request_id=RequestID(), tokens=np.arange(BLOCKS * 16 + 1))
    kv.claim(ctx)
    kv.alloc(ctx)
    kv.step(ctx, counts=0)
    kv.release(ctx)
    assert kv.flush(10)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a closed store of six blocks, made once."""
    place = tmp_path_factory.mktemp("stored") / "kv"
    kv = open_cache(place)
    serve(kv)
    kv.shutdown()
    return place


@pytest.fixture
def directory(stored: Path, tmp_path: Path) -> Path:
    """The same, a copy for each test."""
    return Path(shutil.copytree(stored, tmp_path / "kv"))


def run(*arguments: str | Path, answer: str | None = None) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(
        app, ["doctor", *map(str, arguments)], input=answer, catch_exceptions=False
    )


def checked(directory: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and what is said of the only store."""
    result = run(directory, *options, "--json")
    (store,) = json.loads(result.stdout)["stores"]
    return result.exit_code, store


def damage(path: Path, at: int, flip: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= flip
    path.write_bytes(content)


def contents(directory: Path) -> dict[str, Any]:
    paths = [directory, *directory.rglob("*")]
    return {
        str(path): (path.stat().st_mode, path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in paths
    }


def test_a_sound_store_is_told_with_status_zero(directory: Path) -> None:
    code, store = checked(directory)
    assert (code, store["status"]) == (0, "sound")
    assert (store["blocks"], store["checked_blocks"], store["damaged_blocks"]) == (BLOCKS, BLOCKS, 0)
    assert (store["format"], store["block_bytes"]) == (1, BLOCK_BYTES)
    assert (store["fingerprint"]["model"], store["fingerprint"]["weights_revision"]) == ("small", "7")
    assert store["disk_bytes"] >= BLOCKS * SLOT_BYTES


def test_json_has_every_field(directory: Path) -> None:
    report = json.loads(run(directory, "--json").stdout)
    assert report.keys() == {"status"} | {field.name for field in fields(Examination)}
    assert report["stores"][0].keys() == {field.name for field in fields(StoreReport)}


def test_the_table_says_it_for_people_in_eighty_columns(directory: Path) -> None:
    result = run(directory)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in ("rank-0 sound", "checked 6", "damaged 0", "model small", "page size 16"):
        assert line in lines, result.stdout
    assert any(line.startswith("blocks 6, room for ") and line.endswith(" of 1.00 KiB") for line in lines)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_seed_is_told_by_a_hash_and_neither_it_nor_the_secret_is_printed(directory: Path) -> None:
    manifest = json.loads((directory / "rank-0" / "manifest.json").read_text())
    assert manifest["seed"] == SEED
    said = run(directory).stdout + run(directory, "--json").stdout
    assert said.count(hashlib.sha256(SEED.encode()).hexdigest()[:16]) == 2
    for kept in (SEED, manifest["secret"], manifest["secret"][:16]):
        assert kept not in said


def test_a_check_changes_nothing(directory: Path) -> None:
    before = contents(directory)
    run(directory)
    assert contents(directory) == before


def test_quick_reads_no_block(directory: Path) -> None:
    damage(directory / "rank-0" / "data", 5)
    code, store = checked(directory, "--quick")
    assert (code, store["blocks"], store["checked_blocks"]) == (0, BLOCKS, 0)


@pytest.mark.parametrize(
    ("name", "at", "counted"),
    [
        pytest.param("data", 2 * SLOT_BYTES + BLOCK_BYTES - 1, {"damaged_blocks": 1}, id="a block"),
        pytest.param("entries", 4096 + 40, {"damaged_entries": 1, "blocks": BLOCKS - 1}, id="an entry"),
        pytest.param("manifest.json", 30, {"blocks": 0, "format": None}, id="the manifest"),
    ],
)
def test_a_flipped_byte_is_counted_with_status_one(
    directory: Path, name: str, at: int, counted: dict[str, object]
) -> None:
    damage(directory / "rank-0" / name, at)
    code, store = checked(directory)
    assert (code, store["status"]) == (1, "damaged")
    assert {name: store[name] for name in counted} == counted


@pytest.mark.parametrize(("name", "length"), [("data", 100), ("entries", 4200), ("manifest.json", 100)])
def test_a_file_that_is_cut_off_is_damage(directory: Path, name: str, length: int) -> None:
    path = directory / "rank-0" / name
    path.write_bytes(path.read_bytes()[:length])
    result = run(directory)
    assert result.exit_code == 1
    assert "rank-0 damaged" in " ".join(result.stdout.split())


def test_another_format_cannot_be_read(directory: Path) -> None:
    (directory / "rank-0" / "manifest.json").write_text('{"format": 2}')
    code, store = checked(directory)
    assert (code, store["status"]) == (2, "unreadable")
    assert store["error"] == "it has format 2, and this version reads 1"
    assert "unreadable: it has format 2" in " ".join(run(directory).stdout.split())


def test_of_several_stores_the_worst_decides(directory: Path) -> None:
    other = directory / "rank-10"
    other.mkdir()
    for name in ("data", "entries", "manifest.json"):
        (other / name).write_bytes((directory / "rank-0" / name).read_bytes())
    assert run(directory).exit_code == 0
    damage(other / "data", 0)
    report = json.loads(run(directory, "--json").stdout)
    assert [store["status"] for store in report["stores"]] == ["sound", "damaged"]
    assert report["status"] == "damaged"


def test_what_is_not_ours_is_named(directory: Path) -> None:
    (directory / "notes.txt").touch()
    (directory / "rank-0" / "core").touch()
    report = json.loads(run(directory, "--json").stdout)
    assert (report["foreign"], report["stores"][0]["foreign"]) == (["notes.txt"], ["core"])
    said = run(directory).stdout
    assert "notes.txt" in said
    assert "core" in said


def test_a_store_that_is_open_is_checked_and_stays_locked(directory: Path) -> None:
    kv = open_cache(directory)
    result = run(directory)
    assert result.exit_code == 0
    assert "it is only read" in result.stdout
    program = f"""
import sys
from click.testing import CliRunner
from pagekeeper.cli.app import app
sys.exit(CliRunner().invoke(app, ["doctor", {str(directory)!r}, "--wipe", "--yes"]).exit_code)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 2
    assert checked(directory)[1]["blocks"] == BLOCKS
    kv.shutdown()


def test_a_store_that_is_open_is_not_wiped(directory: Path) -> None:
    kv = open_cache(directory)
    result = run(directory, "--wipe", "--yes")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is in use by process" in result.stderr
    assert "nothing was removed" in result.stderr
    kv.shutdown()
    assert checked(directory)[1]["blocks"] == BLOCKS


def test_a_wipe_removes_our_files_and_leaves_the_rest(directory: Path) -> None:
    (directory / "rank-0" / "notes.txt").write_text("mine")
    (directory / "rank-1").mkdir()
    result = run(directory, "--wipe", "--yes", "--json")
    assert result.exit_code == 0
    wiped = json.loads(result.stdout)
    assert wiped.keys() == {field.name for field in fields(Wiped)}
    names = ("data", "entries", "lock", "manifest.json")
    assert wiped["removed"] == [str(directory / "rank-0" / name) for name in names]
    assert wiped["left"] == [str(directory / "rank-0" / "notes.txt"), str(directory / "rank-1")]
    assert (directory / "rank-0" / "notes.txt").read_text() == "mine"


def test_a_wipe_leaves_the_named_directory_for_a_new_store(directory: Path) -> None:
    assert run(directory, "--wipe", "--yes").stdout == f"Removed 4 files from {directory}.\n"
    assert list(directory.iterdir()) == []
    kv = open_cache(directory)
    serve(kv)
    kv.shutdown()
    assert checked(directory)[1]["blocks"] == BLOCKS


@pytest.mark.parametrize(("name", "content"), [("manifest.json", '{"format": 9}'), ("manifest.json", "")])
def test_a_store_that_cannot_be_opened_can_be_wiped(directory: Path, name: str, content: str) -> None:
    (directory / "rank-0" / name).write_text(content)
    assert run(directory, "--wipe", "--yes").exit_code == 0
    assert list(directory.iterdir()) == []


def test_without_a_manifest_files_may_be_anybody_s_and_are_not_wiped(directory: Path) -> None:
    (directory / "rank-0" / "manifest.json").unlink()
    code, store = checked(directory)
    assert (code, store["problems"]) == (1, ["manifest.json is missing"])
    result = run(directory, "--wipe", "--yes")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "that is no store's" in result.stderr
    assert (directory / "rank-0" / "data").exists()


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("n\n", 4), ("", 4)])
def test_a_wipe_asks_first(directory: Path, answer: str, left: int) -> None:
    result = run(directory, "--wipe", answer=answer)
    assert "Remove these files" in result.stderr
    assert str(directory / "rank-0" / "data") in result.stderr
    assert sum(path.is_file() for path in directory.rglob("*")) == left
    assert (result.exit_code == 0) == (left == 0)


def test_where_there_is_no_store_the_status_is_two(tmp_path: Path, directory: Path) -> None:
    empty = tmp_path / "empty"
    (empty / "rank-0").mkdir(parents=True)
    for options in ([], ["--json"], ["--wipe", "--yes"]):
        result = run(empty, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "there is no store in it" in result.stderr
    assert "name the one that it lies in" in run(directory / "rank-0").stderr
    assert "does not exist" in run(tmp_path / "gone").stderr


@pytest.mark.parametrize("options", [["--yes"], ["--quick", "--wipe"]])
def test_options_that_do_not_go_together_are_refused(directory: Path, options: list[str]) -> None:
    result = run(directory, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "goes with" in result.stderr


def test_a_directory_that_may_not_be_read_is_status_two(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pagekeeper.doctor.inspect_store", refuse)
    code, store = checked(directory)
    assert (code, store["error"]) == (2, "[Errno 13] Permission denied")


def test_the_command_does_without_torch(directory: Path) -> None:
    program = (
        f"import sys; sys.modules['torch'] = None; sys.argv[1:] = ['doctor', {str(directory)!r}];"
        "import pagekeeper.cli as c; c.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
