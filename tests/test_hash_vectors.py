"""Block hashes against known answers: vectors of another implementation, and chains made with hashlib."""

import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pagekeeper as pk
import vectors
from vectors import OWN, hashed, load

SEED = bytes(range(32))
OWN_CASES, SHARED_CASES = 108, 106


@pytest.fixture(scope="module")
def shared_file(shared_dir: Path) -> Path:
    file = shared_dir / "cases" / "hash_vectors.json"
    if not file.is_file():
        pytest.skip("needs ../shared/cases/hash_vectors.json")
    return file


@pytest.mark.parametrize("number", range(OWN_CASES))
def test_a_vector_of_the_second_implementation_is_equal(number: int) -> None:
    case = load(OWN)[number]
    assert hashed(case) == case["hashes"]


@pytest.mark.parametrize("number", range(SHARED_CASES))
def test_a_shared_vector_is_equal(shared_file: Path, number: int) -> None:
    case = load(shared_file)[number]
    assert hashed(case) == case["hashes"]


def test_every_vector_of_the_second_implementation_is_tried() -> None:
    assert len(load(OWN)) == OWN_CASES


def test_every_shared_vector_is_tried(shared_file: Path) -> None:
    assert len(load(shared_file)) == SHARED_CASES


def test_the_second_implementation_still_gives_its_vectors() -> None:
    program = OWN.with_name("make_vectors.py")
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert run.stdout == OWN.read_text()


ENVIRONMENTS = pytest.mark.parametrize(
    "environment",
    [
        {"PAGEKEEPER_CPU": "portable"},
        {"PYTHONHASHSEED": "0"},
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "random", "PAGEKEEPER_CPU": "portable"},
    ],
    ids=lambda environment: "-".join(environment.values()),
)


def checked_in_a_process(file: Path, environment: dict[str, str]) -> int:
    """Checks the file's cases in a process with this environment, and gives how many it has."""
    run = subprocess.run(
        [sys.executable, vectors.__file__, file],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@ENVIRONMENTS
def test_vectors_of_the_second_implementation_are_equal_in_every_process(environment: dict[str, str]) -> None:
    assert checked_in_a_process(OWN, environment) == OWN_CASES


@ENVIRONMENTS
def test_shared_vectors_are_equal_in_every_process(shared_file: Path, environment: dict[str, str]) -> None:
    assert checked_in_a_process(shared_file, environment) == SHARED_CASES


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
