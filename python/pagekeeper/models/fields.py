"""The fields of a model's configuration, by one name each and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pagekeeper.errors import shown
from pagekeeper.params.checks import parse_count, parse_flag

__all__ = ["NAMES", "Fields"]

_Value = TypeVar("_Value")

_MOST_LAYERS = 10_000  # what has more is no model, and would only take time

NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "d_kv"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "max_seq_len",
        "seq_length",
        "model_max_length",
    ),
    "layer_types": ("layer_types", "layers_block_type"),
    "num_mtp_layers": (
        "num_nextn_predict_layers",
        "num_mtp_layers",
        "mtp_num_hidden_layers",
        "num_mtp_modules",
    ),
    "mamba_num_heads": ("mamba_num_heads", "mamba_n_heads"),
    "mamba_head_dim": ("mamba_head_dim", "mamba_d_head"),
    "ssm_state_size": ("ssm_state_size", "mamba_d_state", "state_size"),
    "n_groups": ("n_groups", "mamba_n_groups"),
    "conv_kernel": ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache"),
    "expand": ("expand", "mamba_expand"),
}
"""What models call a field that is asked for by the name on the left; any other has that name alone."""


class Fields:
    """The fields of a text model: what the configuration says, or else the defaults of its family.

    A field that is there and null is not the same as one that is missing: it is None, whatever the default.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        names: Mapping[str, tuple[str, ...]] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._values = values
        self._names = {**NAMES, **(names or {})}
        self._defaults = defaults or {}

    def get(self, name: str) -> Any:
        """The value of a field, unchecked; None if it is null, or missing and without a default."""
        return self._find(name)[1]

    def count(self, name: str, least: int = 1, most: int = 2**31 - 1) -> int:
        """A whole number from `least` to `most`.

        Raises:
            ValueError: it is none, or missing.
        """
        return self._parsed(name, lambda value: parse_count(value, least, most))

    def count_or_none(self, name: str) -> int | None:
        """A whole number from 1; None if the field is null or missing."""
        return None if self.get(name) is None else self.count(name)

    def count_or(self, name: str, default: int, most: int = 2**31 - 1) -> int:
        """A whole number from 0 to `most`; `default` if the field is null or missing."""
        return default if self.get(name) is None else self.count(name, 0, most)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.count("num_hidden_layers", most=_MOST_LAYERS)

    def flag(self, name: str) -> bool:
        """True or False; False if the field is null or missing."""
        return False if self.get(name) is None else self._parsed(name, parse_flag)

    def listed(self, name: str) -> list[Any] | None:
        """A list; None if the field is null or missing."""
        if self.get(name) is None:
            return None
        return self._parsed(name, _parse_list)

    def within(self, name: str) -> Fields:
        """The fields that are nested under `name`, none if it is null or missing."""
        nested = self.get(name)
        return Fields(nested if isinstance(nested, Mapping) else {}, defaults=self._defaults)

    def of_layer(self, number: int) -> Fields:
        """The fields as one layer has them: what `per_layer_config` says of it goes first.

        Its keys are the numbers of layers, perhaps with zeros before them.
        """
        layers = self.get("per_layer_config")
        for key, own in layers.items() if isinstance(layers, Mapping) else ():
            if str(key).lstrip("0").zfill(1) == str(number) and isinstance(own, Mapping):
                return Fields({**self._values, **own}, self._names, self._defaults)
        return self

    def refusal(self, name: str, what: str) -> ValueError:
        """What to raise when a field's value cannot be."""
        key, value = self._find(name)
        return ValueError(f"{key}={shown(value)}: {what}")

    def _find(self, name: str) -> tuple[str, Any]:
        """A field's name in the configuration, and its value."""
        names = self._names.get(name, (name,))
        present = [key for key in names if key in self._values]
        for key in present:
            if self._values[key] is not None:
                return key, self._values[key]
        return (present[0], None) if present else (names[0], self._defaults.get(name))

    def _parsed(self, name: str, parse: Callable[[Any], _Value]) -> _Value:
        key, value = self._find(name)
        if value is None:
            others = self._names.get(name, (name,))[1:]
            known_as = f" (or {', '.join(others)})" if others else ""
            raise ValueError(f"{key}{known_as}: the config has none, and the model cannot be read without it")
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{key}={shown(value)}: {error}") from None


def _parse_list(value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list")
    return list(value)
