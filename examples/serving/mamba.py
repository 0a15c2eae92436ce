"""A layer with a state, as Mamba 2 has them, in plain torch: it reads and writes PageKeeper's pages.

A short convolution, then a state that decays by an amount that depends on the token, and that the token is
added to. A page holds the newest inputs of the convolution and the state, of all layers of a group, after
some number of tokens. There is nothing of a token alone: a prompt goes on from a page that was kept for it
after a prefix, or from zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import linear, silu, softplus

from pagekeeper.params import RecurrentState
from pagekeeper.tables import StateTables


@dataclass(frozen=True)
class Mamba:
    """The shape of a layer."""

    num_heads: int = 4
    head_dim: int = 32
    state_size: int = 16
    conv_kernel: int = 4

    @property
    def inner_size(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Values that are convolved: those of the heads, what they write to the state, what they read."""
        return self.inner_size + 2 * self.state_size

    def states(self, dtype: torch.dtype) -> list[RecurrentState]:
        """What a page holds of each layer."""
        name = str(dtype).removeprefix("torch.")
        return [
            RecurrentState("conv", (self.conv_kernel - 1, self.channels), name),
            RecurrentState("ssm", (self.num_heads, self.head_dim, self.state_size), name),
        ]

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter of a layer."""
        return {
            "in_proj.weight": (self.inner_size + self.channels + self.num_heads, hidden_size),
            "conv1d.weight": (self.channels, self.conv_kernel),
            "dt_bias": (self.num_heads,),
            "A_log": (self.num_heads,),
            "D": (self.num_heads,),
            "norm.weight": (self.inner_size,),
            "out_proj.weight": (hidden_size, self.inner_size),
        }

    def forward(
        self,
        hidden: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        tables: StateTables,
        states: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Moves the state of each request over its new tokens, in its page.

        Args:
            hidden: the new tokens of all requests in batch order, `[total, hidden_size]`.
            weights: the layer's parameters.
            tables: the page of each request, and where its tokens are.
            states: the layer's part of all pages, `[pages, 3, channels]` and `[pages, heads, head_dim,
                state_size]`; written.

        Returns:
            `[total, hidden_size]`.
        """
        conv, ssm = states
        sizes = [self.inner_size, self.channels, self.num_heads]
        gate, inputs, steps = linear(hidden, weights["in_proj.weight"]).split(sizes, dim=-1)
        outputs = []
        for page, (first, last) in zip(
            tables.indices.tolist(), pairwise(tables.query_start_loc.tolist()), strict=True
        ):
            convolved = self._convolve(inputs[first:last], weights["conv1d.weight"], conv[page])
            outputs.append(self._scan(convolved, steps[first:last], weights, ssm[page]))
        mixed: torch.Tensor = torch.cat(outputs) * silu(gate)
        mixed = mixed * (mixed.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights["norm.weight"]
        return linear(mixed, weights["out_proj.weight"])

    def _convolve(self, inputs: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Each channel over its own newest values; `state` has those before `inputs`, and then the last."""
        values = torch.cat((state, inputs))
        state.copy_(values[len(inputs) :])
        return silu(torch.einsum("tck,ck->tc", values.unfold(0, self.conv_kernel, 1), weight))

    def _scan(
        self,
        convolved: torch.Tensor,
        steps: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        state: torch.Tensor,
    ) -> torch.Tensor:
        """The outputs of all heads, `[tokens, inner_size]`; `state` is moved to the last token."""
        heads, write, read = convolved.split([self.inner_size, self.state_size, self.state_size], dim=-1)
        heads = heads.unflatten(-1, (self.num_heads, self.head_dim))
        sizes = softplus(steps + weights["dt_bias"])
        decays = torch.exp(-sizes * weights["A_log"].exp())
        moved = torch.einsum("th,thp,tn->thpn", sizes, heads, write)
        before = state
        for after, decay in zip(moved, decays[:, :, None, None], strict=True):
            before = after.addcmul_(decay, before)
        state.copy_(before)
        outputs: torch.Tensor = torch.einsum("thpn,tn->thp", moved, read) + weights["D"][:, None] * heads
        return outputs.flatten(-2)
