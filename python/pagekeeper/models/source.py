"""A model's configuration as it lies on disk, and the part of it that the text model is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from pagekeeper.errors import shown

__all__ = ["Source"]

_TEXT_MODELS = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "transformer_layer_config",
)
"""Keys below which multimodal models, and drafts in the speculators' format, have their text model."""


@dataclass(frozen=True)
class Source:
    """A configuration as it was read.

    Attributes:
        whole: all of it.
        text: the fields of the text model: `whole`, or what is nested in it.
        model_type: the text model's type; the whole model's, if it has none of its own; "" if nothing says.
        sidecar: what `hf_quant_config.json` beside the file says; empty without one.
    """

    whole: Mapping[str, Any]
    text: Mapping[str, Any]
    model_type: str
    sidecar: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, config: str | PathLike[str] | Mapping[str, Any]) -> Source:
        """Reads a configuration.

        Args:
            config: a directory that has a `config.json`, such a file, or what is in one.

        Raises:
            FileNotFoundError: there is no such file.
            TypeError: `config` is neither a path nor a mapping.
            ValueError: it holds no configuration.
        """
        if isinstance(config, Mapping):
            return cls._of(config, {})
        if not isinstance(config, str | PathLike):
            raise TypeError(f"config={shown(config)}: must be a path or a mapping")
        path = Path(config)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(
                f"{path}: there is no {'config.json in it' if path.is_dir() else 'such file'}; a model is "
                "given by its config.json, or by the directory of it"
            )
        sidecar = file.with_name("hf_quant_config.json")
        return cls._of(_json(file), _json(sidecar) if sidecar.is_file() else {})

    @classmethod
    def _of(cls, whole: Mapping[str, Any], sidecar: Mapping[str, Any]) -> Source:
        text, model_type = whole, _type_of(whole)
        while nested := next((text[key] for key in _TEXT_MODELS if isinstance(text.get(key), Mapping)), None):
            text, model_type = nested, _type_of(nested) or model_type
        return cls(whole, text, model_type, sidecar)

    def of_text_or_whole(self, *keys: str) -> Any:
        """The first of `keys` that the text model has, or else the whole model; None without any."""
        for fields in (self.text, self.whole):
            for key in keys:
                if fields.get(key) is not None:
                    return fields[key]
        return None


def _type_of(fields: Mapping[str, Any]) -> str:
    model_type = fields.get("model_type") or ""
    if not isinstance(model_type, str):
        raise ValueError(f"model_type={shown(model_type)}: must be a str")
    return model_type


def _json(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object, not {shown(content)}")
    return content
