"""Linear layers with weights of 4 bits behind vLLM's kernels of mixed precision, and with fp8 weights
behind its kernels of scaled products, by linear.

GPTQ, AWQ and compressed-tensors end in one of vLLM's classes, MacheteLinearKernel or
MarlinLinearKernel, with the parameters of the checkpoint. Before such a kernel reorders them, they are
packed for fftune too. Calls of few tokens then run fftune's kernel, and all others vLLM's. So both
packed weights are in memory. Each layer is compared with vLLM's kernel once, when it is loaded.

fp8 layers have a scale of the tensor, of rows, or of blocks. vLLM rounds their activations to fp8, and
fftune's kernel does not.

A choice by the number of tokens would make vLLM's traces special ones. So a trace holds one op, which
chooses when it runs.
"""
import functools
from typing import Callable, NamedTuple

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
_FP8_CLASSES = ("CutlassFP8ScaledMMLinearKernel", "FlashInferFP8ScaledMMLinearKernel", "CutlassFp8BlockScaledMMKernel",
                "DeepGemmFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel",
                "FlashInferFp8DeepGEMMDynamicBlockScaledKernel")


class Layer(NamedTuple):
    kernel: object  # vLLM's
    layer: nn.Module
    original: Callable  # apply_weights of its class
    packed: ops.PackedWeight
    order: Tensor | None  # of columns, under act-order
    dtype: torch.dtype  # of x


_layers: dict[str, Layer] = {}  # by the number that a trace has


class Unfit(Exception):
    """Why a layer stays vLLM's."""


def patch_kernels(module) -> None:
    """Wraps the methods of the classes of a module, once."""
    for name in _CLASSES + _FP8_CLASSES:
        cls = getattr(module, name, None)
        if cls is None or cls.__module__ != module.__name__ or hasattr(
                cls.process_weights_after_loading, "_fftune_original"):
            continue
        _patch(cls, _packed if name in _CLASSES else _packed_fp8)


def _patch(cls: type, pack: Callable) -> None:
    process, apply = cls.process_weights_after_loading, cls.apply_weights

    @functools.wraps(process)
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        packed, reason = None, ""
        try:
            packed, order, dtype = pack(self, layer)
        except Unfit as error:
            reason = str(error)
        except Exception as error:  # another vLLM than the one that is known
            reason = one_line(error)
        process(self, layer)
        own = None if packed is None else Layer(self, layer, apply, packed, order, dtype)
        if own is not None:
            reason = _difference(own)
        if reason:
            log_once(f"linear layers by {cls.__name__} stay vLLM's: {reason}")
            return
        self._fftune_key = str(len(_layers))
        _layers[self._fftune_key] = own
        bits = "4 bits" if packed.format == "int4" else packed.format
        log_once(f"linear layers with weights of {bits} run by linear up to {MOST_TOKENS} tokens, else by "
                 f"{cls.__name__}")

    @functools.wraps(apply)
    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **others) -> Tensor:
        key = getattr(self, "_fftune_key", None)
        if key is None or others or not isinstance(x, Tensor):  # x may be rounded by the norm in front of it
            return apply(self, layer, x, bias, **others)
        return torch.ops.fftune_vllm.linear(x, bias, key, _layers[key].packed.n)

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


def _packed(kernel, layer: nn.Module) -> tuple[ops.PackedWeight, Tensor | None, torch.dtype]:
    """The weight in the order of fftune's kernels, the order of its columns under act-order, and the type
    of x."""
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
    return ops.pack_weight(pairs_of_codes(codes), scale, zero, k=k, group=word), order, config.act_type


def _packed_fp8(kernel, layer: nn.Module) -> tuple[ops.PackedWeight, None, torch.dtype]:
    block = getattr(kernel, "weight_group_shape", None)
    dtype = kernel.config.out_dtype
    if dtype not in (torch.bfloat16, torch.float16) or getattr(kernel.config, "input_dtype", dtype) != dtype:
        raise Unfit(f"activations of {dtype}")
    if block is None:
        weight, scale = (getattr(layer, name) for name in kernel.layer_param_names[:2])
        weight, (rows, columns) = weight.data.t(), (1 if scale.numel() > 1 else weight.shape[1], weight.shape[0])
    else:
        weight, (rows, columns) = layer.weight.data, block
        scale = getattr(layer, "weight_scale_inv", None)
        scale = layer.weight_scale if scale is None else scale
    n, k = weight.shape
    if weight.dtype != torch.float8_e4m3fn or scale.numel() != -(-n // rows) * -(-k // columns):
        raise Unfit(f"{weight.dtype} [{n}, {k}] with {scale.numel()} scales, for which there is no kernel")
    group = next((g for g in (0, 128, 64, 32) if (columns >= k if g == 0 else columns % g == 0 and k % g == 0)), None)
    if group is None:
        raise Unfit(f"blocks of {columns} for {k} inputs")
    own = scale.data.float().reshape(-(-n // rows), -1).repeat_interleave(rows, 0)[:n]
    own = own.repeat_interleave(columns // group, 1)[:, :k // group] if group else own
    return ops.pack_weight(weight.contiguous(), own.contiguous(), group=group, format="fp8"), None, dtype


# what runs

def _run(packed: ops.PackedWeight, order: Tensor | None, x: Tensor, bias: Tensor | None) -> Tensor:
    return ops.linear(x if order is None else x.index_select(-1, order), packed, bias)


@torch.library.custom_op("fftune_vllm::linear", mutates_args=())
def _linear(x: Tensor, bias: Tensor | None, key: str, n: int) -> Tensor:
    own = _layers[key]
    if x.numel() > MOST_TOKENS * x.shape[-1] or x.dtype != own.dtype:
        return own.original(own.kernel, own.layer, x, bias)
    return _run(own.packed, own.order, x, bias)


@_linear.register_fake
def _(x, bias, key, n):
    return x.new_empty(*x.shape[:-1], n)


def _difference(own: Layer) -> str:
    """The reason why results of this layer are wrong; "" if they are not."""
    try:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4, own.packed.k, generator=generator).to(own.packed.w.device, own.dtype)
        return difference("results", _run(own.packed, own.order, x, None),
                          own.original(own.kernel, own.layer, x, None)) or ""
    except Exception as error:
        return one_line(error)
