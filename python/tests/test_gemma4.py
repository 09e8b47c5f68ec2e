"""patch(whole_layers=True) on tiny models of Gemma 4."""
import copy
import types

import pytest
import torch
import transformers

import fftune
from fftune import _run, reference
from fftune._custom import OPS, call
from fftune.patching import decoding
from fftune.patching.recognise import Unfit
from models import inputs
from test_layers_with_states import make as layers_with_states
from whole_layers import error, generates_alike, patched_layers, run_over_cache, steps  # noqa: F401

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, sliding_window=32,
             layer_types=["sliding_attention", "sliding_attention", "full_attention"], max_position_embeddings=128,
             hidden_size_per_layer_input=0, final_logit_softcapping=30.0, bos_token_id=1, eos_token_id=None,
             pad_token_id=0)
INPUTS = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=96)
MODELS = {"dense": {}, "keys-as-values": dict(attention_k_eq_v=True),
          "experts": dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24),
          "inputs": INPUTS,
          "shared-keys": dict(INPUTS, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
                              num_kv_shared_layers=2, use_double_wide_mlp=True)}
STATIC = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, cache_implementation="static", disable_compile=True)


def expect_gemma4():
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")


def make(name: str, of_text=True, **changes):
    expect_gemma4()
    torch.manual_seed(3)
    config = transformers.Gemma4TextConfig(**copy.deepcopy(SIZES | MODELS[name]) | changes)
    model = transformers.Gemma4ForCausalLM(config).eval() if of_text else transformers.Gemma4ForConditionalGeneration(
        transformers.Gemma4Config(text_config=config, vision_config=None, audio_config=None, image_token_id=91,
                                  video_token_id=92, audio_token_id=93, boi_token_id=94, eoi_token_id=95)).eval()
    with torch.no_grad():  # initial weights are too small and too much alike to show mistakes
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, torch.nn.Parameter) or path.endswith("layer_scalar"):
                tensor += torch.randn_like(tensor) * (0.3 if tensor.dim() == 1 else 0.1)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_models(name):
    model = make(name)
    patched, ids, before, ran = generates_alike(model, len(model.model.layers), STATIC)
    assert {problem["dim"] for problem in ran} == {8, 16}
    assert all((problem["layer-scalar"], problem["scale"]) == ("yes", "1") for problem in ran)
    assert {problem["v-norm"] for problem in ran if problem.get("keys") != "shared"} == {"yes"}
    assert any(problem.get("keys") == "shared" for problem in ran) == (name == "shared-keys")
    assert all(problem.get("expert-norms", "no") == ("yes" if name == "experts" else "no") for problem in ran)
    assert all((problem.get("input-h") == 8) == (name in ("inputs", "shared-keys")) for problem in ran)
    assert torch.equal(fftune.generate(patched, ids, max_new_tokens=8), before)
    for options in (dict(cache_implementation="dynamic"), dict(cache_implementation=None, use_cache=False)):
        assert torch.equal(patched.generate(ids, **STATIC | options), before)
    fftune.unpatch(patched)
    assert torch.equal(patched.generate(ids, **STATIC), before)


def make_gemma3(**changes):
    """With heads of one size and angles of two kinds."""
    expect_gemma4()
    torch.manual_seed(5)
    sizes = {name: SIZES[name] for name in SIZES if "global" not in name and "per_layer" not in name}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes | changes)).eval()


@pytest.mark.parametrize("name", ["dense", "keys-as-values", "experts", "gemma3"])
def test_kinds_of_layers_have_angles_of_their_own(name, steps):
    model = make_gemma3() if name == "gemma3" else make(name)
    own, _ = patched_layers(model)
    ids = torch.randint(3, 90, (2, 5))
    right = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert torch.equal(fftune.generate(own, ids, 8, stop=[]), right)
    assert len(steps) == 7
    arguments = list(steps[3])
    assert len(arguments[-1]) == 1 and not torch.equal(arguments[8], arguments[-1][0])
    ours, theirs = copy.deepcopy(arguments), copy.deepcopy(arguments)
    with torch.no_grad():
        logits = call(OPS.decode, *ours)[1]
        assert error(logits, reference.decode(*theirs)[1]) < 1e-5
        if name == "gemma3":  # the other angles give something else
            arguments[8], arguments[-1] = arguments[-1][0], [arguments[8]]
            assert error(call(OPS.decode, *arguments)[1], logits) > 1e-4
    for mine, wanted in zip(ours[11], theirs[11]):
        assert error(mine, wanted) < 1e-5


def test_kinds_of_attention_run_layer_by_layer_on_a_gpu():
    """Their times there are not known, also beside layers with states."""
    own, _ = patched_layers(make_gemma3())
    others, _ = patched_layers(layers_with_states("lfm2"))
    groups, behind = ([g for g in model.model._fftune_layers.groups] for model in (own, others))
    convolutions = next(group for group in behind if group.specs[0].states)
    on_gpu = types.SimpleNamespace(parameters=lambda: [types.SimpleNamespace(is_cuda=True)])
    for given, kinds in ((groups, 2), ([*groups, convolutions], 3)):
        assert len(decoding._expect_kinds(given, torch.nn.Embedding(1, 1))) == kinds
        with pytest.raises(Unfit, match="several kinds of attention have not been timed on a GPU"):
            decoding._expect_kinds(given, on_gpu)


def test_wrong_numbers_of_angles_are_refused(steps):
    own, _ = patched_layers(make("dense"))
    fftune.generate(own, torch.randint(3, 90, (1, 5)), 3, stop=[])
    arguments = list(steps[0])
    for angles in ([*arguments[-1]] * 2, [torch.zeros(16, 2)], [arguments[-1][0].int()]):
        arguments[-1] = angles
        with torch.no_grad(), pytest.raises(fftune.Error, match="angles"):
            call(OPS.decode, *arguments)


@pytest.mark.parametrize("name", MODELS)
def test_caches_are_the_models(name):
    model = make(name)
    patched, _ = patched_layers(model)
    ids = torch.randint(1, 90, (2, 12))
    right, theirs = run_over_cache(model, ids[:, :7])
    ours, own = run_over_cache(patched, ids[:, :7])
    assert error(ours, right) < 1e-5
    for at in range(7, 12):
        right, theirs = run_over_cache(model, ids[:, at:at + 1], theirs)
        # One goes on where the other stopped.
        ours, own = run_over_cache(model if at % 2 else patched, ids[:, at:at + 1], own)
        assert error(ours, right) < 1e-5
        for a, b in zip(own.layers, theirs.layers):
            if b.keys is None:  # of a layer that takes another one's
                assert a.keys is None
                continue
            assert error(a.keys, b.keys) < 1e-5 and error(a.values, b.values) < 1e-5
            assert not torch.equal(a.keys, a.values)


def test_a_scalar_that_is_set_later_is_read():
    model = make("dense")
    patched, _ = patched_layers(model)
    for own in (model, patched):
        own.model.layers[1].layer_scalar.fill_(0.25)
        own.model.layers[2].layer_scalar = torch.nn.Buffer(torch.full((1,), 2.0))
    ids = inputs("llama")["input_ids"]
    assert error(run_over_cache(patched, ids)[0], run_over_cache(model, ids)[0]) < 1e-5


def with_weights(norm):
    norm.weight = torch.nn.Parameter(torch.full((8,), 2.0))
    norm.with_scale = True


def with_another_eps(norm):
    norm.eps = 0.1


@pytest.mark.parametrize("change", [with_weights, with_another_eps])
def test_other_norms_of_values_stay_the_models(change):
    model = make("dense")
    change(model.model.layers[1].self_attn.v_norm)
    patched, words = patched_layers(model)
    assert len(words) == 1 and "a norm of values with weights, or with another eps" in words[0], words
    ids = inputs("llama")["input_ids"]
    assert error(run_over_cache(patched, ids)[0], run_over_cache(model, ids)[0]) < 1e-5


def in_sequences(model):
    """A call with two sequences, one padded on the left."""
    ids = torch.randint(1, 90, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, **STATIC)


@pytest.mark.parametrize("name", ["experts", "shared-keys"])
def test_padded_sequences_and_full_windows(name):
    model = make(name, sliding_window=9)
    patched, words = patched_layers(model)
    assert "by layer in" in words[0], words
    assert torch.equal(in_sequences(patched), in_sequences(model))
    ids = torch.randint(1, 90, (2, 12))
    right, theirs = run_over_cache(model, ids[:, :6])
    ours, own = run_over_cache(patched, ids[:, :6])
    for at in range(6, 12):  # the last ones do not find all keys in the window's cache
        right, theirs = run_over_cache(model, ids[:, at:at + 1], theirs)
        ours, own = run_over_cache(patched, ids[:, at:at + 1], own)
        assert error(ours, right) < 1e-5


def test_the_last_logits_alone():
    """Layers that take another one's keys are then given the last tokens alone."""
    model = make("shared-keys")
    patched, _ = patched_layers(model)
    ids = torch.randint(1, 90, (2, 9))
    for keep in (0, 1, 4, torch.tensor([2, 8])):
        results = []
        for own in (patched, model):
            past = transformers.StaticCache(config=model.config, max_cache_len=16)
            with torch.no_grad():
                results.append([own(given, past_key_values=past, logits_to_keep=kept).logits
                                for given, kept in ((ids, keep), (ids[:, -1:], 0))])
        for ours, right in zip(*results):
            assert error(ours, right) < 1e-5


def test_a_model_of_pictures_gives_its_text_model_the_inputs_of_layers():
    model = make("shared-keys", of_text=False)
    ids = torch.randint(1, 80, (2, 7))
    before = model.generate(ids, **STATIC)
    patched, words = patched_layers(model)
    assert [w for w in words if "4 layers" in w], words
    found = {}
    with _run.listening(found):
        assert torch.equal(patched.generate(ids, **STATIC), before)
    assert {problem.get("keys") for _, problem in found.values() if problem["op"] == "layer"} >= {"shared"}


def with_an_own_scale(model):
    model.model.layers[1].router.scalar_root_size *= 2


def with_a_bias(model):
    model.model.layers[1].per_layer_input_gate.bias = torch.nn.Parameter(torch.ones(8))


@pytest.mark.parametrize("name, change, reason", [
    ("experts", with_an_own_scale, "another factor than one by its features"),
    ("inputs", with_a_bias, "an input of its own with biases")])
def test_other_parts_stay_the_models(name, change, reason):
    model = make(name)
    change(model)
    patched, words = patched_layers(model)
    assert len(words) == 1 and reason in words[0], words
    ids = inputs("llama")["input_ids"]
    assert error(run_over_cache(patched, ids)[0], run_over_cache(model, ids)[0]) < 1e-5
