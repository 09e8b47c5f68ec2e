"""Experts of mixtures with weights of 4 and 8 bits inside vLLM, by moe-ffn with packed weights.

vLLM's methods for GPTQ, AWQ, compressed-tensors and mxfp4 get the experts as the checkpoint has them, and
reorder them when they are loaded. Before that they are packed for fftune. The experts are compared with
vLLM's once, and vLLM's order of the weights is given up: they are in memory once.
"""
import functools
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from .. import _run as running
from .. import ops
from .._codes import AWQ_PLACES, codes_of_words, pairs_of_codes, turned
from .._ops.packed import parts_of
from . import faster, plans
from .deployment import current, offloads_weights, returns_routed_experts
from .experts import ACTIVATIONS, local_ids
from .imports import wrap_methods
from .interfaces import EXPERTS_METHODS
from .logs import Unfit, log_once, one_line, reason_of
from .products import PACKED, free, is_loaded, keep, load_again, take_over
from .trial import difference

_ROWS = (4, 300)  # for kernels of few tokens, and of many
_PARTS = ("w13", "w2")
_TIMED = (1, 16, 64, 256, 1024)
_choices: dict[str, faster.Choice] = {}


def patch_methods(module) -> None:
    wrap_methods(module, EXPERTS_METHODS[module.__name__], "process_weights_after_loading", _loading)


def _loading(cls: type, process):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if is_loaded(layer):
            if load_again(layer, lambda: process(self, layer), lambda: (Experts(self, layer),)):
                _free(layer)
            return
        experts = None
        try:
            experts, reason = Experts(self, layer), ""
        except Exception as error:
            reason = reason_of(error)
        process(self, layer)
        if experts is not None:
            reason = experts.adopt(self, layer)
        keep(layer, None if reason else experts.take)
        what = f"experts of {cls.__name__}"
        log_once(f"{what} stay vLLM's: {reason}" if reason else
                 f"{what} run by moe-ffn with packed weights ({experts.weights[0].format})")

    return process_weights_after_loading


# what a layer has

def _gptq(words: Tensor, n: int, bits: int) -> Tensor:
    """Codes [experts, n, k] of words along k, [experts, words of k, n]."""
    rows = words.transpose(1, 2).reshape(-1, words.shape[1])
    k = words.shape[1] * 32 // bits
    codes = codes_of_words(rows, k, 1) if bits == 4 else rows.contiguous().view(torch.uint8)
    return codes.view(len(words), n, k)


def _along_n(words: Tensor, n: int, order: list[int] | None) -> Tensor:
    """Codes [experts, n, rows] of words along n, [experts, rows, words of n]."""
    codes = codes_of_words(words.flatten(0, 1), n, 1)
    return (codes if order is None else turned(codes, order)).view(len(words), -1, n).transpose(1, 2)


class Experts:
    """The packed weights of a layer's experts, and how their choices are given."""

    def __init__(self, method, layer: nn.Module):
        self.many: tuple[list[tuple[int, dict]], int] = [], 0  # as plans.prepare() takes them
        self._expect_plain(method, layer)
        names = layer._parameters
        read = (self._mxfp4 if "w13_weight" in names else self._awq if type(method).__name__ == "AutoAWQMoEMethod"
                else self._words)
        both, down, packed = read(method, layer)
        # (codes, scales, zero points), [experts, rows, ...] each
        count, h, d = both[0].shape[0], both[0].shape[1] // 2, down[0].shape[1]
        self.sizes = count, h, d
        if self.interleaved:
            parts = [[None if t is None else t[:, i::2] for t in both] for i in range(2)]
        else:
            parts = [[None if t is None else t[:, i * h:(i + 1) * h] for t in both] for i in range(2)]
        self.weights = [packed(*part, k) for part, k in zip((*parts, down), (d, d, h))]
        biases = [_bias_of(method, layer, f"{part}_bias") for part in _PARTS]
        self.biases = None
        if biases[0] is not None:
            own = biases[0].data
            gate, up = (own[:, 0::2], own[:, 1::2]) if self.interleaved else own.chunk(2, 1)
            self.biases = [t.to(method.moe.in_dtype, copy=True).contiguous() for t in (gate, up, biases[1].data)]

    def _expect_plain(self, method, layer: nn.Module) -> None:
        moe, parallel = method.moe, method.moe.moe_parallel_config
        self.act = {**ACTIVATIONS, "swigluoai": "swiglu-oai"}.get(layer.activation.value)
        self.interleaved = layer.activation.value == "swigluoai"
        if self.act is None:
            raise Unfit(f"the activation {layer.activation.value}")
        if self.interleaved != (type(method).__name__ == "GptOssMxfp4MoEMethod") \
                or getattr(layer, "swiglu_limit", None) is not None:
            raise Unfit("a clamped activation")
        if getattr(moe, "is_lora_enabled", False):
            raise Unfit("LoRA")
        if parallel.use_all2all_kernels or parallel.enable_eplb:
            raise Unfit("tokens that go to other ranks, or experts that move")
        rounded = [getattr(method, name, None) for name in ("input_dtype", "marlin_input_dtype")]
        backend = getattr(getattr(method, "mxfp4_backend", None), "name", "")
        if any(dtype is not None and dtype.itemsize == 1 for dtype in rounded) \
                or backend.endswith(("FP8", "MXFP4_MXFP4")) or getattr(method, "activation_key", None) is not None:
            raise Unfit("activations that are rounded")
        if moe.in_dtype not in (torch.bfloat16, torch.float16):
            raise Unfit(f"activations of {moe.in_dtype}")

    def _mxfp4(self, method, layer: nn.Module):
        def packed(codes, scale, zero, k):
            return ops.pack_weight(codes.contiguous().flatten(0, 1), scale.contiguous().flatten(0, 1), k=k, group=32,
                                   format="mxfp4")

        return *((getattr(layer, f"{part}_weight").data, getattr(layer, f"{part}_weight_scale").data, None)
                 for part in _PARTS), packed

    def _words(self, method, layer: nn.Module):
        """GPTQ and compressed-tensors, with words along k."""
        config = getattr(method, "quant_config", None) or method
        bits = getattr(config, "weight_bits", None) or config.num_bits
        own = "_qweight" if "w13_qweight" in layer._parameters else "_weight_packed"
        scales = "_scales" if own == "_qweight" else "_weight_scale"
        if getattr(config, "desc_act", False) or getattr(method, "actorder", None) == "group":
            raise Unfit("act-order")
        if not getattr(config, "is_sym", True):
            raise Unfit("zero points of GPTQ")
        # 0.33 has compressed-tensors' rows of outputs as they are in the checkpoint.
        turned_round = getattr(method, "is_transposed", True)
        parts = []
        for part in _PARTS:
            words, scale, zero = (None if t is None else t.data if turned_round else t.data.transpose(1, 2) for t in (
                getattr(layer, part + own), getattr(layer, part + scales),
                getattr(layer, f"{part}_weight_zero_point", None)))
            scale = scale.transpose(1, 2)
            n = scale.shape[1]
            if words.shape[2] != n:
                raise Unfit(f"words of {[*words.shape]} for scales of {[*scale.shape]}")
            parts.append((_gptq(words, n, bits), scale, None if zero is None else _along_n(zero, n, None)))
        return *parts, functools.partial(_pack_integers, method.moe.in_dtype, bits)

    def _awq(self, method, layer: nn.Module):
        parts = []
        for part in _PARTS:
            scale = getattr(layer, f"{part}_scales").data.transpose(1, 2)
            codes, zero = (_along_n(getattr(layer, f"{part}_{name}").data, scale.shape[1], AWQ_PLACES)
                           for name in ("qweight", "qzeros"))
            parts.append((codes, scale, zero))
        return *parts, functools.partial(_pack_integers, method.moe.in_dtype, 4)

    # what runs

    def run(self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        plans.prepare(len(x), *self.many)
        ids = local_ids(topk_ids, layer.expert_map)
        weigh = "before" if layer.apply_router_weight_on_input else "after"
        return ops.moe_ffn(x, ids, topk_weights, *self.weights, biases=self.biases, act=self.act, weigh=weigh)

    def adopt(self, method, layer: nn.Module) -> str:
        """Makes the method's apply run these where it computes the same: the reason why not, or ""."""
        try:
            if method.mk_can_overlap_shared_experts:
                return "shared experts that run inside of vLLM's kernel"
            name = "apply_monolithic" if method.is_monolithic else "apply"
            if name == "apply_monolithic" and (not self.interleaved or layer.expert_map is not None):
                return "a router inside of vLLM's kernel"
            if offloads_weights(current()):
                return "weights that are offloaded"
            if name == "apply_monolithic" and returns_routed_experts(current()):
                return "requests get the experts that were chosen"
            ours = getattr(self, f"_{name}")(method, layer)
            generator = torch.Generator().manual_seed(0)
            for rows in _ROWS:
                problems: dict = {}
                with running.listening(problems):
                    reason = self._difference(method, layer, name, ours, rows, generator)
                if reason:
                    return reason
            if self.weights[0].w.is_cuda:
                reason = self._slower(method, layer, name, ours)
                if reason:
                    return reason
            self.many = list(problems.values()), plans.most_rows()
        except Exception as error:
            return one_line(error)
        setattr(method, name, ours)
        setattr(layer, PACKED, self)  # for whole layers
        _free(layer)
        return ""

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        return *parts_of(*self.weights), *(self.biases or ())

    def take(self, new: "Experts") -> None:
        """Takes over the numbers of experts that are loaded again."""
        take_over(self._tensors, new._tensors)

    def _apply(self, method, layer: nn.Module):
        def apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
            return self.run(layer, x, topk_weights, topk_ids)
        return apply

    def _apply_monolithic(self, method, layer: nn.Module):
        """gpt-oss: a softmax of the logits that were chosen."""
        top_k = method.moe.experts_per_token

        def apply_monolithic(layer, x, router_logits, input_ids=None):
            ids, shares = ops.moe_route(router_logits, top_k, order="after")
            return self.run(layer, x, shares, ids)
        return apply_monolithic

    def _given(self, method, layer: nn.Module, name: str, rows: int, generator) -> tuple:
        """Random arguments of the method `name` for so many tokens."""
        like = self.weights[0].w
        x = torch.randn(rows, self.sizes[2], generator=generator).to(like.device, method.moe.in_dtype)
        # vLLM loads a model with its element type as PyTorch's default.
        logits = torch.randn(rows, layer.global_num_experts, dtype=torch.float32, generator=generator).to(like.device)
        if name == "apply_monolithic":
            return x, logits.to(x.dtype)
        shares, ids = logits.softmax(-1).topk(method.moe.experts_per_token)
        return x, shares, ids.to(method.topk_indices_dtype or torch.int32), None, None

    def _difference(self, method, layer, name: str, ours, rows: int, generator) -> str | None:
        given = self._given(method, layer, name, rows, generator)
        return difference("results", ours(layer, *given), getattr(type(method), name)(method, layer, *given))

    def _slower(self, method, layer: nn.Module, name: str, ours) -> str:
        """The reason why the experts stay vLLM's where these are faster on this device; "" if they are not."""
        kind = f"experts by {type(method).__name__}, {self.weights[0].format}, {self.act}, sizes {self.sizes}"
        generator = torch.Generator().manual_seed(1)

        def both(rows: int):
            given = self._given(method, layer, name, rows, generator)
            return nullcontext((lambda: getattr(type(method), name)(method, layer, *given),
                                lambda: ours(layer, *given)))

        if kind not in _choices:
            _choices[kind] = faster.choice_of(kind, both, _TIMED)
        return "" if _choices[kind].is_faster_everywhere() else (
            f"they are faster; vLLM's time divided by fftune's, by tokens: {_choices[kind].words()}")


def _bias_of(method, layer: nn.Module, name: str) -> Tensor | None:
    """The checkpoint's bias. vLLM 0.33 makes zeros for GPTQ, and drops those that no checkpoint filled. Other methods do
    not: gpt-oss loads its own."""
    if type(method).__name__ == "AutoGPTQMoEMethod" and name not in getattr(layer, "_loaded_expert_biases", (name,)):
        return None
    return getattr(layer, name, None)


def _pack_integers(dtype: torch.dtype, bits: int, codes: Tensor, scale: Tensor, zero: Tensor | None, k: int
                   ) -> ops.PackedWeight:
    """Codes of all experts, [experts, rows, k], and their scales, [experts, rows, groups]."""
    groups = scale.shape[2]
    group = 0 if groups == 1 and k not in (32, 64, 128) else k // groups
    if group not in (0, 32, 64, 128) or k % groups:
        raise Unfit(f"groups of {k / groups:g} inputs")
    codes, scale = codes.flatten(0, 1), scale.flatten(0, 1)
    if bits == 8:
        if zero is not None:
            raise Unfit("weights of 8 bits with zero points")
        return ops.pack_weight((codes ^ 128).contiguous(), scale.float().contiguous(), k=k, group=group, format="int8")
    return ops.pack_weight(pairs_of_codes(codes), scale.to(dtype).contiguous(),
                           None if zero is None else zero.flatten(0, 1).contiguous(), k=k, group=group)


def _free(layer: nn.Module) -> None:
    """Gives vLLM's order of the weights up."""
    for part in _PARTS:
        free(layer, [f"{part}_{end}" for end in ("weight", "qweight", "weight_packed", "scales", "weight_scale",
                                                 "qzeros", "weight_zero_point")])
        _free_triton(getattr(layer, f"{part}_weight", None))


def _free_triton(tensor) -> None:
    """A tensor of triton_kernels keeps its memory in an object of its own."""
    storage = getattr(tensor, "storage", None)
    if not isinstance(tensor, Tensor) and isinstance(getattr(storage, "data", None), Tensor):
        storage.data = storage.data.new_empty(0)
