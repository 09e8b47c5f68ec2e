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
    """The router of a mixture: the `top_k` experts of each token, and their weights.

    Args:
        logits: Router's logits, [..., experts].
        top_k: Number of experts per token.
        bias: Added to the scores for the choice alone, [experts], as in `DeepSeek-V3
            <https://arxiv.org/abs/2412.19437>`_.
        score: "softmax" or "sigmoid" of the logits.
        order: "before": the softmax is that of all logits. "after": the scores are the logits themselves, for
            `bias` and `group_score` too, and the weights are the softmax of the chosen ones.
        groups, top_groups: If not 0, experts are divided into `groups` groups of neighbours, and only
            those of the best `top_groups` groups can be chosen.
        group_score: A group's score, "max" of its experts' scores or "top2" for the sum of the best two.
        renormalise: Divide a token's weights by their sum.
        scale: Factor of the weights.

    Returns:
        (ids, weights): int32 and float32 [..., top_k], the best first, as `moe_ffn` takes them. The
        weights have gradients to the logits.
    """
    weights, ids = call(OPS.moe_route, logits, bias, top_k, score, order, groups,
                        top_groups, group_score, renormalise, scale)
    return ids, weights
