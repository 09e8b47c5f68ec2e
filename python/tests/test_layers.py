"""Whole layers: the op, and patch(model, whole_layers=True) on tiny models of transformers."""
import copy
import inspect

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.utils import counters

import fftune
from fftune import ops, reference
from fftune.patching import decoding as patched_decoding
from fftune.patching import layers as patched_layers
from models import _SIZES, LAYERED, inputs, make
from test_ops import OPCHECK, error

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
FORMS = {
    "llama": dict(),
    "qwen3": dict(norms_of_heads=True),
    "gemma3": dict(norms_of_heads=True, post_norms=True, convention="gemma", act="gelu-tanh",
                   scale=0.2, softcap=5.0),
    "biased": dict(bias=True),
    "phi": dict(bias=True, layer_norm=True, gated=False, parallel=True, act="gelu-tanh", rotary=4),
    "gpt2": dict(bias=True, layer_norm=True, gated=False, act="relu", rotary=0),
    "mixtral": dict(experts=5, top_k=2, order="after"),
    "qwen3-moe": dict(experts=6, top_k=3, packed=True, norms_of_heads=True, renormalise=True),
    "interleaved": dict(experts=4, top_k=2, packed=True, packing="interleaved", score="sigmoid"),
    "olmo2": dict(post_norms="only", norms_of_heads="rows"),
    "exaone4": dict(post_norms="only", norms_of_heads=True),
    "hunyuan": dict(norms_of_heads=True, norm_last=True),
    "persimmon": dict(bias=True, layer_norm=True, gated=False, act="gelu", rotary=4,
                      norms_of_heads="layer", qkv="grouped"),
    "packed-heads": dict(bias=True, qkv="packed", norms_of_heads="rows", convention="gemma"),
    "granite": dict(multiplier=0.22, scale=0.3),
    "granite-moe": dict(multiplier=0.22, experts=5, top_k=2, order="after", packed=True, shared=24),
    "layer-scale": dict(layer_scale=True, bias=True),
    "neox": dict(bias=True, layer_norm=True, gated=False, parallel=True, two_norms=True, act="gelu",
                 rotary=4, qkv="grouped"),
    "cohere": dict(layer_norm=True, parallel=True, rotation="interleaved",
                   constants=("attn_norm_bias",)),
    "olmo": dict(layer_norm=True, constants=("attn_norm", "attn_norm_bias", "ffn_norm",
                                             "ffn_norm_bias")),
    "nanochat": dict(norms_of_heads=True, constants=("attn_norm", "ffn_norm", "q_norm", "k_norm")),
    "glm4": dict(post_norms=True, rotation="interleaved", rotary=4),
    "windowed": dict(window=5, sinks=True),
    "gated-features": dict(output_gate="features", norms_of_heads=True, post_norms=True),
    "gemma4": dict(norms_of_heads=True, post_norms=True, act="gelu-tanh", scale=1.0, v_norm=True,
                   layer_scalar=True),
    "gemma4-experts": dict(norms_of_heads=True, post_norms=True, act="gelu-tanh", scale=1.0, v_norm=True,
                           layer_scalar=True, experts=6, top_k=2, packed=True, renormalise=True, shared=24,
                           expert_norms=True),
    "gemma4-inputs": dict(norms_of_heads=True, post_norms=True, act="gelu-tanh", scale=1.0, input_h=12),
    "shared-keys": dict(norms_of_heads=True, post_norms=True, window=5, input_h=12, layer_scalar=True,
                        drop=("w_k", "w_v", "k_norm")),
    "scaled-queries": dict(q_factors=True),
    "gated-heads": dict(output_gate="heads", bias=True),
    "gpt-oss": dict(bias=True, sinks=True, experts=5, top_k=2, packed=True, packing="interleaved",
                    order="after", act="swiglu-oai"),
    "biased-experts": dict(bias=True, experts=5, top_k=2),
    "deepseek": dict(experts=8, top_k=3, packed=True, score="sigmoid", renormalise=True, groups=4,
                     top_groups=2, group_score="top2", route_scale=2.5, choice_bias=True,
                     shared=24, wide_logits=True),
    "groups": dict(experts=8, top_k=3, groups=2, route_scale=0.5),
    "qwen2-moe": dict(experts=6, top_k=2, packed=True, shared=40, shared_gate=True),
    "afmoe": dict(experts=6, top_k=2, post_norms=True, score="sigmoid", shared=24,
                  shared_gate=True),
}
needs_transformers_5 = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5,
                                          reason="transformers is older than 5")


def make_layers(dtype=torch.float32, batch=2, s=1, layers=2, rotary=8, bias=False, layer_norm=False,
                gated=True, norms_of_heads=False, post_norms=False, parallel=False, experts=0,
                packed=False, two_norms=False, sinks=False, shared=0, shared_gate=False,
                choice_bias=False, qkv="", layer_scale=False, drop=(), heads=4, kv_heads=2, output_gate="",
                layer_scalar=False, expert_norms=False, input_h=0, q_factors=False, **options):
    """Arguments of ops.layer."""
    constants = options.get("constants", ())
    norms_first = post_norms != "only"
    d, h, dim, cache = 32, 48, 8, 24

    def random(*shape, about=0.0):
        return (torch.randn(*shape) * 0.3 + about).to(dtype)

    def weights():
        if norms_first:
            yield "attn_norm", random(d, about=1)
        parts = (("qkv", heads + 2 * kv_heads),) if qkv else (("q", heads), ("k", kv_heads),
                                                              ("v", kv_heads))
        for name, rows in parts:
            yield f"w_{name}", random(rows * dim, d)
            if bias:
                yield f"b_{name}", random(rows * dim)
        if layer_scalar:
            yield "layer_scalar", random(1, about=1).float()
        if layer_scale:
            yield "residual_scale", random(d).float()
        yield "w_o", random(d, heads * dim)
        if sinks:
            yield "sinks", random(heads)
        if output_gate:
            yield "w_g", random(heads if output_gate == "heads" else heads * dim, d)
        if experts:
            yield "w_router", random(experts, d)
        if expert_norms:
            for name in ("router_norm", "experts_norm", "shared_post_norm", "experts_post_norm"):
                yield name, random(d, about=1)
            yield "expert_scale", random(experts, about=1).float()
        if input_h:
            yield from (("w_input_gate", random(input_h, d)), ("layer_input", random(batch, s, input_h, about=1)),
                        ("w_input_out", random(d, input_h)), ("input_norm", random(d, about=1)))
        if q_factors:
            yield "q_factors", random(batch, s, about=1).float()
        if choice_bias:
            yield "choice_bias", random(experts).float()
        if shared:
            yield from (("w_shared_gate", random(shared, d)), ("w_shared_up", random(shared, d)),
                        ("w_shared_down", random(d, shared)))
        if shared_gate:
            yield "w_shared_router", random(1, d)
        of_experts = (experts,) if experts else ()
        if packed:
            yield "w_gate_up", random(*of_experts, 2 * h, d)
        else:
            yield "w_up", random(*of_experts, h, d)
            if gated:
                yield "w_gate", random(*of_experts, h, d)
        yield "w_down", random(*of_experts, d, h)
        has_ffn_norm = norms_first and (two_norms or not parallel)
        if has_ffn_norm:
            yield "ffn_norm", random(d, about=1)
        if layer_norm:
            yield "attn_norm_bias", random(d)
            if has_ffn_norm:
                yield "ffn_norm_bias", random(d)
        if bias:
            yield from (("b_o", random(d)), ("b_down", random(*of_experts, d)))
            if experts:
                yield "b_router", random(experts)
            if packed:
                yield "b_gate_up", random(experts, 2 * h)
            elif experts or not gated:
                yield "b_up", random(*of_experts, h)
            if experts and not packed:
                yield "b_gate", random(experts, h)
        if norms_of_heads:
            all_heads = norms_of_heads == "rows"
            for name, count in (("q_norm", heads), ("k_norm", kv_heads)):
                yield name, random(count * dim if all_heads else dim, about=1)
                if norms_of_heads == "layer":
                    yield f"{name}_bias", random(dim)
        if post_norms:
            yield from (("attn_post_norm", random(d, about=1)),
                        ("ffn_post_norm", random(d, about=1)))

    caches = [tuple(random(batch, cache, kv_heads, dim).transpose(1, 2) for _ in "kv")
              for _ in range(layers)]
    lengths = torch.randint(s, cache + 1, (batch,), dtype=torch.int32)
    if rotary:
        pairs = torch.rand(cache, rotary // 2)
        by_halves = options.get("rotation") != "interleaved"
        options["angles"] = pairs.repeat(1, 2) if by_halves else pairs.repeat_interleave(2, -1)
    if two_norms:
        options["parallel"] = True
    if qkv == "grouped":
        options["grouped"] = True
    own = [{name: w for name, w in weights() if name not in (*constants, *drop)} for _ in range(layers)]
    return (random(batch, s, d), own, caches, lengths, heads, kv_heads), options


def by_reference(monkeypatch, arguments, options):
    """(y, caches) of the reference in float64."""
    x, weights, caches, *others = arguments
    caches = [tuple(t.double().transpose(1, 2).contiguous().transpose(1, 2) for t in pair)
              for pair in caches]
    weights = [{name: t.double() for name, t in one.items()} for one in weights]
    with monkeypatch.context() as context:
        context.setattr("fftune._ops.layer.call", lambda _, *given: reference.layer(*given))
        context.setattr("fftune._ops.layer.expect_tensors", lambda *_, **__: None)  # of float64
        return ops.layer(x.double(), weights, caches, *others, **options), caches


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_values(form, s, dtype, monkeypatch):
    # With nearly equal scores of two experts, rounding may choose the other one, in few draws.
    tries = 4 if "experts" in FORMS[form] and dtype == torch.bfloat16 else 1
    errors = []
    for _ in range(tries):
        arguments, options = make_layers(dtype, s=s, **FORMS[form])
        right, right_caches = by_reference(monkeypatch, arguments, options)
        y = ops.layer(*arguments, **options)
        assert y.shape == right.shape
        pairs = [(y, right)] + [pair for both in zip(arguments[2], right_caches)
                                for pair in zip(*both)]
        errors.append(max(error(own, other) for own, other in pairs))
    assert sum(e < TOLERANCE[dtype] for e in errors) >= max(1, tries - 1), errors


def test_slots_and_positions_that_are_given(monkeypatch):
    arguments, options = make_layers()
    options |= dict(slots=torch.tensor([[23], [30]], dtype=torch.int32),
                    positions=torch.tensor([[0], [5]], dtype=torch.int32))
    arguments = (*arguments[:3], torch.tensor([24, 9], dtype=torch.int32), *arguments[4:])
    right, _ = by_reference(monkeypatch, arguments, options)
    assert error(ops.layer(*arguments, **options), right) < 3e-6


@pytest.mark.parametrize("form", ["llama", "packed-heads", "qwen3-moe"])
@pytest.mark.parametrize("slots_are_given", [False, True])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_pages_hold_what_contiguous_caches_do(form, slots_are_given, side_by_side):
    arguments, options = make_layers(s=3, **FORMS[form])
    x, weights, caches, lengths, heads, kv_heads = arguments
    batch, _, cache, dim = caches[0][0].shape
    page, width = 16, -(-cache // 16)
    table = torch.randperm(batch * width + 3)[:batch * width].view(batch, width)

    def to_pages(tensor):
        paged = torch.full((batch * width + 3, page, kv_heads, dim), 1e9)
        rows = torch.full((batch, width * page, kv_heads, dim), 1e9)
        rows[:, :cache] = tensor.transpose(1, 2)
        paged[table] = rows.view(batch, width, page, kv_heads, dim)
        return paged

    paged = [tuple(map(to_pages, pair)) for pair in caches]
    if side_by_side:
        paged = [torch.cat(pair, -1).split(dim, -1) for pair in paged]
    wanted = ops.layer(*arguments, **options)
    if slots_are_given:
        at = lengths[:, None].long() - 3 + torch.arange(3)
        options["slots"] = (table.gather(1, at // page) * page + at % page).int()
    y = ops.layer(x, weights, paged, lengths, heads, kv_heads, pages=table.int(), **options)
    torch.testing.assert_close(y, wanted)
    for pair, others in zip(paged, caches):
        for one, other in zip(pair, others):
            torch.testing.assert_close(one, to_pages(other))


def test_pages_in_front_of_a_window_are_nobodys():
    """Such as those that an engine has given to other sequences."""
    arguments, options = make_layers(s=2, window=5)
    x, weights, _, _, heads, kv_heads = arguments
    lengths = torch.tensor([24, 22], dtype=torch.int32)  # the first key that is seen is at 17 or 16
    caches = [tuple(torch.randn(5, 16, kv_heads, 8) for _ in "kv") for _ in weights]
    tables, results = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), []
    for value in (0.0, float("nan")):
        own = [tuple(t.clone() for t in pair) for pair in caches]
        for pair in own:
            for cache in pair:
                cache[[0, 2, 4]] = value
        results.append(ops.layer(x, weights, own, lengths, heads, kv_heads, pages=tables, **options))
        tables = torch.tensor([[4, 1], [4, 3]], dtype=torch.int32)
    assert torch.equal(*results) and results[0].isfinite().all()


def test_caches_of_pages_that_are_wrong():
    arguments, options = make_layers()
    x, weights, caches, lengths, heads, kv_heads = arguments
    pages = torch.zeros(2, 2, dtype=torch.int32)
    for shape, words in (((9, 16, kv_heads + 1, 8), "a cache of layer 0"),
                         ((9, 24, kv_heads, caches[0][0].shape[3]), "page=24")):
        with pytest.raises(fftune.Error, match=words):
            ops.layer(x, weights, [(torch.zeros(shape),) * 2] * len(caches), lengths, heads, kv_heads,
                      pages=pages, **options)
    dim = caches[0][0].shape[3]
    whole = torch.zeros(9, 16, kv_heads, 2 * dim)
    for pair in ((whole[..., :dim], torch.zeros(9, 16, kv_heads, dim)), (whole[::2, ..., :dim],) * 2,
                 (torch.zeros(9, kv_heads, 16, dim).transpose(1, 2),) * 2):
        with pytest.raises(fftune.Error, match="a cache does not lie in memory as"):
            ops.layer(x, weights, [pair] * len(caches), lengths, heads, kv_heads, pages=pages,
                      **options)


def test_opcheck(monkeypatch):
    arguments, options = make_layers()
    seen = []
    with monkeypatch.context() as context:
        context.setattr("fftune._ops.layer.call", lambda _, *given: seen.append(given))
        ops.layer(*arguments, **options)
    torch.library.opcheck(torch.ops.fftune.layer.default, seen[0], **OPCHECK)


def _left_out(name):
    arguments, options = make_layers()
    del arguments[1][0][name]
    return arguments, options


def _other(at, change):
    arguments, options = make_layers()
    arguments = list(arguments)
    arguments[at] = change(arguments[at])
    return arguments, options


@pytest.mark.parametrize("make_call, words", [
    (lambda: _left_out("w_o"), "a layer has no w_o"),
    (lambda: _left_out("w_gate"), "w_gate is a weight of some layers"),
    (lambda: _other(1, lambda w: [{**one, "w_off": one["w_o"]} for one in w]), "w_off"),
    (lambda: _other(1, lambda w: [{**one, "w_o": one["w_o"].T[:8]} for one in w]),
     "w_o of layer 0 is [8, 32], not [32, 32]"),
    (lambda: _other(1, lambda w: [{**one, "q_norm": one["ffn_norm"]} for one in w]),
     "give all of q_norm, k_norm, or none"),
    (lambda: _other(2, lambda c: [tuple(t.contiguous() for t in pair) for pair in c]),
     "does not lie in memory"),
    (lambda: _other(2, lambda c: c[:1]), "caches of 1"),
    (lambda: _other(1, lambda w: [{**one, "w_router": one["w_o"][:4]} for one in w]),
     "w_router and top_k: give both"),
    (lambda: _other(1, lambda w: [{**one, "w_gate_up": one["w_up"]} for one in w]),
     "w_gate_up is both"),
    (lambda: _other(3, lambda t: t.long()), "lengths is torch.int64"),
    (lambda: _other(1, lambda w: [{**one, "choice_bias": one["ffn_norm"]} for one in w]),
     "choice_bias is of a mixture of experts"),
    (lambda: _other(1, lambda w: [{**one, "b_gate": one["ffn_norm"]} for one in w]),
     "b_up is of a feed-forward network"),
    (lambda: _other(1, lambda w: [{**one, "sinks": one["ffn_norm"]} for one in w]),
     "sinks of layer 0 is [32], not [4]"),
    (lambda: make_layers(constants=("w_o",)), "w_o is no constant"),
    (lambda: make_layers(window=-1), "window is -1"),
    (lambda: make_layers(layer_scale=True, multiplier=0.5), "give one of them"),
    (lambda: _other(1, lambda w: [{**one, "w_qkv": one["w_o"]} for one in w]),
     "w_k does not go with w_qkv"),
    (lambda: _other(1, lambda w: [{**one, "q_norm_bias": one["ffn_norm"]} for one in w]),
     "give all of q_norm_bias, k_norm_bias"),
    (lambda: (make_layers()[0], make_layers(constants=("ffn_norm",))[1]),
     "ffn_norm is no constant: it is a weight"),
    (lambda: make_layers(bias=True, experts=5, top_k=2, drop=("b_gate",)),
     "experts have all of b_down, b_gate, b_up"),
    (lambda: _other(0, lambda x: x.requires_grad_()), "no gradient"),
    (lambda: _other(0, lambda x: x[0]), "give [batch, tokens, features]"),
])
def test_errors(make_call, words):
    arguments, options = make_call()
    with pytest.raises(fftune.Error) as caught:
        ops.layer(*arguments, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


# patch

SERVED = ["llama", "llama3", "qwen2", "qwen3", "mistral", "gemma", "phi", "gpt2", "mixtral",
          "qwen3-moe", "qwen2-moe", "gpt-oss", "dots1", *LAYERED]
_LONGEST = {"gemma2": 2}  # runs of equal layers, where decode does not run all of them
GENERATE = dict(max_new_tokens=10, do_sample=False, cache_implementation="static",
                disable_compile=True, eos_token_id=None)


@pytest.fixture
def runs(monkeypatch):
    """Records every run of the op, also within `decode`: the tokens of a sequence, and the layers."""
    seen, original = [], patched_layers.call

    def call(op, *arguments):
        seen.append((arguments[0].shape[1], len(arguments[7]) // 2))
        return original(op, *arguments)

    def step(op, *arguments):
        if op.label == "decode":
            seen.append((1, len(arguments[11]) // 2))
        return original(op, *arguments)

    monkeypatch.setattr(patched_layers, "call", call)
    monkeypatch.setattr(patched_decoding, "call", step)
    return seen


def patched(name, **options):
    """A model and its copy that is patched."""
    model = make(name)
    own = copy.deepcopy(model)
    report = fftune.patch(own, whole_layers=True, **options)
    assert any("by layer" in words for _, words in report.replaced), str(report)
    return model, own


def cache_of(model, size=24):
    return transformers.StaticCache(config=model.config, max_cache_len=size)


@torch.no_grad()
def decode(model, step=None, batch=2, size=24, cache=None, **options):
    """Logits of a few steps."""
    torch.manual_seed(5)
    cache = cache_of(model, size) if cache is None else cache
    ids = torch.randint(3, 96, (batch, 7))
    step = model if step is None else step
    logits = [model(ids, past_key_values=cache, use_cache=True, **options).logits[:, -1]]
    for _ in range(4):
        ids = torch.randint(3, 96, (batch, 1))
        logits.append(step(ids, past_key_values=cache, use_cache=True, **options).logits[:, -1])
    return torch.stack(logits)


@needs_transformers_5
@pytest.mark.parametrize("name", SERVED)
def test_generate(name, runs):
    model, own = patched(name)
    ids = inputs(name)["input_ids"]
    right = model.generate(ids, **GENERATE)
    assert torch.equal(own.generate(ids, **GENERATE), right)
    layers = model.config.num_hidden_layers
    if name == "mistral-window":  # until its cache is full
        assert runs == [(9, 2)] + [(1, 2)] * 5
    else:
        # The masks of a last token in a cache that is full do not say that nothing is padded.
        assert sum(count for s, count in runs if s == 1) == 9 * layers
        assert max(count for _, count in runs) == _LONGEST.get(name, layers)
    before = dict(own.state_dict())
    fftune.unpatch(own)
    assert torch.equal(own.generate(ids, **GENERATE), right)
    for key, tensor in own.state_dict().items():
        assert torch.equal(tensor, before[key]) and tensor.is_contiguous()
    assert not any("forward" in m.__dict__ or "_fftune_layers" in m.__dict__
                   for m in own.modules())


@needs_transformers_5
@pytest.mark.parametrize("options", [dict(attention=True), dict(graphs=True),
                                     dict(projections=False)], ids=str)
def test_generate_beside_other_options(options, runs):
    model, own = patched("llama", **options)
    ids = inputs("llama")["input_ids"]
    assert torch.equal(own.generate(ids, **GENERATE), model.generate(ids, **GENERATE))
    assert runs.count((1, 2)) == 9
    long = torch.randint(3, 96, (2, 40))  # more tokens than the op is given at once
    assert torch.equal(own.generate(long, **GENERATE), model.generate(long, **GENERATE))
    assert runs.count((1, 2)) == 18 and max(s for s, _ in runs) == 9


@needs_transformers_5
@pytest.mark.parametrize("name", ["llama", "gemma3", pytest.param("gpt2", marks=pytest.mark.further)])
def test_decode_is_compiled_as_one_graph(name):
    model, own = patched(name)
    right = decode(model)
    torch._dynamo.reset()
    counters.clear()
    # One of them by the default backend, which takes longer than all of the rest.
    step = torch.compile(own, fullgraph=True, backend="inductor" if name == "llama" else "aot_eager")
    assert error(decode(own, step), right) < 2e-6
    # A sliding cache counts in Python too: of that a second graph takes any number.
    assert counters["stats"]["unique_graphs"] == (2 if name == "gemma3" else 1)
    assert error(decode(own, step), right) < 2e-6  # with another cache
    torch._dynamo.reset()
    compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
    assert error(decode(compiled), right) < 2e-6  # the first call too


@needs_transformers_5
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe"])
def test_weights_and_caches_are_read_where_they_are(name, monkeypatch):
    _, own = patched(name)
    seen, original = [], patched_layers.call
    monkeypatch.setattr(patched_layers, "call",
                        lambda op, *given: seen.append(given) or original(op, *given))
    cache = cache_of(own)
    decode(own, cache=cache)
    own_pointers = {p.data_ptr() for p in own.parameters()}
    assert all(w.data_ptr() in own_pointers for given in seen for w in given[6])
    assert {t.data_ptr() for t in seen[-1][7]} == {t.data_ptr() for layer in cache.layers
                                                  for t in (layer.keys, layer.values)}
    assert [int(layer.cumulative_length) for layer in cache.layers] == [11, 11]


def padded(own):
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    return own.generate(torch.randint(3, 96, (2, 7)), attention_mask=mask, **GENERATE)


def exchanged(own):
    layer = own.model.layers[1].self_attn.q_proj
    own.model.layers[1].self_attn.q_proj = nn.Sequential(layer)
    return decode(own)


def watched(own):
    seen = []
    own.model.layers[0].register_forward_hook(lambda *given: seen.append(given[2]))
    decode(own)
    return torch.stack(seen[1:])


def in_other_words(own):
    cache = cache_of(own)
    decode(own, cache=cache)
    ids = torch.randint(3, 96, (2, 1))
    with torch.no_grad():
        result = own(ids, past_key_values=cache, output_hidden_states=True)
    return torch.stack(result.hidden_states)


def watched_inside(own):
    own.model.layers[1].self_attn.register_forward_hook(lambda *given: None)
    return decode(own)


def shortened(own):
    cache = cache_of(own)
    own.config.num_hidden_layers = own.model.config.num_hidden_layers = 1
    return decode(own, cache=cache)


@needs_transformers_5
@pytest.mark.parametrize("use, served", [
    (padded, 0), (exchanged, 0), (watched, 0), (watched_inside, 0), (in_other_words, 5), (shortened, 0),
    (lambda own: decode(own, cache=transformers.DynamicCache()), 0),
    (lambda own: decode(own, batch=65), 0),
    (lambda own: own(torch.randint(3, 96, (1, 5)), past_key_values=cache_of(own)).logits, 0),
    (lambda own: decode(own.train()), 0),
], ids=["padding", "exchanged", "hooks", "hooks-inside", "hidden-states", "early-exit",
        "growing-cache", "many-rows", "gradients", "training"])
def test_other_calls_run_as_before(use, served, runs):
    model, own = patched("llama")
    torch.manual_seed(3)
    right = use(model)
    torch.manual_seed(3)
    ours = use(own)
    assert ours.shape == right.shape and error(ours, right) < 2e-6
    assert len(runs) == served


def with_a_bias(model):
    module = nn.Linear(model.config.hidden_size, model.config.intermediate_size)
    model.model.layers[1].mlp.up_proj = module.to(model.dtype)


def with_a_bias_of_its_own(model):
    k = model.model.layers[0].self_attn.k_proj
    k.bias = nn.Parameter(torch.linspace(-2, 2, k.out_features))


def with_another_eps(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def with_another_scale(model):
    model.model.layers[0].self_attn.scaling *= 3


def narrower(model):
    mlp = model.model.layers[0].mlp
    for module in (mlp.gate_proj, mlp.up_proj):
        module.weight, module.out_features = nn.Parameter(module.weight[:8].clone()), 8
    mlp.down_proj.weight, mlp.down_proj.in_features = nn.Parameter(mlp.down_proj.weight[:, :8].clone()), 8


def bidirectional(model):
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


@needs_transformers_5
@pytest.mark.parametrize("change", [with_a_bias, with_a_bias_of_its_own, with_another_eps,
                                    with_another_scale, narrower])
def test_layers_that_were_changed_since_run_by_themselves(change, runs):
    model, own = patched("llama")
    decode(own)
    runs.clear()
    for one in (model, own):
        torch.manual_seed(4)
        change(one)
    assert error(decode(own), decode(model)) < 2e-6
    assert not runs


@needs_transformers_5
def test_attention_that_is_not_causal_is_left_alone():
    model = make("llama")
    bidirectional(model)
    own = copy.deepcopy(model)
    report = fftune.patch(own, whole_layers=True)
    assert any("is not causal" in words for _, words in report.left), str(report)
    assert error(decode(own), decode(model)) < 2e-6


@needs_transformers_5
def test_hooks_of_hidden_states_do_not_stay_in_the_way(runs):
    model, own = patched("llama")
    in_other_words(own)
    runs.clear()
    assert error(decode(own), decode(model)) < 2e-6 and len(runs) == 5


@needs_transformers_5
def test_a_cache_that_was_there_keeps_what_it_holds(runs):
    model, own = patched("qwen2")
    right = decode(model)
    cache = cache_of(model)
    torch.manual_seed(5)
    ids = torch.randint(3, 96, (2, 7))
    with torch.no_grad():
        model(ids, past_key_values=cache)  # makes it, in its own layout
        ours = []
        for _ in range(4):
            ids = torch.randint(3, 96, (2, 1))
            ours.append(own(ids, past_key_values=cache).logits[:, -1])
    assert error(torch.stack(ours), right[1:]) < 2e-6 and len(runs) == 4


@needs_transformers_5
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_step_with_gradients_follows_steps_without(name):
    results = []
    for each in patched(name):
        cache = cache_of(each)
        decode(each, cache=cache)
        loss = each(torch.full((2, 1), 5), past_key_values=cache).logits.square().mean()
        loss.backward()
        results.append((loss.detach(), *(p.grad for p in each.parameters() if p.grad is not None)))
    assert all(error(own, right) < 1e-5 for right, own in zip(*results, strict=True))


@needs_transformers_5
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", *LAYERED])
def test_calls_without_positions(name, runs):
    """Also where the decoder counts them in its mask, as OPT does, and in calls that run layer by layer."""
    model, own = patched(name)
    for options in ({}, dict(output_hidden_states=True)):
        runs.clear()
        assert error(decode(own, **options), decode(model, **options)) < 5e-6
        assert bool(runs) != bool(options)
    prompt = torch.ones(2, 7, dtype=torch.long)
    ids = torch.randint(3, 96, (2, 7))
    with torch.no_grad():
        ours, theirs = (m(ids, attention_mask=prompt, past_key_values=cache_of(m)).logits for m in (own, model))
    assert error(ours, theirs) < 5e-6


@needs_transformers_5
def test_layers_with_other_heads_keep_keys_of_their_own_shape():
    """Key-value heads that were repeated after patch(), as for tensor parallelism."""
    model, own = patched("llama")
    for each in (model, own):
        for layer in each.model.layers:
            part = layer.self_attn
            part.num_key_value_groups = 1
            for name in ("k_proj", "v_proj"):
                weight = getattr(part, name).weight.detach()
                wide = nn.Linear(weight.shape[1], 2 * weight.shape[0], bias=False)
                wide.weight = nn.Parameter(weight.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1))
                setattr(part, name, wide)
    assert error(decode(own), decode(model)) < 2e-6


@needs_transformers_5
def test_behind_the_end_of_a_cache_nothing_is_written():
    _, own = patched("llama")
    cache = cache_of(own, 11)
    decode(own, cache=cache)
    with pytest.raises(IndexError), torch.no_grad():
        own(torch.randint(3, 96, (2, 1)), past_key_values=cache)


@pytest.mark.parametrize("batch, s", [(1, 1), (3, 1), (3, 2)])
def test_places_behind_a_length(batch, s):
    lengths, slots = patched_layers._places(torch.tensor(5), batch, s, 24)
    assert lengths.tolist() == [5 + s] * batch and lengths.dtype == slots.dtype == torch.int32
    assert slots.tolist() == [[24 * i + 5 + j for j in range(s)] for i in range(batch)]
    # Otherwise they would be copied on a GPU.
    assert slots.data_ptr() % 16 == lengths.data_ptr() % 16 == 0


@needs_transformers_5
def test_copies_and_casts(runs):
    model, own = patched("llama")
    again = copy.deepcopy(own)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.zero_()
    assert error(decode(again), decode(model)) < 2e-6 and len(runs) == 5
    wide = decode(model)
    assert error(decode(again.bfloat16()), wide) < 5e-2 and len(runs) == 10


@needs_transformers_5
def test_report_says_what_is_left():
    report = fftune.patch(make("t5"), whole_layers=True)
    assert any("T5Stack calls its layers in a way" in reason for _, reason in report.left), str(report)
    assert not any("by layer" in own for _, own in report.replaced)


def test_another_layer_is_left_alone(monkeypatch):
    from transformers.models.llama import modeling_llama

    model = make("llama")
    forward = modeling_llama.LlamaDecoderLayer.forward

    def doubled(self, hidden_states, **options):
        return forward(self, hidden_states * 2, **options)

    doubled.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", doubled)
    report = fftune.patch(model, whole_layers=True)
    assert any("in an order that is not known" in words for _, words in report.left), str(report)


def shared_in_one_list(models):
    models[0].layers[1] = models[0].layers[0]


def shared_by_two_decoders(models):
    models[1].layers = models[0].layers


@needs_transformers_5
@pytest.mark.parametrize("share", [shared_in_one_list, shared_by_two_decoders])
def test_layers_at_several_places(share):
    """Weights tied across layers, as ALBERT has them, or across decoders."""
    decoders = torch.nn.ModuleList(make("llama").model for _ in range(2))
    share(decoders)
    ids = torch.randint(3, 96, (2, 5))

    def states(decoder):
        with torch.no_grad():
            return decoder(ids, past_key_values=cache_of(decoder)).last_hidden_state

    right = [states(decoder) for decoder in decoders]
    report = fftune.patch(decoders, whole_layers=True)
    assert any("is called at several places" in reason for _, reason in report.left), str(report)
    for decoder, exact in zip(decoders, right):
        assert error(states(decoder), exact) < 2e-6


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masks_of_the_caller_mean_what_they_do_unpatched(name, attention):
    """A boolean mask is added as 0 and 1 by eager attention, and by PyTorch's hides keys."""
    model = make(name)
    if attention == "sdpa" and name == "gemma2":
        pytest.skip("Gemma 2 has eager attention alone")
    model.set_attn_implementation(attention)
    own = copy.deepcopy(model)
    fftune.patch(own, whole_layers=True)
    ids = inputs(name, 2, 9)["input_ids"]
    seen = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    for mask in (seen, torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)):
        ours, theirs = (m(input_ids=ids, attention_mask=mask).logits for m in (own, model))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
