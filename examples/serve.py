"""Serves a multi-turn chat twice, with and without prefix reuse, and shows what reuse saved.

A small continuous-batching server whose decoder keeps its KV in PageKeeper's pages. Start reading at
`serving/engine.py`: that is where the cache is called.

Example:
    python examples/serve.py --conversations 4 --turns 3 --page-size 16
    python examples/serve.py --sliding-window 64
    python examples/serve.py --mamba
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagekeeper import (
    FullAttention,
    KVCacheParams,
    KVConnectorConfig,
    MHAKVCacheParams,
    MultiKVCacheParams,
    PagedKVCacheManager,
    SlidingWindow,
)
from pagekeeper.params import Recurrent, RecurrentKVCacheParams
from serving.engine import Engine, Request
from serving.loader import UnsupportedModelError, load_model
from serving.mamba import Mamba
from serving.model import DTYPE, Model, ModelConfig
from serving.report import Comparison, Run
from serving.workload import Chat, tokenizer_for


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status: 0 if all tokens are equal, 1 if not, 2 for bad arguments."""
    options = _parser().parse_args(argv)
    try:
        if options.model:
            model = load_model(options.model)
        else:
            model = small_model(options.seed, options.sliding_window, mamba=options.mamba)
    except UnsupportedModelError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    comparison = compare(model, options)
    if options.json:
        print(json.dumps(comparison.to_json()))
    else:
        comparison.show()
    return 0 if comparison.equal else 1


def compare(model: Model, options: argparse.Namespace) -> Comparison:
    """Serves the workload without and with prefix reuse."""
    runs = []
    for reuse in (False, True):
        turns = options.conversations * options.turns
        print(f"serving {turns} turns {'with' if reuse else 'without'} prefix reuse ...", file=sys.stderr)
        chat = Chat(
            tokenizer_for(options.model, model.config.vocab_size),
            conversations=options.conversations,
            turns=options.turns,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
        )
        kv = make_cache(model.config, options, reuse=reuse)
        runs.append(serve(model, kv, chat, options))
        kv.shutdown()
    description = (
        f"{options.conversations} conversations of {options.turns} turns, page size {options.page_size}, "
        f"chunks of {options.max_num_input_tokens}" + (", overlapped steps" if options.overlap else "")
    )
    if model.config.sliding_window is not None:
        description += f", sliding window {model.config.sliding_window}"
    if model.config.mamba is not None:
        description += f", states kept every {snapshot_interval(options)} tokens"
    return Comparison(description, pool_pages(model.config, options), *runs)


def make_cache(
    config: ModelConfig,
    options: argparse.Namespace,
    *,
    reuse: bool,
    tiers: KVConnectorConfig | None = None,
    model_name: str | None = None,
) -> PagedKVCacheManager:
    """A cache of the model's shape: a pool for each group of layers."""
    common: Any = {
        "page_size": options.page_size,
        "devices": ["cpu"],
        "enable_prefix_caching": reuse,
        "kv_connector_config": tiers,
    }
    groups: dict[str | None, KVCacheParams] = {}
    for name, layers in config.groups.items():
        if name == "mamba" and config.mamba is not None:
            groups[name] = RecurrentKVCacheParams(
                states=config.mamba.states(DTYPE),
                num_layers=len(layers),
                kind=Recurrent(snapshot_interval(options)),
                **common,
            )
            continue
        kind: FullAttention | SlidingWindow = FullAttention()
        if name == "sliding" and config.sliding_window is not None:
            kind = SlidingWindow(config.sliding_window)
        groups[name] = MHAKVCacheParams(
            dtype=str(DTYPE),
            n_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_layers=len(layers),
            kind=kind,
            **common,
        )
    pages = pool_pages(config, options)
    return PagedKVCacheManager(
        params=groups.get(None)
        or MultiKVCacheParams({name: group for name, group in groups.items() if name}),
        total_num_pages=pages["full"] if None in groups else pages,
        max_batch_size=options.max_batch,
        model_name=model_name,
    )


def pool_pages(config: ModelConfig, options: argparse.Namespace) -> dict[str, int]:
    """Usable pages of each group; a model with one has "full" alone, of layers that see all tokens."""
    named = {"full": "pages", "sliding": "sliding_pages", "mamba": "state_pages"}
    return {name: getattr(options, named[name]) for name in (group or "full" for group in config.groups)}


def snapshot_interval(options: argparse.Namespace) -> int:
    """Tokens between two states that are kept: those of 4 pages."""
    return 4 * int(options.page_size)


def serve(model: Model, kv: PagedKVCacheManager, chat: Chat, options: argparse.Namespace) -> Run:
    """Serves every conversation to its end; a turn is sent as soon as the one before it is answered."""
    engine = Engine(
        model,
        kv,
        max_batch_size=options.max_batch,
        max_num_input_tokens=options.max_num_input_tokens,
        overlap=options.overlap,
    )
    served: list[Request] = []
    for request in chat.openings():
        engine.submit(request)
    while engine.busy:
        for request in engine.step():
            served.append(request)
            follow_up = None if request.rejected else chat.follow_up(request)
            if follow_up:
                engine.submit(follow_up)
    served.sort(key=lambda request: (request.conversation, request.turn))
    engine.stats.evictions = kv.metrics()["evictions"]
    return Run(served, engine.stats)


def small_model(seed: int, sliding_window: int | None = None, *, mamba: bool = False) -> Model:
    # Its products are too small to gain from threads, which on a busy machine only wait for each other.
    torch.set_num_threads(1)
    config = ModelConfig(sliding_window=sliding_window, mamba=Mamba() if mamba else None)
    return Model.seeded(config, seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve.py",
        description="Serve a multi-turn chat with and without prefix reuse and compare.",
        epilog="example: python examples/serve.py --conversations 4 --turns 3 --page-size 16 --overlap",
    )

    def number(flag: str, default: int, text: str) -> None:
        parser.add_argument(
            flag, type=_at_least_one, default=default, metavar="N", help=f"{text} (default {default})"
        )

    number("--page-size", 16, "tokens in a page")
    number("--pages", 640, "pages in the cache")
    number("--max-batch", 4, "requests in a step")
    number("--max-num-input-tokens", 256, "tokens in a step; longer prompts are computed in chunks")
    number("--conversations", 6, "conversations")
    number("--turns", 4, "questions in each conversation")
    number("--max-new-tokens", 24, "tokens in an answer")
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="plan each step before the tokens of the one before it are known",
    )
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a Hugging Face Llama or Qwen2 directory, computed in float64, 8 bytes a parameter "
        "(default: a small model with seeded weights)",
    )
    models.add_argument(
        "--sliding-window",
        type=_at_least_one,
        metavar="N",
        help="let every other layer of the small model see the last N tokens alone; their pages are a pool "
        "of their own",
    )
    models.add_argument(
        "--mamba",
        action="store_true",
        help="let three of four layers of the small model have states in place of attention; their pages, of "
        "one state each, are a pool of their own",
    )
    number("--sliding-pages", 160, "pages for the layers with a sliding window")
    number("--state-pages", 128, "pages for the layers with states, one a state")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of weights and questions (default 0)"
    )
    parser.add_argument("--json", action="store_true", help="print counts and outputs as JSON")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
