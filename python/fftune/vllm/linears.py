"""Linear layers with weights of 4 bits behind vLLM's kernels of mixed precision, by linear.

GPTQ, AWQ and compressed-tensors end in one of vLLM's classes, MacheteLinearKernel or
MarlinLinearKernel, with the parameters of the checkpoint. Before such a kernel reorders them, they are
packed for fftune too. Calls of few tokens then run fftune's kernel, and all others vLLM's. So both
packed weights are in memory. Each layer is compared with vLLM's kernel once, when it is loaded.

A choice by the number of tokens would make vLLM's traces special ones. So a trace holds one op, which
chooses when it runs.
"""
import functools

import torch
from torch import Tensor, nn

from .. import ops
from .._codes import codes_of_words, pairs_of_codes
from .logs import log_once, one_line
from .trial import difference

# The tokens of a call up to which fftune's kernel runs. It was not measured inside vLLM yet: the part
# "linears" has to be asked for.
MOST_TOKENS = 64
_CLASSES = ("MacheteLinearKernel", "MarlinLinearKernel")
_layers: "dict[str, tuple]" = {}  # by the number that a trace has: kernel, layer, original, packed, order


class Unfit(Exception):
    """Why a layer stays vLLM's."""


def patch_kernels(module) -> None:
    """Wraps the methods of the classes of a module, once."""
    for name in _CLASSES:
        cls = getattr(module, name, None)
        if cls is None or cls.__module__ != module.__name__ or hasattr(
                cls.process_weights_after_loading, "_fftune_original"):
            continue
        _patch(cls)


def _patch(cls: type) -> None:
    process, apply = cls.process_weights_after_loading, cls.apply_weights

    @functools.wraps(process)
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        packed, reason = None, ""
        try:
            packed, order = _packed(self, layer)
        except Unfit as error:
            reason = str(error)
        except Exception as error:  # another vLLM than the one that is known
            reason = one_line(error)
        process(self, layer)
        if packed is not None:
            reason = _difference(self, layer, apply, packed, order)
        if reason:
            log_once(f"linear layers by {cls.__name__} stay vLLM's: {reason}")
            return
        self._fftune_key = str(len(_layers))
        _layers[self._fftune_key] = self, layer, apply, packed, order
        log_once(f"linear layers with weights of 4 bits run by linear up to {MOST_TOKENS} tokens, else by "
                 f"{cls.__name__}")

    @functools.wraps(apply)
    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        key = getattr(self, "_fftune_key", None)
        if key is None:
            return apply(self, layer, x, bias)
        return torch.ops.fftune_vllm.linear(x, bias, key, self.config.partition_weight_shape[1])

    process_weights_after_loading._fftune_original = process
    apply_weights._fftune_original = apply
    cls.process_weights_after_loading = process_weights_after_loading
    cls.apply_weights = apply_weights


# what a layer has

def _rows_of_outputs(parameter: Tensor) -> Tensor:
    """The matrix with outputs first: either of its dimensions may have them."""
    output = getattr(parameter, "output_dim", None)
    if output is None:
        output = 1 - parameter.input_dim
    return parameter.data if output == 0 else parameter.data.t()


def _packed(kernel, layer: nn.Module) -> tuple[ops.PackedWeight, Tensor | None]:
    """The weight in the order of fftune's kernels, and the order of its columns under act-order."""
    config = kernel.config
    k, n = config.partition_weight_shape
    kind = config.weight_type
    if kind.size_bits != 4 or kind.is_signed() or (kind.bias, config.zero_points) not in (
            (8, False), (0, True)):
        raise Unfit(f"weights of {kind}, for which there is no kernel")
    if config.act_type not in (torch.bfloat16, torch.float16) or config.out_type not in (
            None, config.act_type):
        raise Unfit(f"activations of {config.act_type}")
    group = k if config.group_size == -1 else config.group_size
    if group not in (k, 32, 64, 128) or k % group:
        raise Unfit(f"groups of {group} for {k} inputs")
    w_q, w_s, w_zp, *index = kernel._get_weight_params(layer)  # 0.33 has no order of columns
    codes = codes_of_words(_rows_of_outputs(w_q), k, 1)
    scale, zero, order = _rows_of_outputs(w_s), None, None
    if tuple(codes.shape) != (n, k) or tuple(scale.shape) != (n, k // group):
        raise Unfit("groups that are cut by tensor parallelism")
    if config.zero_points:
        zero = codes_of_words(_rows_of_outputs(w_zp), n, 0).contiguous()
    if index and config.has_g_idx:
        order = torch.argsort(index[0].data.long(), stable=True)
        groups = index[0].data.long()[order].view(-1, group)
        if bool((groups != torch.arange(k // group, device=groups.device)[:, None]).any()):
            raise Unfit("groups of act-order that are cut by tensor parallelism")
        codes = codes[:, order]
    scale = scale.to(config.act_type).contiguous()
    word = 0 if group == k and group not in (32, 64, 128) else group
    return ops.pack_weight(pairs_of_codes(codes), scale, zero, k=k, group=word), order


# what runs

def _run(packed: ops.PackedWeight, order: Tensor | None, x: Tensor, bias: Tensor | None) -> Tensor:
    return ops.linear(x if order is None else x.index_select(-1, order), packed, bias)


@torch.library.custom_op("fftune_vllm::linear", mutates_args=())
def _linear(x: Tensor, bias: Tensor | None, key: str, n: int) -> Tensor:
    kernel, layer, apply, packed, order = _layers[key]
    if x.numel() > MOST_TOKENS * x.shape[-1] or x.dtype != packed.scale.dtype:
        return apply(kernel, layer, x, bias)
    return _run(packed, order, x, bias)


@_linear.register_fake
def _(x, bias, key, n):
    return x.new_empty(*x.shape[:-1], n)


def _difference(kernel, layer: nn.Module, apply, packed: ops.PackedWeight, order: Tensor | None) -> str:
    """The reason why results of this layer are wrong; "" if they are not."""
    try:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4, packed.k, generator=generator).to(packed.w.device, packed.scale.dtype)
        return difference("results", _run(packed, order, x, None), apply(kernel, layer, x, None)) or ""
    except Exception as error:
        return one_line(error)
