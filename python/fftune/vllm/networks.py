"""Networks of vLLM whose weights were packed, by the op ffn.

vLLM has the weights of gate and up as one. `layer` takes each by itself, so they are packed again, and the network is
one op in batches that `layer` does not run. The rows of both keep their codes.
"""
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .._custom import OPS
from .._ops.packed import format_of, group_word, parts_of, suffix
from .logs import Unfit
from .products import PACKED, Halves, Product, keep, names_of, register, serve, take_over, taking_of


_GATES = {"silu": F.silu, "gelu": F.gelu, "gelu-tanh": functools.partial(F.gelu, approximate="tanh")}


def fuse(network: nn.Module, act: str, most: int) -> None:
    """Makes vLLM's network one op of fftune, for batches of up to `most` tokens. Unfit if that computes something else,
    or if its weights are no packed ones of one format."""
    both, down = (getattr(module, PACKED, None) for module in (network.gate_up_proj, network.down_proj))
    if both is None or down is None or format_of(both) != format_of(down):
        raise Unfit("quantised weights of a network in several formats")
    gate, up = halves_of(both)
    d, h, word = down.n, gate.n, group_word("ffn", gate.group, gate.format)
    op, tensors = getattr(OPS, f"ffn_packed{suffix(gate.format)}"), parts_of(gate, up, down)
    dtype = gate.scale.dtype if gate.format == "int4" else torch.bfloat16

    def run(x, *weights_and_bias):
        return op.kernel(x, *weights_and_bias, None, h, word, act)

    def own(x: Tensor) -> Tensor:
        gated, plain = ops.linear(x, both).chunk(2, -1)
        return ops.linear(_GATES[act](gated) * plain, down)

    kind = f"network of {gate.format} {h} x {d}, {act}, {gate.scale.dtype}, groups {word}" \
           f"{'' if gate.zero is None else ' with zero points'}"
    serve(network, Product(kind, run, tensors, d, d), own, dtype, most)
    network.__class__ = _class_of(type(network), kind, d, names_of(tensors))
    setattr(network.gate_up_proj, PACKED, Halves(gate, up))
    for name in [name for name in network.gate_up_proj._buffers if name.startswith("fftune_")]:
        setattr(network.gate_up_proj, name, None)  # nobody calls it any more
    keep(network.gate_up_proj, functools.partial(_take_halves, network, tensors, (gate, up)))
    if take := taking_of(network.down_proj):
        keep(network.down_proj, functools.partial(_take_down, network, tensors, take))


def _take_halves(network: nn.Module, tensors: tuple, halves: tuple, packed: ops.PackedWeight, order: None = None) -> None:
    take_over(parts_of(*halves), parts_of(*halves_of(packed)))
    register(network, tensors)


def _take_down(network: nn.Module, tensors: tuple, take: Callable, *packed) -> None:
    take(*packed)
    register(network, tensors)


@functools.cache
def _class_of(cls: type, kind: str, d: int, names: tuple[str, ...]) -> type:
    """The class whose forward is the op, under the name of vLLM's: a trace of it is that of a module's own method."""
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fftune_vllm.run(x, [getattr(self, name) for name in names], None, kind, d)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def halves_of(both: ops.PackedWeight) -> tuple[ops.PackedWeight, ops.PackedWeight]:
    """The first and the last rows of a weight as two weights with the same codes."""
    codes, scale, zero = both.unpack()
    h = both.n // 2

    def part(rows: slice) -> ops.PackedWeight:
        own = tuple(s[rows] for s in scale) if isinstance(scale, tuple) else scale[rows]
        return ops.pack_weight(codes[rows], own, None if zero is None else zero[rows], k=both.k, group=both.group,
                               format=both.format)

    return part(slice(h)), part(slice(h, None))
