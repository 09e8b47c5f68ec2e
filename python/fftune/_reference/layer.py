"""A transformer layer, by the definitions of its parts."""
import math

import torch
import torch.nn.functional as F

from .._layer_form import LayerForm, parse, with_constants
from .._library import Error
from .causal_conv1d import causal_conv1d_update
from .common import ACTIVATIONS, _wide
from .elementwise import act_mul
from .experts import moe_ffn, moe_ffn_fp8_block, moe_ffn_fp8_token, moe_route
from .gated_delta_rule import gated_delta_rule_update
from .linear import linear_fp8_block, linear_fp8_token
from .mla import head_linear, mla, mla_rope
from .norms import gated_rmsnorm, layernorm, rmsnorm
from .packed import _dense
from .rope import _rotated, angles_at
from .ssd import ssd_update


_ACTIVATIONS = {**ACTIVATIONS, "relu2": lambda x: torch.relu(x).square()}


def _expect_no_group(op, memory):
    if memory is not None:
        raise Error(f"{op}: the reference has no sums over the ranks of a group: unset FFTUNE_DISABLE")


def _packed_sizes(form: LayerForm, d: int) -> dict[str, tuple[int, int]]:
    """[n, k] of the packed weights; of all experts, the rows of one behind those of the other."""
    h, heads = form.get("h"), form.get("heads") * form.get("dim")
    experts = form.get("own-experts", form.get("experts", 1))
    columns = heads + 2 * form.get("kv-heads") * form.get("dim")
    attention = {} if form.get("attn-weights") == "dense" else {"w_qkv": (columns, d), "w_o": (d, heads)}
    return attention | {"w_gate": (experts * h, d), "w_up": (experts * h, d), "w_down": (experts * d, h)}


def layer(x, positions, angles, slots, lengths, pages, weights, caches, form, memory=None, first_expert=None):
    _expect_no_group("layer", memory)
    found = parse(form)
    count, states = len(found.weights), found.states
    for at in range(len(weights) // count):
        own = dict(zip(found.weights, weights[at * count:(at + 1) * count]))
        for name, (n, k) in _packed_sizes(found, x.shape[-1]).items() if found.get("packed") else ():
            format, group = found.get("packed").split("-")
            own[name] = _dense(format, *(own.get(f"{name}{part}") for part in ("", "_scale", "_zero")),
                               n, k, group, x.dtype)
            if found.get("experts") and name not in ("w_qkv", "w_o"):
                own[name] = own[name].view(found.get("experts"), -1, k)
        if found.constants:
            own = with_constants(found, own, x)
        x = _one_layer(x, positions, angles, slots, lengths, pages, own,
                       caches[states * at:states * at + states], found)
    return x


def network(x, weights, form):
    return layer(x, None, None, None, None, None, weights, [], form)


def _convolution(x, w, state, form):
    """A gated short convolution, with the last inputs in `state` [batch, channels, width]."""
    gate, factor, values = F.linear(x, w["w_in"], w.get("b_in")).chunk(3, -1)
    inputs = torch.cat((state.mT, gate * values), 1)
    state.copy_(inputs[:, -form.get("width"):].mT)
    taps, bias = _wide(w["w_conv"]), _wide(w.get("b_conv"))
    mixed = F.conv1d(inputs[:, -x.shape[1] - form.get("width") + 1:].mT.to(taps.dtype), taps[:, None], bias,
                     groups=taps.shape[0]).mT
    return (mixed * factor.to(taps.dtype)).to(x.dtype)


def _latent_attention(x, positions, angles, slots, lengths, pages, w, cache, form):
    """Latent attention in its absorbed form, [batch, tokens, heads * features]; writes the cache."""
    eps, nope, rope, rank = (form.get(name) for name in ("latent-eps", "nope", "rope", "rank"))
    if "w_q_a" in w:
        q = F.linear(rmsnorm(F.linear(x, w["w_q_a"]), w["q_a_norm"], eps, form.get("convention")), w["w_q_b"])
    else:
        q = F.linear(x, w["w_q"])
    q = q.unflatten(-1, (-1, nope + rope))
    kv, rows = F.linear(x, w["w_kv_a"]), cache.view(-1, rank + rope)
    if "q_factors" in w:
        q = (_wide(q) * w["q_factors"][..., None, None]).to(x.dtype)
    q_rope = mla_rope(q, kv, w["kv_a_norm"], positions, angles, rows, slots,
                      form.get("rotation", "halves"), form.get("rope-order", "same"), eps, "table",
                      [0.0] * 7 + [form.get("rope-scale", 0.0)])
    w_kv_b = w["w_kv_b"].unflatten(0, (q.shape[2], -1))
    scale = form.get("scale") or (nope + rope) ** -0.5
    out, _ = mla(head_linear(q[..., :nope], w_kv_b[:, :nope].mT), q_rope, cache, pages, lengths, None, scale, False)
    return _gated(head_linear(out, w_kv_b[:, nope:]), x, w)


def _gated(attended, x, w):
    """[batch, tokens, features] of heads [batch, tokens, heads, dim], times sigmoids where a layer has gates."""
    if "w_g" in w:
        gates = torch.sigmoid(_wide(F.linear(x, w["w_g"]))).unflatten(-1, (attended.shape[2], -1))
        attended = (_wide(attended) * gates).to(x.dtype)
    return attended.flatten(2)


def _inputs_of_delta(x, w, form):
    """The rows of q, k and v, the gates of the output, the logits of beta, and the inputs of decays."""
    if "w_qkvz" not in w:
        rows = F.linear(x, w["w_qkv"]) if "w_qkv" in w else torch.cat(
            [F.linear(x, w[f"w_{part}"]) for part in "qkv"], -1)
        decays, gates = (F.linear(F.linear(x, w[f"{name}_low"]) if f"{name}_low" in w else x, w[name])
                         for name in ("w_a", "w_z"))
        return rows, gates, F.linear(x, w["w_b"]), decays
    (keys, values), heads, v_heads = form.features, form.get("heads"), form.get("v-heads")

    def parts(name, *features):
        blocks = F.linear(x, w[name]).unflatten(-1, (heads, -1))
        return [part.flatten(-2) for part in blocks.split([n // heads for n in features], -1)]

    q, k, v, gates = parts("w_qkvz", keys, keys, values, values)
    return torch.cat((q, k, v), -1), gates, *parts("w_ba", v_heads, v_heads)


def _delta_rule(x, w, states, slots, form):
    """Linear attention by the gated delta rule, normalised, with the last inputs of its convolutions and its states."""
    conv, recurrent = states
    (keys, values), heads, v_heads = form.features, form.get("heads"), form.get("v-heads")
    rows, gates, beta, decays = _inputs_of_delta(x, w, form)
    taps = w["w_conv"] if "w_conv" in w else torch.cat([w[f"w_conv_{part}"] for part in "qkv"])
    null = form.get("null-index", -1)
    mixed = causal_conv1d_update(rows, taps, None, None, slots if form.states_are_indexed else None, None, None, conv,
                                 "silu", form.get("conv-order", "channels"), null + 1)
    q, k, v = (t.unflatten(-1, (n, -1)) for t, n in zip(mixed.split((keys, keys, values), -1),
                                                        (heads, heads, v_heads)))
    of_features, bound = form.mixer == "kda", form.get("gate-bound")
    out = gated_delta_rule_update(
        q, k, v, None, decays.unflatten(-1, (v_heads, -1)) if of_features else decays, w["A_log"], w["dt_bias"], None,
        beta, recurrent, slots, None, None, "bounded" if bound else "softplus",
        "channel" if of_features else "head", "l2", 0.0, form.get("beta-scale", 1.0), bound or -5.0, null,
        layout=form.get("state-layout", "kv"))
    of_norm = ("after", "sigmoid", "t5", 1) if of_features else ("after", "silu", "llama", 1)
    return gated_rmsnorm(out, gates.unflatten(-1, (v_heads, -1)), w["mixer_norm"], form.get("mixer-eps"),
                         *of_norm).flatten(2)


def _state_space(x, w, states, slots, form):
    """State space duality, normalised behind a gate, with the last inputs of its convolutions and its states."""
    conv, recurrent = states
    heads, groups = form.state_heads[0], form.get("state-groups")
    features, channels = form.convolved[0], sum(form.convolved)
    gates, rows, steps = _scaled(F.linear(x, w["w_in"]), w, "in_scale").split((features, channels, heads), -1)
    mixed = causal_conv1d_update(rows, w["w_conv"], w.get("b_conv"), None, None, None, None, conv, "silu", "channels",
                                 0)
    inputs, B, C = (t.unflatten(-1, (n, -1)) for t, n in zip(mixed.split(form.convolved, -1), (heads, groups, groups)))
    out = ssd_update(inputs, steps, None, w["A_log"], B, C, w["D"], w["dt_bias"], recurrent, slots,
                     None, None, True, form.get("dt-min", 0.0), form.get("dt-max", 0.0), -1)
    if "mixer_norm" not in w:
        return (_wide(out.flatten(2)) * F.silu(_wide(gates))).to(x.dtype)
    return gated_rmsnorm(out.flatten(2), gates, w["mixer_norm"], form.get("mixer-eps"), "before",
                         "silu", "t5", groups)


def _scaled(y, w, *names):
    """y times the first of these vectors that there is."""
    scale = next((w[name] for name in names if name in w), None)
    return y if scale is None else (_wide(y) * scale.to(_wide(y).dtype)).to(y.dtype)


def _one_layer(x, positions, angles, slots, lengths, pages, w, caches, form):
    y = _unscaled(x, positions, angles, slots, lengths, pages, w, caches, form)
    if "layer_input" in w:
        mixed = act_mul(F.linear(y, w["w_input_gate"]), w["layer_input"], form.get("act"))
        y = y + rmsnorm(F.linear(mixed, w["w_input_out"]), w["input_norm"], form.get("eps"), form.get("convention"))
    return (_wide(y) * w["layer_scalar"].to(_wide(y).dtype)).to(x.dtype) if "layer_scalar" in w else y


def _unscaled(x, positions, angles, slots, lengths, pages, w, caches, form):
    eps = form.get("eps")

    def norm(t, name):
        if form.get("norm") == "layer":
            return layernorm(t, w[name], w[f"{name}_bias"], eps)
        return rmsnorm(t, w[name], eps, form.get("convention"))

    def scaled(y, own="ffn_scale"):
        return _scaled(y, w, "residual_scale", own)

    def added(y, name, residual):
        return residual + (norm(y, name) if form.get("post-norms") else y)

    normed = norm(x, "attn_norm") if "attn_norm" in w else x
    if not form.mixes:
        mid = x
    else:
        mixed = _mixed(normed, positions, angles, slots, lengths, pages, w, caches, form)
        mid = added(scaled(_product(mixed, w, "w_o", "b_o"), "out_scale"), "attn_post_norm", x)
        if form.has_both:
            of_states = _state_space(normed, w, caches[2:], torch.arange(len(x), device=x.device), form)
            mid = mid + scaled(_product(of_states, w, "w_ssm_out"), "ssm_scale")
    if form.get("ffn") == "none":
        return mid
    if "ffn_norm" in w:
        inner = norm(x if form.get("block") == "parallel-norms" else mid, "ffn_norm")
    else:
        inner = normed if form.get("block") == "parallel" else mid
    if "w_router" in w:
        normed = (inner, inner)
        if "router_norm" in w:
            normed = norm(mid, "router_norm"), norm(mid, "experts_norm")
        return added(_experts(inner, w, form, scaled, *normed, norm), "ffn_post_norm", mid)
    gates = _scaled(_product(inner, w, "w_gate" if "w_gate" in w else "w_up", "b_up"), w, "gate_scale")
    hidden = _ACTIVATIONS[form.get("act")](gates)
    if "w_gate" in w:
        hidden = hidden * _product(inner, w, "w_up")
    return added(scaled(_product(hidden, w, "w_down", "b_down")), "ffn_post_norm", mid)


def _mixed(normed, positions, angles, slots, lengths, pages, w, caches, form):
    """The mixer's result in front of w_o."""
    if form.mixer == "conv":
        return _convolution(normed, w, *caches, form)
    if form.mixer in ("gated-delta-rule", "kda"):
        return _delta_rule(normed, w, caches, slots, form)
    if form.mixer == "ssd":
        return _state_space(normed, w, caches, slots, form)
    if form.is_latent:
        return _latent_attention(normed, positions, angles, slots, lengths, pages, w, *caches, form)
    return _attended(normed, positions, angles, slots, lengths, pages, w, caches[:2], form)


def _attended(x, positions, angles, slots, lengths, pages, w, caches, form):
    """Attention of x over the caches, to which its keys and values go."""
    eps = form.get("eps")

    def norm_heads(t, name):
        if name not in w:
            return t
        if form.get("qk-norm") == "layer":
            return layernorm(t, w[name], w[f"{name}_bias"], eps)
        convention = "gemma" if form.get("convention") == "gemma" else "t5"
        shape = t.shape
        if form.get("qk-norm") == "rows":
            t = t.flatten(2)
        return rmsnorm(t, w[name], eps, convention).view(shape)

    if form.shares_keys:
        heads = F.linear(x, w["w_q"], w.get("b_q")).unflatten(-1, (-1, form.get("dim")))
        q, k, v = heads, heads[:, :0], heads[:, :0]
    else:
        q, k, v = _heads(x, w, form)
    gates = None
    if form.get("output-gate") == "q-rows":
        q, gates = q.unflatten(2, (-1, 2)).unbind(3)
    if form.get("v-norm"):
        v = rmsnorm(v, v.new_ones(v.shape[-1]), eps, "t5")
    norms_last = form.get("qk-norm-order") == "after"
    if not norms_last:
        q, k = norm_heads(q, "q_norm"), norm_heads(k, "k_norm")
    if form.get("rotation") != "none" and form.shares_keys:
        k = q
    if form.get("rotation") != "none":
        rotation = form.get("rotation", "halves")
        angle, factor = angles_at(positions, angles, rotation, None, "table",
                                  [0.0] * 7 + [form.get("rope-scale", 0.0)])
        q, k = (_rotated(t, angle.unsqueeze(-2), factor, rotation, False) for t in (q, k))
    if norms_last:
        q, k = norm_heads(q, "q_norm"), norm_heads(k, "k_norm")
    if "q_factors" in w:
        q = (_wide(q) * w["q_factors"][..., None, None]).to(x.dtype)
    keys, values = caches if pages is not None else (cache.transpose(1, 2) for cache in caches)
    quantised = form.get("cache-format") == "e4m3"
    if quantised:  # a cast to float8_e4m3fn does not saturate
        k, v = ((_wide(t) / _wide(w[scale])[:, None]).clamp(-448, 448) for t, scale in ((k, "k_scale"), (v, "v_scale")))
        k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
    for cache, rows in () if form.shares_keys else ((keys, k), (values, v)):
        if quantised:
            cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
        own, to = cache.view(-1, *cache.shape[2:]), slots.flatten().long()
        # A token whose slot is no row goes to one behind the last, which is dropped.
        to = torch.where((to < 0) | (to >= own.shape[0]), own.shape[0], to)
        own.copy_(F.pad(own, (0, 0, 0, 0, 0, 1)).index_copy(0, to, rows.flatten(0, 1))[:-1])
    if quantised:
        keys, values = (t.to(_wide(x).dtype) * _wide(w[scale])[:, None]
                        for t, scale in ((keys, "k_scale"), (values, "v_scale")))
    if pages is not None:
        exists = ((pages >= 0) & (pages < keys.shape[0]))[..., None, None, None]
        keys, values = (torch.where(exists, cache[pages.clamp(0, cache.shape[0] - 1).long()], 0)
                        .flatten(1, 2) for cache in (keys, values))
    # For every sequence at once: in a CUDA graph the lengths cannot be looked at.
    places = torch.arange(keys.shape[1], device=x.device)
    last = lengths[:, None] - x.shape[1] + torch.arange(x.shape[1], device=x.device)
    allowed = (places <= last[..., None])[:, None]
    if window := form.get("window"):
        allowed = allowed & (places > last[..., None] - window)[:, None]
    group = q.shape[2] // keys.shape[2]
    q, keys, values = (_wide(t).transpose(1, 2) for t in (q, keys, values))
    keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
    scores = (form.get("scale") or q.shape[-1] ** -0.5) * (q @ keys.transpose(2, 3))
    if softcap := form.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, -math.inf)
    if "sinks" in w:
        sinks = w["sinks"].to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    attended = scores.softmax(-1)[..., :keys.shape[2]] @ values
    attended = attended.to(x.dtype).transpose(1, 2)
    if gates is not None:
        return (_wide(attended) * torch.sigmoid(_wide(gates))).to(x.dtype).flatten(2)
    return _gated(attended, x, w)


def _product(x, w, name, bias=""):
    """That of a layer's weight. With float8_e4m3fn x is quantised."""
    if w[name].dtype != torch.float8_e4m3fn:
        return F.linear(x, w[name], w.get(bias))
    scale = w[f"{name}_scale"]
    return (linear_fp8_token if scale.dim() == 1 else linear_fp8_block)(x, w[name], scale, w.get(bias), None)


def _heads(x, w, form):
    """q, k and v [batch, tokens, heads, dim] of x."""
    heads, kv_heads, dim = form.get("heads"), form.get("kv-heads"), form.get("dim")
    if "w_qkv" not in w:
        return tuple(F.linear(x, w[f"w_{part}"], w.get(f"b_{part}")).unflatten(-1, (-1, dim))
                     for part in "qkv")
    rows = _product(x, w, "w_qkv", "b_qkv")
    if form.get("qkv-weights") != "grouped":
        return rows.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), -2)
    group = heads // kv_heads
    q, k, v = rows.unflatten(-1, (kv_heads, group + 2, dim)).split((group, 1, 1), -2)
    return q.flatten(-3, -2), k.flatten(-3, -2), v.flatten(-3, -2)


def _experts(x, w, form, scaled, of_router, of_experts, norm):
    """The experts of a layer, and the network beside them, of x; if the residual's summands have a factor, route-scale
    includes it."""
    router = [None if t is None else _wide(t) if form.get("logits") == "f32" else t
              for t in (of_router, w["w_router"], w.get("b_router"))]
    scale, added = form.get("route-scale", 1.0), form.get("sum-eps")
    weights, ids = moe_route(F.linear(*router), w.get("choice_bias"),
                             form.get("top-k"), form.get("score"), form.get("order"),
                             form.get("groups", 0), form.get("top-groups", 0),
                             form.get("group-score", "max"), form.get("renormalise") == "yes" and not added,
                             1.0 if added else scale)
    if added:
        weights = weights / (weights.sum(-1, keepdim=True) + added) * scale
    if "expert_scale" in w:
        weights = weights * w["expert_scale"].to(weights.dtype)[ids.long()]
    if form.get("quantise"):
        first = "w_gate_up" if "w_gate_up" in w else "w_gate"
        return (moe_ffn_fp8_token if form.get("quantise") == "token" else moe_ffn_fp8_block)(
            of_experts, ids, weights, w[first], w.get("w_up"), w["w_down"], w[f"{first}_scale"], w.get("w_up_scale"),
            w["w_down_scale"], form.get("act"), form.get("gate-up", "halves"), 0, "")
    squares = form.get("act") == "relu2"  # relu(x) x, with one weight for both
    act = "relu" if squares else form.get("act")
    w_gate_up, b_gate_up = w.get("w_gate_up"), w.get("b_gate_up")
    if w_gate_up is None:
        w_gate_up = torch.cat((w["w_up" if squares else "w_gate"], w["w_up"]), 1)
        b_gate_up = torch.cat((w["b_gate"], w["b_up"]), 1) if "b_gate" in w else None
    y = moe_ffn(of_experts, ids, weights, w_gate_up, None, w["w_down"], b_gate_up, w.get("b_down"),
                act, form.get("gate-up", "halves"), "after", 0, "")
    if "w_shared_up" not in w:
        return y
    hidden = act_mul(F.linear(x, w["w_shared_up" if squares else "w_shared_gate"]), F.linear(x, w["w_shared_up"]), act)
    shared = F.linear(hidden, w["w_shared_down"])
    if "w_shared_router" in w:
        shared = shared * torch.sigmoid(F.linear(x, w["w_shared_router"]))
    if "router_norm" in w:
        return norm(shared, "shared_post_norm") + norm(y, "experts_post_norm")
    return y + scaled(shared)
