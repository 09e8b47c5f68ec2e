"""Float8StaticCache: what it stores, models that use it, and that patched ones read it in place."""
import copy

import pytest
import torch
import transformers
from torch import nn

import fftune
from fftune.patching import decoding
from fftune.patching import layers as patched_layers
from models import RELEASE, inputs, make

pytestmark = pytest.mark.skipif(RELEASE < (5, 17), reason="transformers is older than 5.17")
E4M3 = torch.float8_e4m3fn
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS = ["llama", "qwen3", "gemma2", "gemma3", "phi", "gpt2", "mixtral", "mistral-window", "olmo2"]
TOKENS, NEW = 9, 20


def error(got, right):
    return ((got.double() - right.double()).norm() / right.double().norm()).item()


def model_of(name="llama", **options):
    model = make(name, device=DEVICE, **options)
    model.generation_config.eos_token_id = None
    return model


def patched(model, **options):
    own = copy.deepcopy(model)
    fftune.patch(own, **options)
    return own


def cache_of(model, scales="tensor", size=TOKENS + NEW):
    return fftune.Float8StaticCache(model.config, size, scales)


def greedy(model, ids, cache, count=NEW, **options):
    return model.generate(ids, past_key_values=cache, max_new_tokens=count, do_sample=False, disable_compile=True,
                          **options)


def check_tokens(got, right):
    """`got`: tokens. `right`: the unpatched model's result with logits. Another processor rounds a key to the code
    beside, 1/16 away, so a sequence may go on otherwise from where the unpatched model's two logits are as near."""
    assert got.shape == right.sequences.shape and torch.equal(got[:, :TOKENS], right.sequences[:, :TOKENS])
    for row, (own, its) in enumerate(zip(got, right.sequences)):
        if torch.equal(own, its):
            continue
        at = int((own != its).nonzero()[0])
        logits = right.logits[at - TOKENS][row]
        assert logits[its[at]] - logits[own[at]] < 0.05 * logits.float().std(), (row, at)


@pytest.fixture
def runs(monkeypatch):
    """The arguments of each call of the op `layer`."""
    seen, own = [], patched_layers.call
    monkeypatch.setattr(patched_layers, "call", lambda op, *given: seen.append(given) or own(op, *given))
    return seen


@pytest.fixture
def loops(monkeypatch):
    seen, run = [], decoding.Loop.run
    monkeypatch.setattr(decoding.Loop, "run", lambda self, ids: (seen.append(self), run(self, ids))[1])
    return seen


# the class

def stored(keys, scale):
    """As the documentation says."""
    return (keys / scale.view(-1, 1, 1)).clamp(-448, 448).to(E4M3)


@pytest.mark.parametrize("scales, count", [("tensor", 1), ("head", 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer(scales, count, dtype):
    config = transformers.LlamaConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=3)
    cache = fftune.Float8StaticCache(config, 12, scales)
    layer, = cache.layers
    assert cache.scales == [None]
    k, v = (torch.randn(2, 3, 5, 16, device=DEVICE).mul(size).to(dtype) for size in (30, 0.01))
    k *= torch.tensor([1.0, 20.0, 0.05], device=DEVICE).view(3, 1, 1)
    results = [cache.update(t, u, 0) for t, u in ((k, v), (2.5 * k, 4 * v))]
    (k_scale, v_scale), = cache.scales
    for scale, first in ((k_scale, k), (v_scale, v)):
        assert scale.dtype == torch.float32 and scale.shape == (count,)
        assert torch.equal(scale.log2(), scale.log2().round())
        most = first.float().abs().amax((0, 2, 3)) if count > 1 else first.float().abs().max().view(1)
        assert ((112 < most / scale) & (most / scale <= 224)).all()
    assert int(cache.get_seq_length()) == 10 and layer.keys.shape == (2, 3, 12, 16)
    for own, all, scale, at in ((layer.keys, torch.cat((k, 2.5 * k), 2), k_scale, 0),
                                (layer.values, torch.cat((v, 4 * v), 2), v_scale, 1)):
        assert own.dtype == E4M3 and own.transpose(1, 2).is_contiguous()
        right = stored(all.float(), scale)
        assert torch.equal(own[:, :, :10].float(), right.float()) and not own[:, :, 10:].float().any()
        for result, tokens in zip(results, (5, 10)):
            assert result[at].dtype == dtype and result[at].shape == own.shape
            wide = right[:, :, :tokens].float() * scale.view(-1, 1, 1)
            assert torch.equal(result[at][:, :, :tokens], wide.to(dtype))
    # Twice the first largest number, and a bit more than that: the others are cut.
    assert own[:, :, 5:10].float().abs().max() == 448 and error(results[0][0][:, :, :5], k) < 0.03


def test_infinities_and_zeros_have_no_part_in_scales():
    config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=2)
    cache = fftune.Float8StaticCache(config, 8, "head")
    k = torch.zeros(1, 2, 3, 4)
    k[0, 0] = torch.tensor([1.0, float("inf"), float("nan"), -3.0])
    keys, _ = cache.update(k, k, 0)
    (k_scale, _), = cache.scales
    assert k_scale.tolist() == [2.0**-6, 1.0]  # 3 · 64 is 192
    assert keys[0, 0, 0, :2].tolist() == [1.0, 448 / 64] and keys[0, 0, 0, 2].isnan() and keys[0, 0, 0, 3] == -3
    assert not keys[0, 1].any()


def test_scales_that_are_given_stay():
    model = model_of()
    given = [(0.25, torch.tensor([0.125])), (torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.0625]))]
    cache = cache_of(model, given)
    ids = inputs("llama", 2, TOKENS, DEVICE)["input_ids"]
    first = greedy(model, ids, cache)
    assert [[s.tolist() for s in pair] for pair in cache.scales] == [[[0.25], [0.125]], [[0.5, 2.0], [1.0, 0.0625]]]
    cache.reset()
    assert cache.scales[0][0].item() == 0.25 and int(cache.get_seq_length()) == 0
    assert torch.equal(greedy(model, ids, cache), first)
    # Those that were computed are computed anew.
    computed = cache_of(model)
    greedy(model, ids, computed)
    again = cache_of(model, computed.scales)
    assert torch.equal(greedy(model, ids, again), greedy(model, ids, cache_of(model)))
    computed.reset()
    assert computed.scales == [None, None]


def test_later_calls_go_on():
    model = model_of()
    ids = inputs("llama", 2, TOKENS, DEVICE)["input_ids"]
    cache = cache_of(model)
    first = greedy(model, ids, cache, 8)
    scales = [[s.clone() for s in pair] for pair in cache.scales]
    assert torch.equal(greedy(model, first, cache, NEW - 8), greedy(model, ids, cache_of(model)))
    assert all(torch.equal(a, b) for own, old in zip(cache.scales, scales) for a, b in zip(own, old))


def test_a_check_with_a_cache_leaves_it_as_it_was():
    model = model_of()
    ids = inputs("llama", 2, TOKENS, DEVICE)["input_ids"]
    cache = cache_of(model)
    greedy(model, ids, cache, 3)
    layer = cache.layers[1]
    before = [t.clone() for t in (layer.keys.float(), layer.values.float(), layer.k_scale, layer.cumulative_length)]
    with torch.no_grad():
        report = fftune.check(model, {"input_ids": ids[:, :1], "past_key_values": cache})
    assert report.good
    assert all(map(torch.equal, before, (layer.keys.float(), layer.values.float(), layer.k_scale,
                                         layer.cumulative_length)))


def test_beams_are_those_of_the_unpatched_model():
    model = model_of()
    ids = inputs("llama", 2, TOKENS, DEVICE)["input_ids"]
    options = dict(max_new_tokens=8, do_sample=False, num_beams=3, disable_compile=True)
    right = model.generate(ids, past_key_values=cache_of(model), **options)
    assert right.shape == (2, TOKENS + 8)
    own = patched(model, whole_layers=True)
    assert torch.equal(own.generate(ids, past_key_values=cache_of(model), **options), right)


def test_layers_without_keys_keep_their_states():
    config = transformers.Lfm2Config(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                                     num_attention_heads=4, num_key_value_heads=2,
                                     layer_types=["conv", "full_attention", "conv"])
    cache = fftune.Float8StaticCache(config, 8)
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["LinearAttentionLayer", "Float8StaticLayer", "LinearAttentionLayer"]
    assert cache.scales == [None] * 3


def test_wrong_arguments():
    model = model_of()
    for given, words in ((dict(scales="row"), "scales is 'row'"), (dict(scales=[(1.0, 1.0)]), "scales of 1 layers"),
                         (dict(scales=[(1.0, 1.0), (0.0, 1.0)]), "k_scale of layer 1"),
                         (dict(scales=[(1.0, 1.0), (1.0, torch.ones(2))]), "1 scales of keys and 2 of values"),
                         (dict(scales=[(1.0, 1.0), 3.0]), "scales of layer 1"),
                         (dict(scales=[(torch.ones(1).double(), 1.0)] * 2), "k_scale of layer 0"),
                         (dict(max_cache_len=0), "max_cache_len is 0"), (dict(config=3), "config is 3")):
        with pytest.raises(fftune.Error, match=words):
            fftune.Float8StaticCache(**{"config": model.config, "max_cache_len": 8, **given})
    ids = inputs("llama", 2, TOKENS, DEVICE)["input_ids"]
    with pytest.raises(fftune.Error, match="scales of 3 heads, and keys of 2"), torch.no_grad():
        model(ids, past_key_values=cache_of(model, [(torch.ones(3), torch.ones(3))] * 2))
    with pytest.raises(fftune.Error, match="no gradients"):
        model(ids, past_key_values=cache_of(model))
    own = patched(model, whole_layers=True)
    used = cache_of(model)
    fftune.generate(own, ids, 4, cache=used)
    for cache, words in ((used, "not empty"), (cache_of(model, size=TOKENS), f"{TOKENS} places for {TOKENS + 3} tokens"),
                         (transformers.StaticCache(model.config, 64), "give a Float8StaticCache"),
                         (cache_of(transformers.LlamaForCausalLM(transformers.LlamaConfig(
                             vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=3,
                             num_attention_heads=1))), "3 layers, the model has 2")):
        with pytest.raises(fftune.Error, match=words):
            fftune.generate(own, ids, 4, cache=cache)
    used.reset()
    with pytest.raises(fftune.Error, match="another number of sequences than 1"):
        fftune.generate(own, ids[:1], 4, cache=used)
    fftune.generate(own, ids, 4, cache=used)


# models

@pytest.mark.parametrize("scales", ["tensor", "head"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_the_unpatched_models(name, scales, runs, loops):
    model = model_of(name)
    ids = inputs(name, 2, TOKENS, DEVICE)["input_ids"]
    right = greedy(model, ids, cache_of(model, scales), output_logits=True, return_dict_in_generate=True)
    check_tokens(greedy(patched(model, attention=True), ids, cache_of(model, scales)), right)
    own = patched(model, whole_layers=True)
    check_tokens(greedy(own, ids, cache_of(model, scales)), right)
    # From the second call on, on CPUs; in a window until it is full.
    steps = 0 if DEVICE == "cuda" else (14 - TOKENS if name == "mistral-window" else NEW) - 1
    assert len(runs) == steps * (2 if name == "gemma3" else 1)
    assert all(("cache-scales=head" in given[8]) == (scales == "head") and given[7][0].dtype == E4M3 for given in runs)
    cache = cache_of(model, scales)
    check_tokens(fftune.generate(own, ids, NEW, cache=cache), right)
    assert int(cache.get_seq_length()) in (TOKENS + NEW - 1, TOKENS)  # `decode` counts beside it
    is_whole = DEVICE == "cpu" and name not in ("gemma3", "gpt2", "mistral-window")
    assert (loops[-1].state is not None) == is_whole


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_layers_have_the_unpatched_results(name, dtype, runs):
    """And scales that are given serve the first call too."""
    if DEVICE == "cuda":
        pytest.skip("on a GPU such calls run layer by layer")
    model = model_of(name, dtype=dtype)
    own = patched(model, whole_layers=True)
    ids = inputs(name, 3, TOKENS, DEVICE)["input_ids"]
    with torch.no_grad():
        known = cache_of(model, "head")
        model(ids, past_key_values=known)
        caches = [cache_of(model, known.scales) for _ in range(2)]
        for part in (ids, ids[:, :1], ids[:, 1:4]):
            right, got = (one(part, past_key_values=cache).logits for one, cache in zip((model, own), caches))
            assert error(got, right) < (1e-5 if dtype == torch.float32 else 3e-2)
    assert len(runs) == 3
    for mine, theirs in zip(caches[1].layers, caches[0].layers):
        assert int(mine.cumulative_length) == TOKENS + 4
        for name in ("keys", "values"):
            # A few codes round the other way.
            assert error(getattr(mine, name).float(), getattr(theirs, name).float()) < (
                1e-3 if dtype == torch.float32 else 3e-2)


def test_compiled_steps(runs):
    model = model_of()
    own = patched(model, whole_layers=True)
    ids = inputs("llama", 2, TOKENS, DEVICE)["input_ids"]
    results = []
    with torch.no_grad():
        for one in (model, own):
            cache = cache_of(model)
            one(ids, past_key_values=cache)
            one(ids[:, :1], past_key_values=cache)
            runs.clear()
            torch._dynamo.reset()
            compiled = torch.compile(one, fullgraph=True, backend="inductor" if one is model else "aot_eager")
            results.append(compiled(ids[:, 1:2], past_key_values=cache).logits)
            assert int(cache.get_seq_length()) == TOKENS + 2
    assert error(results[1], results[0]) < 1e-5 and len(runs) == (DEVICE == "cpu")


@pytest.mark.parametrize("dim", [64, 128])
def test_the_error_is_that_of_e4m3(dim):
    """Beside a cache of 32 bits, with heads of the usual sizes: e4m3 rounds by 2.6% of a number in the mean, keys and
    values of two layers."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=4 * dim, intermediate_size=4 * dim, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, head_dim=dim)
    model = transformers.LlamaForCausalLM(config).to(DEVICE).eval()
    ids = torch.randint(3, 96, (2, 64), device=DEVICE)
    with torch.no_grad():
        right = model(ids, past_key_values=transformers.StaticCache(config, 64)).logits
        for scales in ("tensor", "head"):
            got = model(ids, past_key_values=fftune.Float8StaticCache(config, 64, scales)).logits
            assert 1e-4 < error(got, right) < 0.05
            own = patched(model, whole_layers=True)
            cache = fftune.Float8StaticCache(config, 64, scales)
            own(ids[:, :32], past_key_values=cache)
            got = own(ids[:, 32:], past_key_values=cache).logits
            assert 1e-4 < error(got, right[:, 32:]) < 0.05


def test_other_calls_run_layer_by_layer(runs):
    """The first call, whose keys give the scales; and layers of which nothing is known with such caches."""
    model = model_of()
    own = patched(model, whole_layers=True)
    ids = inputs("llama", 2, TOKENS, DEVICE)["input_ids"]
    with torch.no_grad():
        cache = cache_of(model)
        right = model(ids, past_key_values=cache_of(model)).logits
        assert torch.equal(own(ids, past_key_values=cache).logits.argmax(-1), right.argmax(-1)) and not runs
        group, = own.model._fftune_layers.groups
        group.float8["tensor"] = None  # as without kernels
        own(ids[:, :1], past_key_values=cache)
    assert not runs


def test_a_latent_cache_runs_layer_by_layer(runs):
    model = model_of("deepseek")
    own = patched(model, whole_layers=True)
    ids = inputs("deepseek", 2, TOKENS, DEVICE)["input_ids"]
    assert torch.equal(greedy(own, ids, cache_of(model)), greedy(model, ids, cache_of(model)))
    assert not runs


def test_a_model_that_was_changed_runs_layer_by_layer(runs):
    model = model_of()
    own = patched(model, whole_layers=True)
    for one in (model, own):
        torch.manual_seed(5)
        one.model.layers[1].mlp.up_proj = nn.Linear(32, 48).to(DEVICE)
    ids = inputs("llama", 2, TOKENS, DEVICE)["input_ids"]
    assert torch.equal(greedy(own, ids, cache_of(model)), greedy(model, ids, cache_of(model))) and not runs
