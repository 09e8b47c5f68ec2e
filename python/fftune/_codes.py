"""Codes of 4 bits as checkpoints pack them: eight in a word of 32 bits, two in a byte."""
import torch
from torch import Tensor
from torch.nn import functional as F

# The one group that a format has.
ONLY_GROUP = {"mxfp4": 32, "nvfp4": 16}


def _shifts(dims: int, device) -> Tensor:
    return torch.arange(0, 32, 4, dtype=torch.int32, device=device).view(-1, *(1,) * dims)


def codes_of_words(words: Tensor, count: int, dim: int) -> Tensor:
    """The first `count` codes along `dim` of int32 words, uint8."""
    codes = (words.unsqueeze(dim + 1) >> _shifts(words.dim() - 1 - dim, words.device)) & 15
    return codes.flatten(dim, dim + 1).narrow(dim, 0, count).to(torch.uint8)


def words_of_codes(codes: Tensor, dim: int) -> Tensor:
    """The inverse; codes that a last word lacks are 0."""
    lacks = -codes.shape[dim] % 8
    codes = F.pad(codes, (0, 0) * (codes.dim() - 1 - dim) + (0, lacks)).unflatten(dim, (-1, 8))
    shifts = _shifts(codes.dim() - 2 - dim, codes.device)
    return (codes.to(torch.int32) << shifts).sum(dim + 1, dtype=torch.int32)


def pairs_of_codes(codes: Tensor) -> Tensor:
    """[n, k] -> [n, ceil(k / 2)]: two neighbours of a row in a byte, the first in its low bits."""
    codes = F.pad(codes, (0, codes.shape[1] % 2)).unflatten(1, (-1, 2))
    return codes[..., 0] | codes[..., 1] << 4


def codes_of_pairs(pairs: Tensor, k: int) -> Tensor:
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)[:, :k]


# AWQ's words: the place in a word of the j-th of eight outputs, and which output a place holds.
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
AWQ_OUTPUTS = [0, 2, 4, 6, 1, 3, 5, 7]


def turned(codes: Tensor, order: list[int]) -> Tensor:
    """Each eight codes of a row in this order."""
    return codes.unflatten(1, (-1, 8))[..., order].flatten(1)
