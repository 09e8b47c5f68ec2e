"""ssd: state space duality, the core of Mamba-2."""
import torch
from torch import Tensor

from .._checks import count_of, flag, has_sizes
from .._custom import OPS, call, wants_gradient
from .._declare import declare
from .._library import Error
from .attention import _rowed
from .gated_delta_rule import _laid_states, _states_gradient, _wide, expect_indices, kept_state

_SHAPES = {**dict.fromkeys(("x", "d_out"), "[..., tokens, heads, features]"),
           **dict.fromkeys(("B", "C"), "[..., tokens, groups, state_features]"),
           "dt": "[..., tokens, heads]", "offsets": "[sequences + 1]",
           **dict.fromkeys(("initial_state", "states", "d_final_state"),
                           "[sequences, heads, features, state_features]"),
           **dict.fromkeys(("has_state", "accepted"), "[sequences]"),
           "state_indices": "[..., sequences]"}
_INPUTS = "x, dt, A:f32?, A_log:f32?, B, C, D:f32?, dt_bias:f32?"
_RULES = "softplus:bool, dt_min=dt-min:float, dt_max=dt-max:float"


def _laid_dt(dt: Tensor) -> tuple[Tensor, int | None]:
    laid, row = _rowed(dt.unsqueeze(-1))
    return laid.squeeze(-1), row


def _check(x, dt, A, A_log, B, C, offsets, state_indices=None, accepted=None, **_):
    packed = offsets is not None
    if x.dim() != (3 if packed else 4):
        raise Error(f"ssd: x is {list(x.shape)}: give [batch, tokens, heads, features], or "
                    "[tokens, heads, features] with offsets")
    for name, t in (("dt", dt[..., None] if dt.dim() > 0 else dt), ("B", B), ("C", C)):
        if t.dim() != x.dim() or t.shape[:-2] != x.shape[:-2]:
            raise Error(f"ssd: {name} is {list(t.shape[:-1] if name == 'dt' else t.shape)}, x {list(x.shape)}: "
                        "give as many tokens")
    if (A is None) == (A_log is None):
        raise Error("ssd: give A or A_log, and not both")
    expect_indices("ssd", state_indices, accepted)


def _sequences(x: Tensor, offsets: Tensor | None) -> int:
    return x.shape[0] if offsets is None else offsets.shape[0] - 1


_COMMON = dict(shapes=_SHAPES, check=_check)
_LAYS = {"x": (_rowed, ["x-row"]), "B": (_rowed, ["b-row"]), "C": (_rowed, ["c-row"]), "dt": (_laid_dt, ["dt-row"])}

declare("ssd", "ssd",
        f"{_INPUTS}, initial_state:state?, has_state:mask?, offsets:ints?, {_RULES}, state_dtype, "
        "keep=final-state:bool", "out, final_state?keep", lays=_LAYS, sizes={"b": _sequences},
        fixed={"indices": "no", "states": "", "state-block": "", "slots": ""}, **_COMMON)
declare("ssd_update", "ssd",
        f"{_INPUTS}, states:state!, state_indices:ints, has_state:mask?, offsets:ints?, {_RULES}, "
        "null_index:float, accepted:ints?", "out", lays={**_LAYS, "states": (_laid_states, ["state-block"])},
        fixed={"indices": "yes", "initial-state": "no", "final-state": "no"}, **_COMMON)
declare("ssd_backward", "ssd",
        f"d_out, d_final_state:f32?, {_INPUTS}, initial_state:state?, offsets:ints?, {_RULES}",
        "dx, ddt, dA:A?A, dA_log:A_log?A_log, dB, dC, dD:D?D, ddt_bias:dt_bias?dt_bias, "
        "d_initial_state?initial_state", back=True, lays=_LAYS, sizes={"b": _sequences}, **_COMMON)
_states_gradient("ssd", "ssd", tensors=9, options=3, values=0)


def ssd(x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, D: Tensor | None = None, *,
        A_log: Tensor | None = None, dt_bias: Tensor | None = None, softplus: bool = True,
        dt_limit: tuple[float, float] = (0.0, float("inf")), initial_state: Tensor | None = None,
        states: Tensor | None = None, state_indices: Tensor | None = None, null_index: int = 0,
        has_state: Tensor | None = None, offsets: Tensor | None = None, accepted: Tensor | None = None,
        return_state: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """State space duality, the core of Mamba-2, Bamba, Falcon-H1, Granite 4 and Nemotron-H: linear
    attention whose state S of each head decays, and to which each token is added::

        dt = softplus(dt + dt_bias), within dt_limit
        S = exp(dt A) S + (dt x) Bᵀ;  out = S C + D x

    Head j reads B and C of group ``j // (heads // groups)``. Heads have up to 256 features, and groups as
    many. One op serves prompts, training and decoding. Infinities in out and in states are NaN.

    Args:
        x: [batch, tokens, heads, features]; with `offsets` [tokens, heads, features], all sequences one
            after the other. x, B and C may be views of one packed row, and dt of another.
        dt: Steps, [batch, tokens, heads].
        A: [heads], negative, float32; None with `A_log`.
        B, C: [batch, tokens, groups, state_features].
        D: [heads], float32; nothing is added to out if None.
        A_log: Instead of A, which is ``-exp(A_log)``, [heads], float32.
        dt_bias: [heads], float32; none if None.
        softplus: Whether dt is the softplus of its input.
        dt_limit: The least dt, not negative, and the largest one.
        initial_state: [sequences, heads, features, state_features] in float32 or bfloat16; zeros if None.
            Its gradient is float32.
        states: Instead of that a cache [entries, heads, features, state_features], updated in place:
            sequence i begins and ends with the entry ``state_indices[i]``. Entries may be apart, as a
            view of pages. It has no gradient.
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
        return_state: Return the states behind the last tokens too. An empty sequence keeps its own.

    Returns:
        out like x; with `return_state` (out, final_state), of initial_state's type or float32. All
        tensor arguments but `states` have gradients, with the same bits in every run.
    """
    if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2 or not all(
            isinstance(limit, (int, float)) for limit in dt_limit):
        raise Error(f"ssd: dt_limit is {dt_limit!r}: give the least and the largest dt")
    least, most = map(float, dt_limit)
    if not 0 <= least <= most or most == 0:
        raise Error(f"ssd: dt_limit is {dt_limit!r}: give a least dt of 0 or more, and no smaller largest one")
    rules = flag("ssd", "softplus", softplus), least, 0.0 if most == float("inf") else most
    tensors = x, dt, _wide(A), _wide(A_log), B, C, _wide(D), _wide(dt_bias)
    if states is None:
        if state_indices is not None or accepted is not None:
            raise Error("ssd: state_indices or accepted without states: give states too")
        keep = flag("ssd", "return_state", return_state)
        dtype = "bf16" if has_sizes(initial_state) and initial_state.dtype is torch.bfloat16 else "f32"
        out, final_state = call(OPS.ssd, *tensors, initial_state, has_state, offsets, *rules, dtype, keep)
        if keep and initial_state is not None and not x.numel():
            final_state = kept_state(initial_state, has_state)
        return (out, final_state) if keep else out
    if initial_state is not None or return_state:
        raise Error("ssd: initial_state or return_state with states: these are updated in place")
    if wants_gradient(*tensors, states):
        raise Error("ssd: states in a cache have no gradients: give initial_state")
    return call(OPS.ssd_update, *tensors, states, state_indices, has_state, offsets, *rules,
                float(count_of("ssd", "null_index", null_index)), accepted)
