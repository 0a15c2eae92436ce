"""The example server's model, very small, on a manager's pages: for tests of what decoding gives."""

from collections.abc import Sequence

import numpy as np
import torch

import pagekeeper as pk
from pagekeeper.tables import VllmTables
from serving.model import DTYPE, Model, ModelConfig

CONFIG = ModelConfig(
    vocab_size=101,
    hidden_size=24,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=256,
)
MODEL = Model.seeded(CONFIG, seed=11)


def cache(pages: int, page_size: int = 4) -> pk.PagedKVCacheManager:
    params = pk.MHAKVCacheParams(dtype=DTYPE, n_kv_heads=1, head_dim=8, num_layers=2, page_size=page_size)
    return pk.PagedKVCacheManager(params, total_num_pages=pages, max_batch_size=8)


def forward(
    kv: pk.PagedKVCacheManager, batch: Sequence[pk.TextContext], tokens: Sequence[Sequence[int]]
) -> list[list[int]]:
    """One planned forward of the batch: the likeliest token behind each token of each request."""
    tables = kv.runtime_inputs([list(batch)], form="vllm")[0]
    counts = [len(own) for own in tokens]
    assert np.diff(tables.query_start_loc).tolist() == counts
    ends = np.asarray(tables.seq_lens).tolist()
    positions = [torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
    layers = [kv.get_buffers(layer) for layer in range(CONFIG.num_layers)]
    flat = torch.tensor([token for own in tokens for token in own])
    hidden = MODEL.forward(flat, torch.cat(positions), tables, layers)
    return [own.tolist() for own in MODEL.logits(hidden).argmax(-1).split(counts)]


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """The oracle: the likeliest continuation, everything computed anew for each token on one large page."""
    tokens = list(prompt)
    for _ in range(count):
        length = len(tokens)
        tables = VllmTables(
            block_table=np.array([[0]], dtype=np.int32),
            seq_lens=np.array([length], dtype=np.int32),
            slot_mapping=np.arange(length),
            query_start_loc=np.array([0, length], dtype=np.int32),
            max_query_len=length,
            max_seq_len=length,
        )
        pages = torch.empty((CONFIG.num_layers, 1, 2, length, 1, 8), dtype=DTYPE)
        hidden = MODEL.forward(torch.tensor(tokens), torch.arange(length), tables, list(pages))
        tokens.append(int(MODEL.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
