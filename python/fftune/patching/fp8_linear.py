"""transformers' FP8Linear and CompressedTensorsFP8Linear by linear_fp8, which rounds activations to fp8 as
the layers' own kernels do.

The first, with dynamic activations and scales of 128 x 128 blocks or one scale, divides each 128 elements
of x, or each token, by a scale of largest magnitude / 448 and rounds them to e4m3. (DeepGEMM takes 1e-4 for
smaller magnitudes, and Triton's kernel 4.5e-10; the op has no such limit but 2^-100.) The second has a scale
for each token and one for each row of the weight. The weight stays in the module as it was stored. Calls that
the op does not serve, such as those with gradients, run the layer's own forward.
"""
import torch
from torch import Tensor, nn

from .. import ops
from .recognise import Unfit, has_kernels, original, replace_forward, undoable


_SCALES = {"FP8Linear": "weight_scale_inv", "CompressedTensorsFP8Linear": "weight_scale"}


def is_fp8_linear(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ in _SCALES and kind.__module__.startswith("transformers.")


@torch.compiler.assume_constant_result
def _has_fp8_products(device: torch.device) -> bool:
    """Whether linear_fp8 is fast: by wgmma. The CPU, which transformers has no kernels for, has plain loops."""
    return device.type == "cpu" or device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _rounds_tokens(module: nn.Module) -> bool:
    """Whether whole tokens have a scale, and not blocks of 128 elements. Unfit for other roundings."""
    if type(module).__name__ != "FP8Linear":
        return True
    if module.activation_scheme != "dynamic":
        raise Unfit(f"its activations are rounded by a {module.activation_scheme} scale, for which there is no "
                    "kernel")
    block = None if module.block_size is None else tuple(module.block_size)
    if block is None or block == tuple(module.weight.shape):
        return True
    if block != (128, 128):
        raise Unfit(f"its blocks are {block[0]} by {block[1]}: kernels round activations in blocks of 128")
    return False


def patch_fp8_linear(module: nn.Module) -> str | None:
    weight = module.weight
    if weight.dtype != torch.float8_e4m3fn:
        return None
    if "forward" in module.__dict__:
        raise Unfit("its forward was replaced already")
    name, by_token = _SCALES[type(module).__name__], _rounds_tokens(module)
    (n, k), scale = weight.shape, getattr(module, name)
    shape = (-(-n // 128), -(-k // 128))
    if scale.numel() not in (1, n if name == "weight_scale" else 1) if by_token else tuple(scale.shape) != shape:
        raise Unfit(f"{name} is {[*scale.shape]}, not " + (
            "one scale, or one for each row" if by_token else f"{[*shape]}, of blocks of 128 by 128"))
    if not _has_fp8_products(weight.device):
        raise Unfit("its activations are rounded to fp8, for which kernels are fast on compute capability 9.0 "
                    "alone")
    if not bool(scale.float().isfinite().all()):
        raise Unfit("its scales are not finite")
    if bool(weight.float().isnan().any()):
        raise Unfit("its weight has NaN")
    replace_forward(module, fp8_forward, (name, by_token))
    return (f"{type(module).__name__} by linear of fp8, with activations rounded by " + (
        "token" if by_token else "blocks of 128"))


@undoable
def fp8_forward(self, input: Tensor) -> Tensor:
    name, by_token = self._fftune
    weight, bias = self.weight, self.bias
    # All this may have changed since patch(): .to(dtype) takes the codes for numbers.
    if weight.dtype != torch.float8_e4m3fn or not has_kernels(input) or not _has_fp8_products(input.device) \
            or torch.is_grad_enabled() and input.requires_grad:
        return original(self, input)
    scale = getattr(self, name).float()
    if by_token:
        scale = scale.reshape(-1).expand(len(weight)).contiguous()
    if bias is not None and (bias.dtype != input.dtype or torch.is_grad_enabled() and bias.requires_grad):
        return ops.linear_fp8(input, weight, scale).add_(bias)
    return ops.linear_fp8(input, weight, scale, bias)
