"""The entry point: which parts apply to this process, and the patches of vLLM's modules.

vLLM calls register() in its front end, its engine, every worker, and the processes that inspect a
model class. So nothing here imports a module of a model, or of vLLM's kernels: the patches wait until
vLLM imports those itself. No call initialises CUDA, because vLLM forks its workers afterwards.
"""
import functools
import os
from dataclasses import dataclass

from .imports import after_import
from .interfaces import EXPERTS_METHODS, FP8_METHODS, KERNELS, LINEAR_ATTENTION, MODELS, ORACLES
from .logs import log, one_line

# Each is measured on the device, and serves where it is faster than vLLM's kernels. `linears` have weights of 4 and 8 bits.
PARTS = ("experts", "layers", "linears", "packed-experts", "linear-attention")
# Only FFTUNE_VLLM with their name turns these on: a measurement of one layer does not tell whether they are faster in
# a whole model. `prompts`, `ranks` and `states` are of `layers`: batches with prompts, tensor parallelism, and layers
# with states.
OPT_IN = ("int4-linears", "fp8-linears", "prompts", "ranks", "states")
# Their kernels may give other bits for other numbers of tokens.
_VARIANT = {"int4-linears", "linears", "fp8-linears", "packed-experts", "linear-attention"}
_LEAST_MAJOR = 8  # of compute capabilities: tensor cores for bfloat16


@dataclass(frozen=True)
class Decision:
    """The parts that apply to this process, and the line that says why others do not."""

    parts: tuple[str, ...]
    line: str = ""


def register() -> None:
    """Patches the vLLM of this process. It may be called again, and it raises nothing: an exception
    of a plugin would stop the engine."""
    try:
        decision = _decide()
        for part in decision.parts:
            _patch(part, decision.parts)
        if decision.line:
            log(decision.line)
    except Exception as error:
        try:
            log(f"nothing is replaced: {one_line(error)}")
        except Exception:
            pass  # vLLM, or its logger, is not there


def _decide() -> Decision:
    given = os.environ.get("FFTUNE_VLLM", "").strip()
    wanted = _wanted(given)
    if not wanted.parts:
        return wanted
    reason = _device_reason()
    if reason:
        return _nothing(reason)
    for name in ("VLLM_BATCH_INVARIANT", "FFTUNE_BATCH_INVARIANT"):
        if os.environ.get(name, "0") in ("", "0"):
            continue
        if given in ("", "1"):  # all batches by the ops, so that a row has the same bits in each
            return Decision((*(part for part in wanted.parts if part not in _VARIANT), "prompts"))
        # Batches with prompts run by vLLM's kernels.
        left = (_VARIANT if "prompts" in wanted.parts else {*_VARIANT, "layers"}) & {*wanted.parts}
        if left:
            others = ("batches with prompts run by vLLM's kernels, which give other bits" if "layers" in left else
                      "kernels of weights with codes, and of linear attention, give other bits for other numbers of "
                      "tokens")
            return Decision(tuple(part for part in wanted.parts if part not in left),
                            f"{' and '.join(sorted(left))} stay vLLM's: {name} is set, and {others}")
    return wanted


def _nothing(reason: str) -> Decision:
    return Decision((), f"nothing is replaced: {reason}")


def _wanted(given: str) -> Decision:
    """The parts that FFTUNE_VLLM names, all of them for 1 or if it is not set."""
    if given in ("", "1"):
        return Decision(PARTS)
    names = [name.strip() for name in given.split(",")]
    if names == ["0"]:
        return _nothing("FFTUNE_VLLM=0")
    known = PARTS + OPT_IN
    if any(name not in known for name in names):
        return _nothing(f"FFTUNE_VLLM={given}: give 0, 1, or some of {', '.join(known)}")
    for name in ("prompts", "ranks", "states"):
        if name in names and "layers" not in names:
            return _nothing(f"FFTUNE_VLLM={given}: {name} are of layers, so name both")
    return Decision(tuple(part for part in known if part in names))


def _device_reason() -> str:
    """The reason why the first visible device has no kernels; "" if it has."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "vLLM runs on no CUDA device"
    if type(current_platform).__name__.startswith("NonNvml"):
        return "NVML is not there, and to ask CUDA for the device would initialise it"
    capability = current_platform.get_device_capability()
    if capability is None:
        return "NVML gives no compute capability"
    if capability.major < _LEAST_MAJOR:
        return (f"the device has compute capability {capability.major}.{capability.minor}: fftune's "
                f"kernels are for {_LEAST_MAJOR}.0 and later ones")
    return ""


def _patch(part: str, parts: tuple[str, ...]) -> None:
    modules, change = {
        "experts": (ORACLES, _patch_oracle),
        "int4-linears": (KERNELS, functools.partial(_patch_kernels, parts=parts)),
        "linears": (KERNELS, functools.partial(_patch_kernels, parts=parts)),
        "fp8-linears": (FP8_METHODS, _patch_fp8), "packed-experts": (EXPERTS_METHODS, _patch_experts),
        "linear-attention": (LINEAR_ATTENTION, _patch_linear_attention),
        "layers": (MODELS, functools.partial(_patch_model, parts=parts))}.get(part, ((), None))
    for module in modules:
        after_import(module, change)


def _patch_oracle(module) -> None:
    from .experts import patch_oracle

    patch_oracle(module)


def _patch_kernels(module, parts: tuple[str, ...]) -> None:
    from .linears import FORMATS, patch_kernels

    patch_kernels(module, FORMATS if "linears" in parts else ("int4",))


def _patch_fp8(module) -> None:
    from .fp8_linears import patch_methods

    patch_methods(module)


def _patch_experts(module) -> None:
    from .packed_experts import patch_methods

    patch_methods(module)


def _patch_linear_attention(module) -> None:
    from .linear_attention import patch_layers

    patch_layers(module)


def _patch_model(module, parts: tuple[str, ...]) -> None:
    from .layers import patch_model

    patch_model(getattr(module, MODELS[module.__name__]), parts)
