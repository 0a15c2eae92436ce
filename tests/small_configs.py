"""A small model's configuration, to change a field or two of."""

from typing import Any

from pagekeeper.models import HuggingFaceModel

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
TOKEN = 4 * 2 * 2 * 8 * 2  # layers x key and value x heads x head dimension x bytes


def read(config: dict[str, Any] = LLAMA, **changes: Any) -> HuggingFaceModel:
    return HuggingFaceModel.read(config | changes)
