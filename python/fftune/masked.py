"""MaskedLinear and MaskedFFN with the interface of the Triton package ffn_kernel, with gradients.

Weights are transposed views such as `layer.weight.T`; nothing is copied. Tokens whose mask is set take
the first weights, all others the second.
"""
from torch import Tensor

from . import ops
from ._checks import named
from ._library import Error


def _turned(name: str, w: Tensor) -> Tensor:
    if not isinstance(w, Tensor) or w.is_nested or w.dim() != 2:
        raise Error(f"{name} is {named(w)}: give a tensor of two dimensions, as layer.weight.T")
    return w.t()


class MaskedLinear:
    """Two linear layers behind a mask: ``MaskedLinear.apply(x, w_true_t, w_false_t, mask)``."""

    @staticmethod
    def apply(x: Tensor, w_true_t: Tensor, w_false_t: Tensor, mask: Tensor) -> Tensor:
        """``x w_true_t`` where the mask is set, else ``x w_false_t``.

        Args:
            x: [..., k].
            w_true_t, w_false_t: [k, n], transposed views of the weights.
            mask: bool [...].

        Returns:
            [..., n].
        """
        return ops.masked_linear(x, mask, _turned("w_true_t", w_true_t),
                                 _turned("w_false_t", w_false_t))


class MaskedFFN:
    """Two gated MLPs behind a mask: ``MaskedFFN.apply(x, w1_t, w2_t, w3_t, u1_t, u2_t, u3_t, mask)``."""

    @staticmethod
    def apply(x: Tensor, w1_t: Tensor, w2_t: Tensor, w3_t: Tensor, u1_t: Tensor, u2_t: Tensor,
              u3_t: Tensor, mask: Tensor) -> Tensor:
        """``(silu(x w1_t) ⊙ (x w3_t)) w2_t`` where the mask is set, else the same with u.

        Args:
            x: [..., d].
            w1_t, w3_t, u1_t, u3_t: [d, h], transposed views of the weights.
            w2_t, u2_t: [h, d].
            mask: bool [...].

        Returns:
            [..., d].
        """
        weights = dict(w1_t=w1_t, w3_t=w3_t, w2_t=w2_t, u1_t=u1_t, u3_t=u3_t, u2_t=u2_t)
        return ops.masked_ffn(x, mask, *(_turned(name, w) for name, w in weights.items()))
