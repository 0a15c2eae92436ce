"""A Llama-style decoder in plain torch whose attention reads and writes PageKeeper's pages.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. With biases on q, k and v it is Qwen2. With a
sliding window in every other layer it is a hybrid, as Gemma and gpt-oss are; with states in place of
attention in most layers it is one as Jamba and Nemotron-H are. Parameters carry the names of Hugging Face
checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.nn.functional import linear, silu

from pagekeeper.reference import paged_attention, write_kv
from pagekeeper.tables import StateTables, VllmTables

from .mamba import Mamba

# A matrix product may round differently when rows are added to it, so the same prompt in other chunks, or
# in another batch, gives logits that differ in the last bits. In float64 that is about 1e-14, and two tokens
# would have to tie to that precision before greedy sampling could tell; in float32 it is 1e-5, and sooner or
# later two do. An example that promises equal tokens therefore computes, and keeps its KV, in float64.
DTYPE = torch.float64

LayerTables: TypeAlias = VllmTables | StateTables
LayerPages: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""A layer's part of all pages: keys and values, or each tensor of its states."""


@dataclass(frozen=True)
class Rope:
    """How positions rotate queries and keys."""

    theta: float = 10_000.0
    kind: str = "default"
    """`"default"`, `"linear"` or `"llama3"`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """float32 `[head_dim / 2]`, radians per token."""
        inverse = 1.0 / self.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "llama3":
            # Waves that fit many times into the original context stay, long ones stretch, those between mix.
            turns = self.original_max_positions * inverse / (2 * math.pi)
            keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            keep = keep.clamp(0.0, 1.0)
            return inverse * (keep + (1.0 - keep) / self.factor)
        return inverse


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder; the defaults are the example's own small model."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    """Tokens that a token sees in every other layer, from the first on; None: all, in all layers."""
    mamba: Mamba | None = None
    """What three of four layers have in place of attention, all but the second; None: all have attention."""
    max_positions: int = 32_768
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def groups(self) -> dict[str | None, list[int]]:
        """Layers that see the same tokens, by the name of their group in the cache; one alone has none."""
        layers = list(range(self.num_layers))
        if self.mamba is not None:
            return {"full": layers[1::4], "mamba": [layer for layer in layers if layer % 4 != 1]}
        if self.sliding_window is not None:
            return {"full": layers[1::2], "sliding": layers[::2]}
        return {None: layers}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, as Hugging Face names them."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = {
            "self_attn": {
                "self_attn.q_proj": (queries, self.hidden_size, self.qkv_bias),
                "self_attn.k_proj": (keys, self.hidden_size, self.qkv_bias),
                "self_attn.v_proj": (keys, self.hidden_size, self.qkv_bias),
                "self_attn.o_proj": (self.hidden_size, queries, self.output_bias),
            },
            "mlp": {
                "mlp.gate_proj": (self.intermediate_size, self.hidden_size, self.mlp_bias),
                "mlp.up_proj": (self.intermediate_size, self.hidden_size, self.mlp_bias),
                "mlp.down_proj": (self.hidden_size, self.intermediate_size, self.mlp_bias),
            },
        }
        embedding = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embedding}
        for index in range(self.num_layers):
            prefix = f"model.layers.{index}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}{norm}.weight"] = (self.hidden_size,)
            if self.mamba is not None and index in self.groups["mamba"]:
                mixer = self.mamba.parameter_shapes(self.hidden_size)
                shapes |= {f"{prefix}mixer.{name}": shape for name, shape in mixer.items()}
                parts = {"mlp": projections["mlp"]}
            else:
                parts = projections
            for name, (rows, columns, bias) in (pair for part in parts.values() for pair in part.items()):
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = embedding
        return shapes


class Model:
    """A decoder over pages: one call serves any mix of prefill chunks and decodes."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes one tensor for each of `config.parameter_shapes()`, all of `DTYPE`."""
        self.config = config
        self._weights = weights
        self._inverse_frequencies = config.rope.inverse_frequencies(config.head_dim)

    @classmethod
    def seeded(cls, config: ModelConfig, seed: int) -> Model:
        """Random weights, equal for equal seeds, scaled so that the output depends on the whole input."""
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, shape in config.parameter_shapes().items():
            noise = torch.randn(shape, generator=generator, dtype=DTYPE)
            if name.endswith("norm.weight"):
                weights[name] = 1.0 + 0.1 * noise
            elif name.endswith("dt_bias"):
                weights[name] = noise - 4.0  # a state lasts for some dozens of tokens
            elif name.endswith("embed_tokens.weight"):
                weights[name] = noise
            else:
                weights[name] = 1.5 * noise / math.sqrt(shape[-1])
        return cls(config, weights)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: VllmTables | Sequence[LayerTables],
        pages: Sequence[LayerPages],
    ) -> torch.Tensor:
        """Compute new tokens and leave their KV, or the states after them, in the pages.

        Args:
            tokens: int64 `[total]`, the new tokens of all requests in batch order.
            positions: int64 `[total]`, the place of each token in its request.
            tables: where the pages of these requests are, in all layers or in each of them.
            pages: each layer's part of all pages, `[pages, 2, page_size, num_kv_heads, head_dim]`, or the
                tensors that `Mamba.forward` takes; written.

        Returns:
            Hidden states `[total, hidden_size]`, for `logits`.
        """
        hidden = self._weights["model.embed_tokens.weight"][tokens]
        rotation = self._rotation(positions)
        if isinstance(tables, VllmTables):
            tables = [tables] * self.config.num_layers
        sliding = self.config.groups.get("sliding", [])
        for index, (layer_tables, layer_pages) in enumerate(zip(tables, pages, strict=True)):
            layer = f"model.layers.{index}."
            normed = self._norm(hidden, f"{layer}input_layernorm")
            if isinstance(layer_tables, VllmTables) and isinstance(layer_pages, torch.Tensor):
                window = self.config.sliding_window if index in sliding else None
                prefix = f"{layer}self_attn."
                mixed = self._attention(normed, prefix, rotation, layer_tables, layer_pages, window)
            elif isinstance(layer_tables, StateTables) and not isinstance(layer_pages, torch.Tensor):
                mixed = self._mix(normed, f"{layer}mixer.", layer_tables, layer_pages)
            else:
                raise TypeError(f"layer {index}: its pages are not those of its tables")
            hidden = hidden + mixed
            normed = self._norm(hidden, f"{layer}post_attention_layernorm")
            hidden = hidden + self._feed_forward(normed, f"{layer}mlp.")
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden_size]` to `[rows, vocab_size]`."""
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self._project(self._norm(hidden, "model.norm"), head)

    def _attention(
        self,
        hidden: torch.Tensor,
        prefix: str,
        rotation: tuple[torch.Tensor, torch.Tensor],
        tables: VllmTables,
        layer_kv: torch.Tensor,
        sliding_window: int | None,
    ) -> torch.Tensor:
        query, key, value = (
            self._project(hidden, f"{prefix}{name}_proj").view(len(hidden), -1, self.config.head_dim)
            for name in "qkv"
        )
        write_kv(layer_kv, _rotate(key, rotation), value, tables)
        query = _rotate(query, rotation)
        mixed = paged_attention(query, layer_kv, tables, sliding_window=sliding_window)
        return self._project(mixed.flatten(-2), f"{prefix}o_proj")

    def _mix(
        self, hidden: torch.Tensor, prefix: str, tables: StateTables, states: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        assert self.config.mamba is not None
        names = self.config.mamba.parameter_shapes(self.config.hidden_size)
        weights = {name: self._weights[f"{prefix}{name}"] for name in names}
        return self.config.mamba.forward(hidden, weights, tables, states)

    def _feed_forward(self, hidden: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up = self._project(hidden, f"{prefix}gate_proj"), self._project(hidden, f"{prefix}up_proj")
        return self._project(silu(gate) * up, f"{prefix}down_proj")

    def _project(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        return linear(hidden, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        size = hidden.square().mean(-1, keepdim=True) + self.config.rms_norm_eps
        return self._weights[f"{name}.weight"] * (hidden * size.rsqrt())

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[total, 1, head_dim / 2]`; in float32, as checkpoints were trained."""
        angles = positions.float().unsqueeze(-1) * self._inverse_frequencies
        return angles.cos().to(DTYPE).unsqueeze(1), angles.sin().to(DTYPE).unsqueeze(1)


def _rotate(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates `[total, heads, head_dim]`; an element of the first half pairs with one of the second."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
