"""Linear layers of fp8 inside vLLM by linear_fp8, which rounds activations as vLLM's kernels do.

Fp8LinearMethod and compressed-tensors' W8A8 keep the weight as it was stored, as [n, k] or as its
transpose. Their kernel rounds activations. Each 128 elements of a token have a scale if the weight has
blocks of 128 x 128; else each token has one. The op reads vLLM's weight where it is. vLLM's scales have a
least value, 1 / (448 * 512) for tokens; those of the op have none, so tiny activations are rounded more
finely.
"""
import functools

import torch
from torch import Tensor, nn

from .._ops.linear import OPS
from .imports import wrap_methods
from .interfaces import FP8_METHODS
from .logs import Unfit, reason_of
from .products import Product, adopt, is_loaded, keep, load_again, log_layer, register, take_over

_BLOCK = (128, 128)


def patch_methods(module) -> None:
    wrap_methods(module, FP8_METHODS[module.__name__], "process_weights_after_loading", _loading)


def _loading(cls: type, process):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        kernel = self.fp8_linear
        if is_loaded(layer):
            load_again(layer, lambda: process(self, layer), lambda: weight_of(kernel, layer), reads_first=False)
            return
        process(self, layer)
        words = ""

        def decided(reason: str) -> None:
            keep(layer, None if reason else functools.partial(_take, layer, product.tensors))
            log_layer(type(kernel).__name__, reason, f"with activations rounded by {words}")

        try:
            weight, scale, words = weight_of(kernel, layer)
        except Exception as error:
            return decided(reason_of(error))
        n, k = weight.shape
        product = Product(f"fp8 {n} x {k}, {words}", _run, (weight, scale), n, k)
        adopt(kernel, type(kernel).apply_weights, layer, product, kernel.config.out_dtype, decided)

    return process_weights_after_loading


def _take(layer: nn.Module, tensors: tuple[Tensor, Tensor], weight: Tensor, scale: Tensor, words: str) -> None:
    take_over(tensors, (weight, scale))
    register(layer, tensors)


def weight_of(kernel, layer: nn.Module) -> tuple[Tensor, Tensor, str]:
    """The weight [n, k] and its scales as linear_fp8 takes them, and how activations are rounded."""
    config = kernel.config
    rounding, of_weight = config.activation_quant_key.scale, tuple(config.weight_quant_key.scale.group_shape)
    if rounding.static:
        raise Unfit("activations rounded by a static scale")
    if getattr(layer, "input_scale", None) is not None or getattr(layer, "input_scale_ub", None) is not None:
        raise Unfit("activations rounded by a scale that is given, or has a bound")
    if config.out_dtype not in (torch.bfloat16, torch.float16) or config.input_dtype != config.out_dtype:
        raise Unfit(f"activations of {config.input_dtype} and results of {config.out_dtype}")
    weight = layer.weight.data
    if weight.dtype != torch.float8_e4m3fn:
        raise Unfit(f"a weight of {weight.dtype}")
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] != 9:
        raise Unfit("fp8 products are for compute capability 9.x")
    if tuple(rounding.group_shape) == (1, 128) and of_weight == _BLOCK:
        if getattr(kernel, "use_deep_gemm_e8m0", False) or getattr(getattr(kernel, "fallback", None),
                                                                   "use_deep_gemm_e8m0", False):
            raise Unfit("scales of activations that are powers of two")
        scale = getattr(layer, "weight_scale_inv", None)
        scale = layer.weight_scale.data if scale is None else scale.data
        shape = tuple(-(-size // 128) for size in weight.shape)
        if scale.dtype != torch.float32 or tuple(scale.shape) != shape or not scale.is_contiguous():
            raise Unfit(f"scales of {scale.dtype} {[*scale.shape]}, or in an order of the kernel's own")
        return _contiguous(weight), scale, "blocks of 128"
    # A token has one scale: vLLM's shape for it is (1, -1).
    if tuple(rounding.group_shape) != (1, -1):
        raise Unfit(f"activations rounded in groups of {tuple(rounding.group_shape)}")
    weight, scale = _contiguous(weight.t()), layer.weight_scale.data
    if scale.dtype != torch.float32 or scale.numel() not in (1, len(weight)):
        raise Unfit(f"scales of {scale.dtype} {[*scale.shape]} for {len(weight)} rows")
    if len(weight) != (getattr(kernel, "logical_output_size", None) or len(weight)):
        raise Unfit("a padded weight")
    return weight, scale.reshape(-1).expand(len(weight)).contiguous(), "tokens"


def _contiguous(weight: Tensor) -> Tensor:
    if not weight.is_contiguous():
        raise Unfit("a weight in an order of the kernel's own")
    return weight


def _run(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    op = OPS.linear_fp8_token if scale.dim() == 1 else OPS.linear_fp8_block
    return op.kernel(x, weight, scale, bias, None)  # past the dispatcher, which has brought the call here
