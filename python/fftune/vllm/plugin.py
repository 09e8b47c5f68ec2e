"""The entry point: which parts apply to this process, and the patches of vLLM's modules.

vLLM calls register() in its front end, its engine, every worker, and the processes that inspect a
model class. So nothing here imports a module of a model, or of vLLM's kernels: the patches wait until
vLLM imports those itself. No call initialises CUDA, because vLLM forks its workers afterwards.
"""
import functools
import os
import re
from dataclasses import dataclass

from .imports import after_import
from .logs import log, one_line

PARTS = ("experts", "layers", "int4-linears")
# Parts that were not measured, or are no faster: only FFTUNE_VLLM with their name turns them on.
# `linears` are those of all formats. `prompts` and `ranks` are of `layers`: batches with prompts, and tensor
# parallelism.
OPT_IN = ("linears", "fp8-linears", "packed-experts", "prompts", "ranks")
# Their kernels may give other bits for other numbers of tokens.
_VARIANT = {"int4-linears", "linears", "fp8-linears", "packed-experts"}
# The versions whose sources the patches were written for, by major and minor number, and those in
# which they were measured: in the others nobody gets them without asking.
VERSIONS = ((0, 24), (0, 33))
MEASURED = ((0, 24),)
MEASURED_MAJORS = (9,)  # of compute capabilities
# Compute capabilities, by their major numbers, for which fftune has kernels of tensor cores.
_MAJORS = (8, 9)
_ORACLES = tuple(f"vllm.model_executor.layers.fused_moe.oracle.{name}"
                 for name in ("unquantized", "fp8"))
_KERNELS = tuple(f"vllm.model_executor.kernels.linear.mixed_precision.{name}"
                 for name in ("machete", "marlin"))
_QUANTISATION = "vllm.model_executor.layers.quantization"
_CT = f"{_QUANTISATION}.compressed_tensors"
_FP8_METHODS = (f"{_QUANTISATION}.fp8", f"{_CT}.schemes.compressed_tensors_w8a8_fp8")
_EXPERTS_METHODS = (*(f"{_QUANTISATION}.{name}" for name in ("auto_gptq", "auto_awq", "mxfp4")),
                    *(f"{_CT}.compressed_tensors_moe.compressed_tensors_moe_{name}"
                      for name in ("wna16_marlin", "wna16")))
_MODELS = {f"vllm.model_executor.models.{module}": name for module, name in (
    ("llama", "LlamaModel"), ("mistral", "MistralModel"), ("qwen2", "Qwen2Model"),
    ("qwen3", "Qwen3Model"), ("qwen3_moe", "Qwen3MoeModel"))}


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
    import vllm

    version = _version(vllm.__version__)
    if version not in VERSIONS:
        known = " and ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        return _nothing(f"this is vLLM {vllm.__version__}: fftune {_own_version()} supports {known}")
    reason = _device_reason()
    if reason:
        return _nothing(reason)
    if not given and not _is_measured(version):
        return _nothing(f"it was not measured in vLLM {vllm.__version__} on this device: "
                        "FFTUNE_VLLM=1 turns fftune's kernels on")
    for name in ("VLLM_BATCH_INVARIANT", "FFTUNE_BATCH_INVARIANT"):
        if os.environ.get(name, "0") in ("", "0"):
            continue
        if given in ("", "1"):  # all batches by the ops, so that a row has the same bits in each
            return Decision((*(part for part in wanted.parts if part not in _VARIANT), "prompts"))
        # Batches with prompts run by vLLM's kernels.
        left = (_VARIANT if "prompts" in wanted.parts else {*_VARIANT, "layers"}) & {*wanted.parts}
        if left:
            others = ("batches with prompts run by vLLM's kernels, which give other bits" if "layers" in left else
                      "kernels of weights with codes give other bits for other numbers of tokens")
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
    for name in ("prompts", "ranks"):
        if name in names and "layers" not in names:
            return _nothing(f"FFTUNE_VLLM={given}: {name} are of layers, so name both")
    return Decision(tuple(part for part in known if part in names))


def _is_measured(version: tuple[int, int]) -> bool:
    from vllm.platforms import current_platform

    return version in MEASURED and current_platform.get_device_capability().major in MEASURED_MAJORS


def _version(words: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", words)
    return (int(found[1]), int(found[2])) if found else None


def _own_version() -> str:
    from .. import __version__

    return __version__


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
    if capability.major not in _MAJORS:
        return (f"the device has compute capability {capability.major}.{capability.minor}: fftune's "
                "kernels are for 8.x and 9.x")
    return ""


def _patch(part: str, parts: tuple[str, ...]) -> None:
    names, change = {
        "experts": (_ORACLES, _patch_oracle),
        "int4-linears": (_KERNELS, functools.partial(_patch_kernels, parts=parts)),
        "linears": (_KERNELS, functools.partial(_patch_kernels, parts=parts)),
        "fp8-linears": (_FP8_METHODS, _patch_fp8), "packed-experts": (_EXPERTS_METHODS, _patch_experts),
        "layers": (_MODELS, functools.partial(_patch_model, parts=parts))}.get(part, ((), None))
    for name in names:
        after_import(name, change)


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


def _patch_model(module, parts: tuple[str, ...]) -> None:
    from .layers import patch_model

    patch_model(getattr(module, _MODELS[module.__name__]), parts)
