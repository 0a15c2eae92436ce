"""The disk store beside fio: the same engine, block size, depth and direct flag, in turns.

    python benches/disk_speed.py DIRECTORY [--blocks 65536 262144 1048576 16777216] [--gib 1] [--rounds 7]

The store makes and compares checksums. Prints medians in MiB/s and their ratio. Blocks are written over
such as are there, and read as they were written. Of writes there are two figures: as the disk takes them (the
store syncs nothing), and durable at the end (the store syncs by itself, as is its default, and is flushed;
fio syncs once). Measure on a machine that is otherwise quiet.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

CRATE = Path(__file__).parents[1]
BLOCKS = [64 << 10, 256 << 10, 1 << 20, 16 << 20]
DEPTH = 32


def built() -> Path:
    """The example that copies blocks, built if it is not."""
    example = ["-p", "disk-store", "--example", "speed"]
    command = ["cargo", "build", "--release", *example, "--message-format", "json"]
    output = subprocess.run(command, cwd=CRATE, check=True, stdout=subprocess.PIPE, text=True).stdout
    executables = [json.loads(line).get("executable") for line in output.splitlines()]
    return Path(next(path for path in reversed(executables) if path))


def store(binary: Path, directory: Path, what: str, block: int, total: int, sync: str) -> float:
    """MiB/s of the store, which is in a directory of its own."""
    command = [str(binary), what, str(directory / "store"), *map(str, (block, total, DEPTH)), sync]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(output.split()[0])


def fio(directory: Path, what: str, block: int, total: int, sync: str) -> float:
    """MiB/s of fio, in a file of its own."""
    options = {
        "name": "beside",
        "filename": directory / "fio",
        "ioengine": "io_uring",
        "direct": 1,
        "bs": block,
        "iodepth": DEPTH,
        "rw": what,
        "size": total,
        "end_fsync": int(sync != "none"),
        "output-format": "json",
    }
    command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(json.loads(output)["jobs"][0][what]["bw_bytes"]) / (1 << 20)


def in_turns(rounds: int, one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float]:
    """The medians of both; the first turn of each is not counted."""
    speeds: dict[Callable[[], float], list[float]] = {one: [], other: []}
    for number in range(rounds + 1):
        for call in (one, other) if number % 2 else (other, one):
            speed = call()
            if number:
                speeds[call].append(speed)
    return statistics.median(speeds[one]), statistics.median(speeds[other])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="on the disk to be measured; files are made there")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, help="bytes of a block")
    parser.add_argument("--gib", type=float, default=1, help="GiB that are moved each time")
    parser.add_argument("--rounds", type=int, default=7, help="turns that are counted")
    options = parser.parse_args()
    if not shutil.which("fio"):
        sys.exit("fio is not installed: there is nothing to compare with (Debian: apt install fio)")
    binary = built()
    own: Path = options.directory / "pagekeeper-disk-speed"
    own.mkdir(parents=True)
    print("| block | what | store MiB/s | fio MiB/s | ratio |\n|---|---|---|---|---|")
    try:
        for block in options.blocks:
            total = int(options.gib * (1 << 30)) // block * block
            for what, sync in (("write", "none"), ("write", "batch"), ("read", "none")):
                ours, theirs = in_turns(
                    options.rounds,
                    partial(store, binary, own, what, block, total, sync),
                    partial(fio, own, what, block, total, sync),
                )
                name = {"none": what, "batch": f"{what}, durable"}[sync]
                row = f"| {block >> 10} KiB | {name} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |"
                print(row, flush=True)
            shutil.rmtree(own)
            own.mkdir()
    finally:
        shutil.rmtree(own)


if __name__ == "__main__":
    main()
