"""moe_route: the router's choice in a mixture of experts."""
from torch import Tensor

from .._custom import OPS, call
from .._declare import declare
from .._library import Error


def _expect_choices(top_k, **_):
    if isinstance(top_k, int) and top_k < 1:
        raise Error(f"moe-route: top_k is {top_k}: give 1 or more")


declare("moe_route", "moe-route", "logits, bias:floats?, top_k, score, order, groups, top_groups, "
        "group_score, renormalise:bool, scale", "weights, ids", check=_expect_choices, by_row=True,
        gradient="moe_route_backward")
declare("moe_route_backward", "moe-route", "d_weights:floats, logits, ids:ints, score, order, "
        "renormalise:bool, scale", "d_logits", back=True)


def moe_route(logits: Tensor, top_k: int, *, bias: Tensor | None = None, score: str = "softmax",
              order: str = "before", groups: int = 0, top_groups: int = 0,
              group_score: str = "max", renormalise: bool = False, scale: float = 1.0
              ) -> tuple[Tensor, Tensor]:
    """(ids, weights): the `top_k` experts that each token chooses, the best first, and their
    weights, as `moe_ffn` takes them.

    `logits` [..., experts]. Returns int32 [..., top_k] and float32 [..., top_k]; the weights have
    gradients to the logits. `score`: "softmax" of all logits, or with order="after" of those chosen
    alone; or "sigmoid". `bias` [experts]: is added to the scores for the choice alone (DeepSeek).
    With `groups` groups of neighbours only the best `top_groups` take part, by their best expert or
    with group_score="top2" by the sum of their best two. `renormalise`: a token's weights add up to
    `scale`, which otherwise only multiplies them.
    """
    weights, ids = call(OPS.moe_route, logits, bias, top_k, score, order, groups,
                        top_groups, group_score, renormalise, scale)
    return ids, weights
