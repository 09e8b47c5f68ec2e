"""Linear layers with weights of 4 and 8 bits behind vLLM's kernels of mixed precision, by linear.

GPTQ, AWQ and compressed-tensors end in one of vLLM's classes, MacheteLinearKernel or MarlinLinearKernel,
with the parameters of the checkpoint. Before such a kernel reorders them they are packed for fftune. The
layer is compared with vLLM's kernel once, when it is loaded, and vLLM's order of its weight is given up.
"""
import functools

import torch
from torch import Tensor, nn

from .. import ops
from .._codes import codes_of_words, pairs_of_codes
from .._custom import OPS
from .._ops.packed import group_word, parts_of, suffix
from .imports import wrap_methods
from .interfaces import KERNELS
from .logs import Unfit, reason_of
from .products import PACKED, Product, adopt, free, is_loaded, keep, load_again, log_layer, register, take_over

# By bits, what is subtracted from codes, and zero points.
_CODES = {(4, 8, False): "int4", (4, 0, True): "int4", (8, 128, False): "int8"}
FORMATS = ("int4", "int8")


def patch_kernels(module, formats: tuple[str, ...] = FORMATS) -> None:
    wrap_methods(module, KERNELS[module.__name__], "process_weights_after_loading", functools.partial(_loading, formats))


def _loading(formats: tuple[str, ...], cls: type, process):
    apply = cls.apply_weights

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if is_loaded(layer):
            if load_again(layer, lambda: process(self, layer), lambda: packed_of(self, layer, formats)):
                free(layer, _names_of(self))
            return
        packed, reason = None, ""
        try:
            packed, order = packed_of(self, layer, formats)
        except Exception as error:
            reason = reason_of(error)
        process(self, layer)

        def decided(reason: str) -> None:
            if not reason:
                if order is None:
                    setattr(layer, PACKED, packed)  # for whole layers
                free(layer, _names_of(self))
            keep(layer, None if reason else functools.partial(_take, layer, product.tensors))
            log_layer(cls.__name__, reason, f"with packed weights ({packed.format})" if packed else "")

        if packed is None:
            return decided(reason)
        product = _product_of(packed, order)
        adopt(self, apply, layer, product, self.config.act_type, decided)

    return process_weights_after_loading


def _take(layer: nn.Module, tensors: tuple, packed: ops.PackedWeight, order: Tensor | None) -> None:
    take_over(tensors, _product_of(packed, order).tensors)
    register(layer, tensors)


def _names_of(kernel) -> list[str | None]:
    return [getattr(kernel, f"w_{part}_name", None) for part in ("q", "s", "zp", "gidx")]


# what a layer has

def _rows_of_outputs(parameter: Tensor) -> Tensor:
    """The matrix with outputs first: either of its dimensions may have them."""
    output = getattr(parameter, "output_dim", None)
    if output is None:
        output = 1 - parameter.input_dim
    return parameter.data if output == 0 else parameter.data.t()


def packed_of(kernel, layer: nn.Module, formats: tuple[str, ...] = FORMATS) -> tuple[ops.PackedWeight, Tensor | None]:
    """The weight in the order of fftune's kernels, and the order of its columns under act-order."""
    config = kernel.config
    k, n = config.partition_weight_shape
    kind = config.weight_type
    code = None if kind.is_signed() else _CODES.get((kind.size_bits, kind.bias, config.zero_points))
    if code is None:
        raise Unfit(f"weights of {kind}{' with zero points' if config.zero_points else ''}, for which there is no "
                    "kernel")
    if code not in formats:
        raise Unfit(f"weights of {kind}, which FFTUNE_VLLM=experts,layers,linears turns on")
    if config.act_type not in (torch.bfloat16, torch.float16) or config.out_type not in (
            None, config.act_type):
        raise Unfit(f"activations of {config.act_type}")
    group = k if config.group_size == -1 else config.group_size
    if group not in (k, 32, 64, 128) or k % group:
        raise Unfit(f"groups of {group} for {k} inputs")
    w_q, w_s, w_zp, *index = kernel._get_weight_params(layer)  # 0.33 has no order of columns
    words = _rows_of_outputs(w_q)
    codes = codes_of_words(words, k, 1) if code == "int4" else words.contiguous().view(torch.uint8)[:, :k] ^ 128
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
    word = 0 if group == k and group not in (32, 64, 128) else group
    if code == "int8":
        return ops.pack_weight(codes.contiguous(), scale.float().contiguous(), k=k, group=word, format=code), order
    scale = scale.to(config.act_type).contiguous()
    return ops.pack_weight(pairs_of_codes(codes), scale, zero, k=k, group=word), order


def _product_of(packed: ops.PackedWeight, order: Tensor | None) -> Product:
    n, format = packed.n, packed.format
    op, word, tensors = getattr(OPS, f"linear_packed{suffix(format)}"), group_word("linear", packed.group, format), \
        parts_of(packed)

    def run(x, order, *weight_and_bias):
        x = x if order is None else x.index_select(-1, order)
        return op.kernel(x, *weight_and_bias, None, n, word)  # past the dispatcher, which has brought the call here

    parts = f"{' with zero points' if packed.zero is not None else ''}{' in another order' if order is not None else ''}"
    kind = f"{format} {n} x {packed.k}, {packed.scale.dtype}, groups {word}{parts}"
    return Product(kind, run, (order, *tensors), n, packed.k)
