"""Serves a chat, stops, and starts again in a new process: its KV is on disk, and the tokens are the same.

The server is that of `serve.py`, with a cache that keeps blocks in host memory and, behind it, on disk.

Example:
    python examples/restart.py --conversations 3 --turns 3
    python examples/restart.py --sliding-window 64
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagekeeper import KVConnectorConfig


@dataclass(frozen=True)
class Life:
    """What a server did between its start and its end.

    Attributes:
        prompt_tokens: tokens of all prompts.
        computed_tokens: those of them that were computed.
        disk_blocks: blocks of 16 tokens whose KV was read from disk, those of each group of layers counted.
        outputs: the tokens that each request was answered with.
    """

    prompt_tokens: int
    computed_tokens: int
    disk_blocks: int
    outputs: list[list[int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status: 0 if all tokens are equal and some KV came from disk."""
    options = _parser().parse_args(argv)
    if options.directory is not None:
        print(json.dumps(vars(live(options))))
        return 0
    with tempfile.TemporaryDirectory(prefix="pagekeeper-") as directory:
        turns = options.conversations * options.turns
        print(f"A server answers {turns} turns, stops, and starts again with the same directory.", flush=True)
        first = _in_a_process(options, directory)
        print(f"First life:  {_told(first)}", flush=True)
        second = _in_a_process(options, directory)
        print(f"Second life: {_told(second)}")
    count = sum(map(len, second.outputs))
    if first.outputs != second.outputs or not count:
        print("TOKENS DIFFER after the restart.")
        return 1
    print(f"All {count:,} generated tokens are equal before and after the restart.")
    return 0 if second.disk_blocks else 1


def live(options: argparse.Namespace) -> Life:
    """Serves the chat from the first turn to the last, in this process."""
    from serve import make_cache, serve, small_model
    from serving.workload import Chat, tokenizer_for

    model = small_model(seed=0, sliding_window=options.sliding_window)
    served = argparse.Namespace(
        page_size=16, pages=640, sliding_pages=160, max_batch=4, max_num_input_tokens=256, overlap=False
    )
    tiers = KVConnectorConfig(
        type="rust_tiered",
        host_offload_max_gb=0.0625,
        disk_offload_dir=options.directory,
        disk_offload_max_gb=0.125,
    )
    # The name says whose KV it is: a directory of another model's is refused.
    name = f"small model, seed 0, sliding window {options.sliding_window}"
    kv = make_cache(model.config, served, reuse=True, tiers=tiers, model_name=name)
    chat = Chat(
        tokenizer_for(None, model.config.vocab_size),
        conversations=options.conversations,
        turns=options.turns,
        max_new_tokens=12,
        seed=0,
    )
    run = serve(model, kv, chat, served)
    kv.flush(60)  # from here on it would survive a power cut, too
    disk_blocks = kv.metrics()["connector_host_filled_blocks"]
    kv.shutdown()
    return Life(
        prompt_tokens=run.stats.prompt_tokens,
        computed_tokens=run.stats.prefilled_tokens,
        disk_blocks=disk_blocks,
        outputs=run.outputs,
    )


def _in_a_process(options: argparse.Namespace, directory: str) -> Life:
    command = [sys.executable, __file__, "--directory", directory]
    command += ["--conversations", str(options.conversations), "--turns", str(options.turns)]
    if options.sliding_window is not None:
        command += ["--sliding-window", str(options.sliding_window)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Life(**json.loads(run.stdout))


def _told(life: Life) -> str:
    return (
        f"of {life.prompt_tokens:,} prompt tokens {life.computed_tokens:,} are computed; "
        f"{life.disk_blocks:,} blocks come from disk."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="restart.py", description="Serve a chat twice, with a restart between, and find its KV on disk."
    )
    parser.add_argument("--conversations", type=int, default=2, metavar="N", help="conversations (default 2)")
    parser.add_argument("--turns", type=int, default=2, metavar="N", help="questions in each (default 2)")
    parser.add_argument(
        "--sliding-window",
        type=int,
        metavar="N",
        help="let every other layer of the model see the last N tokens alone, in a group of its own",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="serve once, with blocks in DIR, and print JSON (default: twice, in one that is removed)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
