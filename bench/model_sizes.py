"""The models that models.py builds: their sizes, how many of the real model's layers they have, and
the names by which pages call them. Pure data: needs no PyTorch."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Dense:
    name: str          # of the real model
    prefix: str        # of transformers' classes
    hidden: int
    intermediate: int
    layers: int        # of the model that is built
    all_layers: int    # of the real model
    heads: int
    kv_heads: int
    vocabulary: int


@dataclass(frozen=True)
class Mixture:
    name: str
    hidden: int
    intermediate: int  # of an expert
    experts: int
    chosen: int        # experts of a token
    layers: int
    all_layers: int
    heads: int


# A number behind a slash is the divisor of the layers: llama-8b/4 has a quarter of them.
DENSE = {
    "llama-1b": Dense("Llama-3.2-1B", "Llama", 2048, 8192, 16, 16, 32, 8, 128256),
    "llama-8b/4": Dense("Llama-3.1-8B", "Llama", 4096, 14336, 8, 32, 32, 8, 128256),
    "qwen2.5-7b-6-layers": Dense("Qwen2.5-7B", "Qwen2", 3584, 18944, 6, 28, 28, 4, 152064),
    "phi-3-mini-8-layers": Dense("Phi-3-mini", "Phi3", 3072, 8192, 8, 32, 32, 32, 32064),
    "olmo-2-1b": Dense("OLMo-2-1B", "Olmo2", 2048, 8192, 16, 16, 16, 16, 100352)}
MIXTURES = {
    "mixtral-8x7b/16": Mixture("Mixtral-8x7B", 4096, 14336, 8, 2, 2, 32, 32),
    "qwen3-30b-a3b/12": Mixture("Qwen3-30B-A3B", 2048, 768, 128, 8, 4, 48, 32)}


def title(name: str) -> str:
    """The model's name on pages: "Qwen3-30B-A3B (4 of 48 layers)"; a whole model has no number."""
    model = {**DENSE, **MIXTURES}[name]
    if model.layers == model.all_layers:
        return model.name
    return f"{model.name} ({model.layers} of {model.all_layers} layers)"
