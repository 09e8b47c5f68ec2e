"""masked_softmax: the softmax of scores that are in memory."""
from torch import Tensor

from .._checks import has_sizes, spread
from .._custom import OPS, call
from .._declare import declare
from .._library import Error

CAUSAL = {"causal": {True: "causal", False: None}}  # by the option of masks


def _expect_mask(x, mask, causal, **_):
    if mask is not None and causal:
        raise Error("masked-softmax: causal and a mask: give a mask that is causal itself")
    if mask is not None and mask.shape[1] not in (1, x.shape[1]):
        raise Error(f"masked-softmax: the mask is {list(mask.shape)}: give [batch, 1 or heads, "
                    "queries, keys]")


def _fill(fields, mask, **_):
    if mask is not None:
        fields["mask"] = "bool"


_SHAPES = {**dict.fromkeys(("x", "y", "dy"), "[batch, heads, queries, keys]"),
           "mask": "[batch, 1 or heads, queries, keys]"}
declare("masked_softmax", "masked-softmax", "x, mask:mask?, causal=mask:bool, scale", "y",
        shapes=_SHAPES, words=CAUSAL, check=_expect_mask, fill=_fill,
        gradient="masked_softmax_backward")
declare("masked_softmax_backward", "masked-softmax", "dy, y, causal=mask:bool, scale", "dx",
        back=True, shapes=_SHAPES, words=CAUSAL)


def masked_softmax(x: Tensor, mask: Tensor | None = None, *, causal: bool = False,
                   scale: float = 1.0) -> Tensor:
    """``softmax(scale · x)`` over the last dimension, of the visible columns of each row.

    Args:
        x: Scores, [batch, heads, queries, keys].
        mask: bool [batch, 1 or heads, queries, keys], True where a column is visible; or a mask that
            PyTorch broadcasts to that.
        causal: Instead of a mask, each row sees no column behind its own; the last row is aligned with
            the last column.
        scale: Factor of the scores, not negative.

    Returns:
        A tensor like x. Masked elements are 0, and so is a row without visible columns.
    """
    if has_sizes(x) and x.dim() == 4:
        mask = spread(mask, x.shape[0], x.shape[2], x.shape[3])
    return call(OPS.masked_softmax, x, mask, causal, scale)
