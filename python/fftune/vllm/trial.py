"""Comparisons of fftune's results with vLLM's own, before they take their place."""
import torch
from torch import Tensor

# Relative difference in the Euclidean norm above which results are taken for wrong. Rounding to
# bfloat16 in some 30 layers, and the products of fp8, stay far below it.
_TOLERANCE = 0.25


def difference(name: str, mine: Tensor, own: Tensor) -> str | None:
    """The reason why values are wrong; "" if they are not, None if vLLM's own are no numbers."""
    size = own.float().norm().item()
    error = (mine.float() - own.float()).norm().item()
    if not 0 < size < float("inf"):
        return None
    return "" if error <= _TOLERANCE * size else \
        f"{name} differ from vLLM's by {error / size:.2g} of their norm"


def is_capturing(tensor: Tensor) -> bool:
    """Whether work on the tensor becomes part of a CUDA graph now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
