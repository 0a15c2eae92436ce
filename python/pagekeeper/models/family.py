"""How a family of models is read: what an entry of the table says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagekeeper.models.layer_types import LayerRule, all_full
from pagekeeper.models.readers import AttentionReader, EncoderReader, StateReader, keys_and_values

__all__ = ["Family"]


@dataclass(frozen=True)
class Family:
    """How the configurations of a family of models are read.

    Attributes:
        name: what people call it.
        model_types: the values of `model_type`, of whole models and of their text models.
        layers: which sort each layer is of, where `layer_types` does not list it.
        attention: what a layer with attention keeps.
        states: what a layer with states keeps; None if the family has none.
        names: fields that the family calls otherwise than most, and what they are called, the first that is
            there.
        defaults: fields that a configuration may leave out.
        encoder_length: tokens of the encoder, where there is one and the configuration says how many.
    """

    name: str
    model_types: tuple[str, ...]
    layers: LayerRule = all_full
    attention: AttentionReader = keys_and_values
    states: StateReader | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    encoder_length: EncoderReader = lambda source, fields: None
