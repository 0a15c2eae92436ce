"""Block hashes with known answers: files of cases, and a program that checks them in a process of its own."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pagekeeper as pk
from pagekeeper._native import hash_cpu_path

OWN = Path(__file__).resolve().parents[1] / "rust" / "block-hash" / "tests" / "vectors.json"
"""Made by `make_vectors.py` beside it, another implementation."""


def load(file: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    return cases


def hashed(case: dict[str, Any]) -> list[str]:
    """The hashes of a case's blocks in hexadecimal."""
    parent = case["parent"]
    blocks = pk.hash_blocks(
        case["tokens"],
        case["page_size"],
        algo=case["algo"],
        parent=bytes.fromhex(parent) if parent else None,
        seed=case["seed"],
        salt=case["salt"],
        lora_id=case.get("adapter"),
        lora_generation=case.get("generation", 0),
        mm_items=items(case.get("mm_items", [])),
        prompt_embeds=items(case.get("prompt_embeds", [])),
        extra_ids=case.get("extra_ids") or None,
        overrides=[(index, value) for index, value in case["overrides"]],
    )
    return [block.hex() for block in blocks]


def items(spans: list[tuple[int, int, str]]) -> list[tuple[bytes, int, int]]:
    return [(bytes.fromhex(content), start, length) for start, length, content in spans]


def main() -> None:
    if os.environ.get("PAGEKEEPER_CPU") == "portable":
        assert "portable" in hash_cpu_path().lower(), hash_cpu_path()
    cases = [case for file in sys.argv[1:] for case in load(Path(file))]
    for case in cases:
        assert hashed(case) == case["hashes"], case
    print(len(cases))


if __name__ == "__main__":
    main()
