"""Block hashes against known answers: vectors of another implementation, and chains made with hashlib."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pagekeeper as pk

SEED = bytes(range(32))
CASES = 106


@pytest.fixture(scope="module")
def vectors(shared_dir: Path) -> list[dict[str, Any]]:
    file = shared_dir / "cases" / "hash_vectors.json"
    if not file.is_file():
        pytest.skip("needs ../shared/cases/hash_vectors.json")
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    return cases


def hashed(case: dict[str, Any]) -> list[str]:
    parent = case["parent"]
    blocks = pk.hash_blocks(
        case["tokens"],
        case["page_size"],
        algo=case["algo"],
        parent=bytes.fromhex(parent) if parent else None,
        seed=case["seed"],
        salt=case["salt"],
        overrides=[(index, value) for index, value in case["overrides"]],
    )
    return [block.hex() for block in blocks]


@pytest.mark.parametrize("number", range(CASES))
def test_a_vector_is_equal(vectors: list[dict[str, Any]], number: int) -> None:
    assert hashed(vectors[number]) == vectors[number]["hashes"]


def test_every_vector_is_tried(vectors: list[dict[str, Any]]) -> None:
    assert len(vectors) == CASES


PROGRAM = """
import json, os, sys
import pagekeeper as pk
from pagekeeper._native import hash_cpu_path
portable = os.environ.get("PAGEKEEPER_CPU") == "portable"
assert not portable or "portable" in hash_cpu_path().lower(), hash_cpu_path()
for case in json.load(sys.stdin):
    parent = case["parent"]
    blocks = pk.hash_blocks(case["tokens"], case["page_size"], algo=case["algo"], seed=case["seed"],
                            salt=case["salt"], parent=bytes.fromhex(parent) if parent else None,
                            overrides=[tuple(pair) for pair in case["overrides"]])
    assert [block.hex() for block in blocks] == case["hashes"], case
    print(len(blocks))
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"PAGEKEEPER_CPU": "portable"},
        {"PYTHONHASHSEED": "0"},
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "random", "PAGEKEEPER_CPU": "portable"},
    ],
    ids=lambda environment: "-".join(environment.values()),
)
def test_vectors_are_equal_in_every_process(
    vectors: list[dict[str, Any]], environment: dict[str, str]
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(vectors),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) == CASES


# An oracle of its own: HASH-4 and HASH-4b in a few lines of hashlib


def sha256_chain(tokens: list[int], page_size: int, parent: bytes) -> list[bytes]:
    chain = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        block = struct.pack(f"<{page_size}i", *tokens[start : start + page_size])
        parent = hashlib.sha256(hashlib.sha256(block).digest() + parent).digest()
        chain.append(parent)
    return chain


def root(seed: bytes | None, salt: str | None) -> bytes:
    base = seed or bytes(32)
    if not salt:
        return base
    return bytes(a ^ b for a, b in zip(base, hashlib.sha256(salt.encode()).digest(), strict=True))


TOKENS = [0, 1, -1, 2**31 - 1, -(2**31), 7, 7, 7, 151_643, 128_000, 5]


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 11, 12])
@pytest.mark.parametrize("seed", [None, SEED], ids=["no seed", "seed"])
@pytest.mark.parametrize("salt", [None, "", "tenant-é"])
def test_sha256_is_the_chain_of_block_digests(page_size: int, seed: bytes | None, salt: str | None) -> None:
    expected = sha256_chain(TOKENS, page_size, root(seed, salt))
    assert pk.hash_blocks(TOKENS, page_size, algo="sha256", seed=seed or bytes(32), salt=salt) == expected


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_sha256_64_is_that_chain_cut_to_eight_bytes(salt: str | None) -> None:
    expected = [digest[:8] for digest in sha256_chain(TOKENS, 2, root(SEED, salt))]
    assert pk.hash_blocks(TOKENS, 2, algo="sha256_64", seed=SEED, salt=salt) == expected


@pytest.mark.parametrize("algo", ["sha256", "sha256_64"])
def test_a_parent_takes_the_place_of_seed_and_salt_in_the_sha_family(algo: Any) -> None:
    expected = sha256_chain(TOKENS[4:], 4, sha256_chain(TOKENS[:4], 4, bytes(32))[0])
    width = {"sha256": 32, "sha256_64": 8}[algo]
    parent = sha256_chain(TOKENS[:4], 4, bytes(32))[0]
    found = pk.hash_blocks(TOKENS[4:], 4, algo=algo, parent=parent, seed=SEED, salt="tenant")
    assert found == [digest[:width] for digest in expected]


def test_ahash64_gives_the_published_answer_for_the_first_256_numbers() -> None:
    hashes = [block.hex() for block in pk.hash_blocks(list(range(256)), 128)]
    assert hashes == ["c84100605592b9f1", "ac94494433b9fcac"]
