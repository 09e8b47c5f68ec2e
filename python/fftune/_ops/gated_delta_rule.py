"""gated_delta_rule: linear attention whose state decays, erases and writes."""
import torch
from torch import Tensor

from .._checks import count_of, flag, has_sizes
from .._custom import OPS, call, gradient, wants_gradient
from .._declare import declare
from .._library import Error
from .._run import ready
from .attention import _rowed

_HEADS = "[..., tokens, heads, features]"
_SHAPES = {**dict.fromkeys(("q", "k", "v", "out", "d_out"), _HEADS),
           **dict.fromkeys(("g", "a"), "[..., tokens, heads]"),
           **dict.fromkeys(("beta", "beta_logits"), "[..., tokens, heads]"),
           "dt_bias": "[...]", "offsets": "[sequences + 1]",
           **dict.fromkeys(("initial_state", "states", "d_final_state"),
                           "[sequences, heads, features, features]"),
           **dict.fromkeys(("has_state", "accepted"), "[sequences]"),
           "state_indices": "[..., sequences]"}
_GATES = "g:f32?, a?, A_log:f32?, dt_bias:f32?, beta:f32?, beta_logits?"
_RULES = "gate, decay, qk_norm, scale, beta_scale, gate_bound"


def _gate_row(a: Tensor | None, b: Tensor | None) -> int | None:
    """Elements from a token's gates to the next token's, of two parts of wider rows; None if they
    are laid out in another way, or have no other values in between."""
    if a is None or b is None or a.shape != b.shape or a.is_contiguous() and b.is_contiguous():
        return None
    *lead, tokens, heads = a.shape
    batch = lead[0] if lead else 1
    row = a.stride(-2) if tokens > 1 or not lead else a.stride(-3)
    good = all(t.stride(-1) == 1 and (tokens == 1 or t.stride(-2) == row)
               and (batch == 1 or t.stride(-3) == tokens * row) for t in (a, b))
    return row if good and row > heads else None


def _laid_a(a: Tensor | None, beta_logits: Tensor | None) -> tuple[Tensor | None, int | None]:
    row = _gate_row(a, beta_logits)
    return (a, row) if row else (None if a is None else ready(a), None)


def _laid_logits(beta_logits: Tensor | None, a: Tensor | None) -> tuple[Tensor | None, int | None]:
    # The library has one stride for both: it comes with a.
    return (beta_logits if _gate_row(a, beta_logits) or beta_logits is None else ready(beta_logits),)


def _laid_states(states: Tensor) -> tuple[Tensor, int | None]:
    """A cache whose entries may be apart, as those of pages that hold other states too."""
    own = states[0].numel() if len(states) else 0
    block = states.stride(0)
    if len(states) < 2 or not states[0].is_contiguous() or block < own or states.is_cuda and (
            states.data_ptr() | block * states.element_size()) & 15:
        return ready(states.contiguous()), None
    return states, None if block == own else block


def expect_indices(op: str, state_indices: Tensor | None, accepted: Tensor | None) -> None:
    if state_indices is not None and state_indices.dim() != (1 if accepted is None else 2):
        raise Error(f"{op}: state_indices is {list(state_indices.shape)}: give [sequences], or [sequences, slots] "
                    "with accepted")


def _check(q, k, v, g, a, A_log, dt_bias, beta, beta_logits, offsets, gate, state_indices=None, accepted=None, **_):
    packed = offsets is not None
    if q.dim() != (3 if packed else 4):
        raise Error(f"gated-delta-rule: q is {list(q.shape)}: give [batch, tokens, heads, features], "
                    "or [tokens, heads, features] with offsets")
    for name, t in (("k", k), ("v", v)):
        if t.dim() != q.dim() or t.shape[:-2] != q.shape[:-2]:
            raise Error(f"gated-delta-rule: {name} is {list(t.shape)}, q {list(q.shape)}: give as "
                        "many tokens")
    if (g is None) == (a is None) or (a is None) != (gate == "log"):
        raise Error("gated-delta-rule: give g, or a with A_log and dt_bias")
    if a is not None and (A_log is None or dt_bias is None):
        raise Error("gated-delta-rule: a without A_log and dt_bias: give all three")
    if (beta is None) == (beta_logits is None):
        raise Error("gated-delta-rule: give beta or b, and not both")
    expect_indices("gated-delta-rule", state_indices, accepted)


def _sequences(q: Tensor, offsets: Tensor | None) -> int:
    return q.shape[0] if offsets is None else offsets.shape[0] - 1


_COMMON = dict(shapes=_SHAPES, check=_check, names={"beta_logits": "b"})
_LAYS = {**{t: (_rowed, [f"{t}-row"]) for t in "qkv"}, "a": (_laid_a, ["gate-row"]),
         "beta_logits": (_laid_logits, [])}
_BACKWARD = ("dq, dk, dv, dg:g?g, da:a?a, dA_log:A_log?A_log, ddt_bias:dt_bias?dt_bias, dbeta:beta?beta, "
             "dbeta_logits:beta_logits?beta_logits, d_initial_state?initial_state")


def _states_gradient(name: str, op: str, *, tensors: int, options: int, values: int) -> None:
    """The gradient of the op with states `name` by the op `name`_backward. Its arguments are `tensors`
    tensors, an initial state behind them; has_state and offsets; `options` options; the states' dtype,
    and whether the last ones are kept. `out` has the shape of the tensor with the index `values`."""
    first_option = tensors + 2

    def save(ctx, inputs, output):
        has_state, offsets = inputs[tensors:first_option]
        if has_state is not None:
            raise Error(f"{op}: has_state has no gradients: give an initial_state of zeros")
        ctx.set_materialize_grads(False)
        ctx.options, ctx.keeps = inputs[first_option:first_option + options], inputs[-1]
        ctx.save_for_backward(*inputs[:tensors], offsets)

    @gradient(name, save)
    def _(ctx, d_out, d_final_state):
        *given, offsets = ctx.saved_tensors
        if not ctx.keeps:
            d_final_state = None
        if d_out is None and d_final_state is None:
            return (None,) * (tensors + options + 4)
        if d_out is None:
            d_out = torch.zeros_like(given[values], memory_format=torch.contiguous_format)
        if d_final_state is not None:
            d_final_state = d_final_state.float()
        found = call(getattr(OPS, f"{name}_backward"), d_out, d_final_state, *given, offsets, *ctx.options)
        gradients = [None if t is None else d.to(t.dtype) for t, d in zip(given, found)]
        return *gradients, *(None,) * (options + 4)


def _declare(end: str, layout: str) -> None:
    """The ops of states of one layout: the results' shapes follow from it."""
    fixed = {"state-layout": layout}
    declare(f"gated_delta_rule{end}", "gated-delta-rule",
            f"q, k, v, {_GATES}, initial_state:state?, has_state:mask?, offsets:ints?, {_RULES}, "
            "state_dtype, keep=final-state:bool", "out, final_state?keep", lays=_LAYS,
            sizes={"b": _sequences},
            fixed={"indices": "no", "states": "", "state-block": "", "slots": "", **fixed}, **_COMMON)
    declare(f"gated_delta_rule_update{end}", "gated-delta-rule",
            f"q, k, v, {_GATES}, states:state!, state_indices:ints, has_state:mask?, offsets:ints?, "
            f"{_RULES}, null_index:float, accepted:ints?", "out",
            lays={**_LAYS, "states": (_laid_states, ["state-block"])},
            fixed={"indices": "yes", "initial-state": "no", "final-state": "no", **fixed}, **_COMMON)
    declare(f"gated_delta_rule{end}_backward", "gated-delta-rule",
            f"d_out, d_final_state:f32?, q, k, v, {_GATES}, initial_state:state?, offsets:ints?, {_RULES}",
            _BACKWARD, back=True, lays=_LAYS, sizes={"b": _sequences}, fixed=fixed, **_COMMON)
    _states_gradient(f"gated_delta_rule{end}", "gated-delta-rule", tensors=10, options=6, values=2)


_declare("", "vk")
_declare("_kv", "kv")


def kept_state(initial_state: Tensor, has_state: Tensor | None) -> Tensor:
    """What a call without tokens leaves: the states that its sequences begin with. No kernel runs."""
    kept = initial_state.clone()
    return kept if has_state is None else torch.where(has_state.bool()[:, None, None, None], kept, 0)


def _wide(t: Tensor | None) -> Tensor | None:
    return t.float() if has_sizes(t) and t.dtype in (torch.bfloat16, torch.float16, torch.float64) else t


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None,
                     beta: Tensor | None = None, *, a: Tensor | None = None,
                     A_log: Tensor | None = None, dt_bias: Tensor | None = None,
                     b: Tensor | None = None, gate: str = "softplus", gate_bound: float = -5.0,
                     beta_scale: float = 1.0, qk_norm: bool = False, scale: float = 0.0,
                     initial_state: Tensor | None = None, states: Tensor | None = None,
                     state_indices: Tensor | None = None, null_index: int = 0,
                     has_state: Tensor | None = None, offsets: Tensor | None = None,
                     accepted: Tensor | None = None, state_layout: str = "vk", return_state: bool = False
                     ) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo-Hybrid, and Kimi Delta Attention: linear
    attention whose state S of each value head decays, erases what it holds for a key, and writes::

        S = S · exp(g);  delta = beta (v - S k);  S = S + delta kᵀ;  out = scale · S q

    Value head j reads q and k of head ``j // (value_heads // heads)``. Heads of q and k, and heads of v,
    have up to 256 features each, which may differ. One op serves prompts, training and decoding.

    Args:
        q, k: [batch, tokens, heads, features]; with `offsets` [tokens, heads, features], all sequences
            one after the other. q, k and v may be views of one packed row.
        v: [batch, tokens, value_heads, value_features].
        g: Log of the decay, float32 [batch, tokens, value_heads], or for a decay of each feature of k
            [batch, tokens, value_heads, features]. Instead: `a`, `A_log` and `dt_bias`.
        beta: How much is erased and written, float32 [batch, tokens, value_heads]. Instead: `b`.
        a: Input of the gate, shaped as g: with gate="softplus" ``g = -exp(A_log) softplus(a + dt_bias)``,
            with gate="bounded" ``g = gate_bound · sigmoid(exp(A_log) (a + dt_bias))``. a and b may be
            views of one packed row.
        A_log: [value_heads], float32.
        dt_bias: [value_heads], or [value_heads · features] with a decay of each feature, float32.
        b: ``beta = beta_scale · sigmoid(b)``, [batch, tokens, value_heads].
        gate: "softplus" or "bounded", the meaning of a.
        gate_bound: The least g of gate="bounded".
        beta_scale: 2 where states may have negative eigenvalues, as in OLMo-Hybrid.
        qk_norm: Divide q and k by ``sqrt(sum of squares + 1e-6)`` first.
        scale: Factor of out, not negative; 0 for ``1 / sqrt(features)``.
        initial_state: [sequences, value_heads, value_features, features] in float32 or bfloat16; zeros if
            None. Its gradient is float32.
        states: Instead of that a cache [entries, value_heads, value_features, features], updated in
            place: sequence i begins and ends with the entry ``state_indices[i]``. Entries may be apart,
            as a view of pages. It has no gradient.
        state_indices: int32 [sequences]. An index of at most `null_index`, or beyond the last entry, is
            padding: its out is 0, and no entry is read or written. No two others are the same.
        null_index: 0, or -1 where entry 0 is a sequence's.
        has_state: bool [sequences]: False where a sequence begins with zeros instead of its state.
        offsets: Where each sequence begins among the tokens, int32 [sequences + 1]. Tokens of no
            sequence are left unwritten.
        accepted: int32 [sequences], for the verification of drafts: how many tokens of the last call were
            accepted. A sequence then has an entry for each token, ``state_indices`` [sequences, slots]: it
            begins with that of slot ``accepted[i] - 1``, and the state behind its token t goes to slot t.
            No state is written where the index is padding, nor behind tokens that have no slot.
        state_layout: "vk" for states as above, "kv" for [.., features, value_features].
        return_state: Return the states behind the last tokens too. An empty sequence keeps its own.

    Returns:
        out like v; with `return_state` (out, final_state), of initial_state's type or float32. All
        tensor arguments but `states` have gradients, with the same bits in every run.
    """
    if beta is not None and b is not None:
        raise Error("gated-delta-rule: give beta or b, and not both")
    gates = g if a is None else a
    decay = "head"
    if has_sizes(gates) and has_sizes(q) and gates.dim() == q.dim():
        decay = "channel"
    if not isinstance(state_layout, str) or state_layout not in ("vk", "kv"):
        raise Error(f"gated-delta-rule: state_layout is {state_layout!r}: give 'vk' or 'kv'")
    end = "" if state_layout == "vk" else "_kv"
    rules = ("log" if a is None else gate, decay,
             "l2" if flag("gated-delta-rule", "qk_norm", qk_norm) else "none", scale, beta_scale,
             gate_bound)
    tensors = q, k, v, _wide(g), a, _wide(A_log), _wide(dt_bias), _wide(beta), b
    if states is None:
        if state_indices is not None or accepted is not None:
            raise Error("gated-delta-rule: state_indices or accepted without states: give states too")
        keep = flag("gated-delta-rule", "return_state", return_state)
        dtype = "bf16" if has_sizes(initial_state) and initial_state.dtype is torch.bfloat16 else "f32"
        out, final_state = call(getattr(OPS, f"gated_delta_rule{end}"), *tensors, initial_state,
                                has_state, offsets, *rules, dtype, keep)
        if keep and initial_state is not None and not q.numel():
            final_state = kept_state(initial_state, has_state)
        return (out, final_state) if keep else out
    if initial_state is not None or return_state:
        raise Error("gated-delta-rule: initial_state or return_state with states: these are updated "
                    "in place")
    if wants_gradient(*tensors, states):
        raise Error("gated-delta-rule: states in a cache have no gradients: give initial_state")
    return call(getattr(OPS, f"gated_delta_rule_update{end}"), *tensors, states, state_indices,
                has_state, offsets, *rules, float(count_of("gated-delta-rule", "null_index", null_index)), accepted)
