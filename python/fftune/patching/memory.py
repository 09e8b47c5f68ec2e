"""Tensors that the backward pass computes again instead of reading what the forward pass saved.

The output of a norm is as large as its input, and the products that read it save it. To compute it again
takes one pass over memory, where the products of an MLP take FLOPs too: patch(memory=).
"""
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from .._library import Error
from .._versions import is_transformed, saved_tensors_hooks
from .norms import norm_forward
from .recognise import is_patched, watched

MODES = ("fast", "balanced", "small")


class _Again:
    """Stands for `normed` and views of it where autograd saves them: norm(x) is computed in their place,
    once for all that were saved. It belongs to no cycle of references, so that x is freed with the last
    of them, and not when the garbage is collected."""

    def __init__(self, norm: nn.Module, x: Tensor, normed: Tensor):
        self.norm, self.x = norm, x.detach()
        self.address, self.numel, self.dtype = normed.data_ptr(), normed.numel(), normed.dtype
        self.versions = self._versions()
        self.saved = self.read = 0
        self.value: Tensor | None = None

    def _versions(self) -> tuple[int, int]:
        return self.x._version, self.norm.weight._version

    def pack(self, saved: Tensor):
        if saved.data_ptr() != self.address or saved.numel() != self.numel \
                or saved.dtype != self.dtype or not saved.is_contiguous():
            return saved
        self.saved += 1
        return self, saved.shape

    def again(self) -> Tensor:
        if self._versions() != self.versions:
            raise Error("patch: the input or the weight of a norm was changed in place before its "
                        "backward pass, which computes the norm again: patch(model, memory=\"fast\")")
        if self.value is None:
            with torch.no_grad():
                self.value = self.norm(self.x)
        value = self.value
        self.read += 1
        if self.read % self.saved == 0:  # all have it
            self.value = None
        return value


def _unpack(packed) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed[0].again().view(packed[1])


def norm_again(wanted: bool, norm: nn.Module, x: Tensor, normed: Tensor) -> AbstractContextManager:
    """The context of what reads normed = norm(x), of a module that patch_norm() replaced. Hooks of
    others, such as those of gradient checkpointing, are left alone."""
    if not wanted or not normed.requires_grad or torch.compiler.is_compiling() or is_transformed(normed) \
            or not is_patched(norm, norm_forward) or watched(norm) or saved_tensors_hooks(True) is not None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_Again(norm, x, normed).pack, _unpack)
