"""fftune: tuned fused transformer kernels for PyTorch.

The same kernels in three forms, the outer built on the inner:

    fftune.patch(model)          replace what is known in a transformers model; fftune.unpatch(model)
    fftune.nn.GatedMLP(...)      modules with the state dicts of those that they replace
    fftune.ops.ffn(x, ...)       functions: custom ops that torch.compile keeps whole, with gradients

A first program:

    import torch, fftune
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", dtype="bfloat16").cuda()
    print(fftune.patch(model))              # what was replaced, and what not, with reasons
    model = torch.compile(model)            # optional: the ops stay whole in the graph

and to make it faster on the device at hand:

    fftune.tune(model, example, budget=120)    # search the problems that the model really runs
    fftune.check(module, example)              # its error and time beside eager PyTorch's
    fftune.explain({"op": "ffn", "m": 16, "d": 2048, "h": 8192})    # what would run, and why

Shapes: activations are [..., features], weights [out_features, in_features] as torch.nn.Linear
keeps them. Element types: bfloat16, float16 and float32 on a GPU; float32 and bfloat16 on the CPU.
A call that cannot be served raises fftune.Error with one line that says what to do. With
FFTUNE_DISABLE=1 in the environment every op runs its PyTorch reference.

Kernels are compiled when a problem is first run, and kept in a cache on disk. They are chosen by
presets: $FFTUNE_PRESETS, then the user's (fftune.tune writes there), then those of this package.
"""
from typing import TYPE_CHECKING

from ._library import Error, library_version as _library_version

__version__ = _library_version()

# PyTorch is imported with the first use of what needs it, so that the tool starts at once.
_HOMES = {
    "ops": "ops",
    "nn": "nn",
    "reference": "reference",
    "quantise": "nn",
    "MaskedFFN": "masked",
    "MaskedLinear": "masked",
    "patch": "patching",
    "unpatch": "patching",
    "PatchReport": "patching",
    "generate": "patching.decoding",
    "Float8StaticCache": "patching.float8_cache",
    "graphed": "patching.training",
    "register_attention": "patching.attention",
    "register_experts": "patching.experts_interface",
    "distributed": "distributed",
    "tune": "tuning",
    "check": "tuning",
    "explain": "tuning",
}

if TYPE_CHECKING:
    from . import distributed, nn, ops, reference
    from .patching.attention import register_attention
    from .patching.experts_interface import register_experts
    from .masked import MaskedFFN, MaskedLinear
    from .nn import quantise
    from .patching import PatchReport, patch, unpatch
    from .patching.decoding import generate
    from .patching.float8_cache import Float8StaticCache
    from .patching.training import graphed
    from .tuning import check, explain, tune

__all__ = ["Error", *_HOMES]


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fftune' has no attribute '{name}'")
    from importlib import import_module

    module = import_module(f".{home}", __name__)
    value = module if home == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_HOMES])
