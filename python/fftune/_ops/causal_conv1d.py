"""causal_conv1d: depthwise causal convolution of sequences, and its states."""
import torch
from torch import Tensor

from .._checks import expect_one_of, flag, has_sizes
from .._custom import OPS, call
from .._declare import FROZEN, declare
from .._library import Error

_ROWS = "[batch, tokens, channels], or [tokens, channels] with offsets"
_SHAPES = {**dict.fromkeys(("x", "dy"), "[..., tokens, channels]"), "offsets": "[sequences + 1]",
           "indices": "[sequences]", "has_state": "[sequences]", "accepted": "[sequences]"}


def _laid(x: Tensor) -> tuple:
    """x as the kernels read it: channels next to each other, tokens a constant stride apart, which is None
    where it is the number of channels. On a GPU all tokens are at addresses of 16 bytes, if x is a view."""
    if x.is_contiguous() and not (x.is_cuda and x.data_ptr() & 15):
        return x, None
    row, step = x.stride(-2), 16 // x.element_size() if x.is_cuda else 1
    if x.dim() < 2 or x.stride(-1) != 1 or row < x.shape[-1] or row % step or (
            x.is_cuda and x.data_ptr() & 15) or (
            x.dim() == 3 and x.shape[0] > 1 and x.stride(0) != row * x.shape[1]):
        return x.clone(memory_format=torch.contiguous_format), None
    return x, row


def _laid_state(state: Tensor) -> tuple:
    """The same of states, which are a constant stride apart."""
    if state.is_contiguous() and not (state.is_cuda and state.data_ptr() & 15):
        return state, None
    row, step = state.stride(0), 16 // state.element_size() if state.is_cuda else 1
    if state.dim() != 3 or not state[0].is_contiguous() or row < state[0].numel() or row % step or (
            state.is_cuda and state.data_ptr() & 15):
        return state.clone(memory_format=torch.contiguous_format), None
    return state, row


def _check(x, w, offsets, state=None, accepted=None, state_order="entries", **_):
    if x.dim() != (2 if offsets is not None else 3):
        raise Error(f"causal-conv1d: x is {list(x.shape)}: give {_ROWS}")
    if accepted is None or offsets is not None or state.dim() != 3:
        return  # the tokens of packed sequences are on the device
    entries, least = state.shape[2 if state_order == "channels" else 1], w.shape[-1] - 2 + x.shape[1]
    if entries < least:
        raise Error(f"causal-conv1d: state has {entries} entries: accepted asks for {least}, width - 2 and one for "
                    f"each of {x.shape[1]} tokens")


def _fill(fields, offsets, **_):
    fields["layout"] = "bsc" if offsets is None else "sc"


def _bytes(has_state: Tensor | None) -> Tensor | None:
    return has_state.view(torch.uint8) if has_state is not None and has_state.dtype is torch.bool else has_state


_OF_X = {"x": (_laid, ["x-row"])}
_RULES = {"shapes": _SHAPES, "check": _check, "fill": _fill}
_PASS = {"state": "pass"}
_PLAIN = "w:row, bias:row?, offsets:ints?, act"
_STATES = "w:row, bias:row?, offsets:ints?, initial, act, state_order=state-order"
declare("causal_conv1d", "causal-conv1d", f"x, {_PLAIN}", "y", gradient="causal_conv1d_backward", lays=_OF_X,
        **_RULES)
declare("causal_conv1d_backward", "causal-conv1d", f"dy, x, {_PLAIN}", "dx:x, dw:w, dbias:bias?bias", back=True,
        lays=_OF_X, **_RULES)
declare("causal_conv1d_frozen_backward", "causal-conv1d", f"dy, x, {_PLAIN}", "dx:x", back=True, fixed=FROZEN,
        lays=_OF_X, **_RULES)
declare("causal_conv1d_states", "causal-conv1d", f"x, {_STATES}", "y, final:initial", lays=_OF_X,
        gradient="causal_conv1d_states_backward", fixed=_PASS, **_RULES)
declare("causal_conv1d_states_backward", "causal-conv1d", f"dy, dfinal=d_final, x, {_STATES}",
        "dx:x, dw:w, dbias:bias?bias, dinitial=d_initial:initial", back=True, fixed=_PASS, lays=_OF_X, **_RULES)
declare("causal_conv1d_states_frozen_backward", "causal-conv1d", f"dy, dfinal=d_final, x, {_STATES}",
        "dx:x, dinitial=d_initial:initial", back=True, fixed={**FROZEN, **_PASS}, lays=_OF_X, **_RULES)
declare("causal_conv1d_update", "causal-conv1d",
        "x, w:row, bias:row?, offsets:ints?, indices:ints?, has_state:mask?, accepted:ints?, state!, act, "
        "state_order=state-order, first_slot=first-slot:int", "y", fixed={"state": "update"},
        prepare={"has_state": _bytes},
        lays={**_OF_X, "state": (_laid_state, ["state-row"])}, **_RULES)


def causal_conv1d(x: Tensor, w: Tensor, bias: Tensor | None = None, *, act: str = "none",
                  offsets: Tensor | None = None, initial: Tensor | None = None, final: bool = False,
                  state_order: str = "entries") -> Tensor | tuple[Tensor, Tensor]:
    """``act(bias[c] + Σ_j w[c, j] x[t - (width - 1) + j, c])``: a depthwise causal convolution.

    Inputs before a sequence's first token are zeros, or come from `initial`.

    Args:
        x: [batch, tokens, channels]; with `offsets` [tokens, channels], all sequences one after the other.
            Columns of a wider tensor are read where they are.
        w: Taps, [channels, width], of x's element type or float32. The last one multiplies the token itself.
            Width is 2 to 8.
        bias: [channels].
        act: "none" or "silu".
        offsets: Where each sequence begins among the tokens, int32 [sequences + 1]. Rows behind the last offset
            are zeros.
        initial: The last inputs before the first token, the oldest first: [sequences, entries, channels], of
            width - 1 entries or more.
        final: Return the last inputs of each sequence too, as many as `initial` has, or width - 1.
        state_order: "entries" for states [sequences, entries, channels], "channels" for [sequences, channels,
            entries].

    Returns:
        y of x's shape, or (y, last inputs) with `final`. All have gradients.
    """
    final = flag("causal-conv1d", "final", final)
    expect_one_of("causal-conv1d: state_order", state_order, ("entries", "channels"))
    makes = final and initial is None and all(
        has_sizes(t) and t.is_floating_point() and t.dim() > 1 for t in (x, w))
    if initial is None and not makes:  # an error, if `final`
        return call(OPS.causal_conv1d, x, w, bias, offsets, act)
    if initial is None:
        count = (x.shape[0] if offsets is None else offsets.shape[0] - 1,)
        state = (max(w.shape[-1] - 1, 0), x.shape[-1])
        shape = count + (state if state_order == "entries" else state[::-1])
        initial = torch.zeros(shape, dtype=x.dtype, device=x.device)
    if has_sizes(x) and has_sizes(initial) and x.numel() == 0:
        y, last = x.new_empty(x.shape), initial.clone()
    else:
        y, last = call(OPS.causal_conv1d_states, x, w, bias, offsets, initial, act, state_order)
    return (y, last) if final else y


def causal_conv1d_update(x: Tensor, w: Tensor, bias: Tensor | None = None, *, state: Tensor, act: str = "none",
                         offsets: Tensor | None = None, indices: Tensor | None = None, first_slot: int = 0,
                         has_state: Tensor | None = None, accepted: Tensor | None = None,
                         state_order: str = "entries") -> Tensor:
    """`causal_conv1d` of the next tokens of sequences whose last inputs are in `state`, which is updated in place.

    One token or any number of them, in prefill and decoding. No gradients.

    Args:
        x, w, bias, act, offsets: As in `causal_conv1d`.
        state: [slots, entries, channels], or [slots, channels, entries] with ``state_order="channels"``: the last
            inputs, before the convolution, the oldest first. Width - 1 entries or more. Slots may be any
            multiple of 16 bytes apart, as in pages.
        indices: The slot of each sequence, int32 [sequences]; without it slot i is that of sequence i. Two
            sequences must not share a slot.
        first_slot: Sequences with a lower index are padding: their rows are zeros, and no state is touched.
        has_state: Bool [sequences]: False where the state's contents do not count, as in a first prompt.
        accepted: int32 [sequences], for the verification of drafts: how many tokens of the last call were
            accepted. The new state then keeps the history of each of this call's tokens, for which it needs
            width - 2 + tokens entries.
        state_order: As in `causal_conv1d`.

    Returns:
        y of x's shape.
    """
    return call(OPS.causal_conv1d_update, x, w, bias, offsets, indices, has_state, accepted, state, act,
                state_order, first_slot)
