"""Tests of everything that a version of PyTorch or transformers can break, in a minute: `./dev versions` runs
these with the oldest and the newest that are supported."""
import copy
import importlib
import io
import pkgutil

import pytest
import torch
from torch import nn

import fftune
from fftune import ops
from fftune._custom import References
from cases import trusted
from models import RELEASE, inputs, make

IS_5 = RELEASE >= (5, 0)
# Experts lie in one tensor each from 5 on.
NAMES = ["llama", "qwen3", "gemma2", "phi", "gpt2", "t5", *["mixtral", "gpt-oss"] * IS_5]


def close(ours, theirs, tolerance=1e-4):
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).norm() <= tolerance * theirs.norm())


def pair(name, **options):
    """A model, and a patched copy of it."""
    model = make(name)
    model.generation_config.eos_token_id = None
    own = copy.deepcopy(model)
    report = fftune.patch(own, **options)
    assert report.replaced, str(report)
    return model, own, report


def test_every_module_is_imported():
    names = [m.name for m in pkgutil.walk_packages(fftune.__path__, "fftune.")
             if not m.name.startswith("fftune.vllm.") and m.name != "fftune.__main__"]
    assert len(names) > 60
    for name in names:
        importlib.import_module(name)


def _given(*sizes, wants=True):
    return torch.randn(*sizes, requires_grad=wants)


CALLS = {
    "rmsnorm": lambda: (ops.rmsnorm, (_given(5, 16), _given(16))),
    "layernorm": lambda: (ops.layernorm, (_given(5, 16, wants=False), _given(16, wants=False),
                                          _given(16, wants=False))),
    "linear": lambda: (ops.linear, (_given(5, 16), _given(24, 16), _given(24))),
    "ffn": lambda: (ops.ffn, (_given(5, 16), _given(24, 16), _given(24, 16), _given(16, 24))),
    "attention": lambda: (ops.attention, (_given(2, 7, 4, 16), _given(2, 7, 2, 16), _given(2, 7, 2, 16))),
    "cross-entropy": lambda: (ops.cross_entropy, (_given(5, 40), torch.randint(40, (5,)))),
    "linear-cross-entropy": lambda: (ops.linear_cross_entropy,
                                     (_given(5, 16), _given(40, 16), torch.randint(40, (5,)))),
}


@pytest.mark.parametrize("name", CALLS)
def test_ops_have_the_values_and_gradients_of_their_references(name):
    op, given = CALLS[name]()
    wanted = [t for t in given if t.requires_grad]

    def results():
        y = op(*given)
        return [y, *(torch.autograd.grad(y.square().sum(), wanted) if wanted else ())]

    ours = results()
    with References():
        theirs = results()
    assert len(ours) == 1 + len(wanted) and all(map(close, ours, theirs))


def test_ops_are_what_pytorch_expects_of_ops():
    x, w = _given(5, 16), _given(16)
    assert close(torch.func.vmap(lambda row: ops.rmsnorm(row, w))(x), ops.rmsnorm(x, w))
    gradient = torch.func.grad(lambda x: ops.rmsnorm(x, w).square().sum())
    assert close(gradient(x.detach()), torch.autograd.grad(ops.rmsnorm(x, w).square().sum(), x)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.linear(x, torch.randn(24, 16)).dtype == torch.bfloat16
    with pytest.raises(fftune.Error, match="forward mode"):
        torch.func.jvp(lambda x: ops.rmsnorm(x, w), (x,), (x,))


def test_compiled_ops():
    w = _given(16)
    compiled = torch.compile(lambda x: ops.rmsnorm(x, w) * 2, fullgraph=True)
    x = _given(5, 16)
    assert close(compiled(x), ops.rmsnorm(x, w) * 2)
    ours, = torch.autograd.grad(compiled(x).square().sum(), x)
    assert close(ours, torch.autograd.grad((ops.rmsnorm(x, w) * 2).square().sum(), x)[0])


@pytest.mark.parametrize("name", NAMES)
def test_patched_models(name):
    model, own, _ = pair(name)
    given = inputs(name)
    with torch.no_grad():
        assert close(own(**given).logits, model(**given).logits)
    fftune.unpatch(own)
    with torch.no_grad():
        assert torch.equal(own(**given).logits, model(**given).logits)


def test_attention_runs_in_ops():
    model, own, report = pair("llama", attention=True)
    assert "attention of LlamaModel by attention" in str(report)
    given = inputs("llama")
    with torch.no_grad():
        assert close(own(**given).logits, model(**given).logits)
    fftune.register_attention()
    model.set_attn_implementation("fftune")
    with torch.no_grad():
        assert close(model(**given).logits, own(**given).logits)


def test_hooks_of_all_modules_are_called():
    model, own, _ = pair("llama")
    for one in (model, own):
        seen = []
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
        try:
            one(**inputs("llama"))
        finally:
            handle.remove()
        assert seen.count(type(model.model.layers[0].mlp)) == 2


def test_models_are_compiled_as_one_graph():
    """PyTorch 2.6 traces transformers 4, not 5."""
    if torch.__version__.startswith("2.6.") and IS_5:
        pytest.skip("PyTorch 2.6 does not trace transformers 5")
    model, own, _ = pair("llama")
    given = inputs("llama")
    compiled = torch.compile(own, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert close(compiled(**given, use_cache=False).logits, model(**given).logits)


def test_compiled_models():
    model, own, _ = pair("llama")
    given = inputs("llama")
    compiled = torch.compile(own, backend="aot_eager")
    with torch.no_grad():
        assert close(compiled(**given).logits, model(**given).logits)
    loss = compiled(**given, labels=given["input_ids"]).loss
    loss.backward()
    model(**given, labels=given["input_ids"]).loss.backward()
    assert all(close(a.grad, b.grad, 1e-3) for a, b in zip(own.parameters(), model.parameters()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_generated_ids_are_the_models(name, options):
    if name == "t5" and options:
        pytest.skip("an encoder and a decoder have no static cache")
    model, own, _ = pair(name, whole_layers=IS_5)
    ids = inputs(name)["input_ids"]
    options = dict(max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    assert torch.equal(own.generate(ids, **options), model.generate(ids, **options))


@pytest.mark.skipif(not IS_5, reason="transformers is older than 5")
def test_generation_by_whole_layers_and_graphs():
    model, own, report = pair("llama", whole_layers=True)
    assert "layer" in str(report) and not any("layers:" in reason for _, reason in report.left)
    ids = inputs("llama")["input_ids"]
    right = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(fftune.generate(own, ids, 8), right)
    _, own, _ = pair("llama", graphs=True)
    for _ in range(2):
        assert torch.equal(own.generate(ids, max_new_tokens=8, do_sample=False), right)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_a_cache_of_8_bits():
    model, own, _ = pair("llama", whole_layers=IS_5)
    ids, cache = inputs("llama")["input_ids"], lambda: fftune.Float8StaticCache(model.config, 32)
    if RELEASE < (5, 17):
        with pytest.raises(fftune.Error, match="transformers 5.17 or newer"):
            cache()
        return
    right = model.generate(ids, past_key_values=cache(), max_new_tokens=8, do_sample=False)
    assert torch.equal(own.generate(ids, past_key_values=cache(), max_new_tokens=8, do_sample=False), right)
    assert torch.equal(fftune.generate(own, ids, 8, cache=cache()), right)


def _cache_of(outputs):
    return outputs.cache if "cache" in outputs else outputs.past_key_values


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("name", ["past_key_values", *["cache"] * (RELEASE >= (5, 24))])
def test_caches_by_every_name_that_the_model_knows(name):
    """A call with a cache is one behind the tokens in it, whatever the argument is called."""
    model, own, _ = pair("llama")
    ids, results = inputs("llama")["input_ids"], []
    for one in (own, model):
        with torch.no_grad():
            cache = _cache_of(one(ids[:, :6], use_cache=True))
            results.append(one(ids[:, 6:], **{name: cache}).logits)
    assert close(*results)


def test_training():
    model, own, _ = pair("llama")
    given = inputs("llama")
    for one in (own, model):
        one.train()
        one(**given, labels=given["input_ids"]).loss.backward()
    assert all(close(a.grad, b.grad, 1e-3) for a, b in zip(own.parameters(), model.parameters()))
    own.zero_grad()
    own.gradient_checkpointing_enable()  # 5.24 has another name too
    own(**given, labels=given["input_ids"]).loss.backward()
    assert all(close(a.grad, b.grad, 1e-3) for a, b in zip(own.parameters(), model.parameters()))
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    before = own(**given, labels=given["input_ids"]).loss.item()
    for _ in range(3):
        optimizer.zero_grad()
        own(**given, labels=given["input_ids"]).loss.backward()
        optimizer.step()
    assert own(**given, labels=given["input_ids"]).loss.item() < before


def test_logits_of_outputs_are_those_that_are_put_there():
    _, own, _ = pair("llama")
    given = inputs("llama")
    for names in ((), ("logits",)):
        outputs = own.train()(**given, labels=given["input_ids"])
        for name in names:
            setattr(outputs, name, torch.zeros(1))
        other = type(outputs)(**outputs)
        assert torch.equal(other.logits, outputs.logits) and torch.equal(outputs[1], outputs.logits)
        assert torch.equal(outputs.to_tuple()[0], outputs.loss)


def test_copies_and_files():
    model, own, _ = pair("llama")
    given, file = inputs("llama"), io.BytesIO()
    torch.save(own, file)
    file.seek(0)
    with torch.no_grad():
        for other in (copy.deepcopy(own), torch.load(file, weights_only=False)):
            assert close(other(**given).logits, model(**given).logits)
    assert own.state_dict().keys() == model.state_dict().keys()


def test_modules_and_quantised_layers():
    x = torch.randn(5, 32)
    for module in (fftune.nn.GatedMLP(32, 48), fftune.nn.MoE(32, 48, 4, 2),
                   fftune.quantise(nn.Sequential(nn.Linear(32, 48)), "int4", group=32)):
        assert fftune.check(module, x).good
        other = copy.deepcopy(module)
        other.load_state_dict(module.state_dict())
        assert torch.equal(other(x), module(x))


def test_tuning(tmp_path, monkeypatch):
    monkeypatch.setenv("FFTUNE_PRESETS", str(tmp_path))
    report = fftune.tune(fftune.nn.RMSNorm(72), torch.randn(6, 72), budget=1, presets=tmp_path,
                         keep_undecided=True)
    assert len(report.searched) == 1 and not report.failed
    trusted(tmp_path)
    assert fftune.explain({"op": "rmsnorm", "m": 6, "d": 72}, "cpu")["preset"]["exact_shape"]


def test_experts_are_registered_where_models_can_be_told():
    if RELEASE < (5, 8):
        with pytest.raises(fftune.Error, match="install 5.8 or newer"):
            fftune.register_experts()
        return
    fftune.register_experts()
    model = make("mixtral")
    own = copy.deepcopy(model)
    own.set_experts_implementation("fftune")
    given = inputs("mixtral")
    with torch.no_grad():
        assert close(own(**given).logits, model(**given).logits)
