"""Which sort each layer of a model is: what its family goes by where the configuration does not list it.

A sort is one of the words of `LayerType`. A rule takes a model's fields and says the sort of each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from pagekeeper.errors import shown
from pagekeeper.models.fields import Fields

__all__ = [
    "LayerRule",
    "LayerType",
    "all_full",
    "all_layers",
    "at_indices",
    "common_layers",
    "every_nth",
    "from_flags",
    "from_layers_on",
    "full_attn_layers",
    "listed_types",
    "period_and_offset",
    "spelled",
    "unrotated_in_full",
    "windowed",
]

LayerType: TypeAlias = Literal[
    "full",  # attention to all tokens
    "sliding",  # attention to a window
    "chunked",  # attention to the token's own chunk
    "cross",  # attention to an encoder's tokens
    "full+cross",
    "states",
    "full+states",
    "nothing",  # no attention and no states
]

LayerRule: TypeAlias = Callable[[Fields], list[LayerType]]

_LISTED: dict[str, LayerType] = {
    "full_attention": "full",
    "global_attention": "full",
    "indexed_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "sliding_window_attention": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "states",
    "mamba": "states",
    "mamba2": "states",
    "conv": "states",
    "hybrid": "full+states",
    "moe": "nothing",
    "mlp": "nothing",
}


def listed_types(fields: Fields) -> list[LayerType] | None:
    """What the configuration itself lists, one a layer; None if it does not.

    Raises:
        ValueError: a word is unknown.
    """
    words = fields.listed("layer_types")
    if words is None:
        return None
    for layer, word in enumerate(words):
        if not isinstance(word, str) or word not in _LISTED:
            raise ValueError(
                f"layer_types[{layer}]={shown(word)}: must be one of {', '.join(map(repr, _LISTED))}"
            )
    return [_LISTED[word] for word in words]


def all_layers(sort: LayerType) -> LayerRule:
    """Every layer is of one sort."""
    return lambda fields: [sort] * fields.num_layers


def all_full(fields: Fields) -> list[LayerType]:
    """Every layer reads all tokens."""
    return ["full"] * fields.num_layers


def windowed(fields: Fields) -> list[LayerType]:
    """Every layer has a window if there is one: `sliding_window`, unless `use_sliding_window` is False."""
    return [_window_or_full(fields)] * fields.num_layers


def common_layers(fields: Fields) -> list[LayerType]:
    """What most models mean by the fields that many have.

    With `is_encoder_decoder` every layer reads an encoder too. With `sliding_window_pattern` one layer of so
    many reads all tokens, and the others have a window; without it all have it if there is one.
    """
    if fields.get("is_encoder_decoder") is True:
        return all_layers("full+cross")(fields)
    if fields.get("sliding_window_pattern") is not None:
        return every_nth("full", "sliding", "sliding_window_pattern")(fields)
    return windowed(fields)


def from_layers_on(fields: Fields) -> list[LayerType]:
    """If there is a window, layers have it from number `max_window_layers` on."""
    first = fields.count_or("max_window_layers", 0)
    window = _window_or_full(fields)
    return [window if layer >= first else "full" for layer in range(fields.num_layers)]


def every_nth(sort: LayerType, others: LayerType, period: int | str, default: int = 1) -> LayerRule:
    """Every so many layers one is of a sort, the last of each period; the others are of another.

    Args:
        sort: of the last layer of each period.
        others: of the layers before it.
        period: layers, or the field that says how many.
        default: layers, where the field is null or missing.
    """

    def rule(fields: Fields) -> list[LayerType]:
        every = period if isinstance(period, int) else fields.count_or(period, default)
        if every < 1:
            raise fields.refusal(str(period), "must be a whole number from 1")
        layers = range(fields.num_layers)
        return [sort if (layer + 1) % every == 0 else others for layer in layers]

    return rule


def period_and_offset(fields: Fields) -> list[LayerType]:
    """Attention where the layer's number leaves `attn_layer_offset` over multiples of `attn_layer_period`."""
    period, offset = fields.count("attn_layer_period"), fields.count("attn_layer_offset", least=0)
    layers = range(fields.num_layers)
    return ["full" if layer % period == offset else "states" for layer in layers]


def at_indices(sort: LayerType, others: LayerType, field: str, *, without: LayerType) -> LayerRule:
    """The layers whose numbers a field lists are of a sort; all are of sort `without` without that field."""

    def rule(fields: Fields) -> list[LayerType]:
        indices = fields.listed(field)
        if indices is None:
            return [without] * fields.num_layers
        return [sort if layer in indices else others for layer in range(fields.num_layers)]

    return rule


def from_flags(field: str, otherwise: LayerRule) -> LayerRule:
    """A field lists 1 for attention and 0 for states, one a layer; without it layers are as `otherwise`."""

    def rule(fields: Fields) -> list[LayerType]:
        flags = fields.listed(field)
        if flags is None:
            return otherwise(fields)
        if any(flag not in (0, 1) for flag in flags):
            raise fields.refusal(field, "must be a list of 0 and 1")
        return ["full" if flag else "states" for flag in flags]

    return rule


def full_attn_layers(fields: Fields) -> list[LayerType]:
    """Attention in the layers that `linear_attn_config.full_attn_layers` lists, counted from 1.

    Without it every fourth layer has attention, the fifth being the first.
    """
    listed = fields.within("linear_attn_config").listed("full_attn_layers")
    layers = range(fields.num_layers)
    full = range(5, len(layers) + 1, 4) if listed is None else listed
    return ["full" if layer + 1 in full else "states" for layer in layers]


def unrotated_in_full(fields: Fields) -> list[LayerType]:
    """Layers with rotary positions read their own chunk, those without read all tokens.

    `no_rope_layers` lists 1 for a layer that has them; without it every `no_rope_layer_interval`-th has none.
    """
    layers: list[LayerType] = ["full"] * fields.num_layers
    if fields.get("attention_chunk_size") is None:
        return layers
    rotary = fields.listed("no_rope_layers")
    if rotary:
        return ["chunked" if has else "full" for has in rotary]
    return every_nth("full", "chunked", "no_rope_layer_interval", default=4)(fields)


def spelled(field: str) -> LayerRule:
    """A letter a layer: M for states, * for attention, - and E for neither."""
    letters: dict[str, LayerType] = {"M": "states", "*": "full", "-": "nothing", "E": "nothing"}

    def rule(fields: Fields) -> list[LayerType]:
        pattern = fields.get(field)
        if not isinstance(pattern, str) or not set(pattern) <= set(letters):
            raise fields.refusal(field, "must be a string of the letters M, *, - and E, one a layer")
        return [letters[letter] for letter in pattern]

    return rule


def _window_or_full(fields: Fields) -> LayerType:
    switched_off = fields.get("use_sliding_window") is False
    return "full" if switched_off or not fields.get("sliding_window") else "sliding"
