"""transformers' FP8Linear and CompressedTensorsFP8Linear by linear_fp8, which rounds activations to fp8 as
the layers' own kernels do.

The first, with dynamic activations, divides each 128 elements of x by a scale of largest magnitude / 448 if
the weight has blocks of 128 x 128, or each token if it has one scale, and rounds to e4m3. DeepGEMM takes
1e-4 for smaller magnitudes, and Triton's kernel 4.5e-10; the op's limit is 2^-100. The second has a scale
for each token and one for each row of the weight. The weight stays in the module as it was stored. Calls that
the op does not serve, such as those with gradients, run the layer's own forward.
"""
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import ops
from .recognise import CodedLayer, Unfit, has_kernels, is_patched, original, undoable
from .trial import hidden, replace_forward


_SCALES = {"FP8Linear": "weight_scale_inv", "CompressedTensorsFP8Linear": "weight_scale"}


@dataclass(frozen=True)
class RoundedFp8(CodedLayer):
    """A replaced layer: the name of its scales, and whether whole tokens have one."""

    scale: str
    by_token: bool


def is_fp8_linear(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ in _SCALES and kind.__module__.startswith("transformers.")


def is_static_fp8_linear(module: nn.Module) -> bool:
    """Whether it divides x by a scale that it was given: a layer with a packed weight takes its place."""
    return is_fp8_linear(module) and getattr(module, "activation_scheme", "dynamic") != "dynamic"


def expect_scales(scale: Tensor) -> None:
    """Finite numbers. Where they are powers of two, DeepGEMM on compute capability 9.0 divides activations by
    largest magnitudes, and Triton's kernel by powers of two."""
    if scale.dtype.itemsize == 1:
        raise Unfit(f"its scales are {str(scale.dtype)[6:]}, for which kernels round activations in several ways")
    if not bool(scale.float().isfinite().all()):
        raise Unfit("its scales are not finite")


def has_fp8_products(device: torch.device) -> bool:
    """Whether linear_fp8 is fast: by wgmma. The CPU, which transformers has no kernels for, has plain loops."""
    return device.type == "cpu" or device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


# As torch.compiler.assume_constant_result does, which imports the compiler.
has_fp8_products._dynamo_marked_constant = True


def _rounds_tokens(module: nn.Module) -> bool:
    """Whether whole tokens have a scale, and not blocks of 128 elements. Unfit for other roundings."""
    if type(module).__name__ != "FP8Linear":
        return True
    block = None if module.block_size is None else tuple(module.block_size)
    if block is None or block == tuple(module.weight.shape):
        return True
    if block != (128, 128):
        raise Unfit(f"its blocks are {block[0]} by {block[1]}: kernels round activations in blocks of 128")
    return False


def patch_fp8_linear(module: nn.Module, dtype: torch.dtype | None, known: dict) -> str | None:
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
    if not has_fp8_products(weight.device):
        raise Unfit("its activations are rounded to fp8, for which kernels are fast on compute capability 9.0 "
                    "alone")
    expect_scales(scale)
    if bool(weight.float().isnan().any()):
        raise Unfit("its weight has NaN")
    replace_forward(module, fp8_forward, (RoundedFp8(n, k, dtype or torch.bfloat16, name, by_token),), hidden(k), known)
    return (f"{type(module).__name__} by linear of fp8, with activations rounded by " + (
        "token" if by_token else "blocks of 128"))


def is_rounded_fp8(module: nn.Module | None) -> bool:
    """Whether it is a replaced layer, which rounds x."""
    return is_patched(module, fp8_forward)


def rounds_alike(*layers: nn.Module) -> bool:
    return all(map(is_rounded_fp8, layers)) and len({layer._fftune[0].by_token for layer in layers}) == 1


def serves(layer: nn.Module, x: Tensor) -> bool:
    """Whether the op computes the layer without its bias. All this may have changed since patch(): .to(dtype)
    takes the codes for numbers."""
    return (layer.weight.dtype == torch.float8_e4m3fn and has_kernels(x) and has_fp8_products(x.device)
            and not (torch.is_grad_enabled() and x.requires_grad))


def has_bias_for(layer: nn.Module, x: Tensor) -> bool:
    """Whether the op can add the layer's bias, if it has one."""
    bias = layer.bias
    return bias is None or bias.dtype == x.dtype and not (torch.is_grad_enabled() and bias.requires_grad)


def scales_of(layer: nn.Module) -> Tensor:
    """float32, one of each row, or of each block."""
    format, = layer._fftune
    scale = getattr(layer, format.scale).float()
    return scale.reshape(-1).expand(format.n).contiguous() if format.by_token else scale


def expect_scales_of_op(*scales: Tensor) -> None:
    """That they are those that the op reads, where they lie: float32."""
    if any(scale.dtype != torch.float32 or not scale.is_contiguous() for scale in scales):
        raise Unfit("the scales of its linear layers are not float32")


def fp8_linear(layer: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    weight, scale = layer.weight, scales_of(layer)
    if has_bias_for(layer, x):
        return ops.linear_fp8(x, weight, scale, layer.bias, residual)
    y = ops.linear_fp8(x, weight, scale).add_(layer.bias)
    return y if residual is None else y + residual


@undoable
def fp8_forward(self, input: Tensor) -> Tensor:
    return fp8_linear(self, input) if serves(self, input) else original(self, input)


# q, k and v in one

MERGED = ("_fftune_fp8_w", "_fftune_fp8_scale", "_fftune_fp8_bias")


def _tensors(layers: list[nn.Module]):
    """Weights, scales and biases of the layers."""
    return zip(*((layer.weight, getattr(layer, layer._fftune[0].scale), layer.bias) for layer in layers))


def merge_fp8(owner: nn.Module, layers: list[nn.Module]) -> None:
    """Gives the module the rows of these layers in one weight, their scales and biases. The layers' own tensors
    become views of these. Unfit where they do not go together."""
    by_token = layers[0]._fftune[0].by_token
    if not rounds_alike(*layers) or len({layer.weight.shape[1] for layer in layers}) > 1:
        raise Unfit("q, k and v round activations in different ways")
    for layer in layers:
        scale = getattr(layer, layer._fftune[0].scale)
        if scale.dtype != torch.float32 or by_token and scale.numel() != len(layer.weight):
            raise Unfit("the scales of q, k and v are not float32 of each row, or of each block")
    if not by_token and any(len(layer.weight) % 128 for layer in layers[:2]):
        raise Unfit("a block of 128 rows has rows of two of q, k and v")
    if len({None if layer.bias is None else layer.bias.dtype for layer in layers}) > 1:
        raise Unfit("some of q, k and v have a bias, and some have none")
    for buffer, parts in zip(MERGED, _tensors(layers)):
        if parts[0] is None:
            owner.register_buffer(buffer, None, persistent=False)
            continue
        of_rows = by_token and buffer == MERGED[1] or parts[0].dim() < 2
        with torch.inference_mode(False):
            # Not all devices concatenate fp8.
            merged = torch.cat([part.detach().reshape(-1).view(torch.uint8) for part in parts]).view(parts[0].dtype)
            for part, own in zip(parts, merged.split([part.numel() for part in parts])):
                part.data = own.view(part.shape)
        owner.register_buffer(buffer, merged if of_rows else merged.view(-1, parts[0].shape[1]), persistent=False)


def merged_fp8_of(owner: nn.Module, layers: list[nn.Module], x: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Weight, scales and bias of q, k and v together, where they are merged and the op serves x. A model that
    was moved since, or was given other tensors, is merged again."""
    if owner._buffers.get(MERGED[0]) is None or not rounds_alike(*layers) or torch.compiler.is_compiling() \
            or not all(serves(layer, x) and has_bias_for(layer, x) for layer in layers):
        return None
    if not _are_views(owner, layers):
        try:
            merge_fp8(owner, layers)
        except Unfit:
            drop_merged_fp8(owner)
            return None
    return tuple(owner._buffers[name] for name in MERGED)


def stays_merged(owner: nn.Module, layers: list[nn.Module]) -> bool:
    """Whether the tensors of replaced layers are still views of the module's."""
    return owner._buffers.get(MERGED[0]) is not None and rounds_alike(*layers) and _are_views(owner, layers)


def _are_views(owner: nn.Module, layers: list[nn.Module]) -> bool:
    for buffer, parts in zip(MERGED, _tensors(layers)):
        merged = owner._buffers[buffer]
        if merged is None and all(part is None for part in parts):
            continue
        if merged is None or any(part is None or part.dtype != merged.dtype or not part.is_contiguous()
                                 for part in parts):
            return False
        places = itertools.accumulate((part.nbytes for part in parts), initial=merged.data_ptr())
        if [*places] != [*(part.data_ptr() for part in parts), merged.data_ptr() + merged.nbytes]:
            return False
    return True


def drop_merged_fp8(owner: nn.Module) -> None:
    for name in MERGED:
        if name in owner._buffers:
            del owner._buffers[name]
            owner._non_persistent_buffers_set.discard(name)


def part_fp8(module: nn.Module) -> None:
    """Takes back that the tensors of a replaced layer are views of others."""
    if is_rounded_fp8(module):
        for tensor in module._parameters.values():
            if tensor is not None and tensor.untyped_storage().nbytes() > tensor.nbytes:
                with torch.inference_mode(False):
                    tensor.data = tensor.data.clone()
