"""Which cache a model needs, from the `config.json` that Hugging Face models come with.

Nothing is fetched, and neither transformers nor torch is imported. `HuggingFaceModel.read` says layer by
layer what a model keeps, and `HuggingFaceModel.to_params` gives the parameters of its cache. A new family of
models is an entry of the table in `pagekeeper.models.families`.
"""

from pagekeeper.models.families import FAMILIES
from pagekeeper.models.family import Family
from pagekeeper.models.keeps import KeysAndValues, Latents, Layer, States, StateTensor
from pagekeeper.models.model import HuggingFaceModel

__all__ = [
    "FAMILIES",
    "Family",
    "HuggingFaceModel",
    "KeysAndValues",
    "Latents",
    "Layer",
    "StateTensor",
    "States",
]
