"""experts_implementation="fftune" of transformers, for models that are not patched.

transformers 5 hands experts to the function of that name: forward(module, hidden_states, ids,
weights). The module says how its weights lie in memory, and its `_apply_gate` is the activation of
gate and up, which is identified by what it computes.
"""
import functools
import inspect
import warnings

import torch
from torch import Tensor, nn

from .. import ops
from .._library import Error
from .experts import GATED, known_by, lay_out
from .recognise import SCALES, Elsewhere, Foreign, Unfit, are_plain, has_kernels, identify, stand_in, view_of

NAME = "fftune"


def register_experts() -> None:
    """Registers ``experts_implementation="fftune"`` with transformers 5.8 or newer.

    Models loaded with ``from_pretrained(name, experts_implementation="fftune")``, or changed by
    ``model.set_experts_implementation("fftune")``, then run the experts of mixtures by
    `fftune.ops.moe_ffn`, with gradients. Experts that it cannot run keep their own forward, with a warning
    that says why. Transposed weights, as in gpt-oss, are laid out in the other order by the first call.
    Make that call before ``torch.compile`` unless the activation is SiLU.
    """
    try:
        from transformers.integrations.moe import ExpertsInterface
        # Before 5.8 a model refuses every name but those of transformers.
        from transformers.modeling_utils import ALL_EXPERTS_FUNCTIONS  # noqa: F401
    except ImportError:
        raise Error("register_experts: this transformers cannot be told of other experts: install "
                    "5.8 or newer") from None
    ExpertsInterface.register(NAME, _forward)


def _forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
             ) -> Tensor:
    found = _found(module)
    if found is None or not has_kernels(hidden_states) or not are_plain(*module._parameters.values()):
        return inspect.unwrap(type(module).forward)(module, hidden_states, top_k_index, top_k_weights)
    act, packing = found
    gate_up, down = module.gate_up_proj, module.down_proj
    if _trait(module, "is_transposed"):
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if _trait(module, "has_bias") else None
    return ops.moe_ffn(hidden_states, top_k_index, top_k_weights, gate_up, None, down, biases=biases,
                       act=act, packing=packing)


def _found(module: nn.Module) -> tuple[str, str] | None:
    """The activation and the packing of gate and up; None if moe_ffn has not what the experts
    compute. Found once for each module."""
    known = getattr(module, "_fftune_experts", ())
    if known != ():
        return known
    if torch.compiler.is_compiling():
        # Traced code cannot try the activation. SiLU is known by the name of its class.
        usual = (_trait(module, "has_gate") and _packings(module) == ("halves",)
                 and not _trait(module, "is_transposed")
                 and not _trait(module, "has_post_expert_norm")
                 and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
                 and type(module)._apply_gate.__name__ == "_default_apply_gate")
        return ("silu", "halves") if usual else None
    known = gate_of(module)
    if isinstance(known, str):
        warnings.warn(f"fftune: {type(module).__name__} {known}: its own forward runs")
        known = None
    elif _trait(module, "is_transposed"):
        lay_out(module)
    module._fftune_experts = known
    return known


def _trait(module: nn.Module, name: str) -> bool:
    """A trait that transformers' decorator of experts sets on a module. Later releases added
    traits: without one, a module is as the trait's default says."""
    return getattr(module, name, name == "has_gate")


def _packings(module: nn.Module) -> tuple[str, ...]:
    """The ways in which gate and up may lie in their weight: both if the release has no such trait."""
    told = getattr(module, "is_concatenated", None)
    return ("halves", "interleaved") if told is None else ("halves",) if told else ("interleaved",)


def gate_of(module: nn.Module) -> tuple[str, str] | str:
    """The activation and the packing, or the reason why moe_ffn does not compute the experts."""
    if not _trait(module, "has_gate"):
        return "has no gate"
    if _trait(module, "has_post_expert_norm"):
        return "has a norm of its own"
    if not hasattr(module, "gate_up_proj") or not hasattr(module, "down_proj"):
        return "has other weights than gate_up_proj and down_proj"
    known = {known_by(act, packing): functools.partial(_activated, act, packing)
             for act in GATED for packing in _packings(module)}
    bare = view_of(module, {})
    bare.__dict__.update(_parameters={}, _buffers={})
    own = stand_in(bare)
    try:
        return identify(own._apply_gate, known, lambda numbers: numbers(257, 12) * SCALES[numbers.seed % len(SCALES)],
                        subject=f"the gate of {type(module).__name__}", elsewhere=Elsewhere(own))
    except Unfit as reason:
        return f"computes an activation for which there is no kernel: {reason}"


def _activated(act: str | Foreign, packing: str, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1) if packing == "halves" else (rows[:, 0::2], rows[:, 1::2])
    return GATED[act](gate, up)
