"""Experts of mixtures behind vLLM's modular kernels, by moe-ffn.

vLLM's oracles choose a backend for the experts of a layer, and `backend_to_kernel_cls` gives its
class. In the place of TritonExperts it gives a subclass, which runs moe-ffn where it can and
TritonExperts otherwise. Both run in the first call of a kind, which is part of vLLM's profile run:
its result is TritonExperts', and the other has to agree with it.

The weights of both have one layout: w1 [experts, 2h, d], per expert all gate rows, then all up rows;
w2 [experts, d, h].
"""
import functools
import inspect
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _run as running
from .._library import Error
from .._ops.moe_ffn import moe_ffn_into
from . import faster, plans
from .interfaces import expect_parameters
from .logs import log_once, reason_of
from .trial import difference, is_capturing

_BLOCK = 128  # rows and columns with one scale
_ROWS = 64  # of a result that are compared
_TIMED = (1, 16, 64, 256, 1024, 4096)


class _Tested(NamedTuple):
    """The findings of the first call of a kind of experts, which is part of vLLM's profile run."""

    problems: list[tuple[int, dict]]  # each with its device
    most: int  # tokens
    choice: faster.Choice | None  # None where nothing was measured: all calls run here


_tested: dict[tuple, _Tested] = {}  # kinds of experts whose results agreed with vLLM's
_failed: dict = {}  # kinds that stay vLLM's -> the reason
# vLLM's names of activations with a gate, and fftune's.
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu-tanh"}


def patch_oracle(module) -> None:
    """Makes the module's backend_to_kernel_cls give the subclass."""
    original = module.backend_to_kernel_cls
    if hasattr(original, "_fftune_original"):
        return

    @functools.wraps(original)
    def backend_to_kernel_cls(backend):
        found = original(backend)  # a class, or a list of classes
        return [*map(_replaced, found)] if isinstance(found, list) else _replaced(found)

    backend_to_kernel_cls._fftune_original = original
    module.backend_to_kernel_cls = backend_to_kernel_cls


def _replaced(cls: type) -> type:
    if cls.__name__ != "TritonExperts" or not cls.__module__.endswith(".triton_moe"):
        return cls
    own = experts_class(cls)
    try:
        expect_parameters("TritonExperts.apply", cls.apply, tuple(inspect.signature(own.apply).parameters))
    except Exception as error:
        log_once(f"experts stay vLLM's: {reason_of(error)}")
        return cls
    return own


@functools.cache
def experts_class(triton: type) -> type:
    """The subclass of vLLM's TritonExperts that runs moe-ffn where it can."""

    class FFTuneExperts(triton):
        def apply(self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor,
                  topk_weights: Tensor, topk_ids: Tensor, activation, global_num_experts: int,
                  expert_map: Tensor | None, a1q_scale: Tensor | None, a2_scale: Tensor | None,
                  workspace13: Tensor, workspace2: Tensor, expert_tokens_meta,
                  apply_router_weight_on_input: bool):
            kind = (w1.shape, w2.shape, w1.dtype, activation, expert_map is None,
                    apply_router_weight_on_input)
            reason = _failed.get(kind) or unfit(self, output, hidden_states, w1, w2, activation,
                                                a1q_scale)
            mine, problems = None, {}
            # A stream that is being captured cannot be waited for.
            if reason is None and (_is_ready(kind, len(output)) if kind in _tested else not is_capturing(output)):
                try:
                    with running.listening(problems) if kind not in _tested else nullcontext():
                        _run(self, output=output, hidden_states=hidden_states, w1=w1, w2=w2,
                             topk_weights=topk_weights, topk_ids=topk_ids, act=ACTIVATIONS[activation.value],
                             expert_map=expert_map, a1q_scale=a1q_scale, weighed=apply_router_weight_on_input)
                    if kind in _tested:
                        return None
                    mine = output[:_ROWS].clone()
                except Error as error:  # TritonExperts writes all of the output
                    reason = _failed[kind] = str(error)
            theirs = functools.partial(
                super().apply, w1=w1, w2=w2, activation=activation, global_num_experts=global_num_experts,
                expert_map=expert_map, a2_scale=a2_scale, workspace13=workspace13, workspace2=workspace2,
                expert_tokens_meta=expert_tokens_meta, apply_router_weight_on_input=apply_router_weight_on_input)
            result = theirs(output=output, hidden_states=hidden_states, topk_weights=topk_weights,
                            topk_ids=topk_ids, a1q_scale=a1q_scale)
            if mine is not None:
                found = difference("results", mine, output[:_ROWS])
                if found:
                    reason = _failed[kind] = found
                elif found is not None:
                    ours = functools.partial(_run, self, w1=w1, w2=w2, act=ACTIVATIONS[activation.value],
                                             expert_map=expert_map, weighed=apply_router_weight_on_input)
                    reason = _adopt(kind, list(problems.values()), theirs, ours, output, hidden_states, topk_weights,
                                    topk_ids, a1q_scale, global_num_experts)
            if reason is not None:
                log_once(f"experts of {_words_of(kind)} stay vLLM's: {reason}")
            return result

    FFTuneExperts.__qualname__ = "FFTuneExperts"
    return FFTuneExperts


def _is_ready(kind: tuple, rows: int) -> bool:
    """Whether moe-ffn runs: where it is faster, and for many tokens once their kernels are compiled."""
    problems, most, choice = _tested[kind]
    if choice is not None and not choice.is_faster(rows):
        return False
    return rows <= plans.EXACT or plans.are_ready(problems, most)


def _adopt(kind: tuple, problems: list, theirs, ours, output: Tensor, x: Tensor, weights: Tensor, ids: Tensor,
           scale: Tensor | None, experts: int) -> str | None:
    """Has later calls of the kind run moe-ffn where it is faster than TritonExperts; the reason why not, if it is
    nowhere. The sums of batch-invariant kernels have one order, so these run all calls."""
    what, choice = f"experts of {_words_of(kind)}", None
    if output.is_cuda and not running.BATCH_INVARIANT:
        generator = torch.Generator(x.device).manual_seed(0)

        def both(rows: int):
            # Tokens of the profile run are alike, and so are their experts.
            chosen = torch.rand(rows, experts, device=x.device, generator=generator).topk(ids.shape[1]).indices
            of_rows = dict(output=torch.empty_like(output[:rows]), hidden_states=x[:rows], topk_weights=weights[:rows],
                           topk_ids=chosen.to(ids.dtype), a1q_scale=None if scale is None else scale[:rows])
            return nullcontext((lambda: theirs(**of_rows), lambda: ours(**of_rows)))

        choice = faster.choice_of(what, both, [rows for rows in _TIMED if rows <= len(output)], repr(kind), ids.shape[1])
        if not any(map(choice.is_faster, choice.times)):
            _failed[kind] = f"TritonExperts are faster; their time divided by moe-ffn's, by tokens: {choice.words()}"
            return _failed[kind]
    _tested[kind] = _Tested(problems, len(output), choice)
    log_once(f"{what} run by moe-ffn" + ("" if choice is None else
             f" where it is faster; vLLM's time divided by fftune's, by tokens: {choice.words()}"))
    return None


def unfit(experts, output: Tensor, x: Tensor, w1: Tensor, w2: Tensor, activation,
          a1q_scale: Tensor | None) -> str | None:
    """The reason why moe-ffn does not compute what these experts do; None if it does."""
    config = experts.quant_config
    own = getattr(experts, "activation_config", None)  # of 0.33
    if getattr(experts, "_lora_context", None) is not None:
        return "LoRA"
    if activation.value not in ACTIVATIONS:
        return f"the activation {activation.value}"
    if config.gemm1_clamp_limit is not None or getattr(own, "clamp_limit", None) is not None:
        return "a clamped activation"
    if experts.w1_bias is not None or experts.w2_bias is not None:
        return "biases"
    if w1.dim() != 3 or w2.shape != (w1.shape[0], w1.shape[2], w1.shape[1] // 2) or w1.shape[1] % 2:
        return f"weights of {list(w1.shape)} and {list(w2.shape)}"
    if x.shape[-1] != w1.shape[2]:
        return f"inputs of {x.shape[-1]} features for weights of {w1.shape[2]}"
    if not (w1.is_contiguous() and w2.is_contiguous()):
        return "weights that are not contiguous"
    if output.dtype is not torch.bfloat16 or not output.is_contiguous():
        return f"an output of {output.dtype}, or one that is not contiguous"
    if w1.dtype is not w2.dtype or x.dtype is not w1.dtype:
        return f"inputs of {x.dtype} for weights of {w1.dtype} and {w2.dtype}"
    if x.dtype is torch.bfloat16:
        return None if experts.quant_dtype is None else f"inputs quantised to {experts.quant_dtype}"
    if x.dtype is not torch.float8_e4m3fn:
        return f"weights of {w1.dtype}"
    return _unfit_scales(experts, x, w1, a1q_scale)


def _unfit_scales(experts, x: Tensor, w1: Tensor, a1q_scale: Tensor | None) -> str | None:
    if experts.block_shape is None or list(experts.block_shape) != [_BLOCK, _BLOCK]:
        return f"fp8 with scales of blocks {experts.block_shape}"
    count, rows, d = w1.shape
    if rows % (2 * _BLOCK) or d % _BLOCK:
        return f"fp8 of {rows // 2} x {d}, which are no whole blocks of {_BLOCK}"
    h = rows // 2
    for scale, shape in ((a1q_scale, (*x.shape[:-1], d // _BLOCK)),
                         (experts.w1_scale, (count, rows // _BLOCK, d // _BLOCK)),
                         (experts.w2_scale, (count, d // _BLOCK, h // _BLOCK))):
        if scale is None or scale.dtype is not torch.float32 or scale.shape != shape \
                or not scale.is_contiguous():
            return "fp8 with scales of another kind"
    return None


def _run(experts, *, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor,
         topk_ids: Tensor, act: str, expert_map: Tensor | None, a1q_scale: Tensor | None,
         weighed: bool) -> None:
    topk_ids = local_ids(topk_ids, expert_map)
    if weighed:  # x was multiplied by them before
        topk_weights = torch.ones_like(topk_weights)
    scales = None if a1q_scale is None else (a1q_scale, experts.w1_scale, experts.w2_scale)
    moe_ffn_into(output, hidden_states, topk_ids, topk_weights, w1, w2, scales, act=act)


def local_ids(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Ids of all ranks' experts as those of this rank's, -1 for others."""
    if expert_map is None:
        return topk_ids
    here = expert_map[topk_ids.clamp(min=0).long()]
    return torch.where(topk_ids < 0, topk_ids, here.to(topk_ids.dtype))


def _words_of(kind: tuple) -> str:
    (count, *_), (_, d, h), dtype, *_ = kind
    return f"{count} x {h} x {d} in {str(dtype).removeprefix('torch.')}"
