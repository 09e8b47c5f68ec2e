"""Whole layers whose mixer is no attention: the op `layer`, and patch(model, whole_layers=True)."""
import copy
import types

import pytest
import torch
import transformers

import fftune
from fftune import reference
from fftune._custom import OPS, call
from fftune._layer_form import FLOAT32, Choice, form_of, parse
from fftune.patching import decoding, graphs, layers as patched_layers
from fftune.patching.caches import with_growing_cache
from fftune.patching.graphs import _has_convolutions_alone, _tensors_of
from models import RELEASE

pytestmark = pytest.mark.skipif(RELEASE < (5, 23), reason="transformers has other caches of states")
_SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)
_KINDS = ["conv", "full_attention", "conv", "conv"]


def lfm2(**more):
    return transformers.Lfm2Config(**{**_SIZES, "num_hidden_layers": 4, "layer_types": _KINDS,
                                      "block_auto_adjust_ff_dim": False, **more})


def lfm2_moe(**more):
    """Its router is given the bias of the block around it, and adds 1e-6 to the sum of the scores."""
    return transformers.Lfm2MoeConfig(**{**_SIZES, "num_hidden_layers": 4, "layer_types": _KINDS, **more},
                                      num_dense_layers=1, num_experts=6, num_experts_per_tok=2,
                                      moe_intermediate_size=24)


def lfm3():
    """With a window, gates of heads, and norms behind what is added."""
    return transformers.Lfm3Config(**{**_SIZES, "num_hidden_layers": 4}, head_dim=8, sliding_window=64,
                                   layer_types=["conv", "full_attention", "conv", "sliding_attention"])


_DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16,
              layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"])


def qwen3_5():
    """With gates in the rows of q."""
    return transformers.Qwen3_5TextConfig(**{**_SIZES, "num_hidden_layers": 4}, **_DELTA, head_dim=16)


def qwen3_5_moe():
    return transformers.Qwen3_5MoeTextConfig(**{**_SIZES, "num_hidden_layers": 4}, **_DELTA, head_dim=16, num_experts=6,
                                             num_experts_per_tok=2, moe_intermediate_size=24,
                                             shared_expert_intermediate_size=24)


def qwen3_next():
    """With the rows of each head of k together."""
    return transformers.Qwen3NextConfig(**{**_SIZES, "num_hidden_layers": 4}, **_DELTA, head_dim=16, num_experts=6,
                                        num_experts_per_tok=2, moe_intermediate_size=24,
                                        shared_expert_intermediate_size=24)


def olmo_hybrid():
    return transformers.OlmoHybridConfig(**{**_SIZES, "num_hidden_layers": 4}, **_DELTA)


_MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=12, mamba_chunk_size=8)


def bamba(**more):
    return transformers.BambaConfig(**{**_SIZES, "num_hidden_layers": 4}, **{
        **_MAMBA, "mamba_n_groups": 2, "attn_layer_indices": [2], "time_step_limit": (0.0, float("inf")), **more})


def granite_hybrid(experts=0):
    """With a factor of what is added, and without RoPE; with experts these are beside an MLP for every token."""
    return transformers.GraniteMoeHybridConfig(
        **{**_SIZES, "num_hidden_layers": 4}, **_MAMBA, mamba_n_groups=1, num_local_experts=experts,
        num_experts_per_tok=min(2, experts), shared_intermediate_size=40, residual_multiplier=0.22,
        attention_multiplier=0.3, position_embedding_type="nope",
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"])


_KIMI = dict(moe_intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
             kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
             mlp_layer_types=["dense", "dense", "sparse", "sparse"], layer_types=_DELTA["layer_types"])


def kimi_linear():
    """Decays and gates by way of latents; latent attention between them."""
    return transformers.KimiLinearConfig(**{**_SIZES, "num_hidden_layers": 4, "num_key_value_heads": 4}, **_KIMI,
                                         linear_head_dim=16, linear_num_heads=2)


def bailing_hybrid(**more):
    """Decays with a bound, and a gate of each head in latent attention."""
    return transformers.BailingHybridConfig(**{**_SIZES, "num_hidden_layers": 4, "num_key_value_heads": 4}, **_KIMI,
                                            head_dim=16, **more)


def mamba2(**more):
    """Layers that are mixers alone, without positions and masks; it adds in float32."""
    return transformers.Mamba2Config(vocab_size=96, hidden_size=32, num_hidden_layers=4, num_heads=4, head_dim=16,
                                     state_size=12, n_groups=2, chunk_size=8, bos_token_id=1, eos_token_id=2,
                                     pad_token_id=0, **more)


def nemotron_h(kinds="M-*E", **more):
    """Layers that are a mixer, attention, an MLP with relu(x)², or such experts alone; prompts limit their steps."""
    return transformers.NemotronHConfig(**_SIZES, hybrid_override_pattern=kinds, mamba_num_heads=4, mamba_head_dim=16,
                                        ssm_state_size=12, n_groups=2, head_dim=8, chunk_size=8, n_routed_experts=6,
                                        num_experts_per_tok=2, moe_intermediate_size=24, routed_scaling_factor=2.5,
                                        moe_shared_expert_intermediate_size=20, **more)


# About those of Falcon-H1-0.5B.
_FACTORS = dict(ssm_in_multiplier=1.25, ssm_out_multiplier=0.2357, attention_out_multiplier=0.9375,
                key_multiplier=0.390625, mlp_multipliers=[0.8838, 0.5859],
                ssm_multipliers=[0.35, 0.25, 0.36, 0.5, 0.37])


def falcon_h1(**more):
    """Attention and Mamba-2 on the same input, with factors of all parts."""
    return transformers.FalconH1Config(**{**_SIZES, "num_hidden_layers": 4}, **_MAMBA, **{
        "mamba_n_groups": 2, "mamba_d_ssm": 64, "head_dim": 8, "mamba_rms_norm": False, **_FACTORS, **more})


MODELS = {"falcon-h1": falcon_h1, "falcon-h1-plain": lambda: falcon_h1(
              mamba_n_groups=1, mamba_conv_bias=False, tie_word_embeddings=True, lm_head_multiplier=1.0,
              mlp_multipliers=[1.0, 1.0], **dict.fromkeys(
                  ("ssm_in_multiplier", "ssm_out_multiplier", "attention_out_multiplier", "key_multiplier"), 1.0)),
          "lfm2": lfm2, "lfm2-biased": lambda: lfm2(conv_bias=True, conv_L_cache=5), "lfm3": lfm3,
          "lfm2-moe": lfm2_moe, "lfm2-moe-unbiased": lambda: lfm2_moe(use_expert_bias=False, norm_topk_prob=False),
          "qwen3.5": qwen3_5, "qwen3.5-moe": qwen3_5_moe, "qwen3-next": qwen3_next, "olmo-hybrid": olmo_hybrid,
          "bamba": bamba, "bamba-plain": lambda: bamba(mamba_conv_bias=False, mamba_n_groups=1),
          "granite-hybrid": granite_hybrid, "granite-hybrid-moe": lambda: granite_hybrid(6), "kimi-linear": kimi_linear,
          "mamba2": mamba2, "nemotron-h": nemotron_h, "bailing-hybrid": bailing_hybrid,
          "bailing-hybrid-free": lambda: bailing_hybrid(kda_safe_gate=False)}
# Their mixers, one for each run of equal layers.
RUNS = {**dict.fromkeys(("falcon-h1", "falcon-h1-plain"), ["attention-ssd"]),
        "mamba2": ["ssd"], "nemotron-h": ["ssd", "none", "attention", "none"],
        "lfm2": ["conv", "attention", "conv"], "lfm2-biased": ["conv", "attention", "conv"],
        "lfm3": ["conv", "attention"] * 2,
        **dict.fromkeys(("lfm2-moe", "lfm2-moe-unbiased"), ["conv", "attention", "conv"]),
        **dict.fromkeys(("qwen3.5", "qwen3.5-moe", "qwen3-next", "olmo-hybrid"),
                        ["gated-delta-rule", "attention", "gated-delta-rule"]),
        **dict.fromkeys(("bamba", "bamba-plain", "granite-hybrid", "granite-hybrid-moe"), ["ssd", "attention", "ssd"]),
        **dict.fromkeys(("kimi-linear", "bailing-hybrid", "bailing-hybrid-free"), ["kda", "mla", "kda"])}


def make(name: str, dtype=torch.float32):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]())
    with torch.no_grad():  # initial weights are too small and too much alike to show mistakes
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1)
    return model.to(dtype).eval()


@pytest.fixture
def runs(monkeypatch):
    """The mixers of the layers that the op has run."""
    seen, original = [], patched_layers.call

    def listen(op, *arguments):
        if op in (OPS.layer, OPS.network):
            seen.append(parse(arguments[8] if op is OPS.layer else arguments[2]).mixer)
        return original(op, *arguments)

    monkeypatch.setattr(patched_layers, "call", listen)
    return seen


def patched(model):
    own = copy.deepcopy(model)
    return own, fftune.patch(own, whole_layers=True)


def steps(model, calls, mask=None):
    """Logits of some calls one after the other over a static cache, and the cache."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=48)
    logits = []
    with torch.no_grad():
        for ids in calls:
            if mask is not None:
                mask = torch.cat((mask, mask.new_ones(len(ids), ids.shape[1])), 1)
            name = "cache_params" if isinstance(model.config, transformers.Mamba2Config) else "past_key_values"
            logits.append(model(ids, use_cache=True, attention_mask=mask, **{name: cache}).logits)
    return torch.cat(logits, 1), cache


def states_of(cache):
    return [state for layer in cache.layers for state in (
        (layer.conv_states[0], layer.recurrent_states[0]) if hasattr(layer, "conv_states") else (layer.keys,))
        if state is not None]


def ids(*tokens, batch=2):
    return [torch.randint(3, 96, (batch, n)) for n in tokens]


_D, _H = 24, 40
_NETWORK = dict(attn_norm=(_D,), ffn_norm=(_D,), w_gate=(_H, _D), w_up=(_H, _D), w_down=(_D, _H))


def conv_shapes(bias):
    of_bias = dict(b_in=(60,), b_conv=(20,), b_o=(_D,)) if bias else {}
    return dict(w_in=(60, _D), w_conv=(20, 3), w_o=(_D, 20), **of_bias), dict(dim=10, width=3)


def ssd_shapes(bias):
    """4 heads of 6 features in 2 groups, with states of 8."""
    shapes = dict(w_in=(84, _D), w_conv=(56, 4), A_log=(4,), dt_bias=(4,), D=(4,), mixer_norm=(24,), w_o=(_D, 24))
    if bias:
        shapes |= dict(b_conv=(56,), b_o=(_D,))
    return shapes, dict(heads=4, dim=6, width=4, state_dim=8, state_groups=2, mixer_eps=1e-5)


def delta_shapes(packed):
    """2 heads of 6 features and 4 of 5 values; q, k and v are rows of one weight, or not."""
    rows = dict(q=12, k=12, v=20)
    shapes = dict(w_z=(20, _D), w_b=(4, _D), w_a=(4, _D), A_log=(4,), dt_bias=(4,), mixer_norm=(5,), w_o=(_D, 20))
    shapes |= dict(w_qkv=(44, _D), w_conv=(44, 4)) if packed else \
        {f"w{conv}_{name}": (n, size) for name, n in rows.items() for conv, size in (("", _D), ("_conv", 4))}
    return shapes, dict(dim=6, width=4, v_heads=4, v_dim=5, mixer_eps=1e-5, beta_scale=2.0)


def grouped_shapes(shares):
    """2 heads of 8 features, each with one or two of 8 values; all rows of a head of k are together."""
    values = 4 if shares else 2
    channels = 32 + 8 * values
    shapes = dict(w_qkvz=(channels + 8 * values, _D), w_ba=(2 * values, _D), w_conv=(channels, 4), A_log=(values,),
                  dt_bias=(values,), mixer_norm=(8,), w_o=(_D, 8 * values))
    return shapes, dict(dim=8, width=4, v_heads=values, v_dim=8)


def kda_shapes(bounded):
    """2 heads of 6 features, with 5 values; decays and gates by way of 7 features, or with a bound."""
    shapes = {f"w_{name}": (n, _D) for name, n in dict(q=12, k=12, v=10, b=2).items()}
    shapes |= {f"w_conv_{name}": (n, 4) for name, n in dict(q=12, k=12, v=10).items()}
    inner = _D if bounded else 7
    shapes |= dict(w_a=(12, inner), w_z=(10, inner), A_log=(2,), dt_bias=(12,), mixer_norm=(5,), w_o=(_D, 10))
    sizes = dict(dim=6, width=4, v_heads=2, v_dim=5, mixer_eps=1e-5)
    if bounded:
        return shapes, sizes | dict(gate_bound=-5.0)
    return shapes | dict(w_a_low=(7, _D), w_z_low=(7, _D)), sizes | dict(gate_rank=7)


@pytest.mark.parametrize("mixer,shapes_of", (("conv", conv_shapes), ("ssd", ssd_shapes), ("kda", kda_shapes),
                                             ("gated-delta-rule", delta_shapes)))
@pytest.mark.parametrize("s", (1, 2, 7))
@pytest.mark.parametrize("form", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_op_is_its_reference(mixer, shapes_of, s, form, dtype):
    layers = 2
    torch.manual_seed(1)
    own, sizes = shapes_of(form)
    shapes = own | _NETWORK
    sizes = dict(heads=2) | sizes
    form = form_of(tuple(shapes), kv_heads=sizes["heads"], act="silu", eps=1e-5, convention="llama", rotary=0,
                   softcap=0.0, scale=0.0, rope_scale=0.0, rotates=False, mixer=mixer, **sizes)
    parsed = parse(form)
    weights = [torch.randn(*shapes[name]) * 0.3 + (len(shapes[name]) == 1)
               for _ in range(layers) for name in parsed.weights]
    # As models have them: logarithms and inputs of softplus.
    types = [torch.float32 if name in FLOAT32 else dtype for name in parsed.weights] * layers
    weights = [w.to(own_type) for w, own_type in zip(weights, types)]
    x = torch.randn(3, s, _D).to(dtype)
    states = [torch.randn(*shape).to(torch.float32 if at else dtype) for _ in range(layers)
              for at, shape in enumerate(parsed.state_shapes(3))]
    slots = torch.tensor([2, 0, 1], dtype=torch.int32) if parsed.is_recurrent else None
    mine = [t.clone() for t in states]
    y = call(OPS.layer, x, None, None, slots, None, None, weights, mine, form, None, None)
    right_states = [t.float() for t in states]
    right = reference.layer(x.float(), None, None, slots, None, None, [w.float() for w in weights], right_states, form)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, theirs in zip((y, *mine), (right, *right_states)):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()
    reason = "slots is of other layers" if slots is None else "slots is None: give a tensor"
    with pytest.raises(fftune.Error, match=reason):
        slots = torch.zeros(3, s, dtype=torch.int32) if slots is None else None
        call(OPS.layer, x, None, None, slots, None, None, weights, mine, form, None, None)


@pytest.mark.parametrize("s", (1, 2, 7))
@pytest.mark.parametrize("shares", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rows_of_heads_together_are_those_of_packed_weights(s, shares, dtype):
    torch.manual_seed(1)
    own, sizes = grouped_shapes(shares)
    values, options = sizes["v_heads"], dict(
        heads=2, kv_heads=2, act="silu", eps=1e-5, convention="llama", rotary=0, softcap=0.0, scale=0.0, rope_scale=0.0,
        rotates=False, mixer="gated-delta-rule")
    shapes = own | _NETWORK
    grouped = {name: (torch.randn(*shape) * 0.3 + (len(shape) == 1)).to(torch.float32 if name in FLOAT32 else dtype)
               for name, shape in shapes.items()}
    packed = {name: weight for name, weight in grouped.items() if name not in ("w_qkvz", "w_ba")}
    q, k, v, packed["w_z"] = (part.flatten(0, 1) for part in grouped["w_qkvz"].unflatten(0, (2, -1)).split(
        (8, 8, 4 * values, 4 * values), 1))
    packed["w_qkv"] = torch.cat((q, k, v))
    packed["w_b"], packed["w_a"] = (part.flatten(0, 1) for part in grouped["w_ba"].unflatten(0, (2, -1)).chunk(2, 1))
    x, slots = torch.randn(3, s, _D).to(dtype), torch.tensor([2, 0, 1], dtype=torch.int32)
    states = [torch.randn(3, 32 + 8 * values, 4).to(dtype), torch.randn(3, values, 8, 8)]

    def run(compute, weights, x, states):
        form = form_of(tuple(weights), **options, **sizes)
        return compute(x, None, None, slots, None, None, [weights[name] for name in parse(form).weights], states, form)

    by_op = lambda *arguments: call(OPS.layer, *arguments, None, None)
    ours, theirs, right = ([t.clone() for t in states] for _ in range(3))
    y = run(by_op, grouped, x, ours)
    for one, other in zip((y, *ours), (run(by_op, packed, x, theirs), *theirs)):
        assert torch.equal(one, other)
    right = [t.float() for t in right]
    y_right = run(reference.layer, {name: weight.float() for name, weight in grouped.items()}, x.float(), right)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for one, other in zip((y, *ours), (y_right, *right)):
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("s", (1, 3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("half", ("mixer", "network", "squares", "experts"))
def test_half_a_layer_is_its_reference(half, s, dtype):
    torch.manual_seed(1)
    network = dict(ffn_norm=(_D,), w_up=(_H, _D), w_down=(_D, _H))
    experts = dict(ffn_norm=(_D,), w_router=(5, _D), choice_bias=(5,), w_up=(5, _H, _D), w_down=(5, _D, _H),
                   w_shared_up=(16, _D), w_shared_down=(_D, 16))
    squares = dict(heads=0, mixer="none", act="relu2")
    shapes, options = dict(
        mixer=(dict(ssd_shapes(True)[0], attn_norm=(_D,)), dict(ssd_shapes(True)[1], mixer="ssd", network=False)),
        network=(dict(network, w_gate=(_H, _D)), dict(heads=0, mixer="none")), squares=(network, squares),
        experts=(experts, dict(squares, choice=Choice(5, 2, "sigmoid", renormalise=True, scale=2.5))))[half]
    options = dict(kv_heads=4, dim=6, act="silu", eps=1e-5, convention="llama", rotary=0, softcap=0.0, scale=0.0,
                   rope_scale=0.0, rotates=False) | options
    form = form_of(tuple(shapes), **options)
    parsed = parse(form)
    weights = [(torch.randn(*shapes[name]) * 0.3 + (name.endswith("norm"))).to(
        torch.float32 if name in FLOAT32 else dtype) for _ in range(2) for name in parsed.weights]
    x = torch.randn(3, s, _D).to(dtype)
    states = [torch.randn(*shape).to(torch.float32 if at else dtype) for _ in range(2)
              for at, shape in enumerate(parsed.state_shapes(3))]
    slots = torch.tensor([2, 0, 1], dtype=torch.int32) if parsed.is_recurrent else None
    mine, right_states = [t.clone() for t in states], [t.float() for t in states]
    y = call(OPS.layer, x, None, None, slots, None, None, weights, mine, form, None, None)
    right = reference.layer(x.float(), None, None, slots, None, None, [w.float() for w in weights], right_states, form)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    for ours, theirs in zip((y, *mine), (right, *right_states)):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()
    if not parsed.mixes:
        assert torch.equal(call(OPS.network, x, weights, form), y)
        with pytest.raises(fftune.Error, match="slots is of other layers"):
            call(OPS.layer, x, None, None, torch.zeros(3, dtype=torch.int32), None, None, weights, [], form, None, None)


def test_a_network_alone_compiles():
    """The inductor refuses an op that writes to a list of tensors, and is given none."""
    torch._dynamo.reset()
    form = form_of(("ffn_norm", "w_gate", "w_up", "w_down"), heads=0, kv_heads=0, dim=0, act="silu", eps=1e-5,
                   convention="llama", rotary=0, softcap=0.0, scale=0.0, rope_scale=0.0, rotates=False, mixer="none")
    torch.manual_seed(1)
    shapes = dict(ffn_norm=(_D,), w_gate=(_H, _D), w_up=(_H, _D), w_down=(_D, _H))
    weights = [torch.randn(*shapes[name]) for name in parse(form).weights]
    run = lambda x: call(OPS.network, x, weights, form)
    x = torch.randn(2, 3, _D)
    assert torch.equal(torch.compile(run, fullgraph=True)(x), run(x))


@pytest.mark.parametrize("names,options,words", (
    (("attn_norm", "w_in", "w_down"), dict(mixer="ssd", network=False), "no A_log"),
    (("ffn_norm", "w_up", "w_down", "w_o"), dict(mixer="none"), "a layer has w_o"),
    ((*grouped_shapes(True)[0], "attn_norm", "w_z"), dict(mixer="gated-delta-rule", network=False), "has w_z"),
    ((*grouped_shapes(True)[0], "attn_norm"), dict(mixer="kda", network=False), "has w_ba"),
    (("ffn_norm", "w_gate", "w_up", "w_down"), dict(mixer="none", act="relu2"), "relu2 is of networks without gates"),
    (("w_up", "w_down"), dict(mixer="none"), "no ffn_norm")), ids=str)
def test_weights_of_half_a_layer(names, options, words):
    with pytest.raises(fftune.Error, match=words):
        form_of(names, **dict(heads=2, kv_heads=2, dim=8, act="silu", eps=1e-5, convention="llama", rotary=0,
                              softcap=0.0, scale=0.0, rope_scale=0.0, rotates=False) | options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("calls", ((9, 1, 1, 1), (1, 1, 4, 1), (2, 1, 1), (33, 1, 1)))
def test_results_are_the_models(name, calls, runs):
    model = make(name)
    own, report = patched(model)
    assert any(words.startswith("4 layers of") for _, words in report.replaced), report
    given = ids(*calls)
    right, right_cache = steps(model, given)
    ours, cache = steps(own, given)
    # A call of more than 64 tokens in all is the model's.
    ran = sum(n <= 32 for n in calls)
    assert runs == RUNS[name] * ran
    assert (ours - right).abs().max() <= 3e-5 * right.abs().max()
    for state, other in zip(states_of(cache), states_of(right_cache)):
        assert (state - other).abs().max() <= 3e-5 * other.abs().max()


def test_a_cache_that_was_reset_begins_anew(runs):
    model = make("lfm2")
    own, _ = patched(model)
    (first, second) = ids(5, 6)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        own(first, past_key_values=cache)
        cache.reset()
        ours = own(second, past_key_values=cache).logits
        assert len(runs) == 6
        right, _ = steps(model, [second])
    assert (ours - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("name", ("lfm2", "bamba", "qwen3-next", "falcon-h1"))
def test_padding_is_the_models(name, runs):
    model = make(name)
    own, _ = patched(model)
    given = ids(5, 1, 1)
    mask = torch.zeros(2, 0, dtype=torch.long)
    right, _ = steps(model, given, mask)
    ours, _ = steps(own, given, mask)
    assert runs == RUNS[name] * 3  # a mask that masks nothing
    assert (ours - right).abs().max() <= 1e-5 * right.abs().max()
    runs.clear()
    mask = torch.tensor([[1, 1], [0, 1]])
    given[0] = torch.cat((torch.full((2, 2), 5), given[0]), 1)
    right, _ = steps(model, [given[0][:, 2:], *given[1:]], mask)
    ours, _ = steps(own, [given[0][:, 2:], *given[1:]], mask)
    assert not runs and (ours - right).abs().max() <= 1e-5 * right.abs().max()


def test_a_gate_in_the_rows_of_q_follows_its_weight(runs):
    model = make("qwen3.5")
    own, _ = patched(model)
    given = ids(3, 1)
    steps(own, given)
    with torch.no_grad():
        for each in (model, own):
            each.model.layers[2].self_attn.q_proj.weight.mul_(-0.5)
    right, _ = steps(model, given)
    ours, _ = steps(own, given)
    assert len(runs) == 12 and (ours - right).abs().max() <= 1e-5 * right.abs().max()
    runs.clear()
    other, _ = steps(copy.deepcopy(own), given)
    assert len(runs) == 6 and torch.equal(other, ours)


def scaled_in_place(parameter):
    parameter.data.mul_(-0.5)


def scaled_elsewhere(parameter):
    parameter.data = parameter.data * 1.5


@pytest.mark.parametrize("change", (scaled_in_place, scaled_elsewhere))
@pytest.mark.parametrize("name", ("lfm2", "qwen3.5", "qwen3-next", "olmo-hybrid", "bamba", "falcon-h1"))
def test_a_weight_that_changed_unseen_is_read_anew(name, change, runs):
    """No version of a parameter counts what goes through its .data, and a new tensor may get an old one's address."""
    model = make(name)
    own, _ = patched(model)
    given = ids(5)
    for _ in range(3):
        expected, _ = steps(model, given)
        runs.clear()
        result, _ = steps(own, given)
        assert runs == RUNS[name]
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        for changed in (model, own):
            for parameter in (p for layer in changed.model.layers for p in layer.parameters() if p.dim() > 1):
                change(parameter)


@pytest.mark.parametrize("of", ("norm", "conv", "proj"))
@pytest.mark.parametrize("name", ("lfm2", "qwen3.5", "bamba"))
def test_weights_of_another_type_are_the_models(name, of, runs):
    """Norms in float32 of a bfloat16 model, as training with few bits sets them up."""
    model = make(name, torch.bfloat16)
    own, _ = patched(model)
    for changed in (model, own):
        for path, parameter in changed.named_parameters():
            if of in path:
                parameter.data = parameter.data.float()
    results, given = [], ids(5)
    for changed in (model, own):
        runs.clear()
        try:
            results.append(steps(changed, given)[0])
        except RuntimeError as error:  # of PyTorch: products of two types
            assert not isinstance(error, fftune.Error)
            results.append(None)
        assert not runs
    # Parts of layers run by other ops, which round at other places.
    assert results[0] is results[1] is None or (results[1] - results[0]).norm() <= 5e-2 * results[0].norm()


def test_layers_run_after_the_model_was_saved(tmp_path, runs):
    """save_pretrained() writes the weights' type into the configuration."""
    own, _ = patched(make("lfm2"))
    given = ids(5)
    before, _ = steps(own, given)
    own.save_pretrained(tmp_path)
    runs.clear()
    after, _ = steps(own, given)
    assert runs == RUNS["lfm2"] and torch.equal(after, before)


@pytest.mark.parametrize("name", ("qwen3.5", "mamba2", *(pytest.param(name, marks=pytest.mark.further)
                                                         for name in ("lfm2", "bamba", "falcon-h1"))))
def test_compiled(name):
    torch._dynamo.reset()  # whatever other tests have compiled
    model = make(name)
    own, _ = patched(model)
    given = ids(1, 1, 1)
    right, _ = steps(model, given)
    ours, _ = steps(torch.compile(own, fullgraph=True, backend="eager"), given)
    assert (ours - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("options", ({}, dict(cache_implementation="static"), dict(num_beams=2),
                                     dict(prompt_lookup_num_tokens=3)), ids=str)
@pytest.mark.parametrize("name", ("lfm2", "qwen3.5", "qwen3-next", "bamba", "mamba2", "nemotron-h", "falcon-h1"))
def test_generate(options, name):
    model = make(name)
    if model._is_stateful and "prompt_lookup_num_tokens" in options:
        pytest.skip("transformers has no drafts for models with recurrent states")
    own, _ = patched(model)
    given, = ids(7, batch=1 if "prompt_lookup_num_tokens" in options else 3)
    options = dict(options, max_new_tokens=12, do_sample=False)
    assert torch.equal(own.generate(given, **options), model.generate(given, **options))


@pytest.mark.parametrize("name,calls", (("lfm2", 1), ("bamba", 1), ("qwen3-next", 1), ("mamba2", 12),
                                        ("nemotron-h", 12)))
def test_generate_of_fftune(name, calls, runs):
    """Bamba's decoder counts from 0 where it is given no positions. Steps behind the prompt are `decode`, but of
    layers that are a mixer or a network alone."""
    model = make(name)
    own, _ = patched(model)
    given, = ids(7, batch=3)
    right = model.generate(given, max_new_tokens=12, do_sample=False)
    assert torch.equal(fftune.generate(own, given, max_new_tokens=12), right)
    assert runs == RUNS[name] * calls


def test_the_cache_of_a_model_without_static_ones_is_the_models(runs):
    model = make("lfm2")
    own, _ = patched(model)
    given, = ids(7)
    with torch.no_grad():
        assert torch.allclose(own(given).logits, model(given).logits, atol=1e-4)
        one, other = (m(given, use_cache=True).past_key_values for m in (own, model))
    assert not runs
    for state, right in zip(states_of(one), states_of(other)):
        assert torch.allclose(state, right, atol=1e-5)


def test_a_changed_convolution_is_the_models(runs):
    model = make("lfm2")
    own, _ = patched(model)
    given = ids(3, 1)
    for each in (model, own):
        each.model.layers[2].conv.conv = torch.nn.Sequential(each.model.layers[2].conv.conv)
        each.model.layers[2].conv.conv.weight = each.model.layers[2].conv.conv[0].weight * 2
        each.model.layers[2].conv.conv.bias = None
    right, _ = steps(model, given)
    ours, _ = steps(own, given)
    assert not runs and torch.allclose(ours, right, atol=1e-4)


@pytest.mark.parametrize("least", (0.001, 0.5))
def test_limits_of_steps_are_those_of_prompts(least, runs):
    """transformers has none where a sequence with a state goes on by one token."""
    model = make("nemotron-h")
    model.model.layers[0].mixer.time_step_limit = (least, float("inf"))
    with torch.no_grad():
        model.model.layers[0].mixer.dt_bias.copy_(torch.tensor([-9.0, -8.0, -1.0, 1.0]))
    own, _ = patched(model)
    for calls in ((1, 1, 1), (5, 1, 3)):
        given = ids(*calls)
        right, right_cache = steps(model, given)
        ours, cache = steps(own, given)
        assert (ours - right).abs().max() <= 3e-5 * right.abs().max()
        assert (states_of(cache)[1] - states_of(right_cache)[1]).norm() <= 1e-5 * states_of(right_cache)[1].norm()
    assert runs == RUNS["nemotron-h"] * 6


def test_other_limits_of_steps_are_left_alone(runs):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(bamba())
    for layer in (0, 1, 3):
        model.model.layers[layer].mamba.time_step_limit = (2.0, 1.0)
    _, report = patched(model.eval())
    assert any("BambaMixer limits its steps to (2.0, 1.0)" in reason for _, reason in report.left), report
    model = make("bamba")
    own, _ = patched(model)
    for each in (model, own):
        each.model.layers[1].mamba.time_step_limit = (0.0, 0.5)
    given = ids(4, 1)
    right, _ = steps(model, given)
    ours, _ = steps(own, given)
    assert not runs and (ours - right).abs().max() <= 1e-5 * right.abs().max()


def test_a_projection_with_a_bias_is_left_alone():
    model = transformers.AutoModelForCausalLM.from_config(bamba(mamba_proj_bias=True)).eval()
    _, report = patched(model)
    assert any("BambaMixer has a bias of its projection" in reason for _, reason in report.left), report


def test_other_convolutions_are_left_alone(monkeypatch):
    from transformers.models.lfm2 import modeling_lfm2

    forward = modeling_lfm2.Lfm2ShortConv.forward
    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward",
                        lambda self, *arguments, **options: 2 * forward(self, *arguments, **options))
    _, report = patched(make("lfm2"))
    assert not any("by layer" in words and "Lfm2Model" in words for _, words in report.replaced), report


def test_experts_of_latents_are_left_alone():
    _, report = patched(transformers.AutoModelForCausalLM.from_config(nemotron_h(moe_latent_size=16)).eval())
    assert any("a mixture of experts, fc1_latent_proj, fc2_latent_proj, gate, shared_experts is not known" in reason
               for _, reason in report.left), report


def test_a_changed_activation_is_the_models(runs):
    model = make("nemotron-h")
    own, _ = patched(model)
    given = ids(3, 1)
    for each in (model, own):
        each.model.layers[1].mixer.act_fn = torch.nn.SiLU()
    right, _ = steps(model, given)
    ours, _ = steps(own, given)
    assert not runs and torch.allclose(ours, right, atol=1e-4)


def test_an_output_gate_of_features(runs):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AfmoeConfig(
        **{**_SIZES, "num_hidden_layers": 3}, head_dim=8, num_dense_layers=3, sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    own, report = patched(model)
    assert any(words.startswith("3 layers of AfmoeModel") for _, words in report.replaced), report
    given = ids(5, 1, 3)
    right, _ = steps(model, given)
    ours, _ = steps(own, given)
    assert set(runs) == {"attention"} and (ours - right).abs().max() <= 1e-5 * right.abs().max()


def test_a_gate_with_a_bias_is_left_alone():
    model = make("lfm3")
    gate = model.model.layers[1].self_attn.g_proj
    gate.bias = torch.nn.Parameter(torch.ones(gate.out_features))
    _, report = patched(model)
    assert any("has an output gate, g_proj, with a bias" in reason for _, reason in report.left), report


def test_a_sum_in_float32_is_the_models_in_other_types(runs):
    """The op adds in the type of its tokens."""
    model = make("mamba2")
    own, _ = patched(model)
    for each in (model, own):
        each.bfloat16()
    given = ids(4, 1)
    right, _ = steps(model, given)
    ours, _ = steps(own, given)
    assert not runs and (ours - right).norm() <= 5e-2 * right.norm()
    _, report = patched(make("mamba2", torch.bfloat16))
    assert any("Mamba2Block adds in float32" in reason for _, reason in report.left), report
    model = transformers.AutoModelForCausalLM.from_config(mamba2(residual_in_fp32=False)).bfloat16().eval()
    own, _ = patched(model)
    right, _ = steps(model, given)
    ours, _ = steps(own, given)
    assert runs == ["ssd"] * 2 and (ours - right).norm() <= 3e-2 * right.norm()


def test_restored(runs):
    model = make("lfm2")
    own, _ = patched(model)
    fftune.unpatch(own)
    given = ids(3, 1)
    assert torch.equal(steps(own, given)[0], steps(model, given)[0]) and not runs


def captured(model, whole):
    """A copy whose steps are captured, and what runs them. Without a GPU they run again."""
    own = copy.deepcopy(model)
    fftune.patch(own, graphs=True, whole_layers=whole)
    return own, own.__dict__["get_compiled_call"].__self__


def generated(model, given, **options):
    compile_config = transformers.CompileConfig()
    compile_config._compile_all_devices = True
    return model.generate(given, max_new_tokens=9, min_new_tokens=9, do_sample=False, compile_config=compile_config,
                          **options)


@pytest.mark.parametrize("whole", (False, True))
@pytest.mark.parametrize("name", ("lfm2", "qwen3.5", "qwen3-next", "olmo-hybrid", "bamba", "granite-hybrid-moe",
                                  "kimi-linear", "mamba2", "nemotron-h"))
def test_steps_with_states_are_captured(name, whole):
    model = make(name)
    own, runner = captured(model, whole)
    for given in ids(7, 5):  # the second call has a cache of its own, which is copied into the graph's
        assert torch.equal(generated(own, given), model.generate(given, max_new_tokens=9, min_new_tokens=9,
                                                                 do_sample=False))
        assert any(step.graph is not None for step in runner._steps.values()) and not runner._failed


@pytest.mark.parametrize("name, alone", [("lfm2", True), ("qwen3.5", False), ("bamba", False)])
def test_steps_with_convolutions_alone_are_not_captured_on_a_gpu(name, alone, monkeypatch):
    model = make(name)
    _, cache = steps(model, ids(3))
    assert not _has_convolutions_alone(cache), "on a CPU"
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            layer.conv_states = {i: types.SimpleNamespace(is_cuda=True) for i in layer.conv_states}
    assert _has_convolutions_alone(cache) == alone
    own, runner = captured(model, False)
    monkeypatch.setattr(graphs, "_has_convolutions_alone", lambda cache: True)
    given, = ids(7)
    right = model.generate(given, max_new_tokens=9, min_new_tokens=9, do_sample=False)
    assert torch.equal(generated(own, given), right)
    assert not runner._steps


def test_a_cache_with_states_outlives_the_graph():
    """Later calls write into the cache of a graph. generate() returns another one."""
    model = make("qwen3.5")
    own, _ = captured(model, True)
    first, second = ids(7, 7)
    results = []
    for each in (model, own):
        out = generated(each, first, return_dict_in_generate=True) if each is own else each.generate(
            first, max_new_tokens=9, min_new_tokens=9, do_sample=False, return_dict_in_generate=True)
        if each is own:
            generated(own, second)
        with torch.no_grad():
            results.append(each(out.sequences[:, -1:], past_key_values=out.past_key_values).logits)
    assert (results[1] - results[0]).abs().max() <= 3e-5 * results[0].abs().max()


def test_states_that_a_graph_cannot_use():
    _, cache = steps(make("lfm2"), ids(3))
    states = next(layer for layer in cache.layers if hasattr(layer, "conv_states"))
    assert len(_tensors_of(cache)) == 3 + 3  # of keys, and of three convolutions
    states.record_past = True  # then it gets new tensors
    assert _tensors_of(cache) is None
    states.record_past, states.has_previous_state[0] = False, False  # the first call takes another way
    assert _tensors_of(cache) is None
    states.has_previous_state[0], states.__class__ = True, type("OtherStates", (type(states),), {})
    assert _tensors_of(cache) is None


def test_steps_over_states_of_another_transformers_run_as_before():
    model, (given,) = make("lfm2"), ids(1)
    _, cache = steps(model, ids(3))
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            layer.recurrent_states = None
    runner = graphs.Steps(model, None)
    with torch.no_grad():
        assert runner(input_ids=given, past_key_values=cache).logits.shape[:2] == given.shape
    assert not runner._steps
    outputs = {"past_key_values": cache}
    assert with_growing_cache(outputs, model.config)["past_key_values"] is cache


@pytest.mark.parametrize("name", ("mamba2", "nemotron-h", "qwen3-next"))
def test_steps_by_layers_can_be_captured(name, monkeypatch):
    """A graph would have all tensors that such a step reads and writes."""
    model, seen = make(name), []
    own, _ = patched(model)
    given, = ids(7)
    monkeypatch.setattr(decoding, "_whole_or_none", lambda head: None)
    monkeypatch.setattr(decoding.Loop, "_capture", lambda loop: seen.append(loop) or (lambda: loop.advance(loop.ids)))
    right = model.generate(given, max_new_tokens=9, do_sample=False)
    assert torch.equal(fftune.generate(own, given, 9), right)
    loop, = seen
    assert loop.state is None and len(_tensors_of(loop.cache)) >= len(states_of(loop.cache))


def test_small_weights_become_float32_together(monkeypatch):
    """One kernel for all layers of an op, not one for each weight."""
    own, _ = patched(make("bamba", torch.bfloat16))
    copies, original = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, given: copies.append(len(to)) or original(to, given))
    steps(own, ids(3))
    assert copies == [2 * 3, 3]  # A_log, dt_bias and D of two layers, and of one behind attention


def both_shapes():
    """4 heads of 6 features of attention, beside 3 heads of 8 of ssd, without a norm, and with factors of all parts."""
    of_ssd = dict(w_in=(24 + 24 + 2 * 8 + 3, _D), in_scale=(67,), w_conv=(40, 4), b_conv=(40,), A_log=(3,),
                  dt_bias=(3,), D=(3,), w_ssm_out=(_D, 24), ssm_scale=(_D,))
    return dict(w_q=(24, _D), w_k=(12, _D), w_v=(12, _D), w_o=(_D, 24), out_scale=(_D,), ffn_scale=(_D,),
                gate_scale=(_H,), **of_ssd)


@pytest.mark.parametrize("s", (1, 2, 7))
@pytest.mark.parametrize("normed", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_attention_beside_ssd_is_its_reference(s, normed, dtype):
    torch.manual_seed(1)
    shapes = both_shapes() | _NETWORK | (dict(mixer_norm=(24,)) if normed else {})
    form = form_of(tuple(shapes), heads=4, kv_heads=2, dim=6, act="silu", eps=1e-5, convention="llama", rotary=6,
                   softcap=0.0, scale=0.7, rope_scale=0.4, rotates=True, mixer="attention-ssd", width=4, state_dim=8,
                   state_groups=1, state_heads=(3, 8), mixer_eps=1e-5)
    parsed = parse(form)
    weights = [(torch.randn(*shapes[name]) * 0.3 + (len(shapes[name]) == 1)).to(
        torch.float32 if name in FLOAT32 else dtype) for _ in range(2) for name in parsed.weights]
    x = torch.randn(3, s, _D).to(dtype)
    # Keys and values of 16 tokens, 5 of them before the call.
    caches = [t for _ in range(2) for t in (
        *(torch.randn(3, 16, 2, 6).to(dtype).transpose(1, 2) for _ in range(2)),
        *(torch.randn(*shape).to(torch.float32 if at else dtype) for at, shape in enumerate(parsed.state_shapes(3))))]
    places = torch.arange(5, 5 + s, dtype=torch.int32)
    slots = places + 16 * torch.arange(3, dtype=torch.int32)[:, None]
    angles, lengths = torch.randn(16, 3).repeat(1, 2), torch.full((3,), 5 + s, dtype=torch.int32)
    given = places.expand(3, -1).contiguous(), angles, slots, lengths, None
    mine = [t.clone() for t in caches]
    y = call(OPS.layer, x, *given, weights, mine, form, None, None)
    right_caches = [t.float() for t in caches]
    right = reference.layer(x.float(), *given, [w.float() for w in weights], right_caches, form)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, theirs in zip((y, *mine), (right, *right_caches)):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("left,words", (
    ("ssm_scale", "each product that adds"), ("w_ssm_out", "no w_ssm_out"), ("w_gate", "gate_scale is of a network")))
def test_weights_of_attention_beside_ssd(left, words):
    names = [name for name in both_shapes() | _NETWORK if name != left]
    with pytest.raises(fftune.Error, match=words):
        form_of(names, heads=4, kv_heads=2, dim=6, act="silu", eps=1e-5, convention="llama", rotary=6, softcap=0.0,
                scale=0.0, rope_scale=0.0, rotates=True, mixer="attention-ssd", width=4, state_dim=8, state_groups=1,
                state_heads=(3, 8))


@pytest.mark.parametrize("factor", (("self_attn", "key_multiplier"), ("mamba", "ssm_in_multiplier"),
                                    ("feed_forward", "gate_multiplier"), ("", "attn_out_multiplier")), ids=str)
def test_a_changed_factor_is_the_models(factor, runs):
    model = make("falcon-h1")
    own, _ = patched(model)
    part, name = factor
    given = ids(3, 1)
    before, _ = steps(own, given)
    for each in (model, own):
        setattr(each.model.layers[2].get_submodule(part), name, 0.75)
    runs.clear()
    right, _ = steps(model, given)
    ours, _ = steps(own, given)
    assert not runs and (ours - right).abs().max() <= 1e-5 * right.abs().max()
    assert (before - right).abs().max() > 1e-3 * right.abs().max()


def test_factors_of_columns_are_read_anew(runs):
    model = make("falcon-h1")
    own, _ = patched(model)
    for each in (model, own):
        columns = each.model.layers[1].mamba.mup_vector
        columns.mul_(torch.linspace(0.5, 2, columns.numel()))
    given = ids(3, 1)
    right, _ = steps(model, given)
    ours, _ = steps(own, given)
    assert runs == ["attention-ssd"] * 2 and (ours - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("more,words", (
    (dict(attention_in_multiplier=0.5), "a factor in front of its attention"),
    (dict(key_multiplier=-0.5), "has a factor of keys, -0.5"),
    (dict(attention_bias=True), "has attention, biases or limits"),
    (dict(mamba_proj_bias=True), "has a bias of its projection"),
    (dict(time_step_limit=(0.001, 0.1)), "has attention, biases or limits"),
    (dict(mamba_rms_norm=True), "was not replaced")), ids=str)
def test_other_layers_of_attention_beside_ssd_are_left_alone(more, words):
    _, report = patched(transformers.AutoModelForCausalLM.from_config(falcon_h1(**more)).eval())
    assert any(words in reason for _, reason in report.left), report


def test_roundings_of_factors_are_no_greater_than_the_models(runs):
    wide, model = make("falcon-h1"), make("falcon-h1", torch.bfloat16)
    own, _ = patched(model)
    given = ids(9, 1, 1, 2)
    right, _ = steps(wide, given)
    errors = [(steps(each, given)[0].float() - right).norm() / right.norm() for each in (own, model)]
    assert runs == ["attention-ssd"] * 4 and errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize("name", ("bamba", "falcon-h1"))
def test_the_model_goes_on_with_states_of_the_op(name, runs):
    model = make(name)
    own, _ = patched(model)
    given = ids(3, 33, 2)  # 66 tokens are the model's
    right, right_cache = steps(model, given)
    ours, cache = steps(own, given)
    assert runs == RUNS[name] * 2 and (ours - right).abs().max() <= 3e-5 * right.abs().max()
    for state, other in zip(states_of(cache), states_of(right_cache)):
        assert (state - other).abs().max() <= 3e-5 * other.abs().max()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_factors_of_a_layer_of_attention(dtype):
    torch.manual_seed(2)
    shapes = _NETWORK | dict(w_q=(24, _D), w_k=(12, _D), w_v=(12, _D), w_o=(_D, 24), out_scale=(_D,), ffn_scale=(_D,),
                             gate_scale=(_H,))
    weights = {name: (torch.randn(*shape) * 0.3 + (len(shape) == 1)).to(torch.float32 if name in FLOAT32 else dtype)
               for name, shape in shapes.items()}
    caches = [torch.randn(3, 16, 2, 6).to(dtype).transpose(1, 2) for _ in range(2)]
    x, lengths = torch.randn(3, 2, _D).to(dtype), torch.tensor([2, 9, 16], dtype=torch.int32)
    y = fftune.ops.layer(x, [weights], [[t.clone() for t in caches]], lengths, 4, 2)
    form = form_of(tuple(weights), heads=4, kv_heads=2, dim=6, act="silu", eps=1e-6, convention="llama", rotary=0,
                   softcap=0.0, scale=0.0, rope_scale=0.0, rotates=False)
    slots = (lengths[:, None] - 2 + torch.arange(2) + 16 * torch.arange(3)[:, None]).int()
    right = reference.layer(x.float(), None, None, slots, lengths, None, [weights[name].float() for name in
                            parse(form).weights], [t.float() for t in caches], form)
    assert (y - right).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * right.norm()
    for more in (dict(network=False), dict(choice=Choice(4, 2))):
        with pytest.raises(fftune.Error):
            form_of(("attn_norm", "ffn_norm", "w_q", "w_k", "w_v", "w_o", "out_scale", "ffn_scale", "w_gate", "w_up",
                     "w_down", *(("w_router",) if "choice" in more else ())), heads=4, kv_heads=2, dim=6, act="silu",
                    eps=1e-6, convention="llama", rotary=0, softcap=0.0, scale=0.0, rope_scale=0.0, rotates=False,
                    **more)
