"""Writes vectors.json: block hashes computed by a second implementation, in plain Python.

It shares nothing with the crate but the written format, so that the two check each other:
    python make_vectors.py > vectors.json
"""

import hashlib
import json
import random
import struct
from typing import Any

MASK = 2**64 - 1
SEED = bytes(range(32))
GUARD_SECRET = bytes(range(100, 132))


def sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


def folded_multiply(a: int, b: int) -> int:
    return (a * b & MASK) ^ (a * b >> 64)


def rotate_left(value: int, count: int) -> int:
    return (value << count | value >> (64 - count)) & MASK


class AHash:
    """The folded-multiply AHash, as its formula is written."""

    def __init__(self, root: bytes) -> None:
        pi = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
        k0, k1, k2, k3 = (
            word ^ constant for word, constant in zip(struct.unpack("<4Q", root), pi, strict=True)
        )
        self.start, self.pad, self.extra = k0, k1, (k2, k3)

    def absorb(self, buffer: int, pair: tuple[int, int]) -> int:
        folded = folded_multiply(pair[0] ^ self.extra[0], pair[1] ^ self.extra[1])
        return rotate_left((buffer + self.pad & MASK) ^ folded, 23)

    def finish(self, buffer: int) -> int:
        return rotate_left(folded_multiply(buffer, self.pad), buffer & 63)

    def message(self, data: bytes) -> int:
        buffer = (self.start + len(data)) * 6364136223846793005 & MASK
        if len(data) > 16:
            buffer = self.absorb(buffer, struct.unpack("<2Q", data[-16:]))
            while len(data) > 16:
                buffer = self.absorb(buffer, struct.unpack("<2Q", data[:16]))
                data = data[16:]
        elif len(data) > 8:
            buffer = self.absorb(buffer, (*struct.unpack("<Q", data[:8]), *struct.unpack("<Q", data[-8:])))
        else:  # a block is at least 4 bytes
            buffer = self.absorb(buffer, (*struct.unpack("<I", data[:4]), *struct.unpack("<I", data[-4:])))
        return self.finish(buffer)

    def pair(self, parent: int, content: int) -> int:
        return self.finish(self.absorb(self.start, (parent, content)))


def record(tag: int, payload: bytes) -> bytes:
    return struct.pack("<II", tag, len(payload)) + payload


def root_of(case: dict[str, Any]) -> bytes:
    root = bytes.fromhex(case["seed"]) if case["seed"] else bytes(32)
    if case["salt"]:
        root = bytes(a ^ b for a, b in zip(root, sha256(case["salt"].encode()), strict=True))
    fields = b""
    if isinstance(case["adapter"], str):
        fields += record(1, case["adapter"].encode())
    elif case["adapter"] is not None:
        fields += record(2, struct.pack("<q", case["adapter"]))
    if case["generation"]:
        fields += record(3, struct.pack("<Q", case["generation"]))
    return sha256(b"pk1-ns" + fields + root) if fields else root


def messages(case: dict[str, Any]) -> list[bytes]:
    """What is hashed for each whole block, apart from its parent."""
    tokens, size = list(case["tokens"]), case["page_size"]
    wide = {}
    for index, value in case["overrides"]:
        if not 0 <= index < len(tokens):
            continue
        if -(2**31) <= value < 2**31:
            tokens[index] = value
        else:
            wide[index] = value
    out = []
    for start in range(0, len(tokens) - size + 1, size):
        end = start + size
        extra = b""
        for tag, name in ((1, "mm_items"), (2, "prompt_embeds")):
            for first, length, digest in sorted(case[name]):
                if first < end and first + length > start:
                    extra += record(tag, struct.pack("<qQ", first - start, length) + bytes.fromhex(digest))
        for index, extra_id in enumerate(case["extra_ids"]):
            if start <= index < end and extra_id:
                extra += record(3, struct.pack("<QQ", index - start, extra_id))
        for index, value in sorted(wide.items()):
            if start <= index < end:
                value_bytes = value.to_bytes(16, "little", signed=True)
                extra += record(4, struct.pack("<Q", index - start) + value_bytes)
        message = struct.pack(f"<{size}i", *tokens[start:end])
        out.append(message + b"pk1-xk" + extra if extra else message)
    return out


def ahash64_chain(root: bytes, value: int, blocks: list[bytes]) -> list[bytes]:
    hasher = AHash(root)
    out = []
    for message in blocks:
        value = hasher.pair(value, hasher.message(message))
        out.append(value.to_bytes(8, "big"))
    return out


def hashes(case: dict[str, Any]) -> list[str]:
    root = root_of(case)
    parent = bytes.fromhex(case["parent"]) if case["parent"] else None
    out = []
    if case["algo"] == "ahash64":
        value = int.from_bytes(parent or bytes(8), "big")
        return [link.hex() for link in ahash64_chain(root, value, messages(case))]
    link = parent or root
    for message in messages(case):
        link = sha256(sha256(message) + link)
        out.append((link if case["algo"] == "sha256" else link[:8]).hex())
    return out


def guards(case: dict[str, Any]) -> list[str]:
    root = root_of(case)
    if case["algo"] == "ahash64":
        first, second = (
            ahash64_chain(sha256(b"pk1-gd" + bytes([n]) + GUARD_SECRET + root), 0, messages(case))
            for n in range(2)
        )
        return [(a + b).hex() for a, b in zip(first, second, strict=True)]
    link, out = root, []
    for message in messages(case):
        link = sha256(sha256(message) + link)
        out.append(link[16:].hex())
    return out


NOTHING: dict[str, Any] = {
    "parent": None, "seed": None, "salt": None, "adapter": None, "generation": 0,
    "mm_items": [], "prompt_embeds": [], "extra_ids": [], "overrides": [],
}  # fmt: skip


def variants(random_: random.Random) -> list[dict[str, Any]]:
    """What to give beside the tokens; the first two are for every page size."""
    first, second = random_.randbytes(32).hex(), random_.randbytes(32).hex()
    return [
        {},
        {"seed": SEED.hex(), "salt": "tenant-é"},
        {"adapter": "tenant-é"},
        {"adapter": "", "generation": 2**64 - 1},
        {"adapter": 7, "salt": "s", "generation": 1},
        {"adapter": -(2**63), "seed": SEED.hex()},
        {"generation": 3},
        {"mm_items": [[5, 11, first], [3, 4, second], [5, 2, second], [20, 1, first]]},
        {"prompt_embeds": [[0, 3, second], [17, 30, first]]},
        {"extra_ids": [0, 9, 0, 2**64 - 1, 0, 0, 1]},
        {"overrides": [[2, -(2**31)], [0, 2**31 - 1], [-1, 5], [9999, 5]]},
        {"overrides": [[4, 2**31], [1, -(2**31) - 1], [3, 2**64 - 1], [18, -(2**63)], [2, 4]]},
        {
            "seed": SEED.hex(), "adapter": "a", "mm_items": [[2, 3, first]], "prompt_embeds": [[2, 3, first]],
            "extra_ids": [0, 0, 8], "overrides": [[2, 2**40], [1, -7]],
        },
    ]  # fmt: skip


def main() -> None:
    random_ = random.Random(20)
    cases = []
    for algo in ("ahash64", "sha256", "sha256_64"):
        for page_size, blocks in ((1, 4), (3, 3), (14, 5), (16, 2), (17, 2), (128, 3)):
            for variant in variants(random_) if page_size in (3, 16) else variants(random_)[:2]:
                count = blocks * page_size + min(page_size - 1, 2)
                tokens = [
                    random_.choice((random_.randrange(150_000), random_.randrange(-(2**31), 0)))
                    for _ in range(count)
                ]
                cases.append({"algo": algo, "tokens": tokens, "page_size": page_size, **NOTHING, **variant})
        parent = random_.randbytes(8 if algo == "ahash64" else 32).hex()
        for seed in (None, SEED.hex()):
            tokens = list(range(-3, 6))
            cases.append(
                {"algo": algo, "tokens": tokens, "page_size": 4, **NOTHING, "parent": parent, "seed": seed}
            )
    for case in cases:
        case["hashes"] = hashes(case)
        if case["parent"] is None:
            case["guards"] = guards(case)
    lines = (json.dumps(case, separators=(",", ":")) for case in cases)
    print('{"cases": [\n' + ",\n".join(lines) + "\n]}")


if __name__ == "__main__":
    main()
