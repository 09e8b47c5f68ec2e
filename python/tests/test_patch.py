"""patch() on tiny models of transformers: logits, gradients, generation, and what it reports."""
import collections
import copy

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import fftune
from fftune import _run
from fftune.patching import attention
from models import MIXTURES, MODELS, inputs, make

EACH = pytest.mark.parametrize("name", MODELS)
# Before, masks are made from positions, from which a static cache's length cannot be told.
needs_transformers_5 = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5,
                                          reason="transformers is older than 5")
EXPECTED = {
    "llama": {"LlamaRMSNorm by rmsnorm (llama)": 5, "LlamaMLP by ffn (silu)": 2,
              "norm, MLP and residual of LlamaDecoderLayer by ffn with a norm": 2,
              "LlamaRotaryEmbedding by rope": 1,
              "projections of LlamaAttention by linear up to 64 tokens": 2,
              "LlamaModel without the causal mask": 1,
              "loss of LlamaForCausalLM by linear-cross-entropy, in training": 1,
              "no_repeat_ngram_size by ngram-block": 1},
    "qwen3": {"Qwen3RMSNorm by rmsnorm (llama)": 9, "Qwen3MLP by ffn (silu)": 2,
              "norm, MLP and residual of Qwen3DecoderLayer by ffn with a norm": 2,
              "Qwen3RotaryEmbedding by rope": 1,
              "projections of Qwen3Attention by linear up to 64 tokens": 2,
              "Qwen3Model without the causal mask": 1,
              "loss of Qwen3ForCausalLM by linear-cross-entropy, in training": 1,
              "no_repeat_ngram_size by ngram-block": 1},
    "gemma": {"GemmaRMSNorm by rmsnorm (gemma)": 5, "GemmaMLP by ffn (gelu-tanh)": 2,
              "norm, MLP and residual of GemmaDecoderLayer by ffn with a norm": 2,
              "GemmaRotaryEmbedding by rope": 1,
              "projections of GemmaAttention by linear up to 64 tokens": 2,
              "GemmaModel without the causal mask": 1,
              "loss of GemmaForCausalLM by linear-cross-entropy, in training": 1,
              "no_repeat_ngram_size by ngram-block": 1},
    "phi": {"PhiMLP by ffn without a gate (gelu-tanh), with gradients by bias-gelu": 2,
            "LayerNorm by layernorm, without gradients": 3, "PhiRotaryEmbedding by rope": 1,
            "PhiModel without the causal mask": 1,
            "loss of PhiForCausalLM by linear-cross-entropy, in training": 1,
            "no_repeat_ngram_size by ngram-block": 1},
    "gpt2": {"bias and gelu of GPT2MLP by bias-gelu": 2,
             "LayerNorm by layernorm, without gradients": 5,
             "residual and norm before the MLP of GPT2Block by layernorm": 2,
             "GPT2Model without the causal mask": 1,
             "loss of GPT2LMHeadModel by linear-cross-entropy, in training": 1,
             "no_repeat_ngram_size by ngram-block": 1},
    "t5": {"T5LayerNorm by rmsnorm (llama)": 12,
           "T5DenseActDense by ffn without a gate (relu), without gradients": 4,
           "MLP and residual of T5LayerFF by ffn without a gate": 4, "no_repeat_ngram_size by ngram-block": 1},
}


def words_of(report):
    counts = {}
    for _, words in report.replaced:
        counts[words] = counts.get(words, 0) + 1
    return counts


def logits(model, name, **options):
    torch.manual_seed(7)
    return model(**inputs(name), use_cache=False, **options).logits


def close(ours, theirs, tolerance):
    ours, theirs = ours.double(), theirs.double()
    return (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("name", EXPECTED)
def test_report(name):
    report = fftune.patch(make(name))
    assert words_of(report) == EXPECTED[name]
    assert len(str(report).splitlines()) >= len(EXPECTED[name])


def test_a_report_of_a_module_without_a_name():
    report = fftune.patch(make("llama").model.layers[0].mlp)
    assert str(report).startswith("replaced: the module itself: LlamaMLP by ffn")


@EACH
def test_logits(name):
    model = make(name)
    before = logits(model, name)
    fftune.patch(model)
    after = logits(model, name)
    assert close(after, before, 1e-5)
    assert not torch.equal(after, before)  # other kernels round in another way
    fftune.unpatch(model)
    assert torch.equal(logits(model, name), before)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name, expected", [
    ("phi", {"mlp": 2, "layernorm": 3}), ("gpt2", {"layernorm": 3, "add_layernorm": 2}),
    ("t5", {"mlp": 4}), ("t5-gated", {})])
def test_without_gradients(name, expected, monkeypatch):
    model = make(name)
    with torch.no_grad():
        before = logits(model, name)
        fftune.patch(model)
        seen = {}
        for op in ("mlp", "layernorm", "add_layernorm"):
            def spy(*given, op=op, function=getattr(fftune.ops, op), **options):
                seen[op] = seen.get(op, 0) + 1
                return function(*given, **options)
            monkeypatch.setattr(fftune.ops, op, spy)
        assert close(logits(model, name), before, 1e-5)
        assert seen == expected
        torch._dynamo.reset()
        # One of them by the default backend, which takes longer than all of the rest.
        backend = "inductor" if name == "gpt2" else "aot_eager"
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        assert close(logits(compiled, name), before, 1e-5)
    seen.clear()
    logits(model, name)  # with gradients
    assert seen == {}


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("projections", [False, True])
def test_an_eps_that_is_set_after_patch(name, projections):
    """In all the ways in which a norm runs: alone, with the residual, in a block, and of heads."""
    model = make(name)
    other = copy.deepcopy(model)
    fftune.patch(other, projections=projections)
    for module in [*model.modules(), *other.modules()]:
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5
    assert close(logits(other, name), logits(model, name), 1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("projections", [True, "auto"])
def test_projections(name, projections, monkeypatch):
    model = make(name)
    with torch.no_grad():
        for layer in model.model.layers:  # qwen2's biases start as zeros
            for part in layer.self_attn.children():
                if getattr(part, "bias", None) is not None:
                    part.bias.normal_()
    before = logits(model, name)
    report = fftune.patch(model, projections=projections)
    assert sum("projections" in words for _, words in report.replaced) == 2
    seen = []

    def spy(name):
        function = getattr(fftune.ops, name)
        monkeypatch.setattr(fftune.ops, name, lambda x, *rest, **options: seen.append(
            (name, x.shape[:-1].numel())) or function(x, *rest, **options))

    spy("linear"), spy("qkv")
    with torch.no_grad():
        assert close(logits(model, name), before, 1e-5)
        assert seen == [("qkv", 18), ("linear", 18)] * 2
        model(torch.randint(3, 96, (1, 65)), use_cache=False)
    logits(model, name)
    assert seen[4:] == ([] if projections == "auto" else
                        [("qkv", 65), ("linear", 65)] * 2 + [("linear", 18)] * 8)
    ids, options = inputs(name)["input_ids"], dict(max_new_tokens=8, do_sample=False)
    ours = model.generate(ids, **options)
    assert torch.equal(fftune.unpatch(model).generate(ids, **options), ours)


def test_gradients_through_projections():
    model = make("llama").train()
    logits(model, "llama").square().mean().backward()
    before = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    fftune.patch(model, projections=True)
    logits(model, "llama").square().mean().backward()
    for n, parameter in model.named_parameters():
        assert close(parameter.grad, before[n], 2e-4), n


def masks_of(model, name, **options):
    """The mask that every attention is given."""
    seen = []
    attention = next(m for m in model.modules() if hasattr(m, "is_causal"))
    interface = transformers.AttentionInterface()
    implementation = attention.config._attn_implementation
    kept = interface[implementation]

    def spy(module, query, key, value, attention_mask, **others):
        seen.append(attention_mask)
        return kept(module, query, key, value, attention_mask, **others)

    transformers.AttentionInterface.register(implementation, spy)
    try:
        result = logits(model, name, **options)
    finally:
        transformers.AttentionInterface.register(implementation, kept)
    return result, seen


@pytest.mark.parametrize("reads", [False, True])
def test_a_compiler_makes_no_causal_mask_unless_somebody_reads_it(reads):
    model = make("llama")
    ids = inputs("llama")["input_ids"]
    with torch.no_grad():
        before = model(input_ids=ids).logits
    fftune.patch(model)
    shapes = []

    class Reader(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, **options):
            return self.inner(**options)

    if reads:
        model.model.layers[0].self_attn = Reader(model.model.layers[0].self_attn)

    def backend(graph, examples):
        shapes.extend(node.meta["example_value"].shape for node in graph.graph.nodes
                      if isinstance(node.meta.get("example_value"), torch.Tensor))
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        after = torch.compile(model, backend=backend)(input_ids=ids).logits
    assert close(after, before, 1e-5)
    assert ((1, 1, 0, 0) in [tuple(shape) for shape in shapes]) != reads


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_the_causal_mask_is_made_only_where_it_says_more(name):
    ids = inputs(name)["input_ids"]
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    model = make(name)
    for options, plain in (({}, True), ({"attention_mask": padding}, False),
                           ({"position_ids": packed}, False)):
        before = logits(model, name, **options)
        fftune.patch(model)
        after, masks = masks_of(model, name, **options)
        assert close(after[1], before[1], 1e-5) and close(after[0, 3:], before[0, 3:], 1e-5)
        # Transformers makes none itself where it can look at what is masked.
        assert all((mask is None) == plain for mask in masks)
        assert model.config._attn_implementation == "fftune_sdpa"
        fftune.unpatch(model)
        assert model.config._attn_implementation == "sdpa"


def test_a_compiled_model_makes_no_mask():
    model = make("llama")
    fftune.patch(model)
    sizes = []

    def backend(graph, example):
        sizes.extend(node.meta["example_value"].shape for node in graph.graph.nodes
                     if getattr(node.meta.get("example_value"), "dtype", None) == torch.bool)
        return graph.forward

    torch._dynamo.reset()
    logits(torch.compile(model, fullgraph=True, backend=backend), "llama")
    assert all(size.numel() == 0 for size in sizes)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma", "gpt2"])
def test_attention(name):
    ids = inputs(name)["input_ids"]
    padding = torch.ones_like(ids)
    padding[1, -3:] = 0
    for training, options in ((False, {}), (True, {}), (False, {"attention_mask": padding})):
        model = make(name).train(training)
        before = logits(model, name, **options)
        report = fftune.patch(model, attention=True)
        assert any("by attention" in words for _, words in report.replaced)
        found = {}
        with _run.listening(found):
            after = logits(model, name, **options)
        assert sum(problem["op"] == "attention" for _, problem in found.values()) == 1
        seen = padding.bool() if options else slice(None)
        assert close(after[seen], before[seen], 1e-5)
        if training:
            grads = [torch.autograd.grad(y.square().mean(), list(model.parameters()),
                                         allow_unused=True) for y in (after, before)]
            for mine, other in zip(*grads):
                assert other is None or close(mine, other, 2e-4)


def test_attention_of_that_name():
    fftune.register_attention()
    model = make("llama")
    before = logits(model, "llama")
    model.set_attn_implementation("fftune")
    found = {}
    with _run.listening(found):
        assert close(logits(model, "llama"), before, 1e-5)
    assert {problem["op"] for _, problem in found.values()} == {"attention"}
    ids, options = inputs("llama")["input_ids"], dict(max_new_tokens=8, do_sample=False)
    ours = model.generate(ids, **options)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(ids, **options), ours)


@needs_transformers_5
@pytest.mark.parametrize("name", ["gpt-oss", "gemma2"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("serves", [True, False])
def test_sinks_and_soft_caps_are_attentions(name, cache, serves, monkeypatch):
    """By fftune or, of calls that it does not serve, by the module's own attention: with both."""
    fftune.register_attention()
    model = make(name)
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        if name == "gpt-oss":
            layer.self_attn.sinks.data.uniform_(-1, 4)
        else:
            layer.self_attn.attn_logit_softcapping = 0.05
    ids, options = inputs(name)["input_ids"], dict(max_new_tokens=8, min_new_tokens=8, do_sample=False,
                                                   cache_implementation=cache, disable_compile=True)
    right, tokens = logits(model, name), model.generate(ids, **options)
    model.set_attn_implementation("fftune")
    if not serves:
        for part in ("_serves", "_serves_cache"):
            monkeypatch.setattr(fftune.patching.attention, part, lambda *_, **__: False)
    found = {}
    with _run.listening(found):
        assert close(logits(model, name), right, 1e-5)
        assert torch.equal(model.generate(ids, **options), tokens)
    ran = [problem for _, problem in found.values() if problem["op"] == "attention"]
    assert bool(ran) == serves
    assert all("sinks" in problem if name == "gpt-oss" else "softcap" in problem for problem in ran)


def test_heads_of_512_features_are_fast_without_gradients():
    """A backward pass has tensor cores up to 256 features, and so have CPUs and f32."""
    serves = attention._serves
    with FakeTensorMode():
        def heads(dim, device="cuda", dtype=torch.bfloat16):
            return [torch.empty(1, 8, 4, dim, device=device, dtype=dtype).transpose(1, 2) for _ in "qkv"]

        assert serves(*heads(512), None)
        assert not serves(*heads(514), None)
        assert not serves(*heads(512, dtype=torch.float32), None)
        assert not serves(*heads(512, device="cpu"), None)
        query, key, value = heads(512)
        key.requires_grad_()
        assert not serves(query, key, value, None)
        with torch.no_grad():
            assert serves(query, key, value, None)
        assert serves(*(t.requires_grad_() for t in heads(256)), None)


@needs_transformers_5
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("padding", [False, True])
def test_attention_over_a_static_cache(name, padding):
    """Prefill and every step by attention, without a copy of the cache; with padding right too."""
    model = make(name)
    ids = inputs(name)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = not padding
    options = dict(attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False,
                   cache_implementation="static", disable_compile=True)
    before = model.generate(ids, **options)
    fftune.patch(model, attention=True)
    found = {}
    with _run.listening(found):
        assert torch.equal(model.generate(ids, **options), before)
    ran = [problem for _, problem in found.values() if problem["op"] == "attention"]
    assert [problem["s"] for problem in ran] == ([] if padding else [9, 1])
    assert padding or all(problem["lengths"] == "yes" and problem["kv-heads"] == 1
                          for problem in ran)


@pytest.mark.parametrize("options", [dict(attention=True), dict(whole_layers=True)], ids=str)
def test_a_mask_that_ends_before_the_keys_do(options):
    """transformers masks the keys behind its end."""
    def steps(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            model(**inputs("llama"), past_key_values=cache)
            return model(input_ids=ids, attention_mask=torch.ones(2, 3, dtype=torch.long),
                         past_key_values=cache).logits

    model, ids = make("llama"), torch.randint(3, 96, (2, 3))
    torch.manual_seed(1)
    right = steps(model)
    fftune.patch(model, **options)
    torch.manual_seed(1)
    assert close(steps(model), right, 1e-5)


@needs_transformers_5
def test_a_compiled_step_over_a_static_cache_has_no_graph_break():
    model = make("llama")
    fftune.patch(model, attention=True)
    ids = inputs("llama")["input_ids"]

    def steps(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            first = fftune_model(input_ids=ids, past_key_values=cache)
            return [first.logits, *(model(input_ids=ids[:, i:i + 1], past_key_values=cache).logits
                                    for i in range(3))]

    fftune_model = model
    right = steps(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = {}
    with _run.listening(found):
        for mine, other in zip(steps(compiled), right):
            assert close(mine, other, 1e-5)
    assert any(problem["op"] == "attention" and problem["s"] == 1 for _, problem in found.values())


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen2", marks=pytest.mark.further), "gpt2"])
def test_attention_is_compiled_without_graph_breaks(name):
    model = make(name).train()
    before = logits(model, name)
    right = torch.autograd.grad(before.square().mean(), list(model.parameters()),
                                allow_unused=True)
    fftune.patch(model, attention=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = {}
    with _run.listening(found):
        after = logits(compiled, name)
        grads = torch.autograd.grad(after.square().mean(), list(model.parameters()),
                                    allow_unused=True)
    assert close(after, before, 1e-5)
    assert sum(problem["op"] == "attention" for _, problem in found.values()) == 2
    for mine, other in zip(grads, right):
        assert other is None or close(mine, other, 2e-4)


def test_models_may_share_their_configuration():
    first = make("llama")
    second = type(first)(first.config)
    fftune.patch(first)
    assert second.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("later", [False, True])
def test_a_window_smaller_than_the_text_keeps_its_mask(later):
    def narrow(model):
        for module in model.modules():
            if hasattr(module, "config"):
                module.config.sliding_window = 4

    model = make("mistral")
    other = copy.deepcopy(model)
    narrow(other)
    before = logits(other, "mistral")
    if not later:
        narrow(model)
    fftune.patch(model)
    if later:
        narrow(model)
    assert close(logits(model, "mistral"), before, 1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma", "t5-gated"])
def test_logits_in_bf16(name):
    model = make(name, torch.bfloat16)
    exact = logits(copy.deepcopy(model).float(), name)
    before = (logits(model, name).double() - exact).norm()
    fftune.patch(model)
    after = (logits(model, name).double() - exact).norm()
    assert after <= 1.2 * before


@EACH
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients(name, recompute):
    model = make(name).train()
    logits(model, name).square().mean().backward()
    before = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    fftune.patch(model, recompute=recompute)
    logits(model, name).square().mean().backward()
    for n, parameter in model.named_parameters():
        if before[n] is not None:
            assert close(parameter.grad, before[n], 2e-4), n


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_generate(name):
    model = make(name)
    options = dict(max_new_tokens=24, do_sample=False, no_repeat_ngram_size=2, num_beams=2)
    ids = inputs(name)["input_ids"]
    before = model.generate(ids, **options)
    fftune.patch(model)
    assert torch.equal(model.generate(ids, **options), before)


def test_generate_needs_a_plan_for_many_lengths():
    model = make("gpt2")
    fftune.patch(model)
    ids = torch.randint(3, 96, (2, 5))
    options = dict(do_sample=False, no_repeat_ngram_size=3, min_new_tokens=40, max_new_tokens=40)
    found = {}
    with _run.listening(found):
        model.generate(ids, **options)
    assert sum(problem["op"] == "ngram-block" for _, problem in found.values()) == 1


def test_generate_with_left_padding_and_a_static_cache():
    """Every sequence has positions of its own."""
    model = make("llama")
    ids = torch.randint(3, 96, (2, 7))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False,
                   cache_implementation="static", disable_compile=True)
    before = model.generate(ids, **options)
    fftune.patch(model)
    assert torch.equal(model.generate(ids, **options), before)


@needs_transformers_5
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral"])
@pytest.mark.parametrize("attention", [False, True])
def test_generate_with_graphs(name, attention):
    """Where there is no GPU the steps run with the inputs and the cache that a graph would read."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    compile_config = transformers.CompileConfig()
    compile_config._compile_all_devices = True
    model = make(name, device=device)
    texts = [inputs(name, device=device)["input_ids"] for _ in range(3)]
    options = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, no_repeat_ngram_size=2)
    before = [model.generate(ids, **options) for ids in texts]
    fftune.patch(model, graphs=True, attention=attention)
    runner = model.__dict__["get_compiled_call"].__self__
    for ids, right in zip(texts, before):
        assert torch.equal(model.generate(ids, **options, compile_config=compile_config), right)
    step, = runner._steps.values()
    assert step.graph is not None and not runner._failed
    fftune.unpatch(model)
    assert model.generation_config.cache_implementation is None
    assert torch.equal(model.generate(texts[0], **options), before[0])


def graphs_of(model, name, training):
    """The result of a compiled call, its graph breaks, and the copies in its graphs: not of ids and numbers."""
    torch._dynamo.reset()
    counters.clear()
    called = collections.Counter()

    def count(graph, _):
        called.update(node.target.overloadpacket.__name__ for node in graph.graph.nodes
                      if isinstance(node.target, torch._ops.OpOverload) and isinstance(node.meta["val"], torch.Tensor)
                      and node.meta["val"].is_floating_point() and node.meta["val"].dim())
        return graph.forward

    given = inputs(name)
    run = torch.compile(model.train(training), backend=aot_autograd(fw_compiler=count, bw_compiler=count))
    with torch.set_grad_enabled(training):
        outputs = run(**given, use_cache=False, labels=given["input_ids"] if training else None)
    if training:
        outputs.loss.backward()
    return (outputs.loss if training else outputs.logits, sum(counters["graph_break"].values()),
            called["clone"] + called["_to_copy"] + called["copy_"])


@needs_transformers_5
@pytest.mark.parametrize("name, training", [
    ("llama", True), *((name, False) for name in ("llama", "gemma2", "gpt2", "mixtral")),
    *(pytest.param(name, training, marks=pytest.mark.further) for name, training in (
        *((name, False) for name in ("qwen2", "qwen3", "gemma", "gemma3", "phi", "phi3", "t5", "olmo2", "qwen3-moe")),
        *((name, True) for name in ("qwen3", "gemma2", "phi", "gpt2", "t5", "mixtral", "qwen3-moe"))))])
def test_a_patched_model_has_no_more_graph_breaks_and_copies(name, training):
    model = make(name)
    own = copy.deepcopy(model)
    fftune.patch(own)
    torch.manual_seed(7)
    ours, breaks, copies = graphs_of(own, name, training)
    if breaks or training or name in ("llama", "phi", "mixtral"):
        torch.manual_seed(7)
        right, most_breaks, most_copies = graphs_of(model, name, training)
        assert breaks <= most_breaks and copies <= most_copies
    else:
        right = logits(model, name)
    assert close(ours, right, 1e-5)


def test_gradient_checkpointing_goes_on():
    model = make("llama").train()
    fftune.patch(model)
    model.gradient_checkpointing_enable()
    calls = []
    layer = model.model.layers[0]
    wrapped = layer._gradient_checkpointing_func
    layer._gradient_checkpointing_func = lambda *a, **o: calls.append(1) or wrapped(*a, **o)
    logits(model, "llama").square().mean().backward()
    assert calls


def test_hidden_states_and_attentions_are_given_as_before():
    model = make("llama")
    before = model(**inputs("llama"), output_hidden_states=True)
    fftune.patch(model)
    torch.manual_seed(1)
    after = model(**inputs("llama"), output_hidden_states=True)
    assert len(after.hidden_states) == len(before.hidden_states)


def test_copies_and_state_dicts(tmp_path):
    model = make("llama")
    names = list(model.state_dict())
    before = logits(model, "llama")
    fftune.patch(model)
    assert list(model.state_dict()) == names
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    assert logits(again, "llama").eq(0).all()  # the copy runs on its own weights
    assert close(logits(model, "llama"), before, 1e-5)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, "llama"), before)


def test_weights_are_not_copied():
    model = make("llama")
    addresses = [p.data_ptr() for p in model.parameters()]
    fftune.patch(model)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def check_autocast(name):
    model = make(name).train()
    fftune.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = logits(model, name).square().mean()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_autocast():
    check_autocast("llama")


def test_what_is_left_alone_is_said():
    model = make("llama")
    layer = model.model.layers[0]
    layer.mlp.act_fn = nn.Hardswish()
    layer.self_attn.q_proj = nn.Linear(32, 32)
    model.model.layers[1].mlp.gate_proj = nn.Sequential(nn.Linear(32, 48))
    before = logits(model, "llama")
    report = fftune.patch(model)
    assert ("model.layers.0.mlp", "there is no kernel for the activation Hardswish") in report.left
    assert close(logits(model, "llama"), before, 1e-5)


def test_adapters_put_in_later_are_not_passed_by():
    class Adapter(nn.Module):  # as PEFT's: the weight alone looks like the layer's
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer
            self.added = nn.Linear(layer.in_features, layer.out_features, bias=False)

        @property
        def weight(self):
            return self.base_layer.weight

        @property
        def bias(self):
            return None

        def forward(self, x):
            return self.base_layer(x) + self.added(x)

    model = make("llama")
    fftune.patch(model)
    for layer in model.model.layers:
        layer.mlp.up_proj = Adapter(layer.mlp.up_proj)
    after = logits(model, "llama")
    fftune.unpatch(model)
    assert close(after, logits(model, "llama"), 1e-5)


def test_layers_of_another_order_are_not_fused():
    class Scaled(type(make("llama").model.layers[0])):
        def forward(self, hidden_states, **options):
            return super().forward(hidden_states, **options) * 0.5

    model = make("llama")
    for layer in model.model.layers:
        layer.__class__ = Scaled
    before = logits(model, "llama")
    report = fftune.patch(model)
    assert any("is no x + attention" in words for _, words in report.left)
    assert close(logits(model, "llama"), before, 1e-5)


def test_hooks_keep_being_called():
    model = make("llama")
    called = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: called.append(1))
    report = fftune.patch(model)
    logits(model, "llama")
    assert called and any("has hooks" in words for _, words in report.left)


def test_the_random_generator_is_left_alone():
    model = make("gemma")
    torch.manual_seed(5)
    right = torch.rand(3)
    torch.manual_seed(5)
    fftune.patch(model)
    assert torch.equal(torch.rand(3), right)


def test_patching_twice_is_patching_once():
    model = make("llama")
    first, second = fftune.patch(model), fftune.patch(model)
    assert words_of(first) == words_of(second)


MIXTURE = pytest.mark.parametrize("name", MIXTURES)
EXPERTS = {"mixtral": 2, "qwen2-moe": 2, "qwen3-moe": 2, "deepseek": 1, "gpt-oss": 2,
           "dots1": 1}


def problems_of(run):
    found = {}
    with _run.listening(found):
        result = run()
    return result, [problem for _, problem in found.values()]


@needs_transformers_5
@MIXTURE
def test_mixtures_of_experts(name):
    model = make(name).train()
    before = logits(model, name)
    right = torch.autograd.grad(before.square().mean(), list(model.parameters()), allow_unused=True)
    report = fftune.patch(model)
    for op in ("moe-ffn", "moe-route"):
        assert sum(op in words for _, words in report.replaced) == EXPERTS[name]
    after, problems = problems_of(lambda: logits(model, name))
    assert {"moe-ffn", "moe-route"} <= {p["op"] for p in problems}
    with torch.no_grad():
        inferred, problems = problems_of(lambda: logits(model, name))
    assert close(inferred, before, 1e-5)
    assert all(p["gate-up"] for p in problems if p["op"] == "moe-ffn")
    assert close(after, before, 1e-5)
    grads, problems = problems_of(lambda: torch.autograd.grad(
        after.square().mean(), list(model.parameters()), allow_unused=True))
    assert all(p["gate-up"] for p in problems if p["op"] == "moe-ffn")
    assert any((p["op"], p["pass"]) == ("moe-ffn", "bwd") for p in problems)
    for (n, _), mine, other in zip(model.named_parameters(), grads, right):
        assert other is None or close(mine, other, 2e-4), n
    ids, options = inputs(name)["input_ids"], dict(max_new_tokens=8, do_sample=False)
    model.eval()
    ours = model.generate(ids, **options)
    assert torch.equal(fftune.unpatch(model).generate(ids, **options), ours)


@needs_transformers_5
def test_mixtures_in_bf16_and_under_autocast():
    model = make("qwen3-moe", torch.bfloat16)
    exact = logits(copy.deepcopy(model).float(), "qwen3-moe")
    before = (logits(model, "qwen3-moe").double() - exact).norm()
    fftune.patch(model)
    assert (logits(model, "qwen3-moe").double() - exact).norm() <= 1.3 * before
    check_autocast("qwen3-moe")


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("when", ["before", "later", "autocast"])
@needs_transformers_5
def test_types_without_kernels_are_computed_as_before(name, dtype, when):
    if when == "autocast" and dtype == torch.float64:
        pytest.skip("PyTorch has no autocast to float64")
    model = make(name)
    model.config._experts_implementation = "eager"  # the others have no float64
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = 6  # all experts: a rounding changes no choice
    if when == "before":
        model.to(dtype)
    fftune.patch(model, projections=True, whole_layers=True)
    if when == "later":
        model.to(dtype)

    def results():
        with torch.autocast("cpu", torch.float16, enabled=when == "autocast"):
            y = logits(model, name)
        model.zero_grad()
        y.float().square().mean().backward()
        return y.detach(), *(p.grad for p in model.parameters())

    ours = results()
    fftune.unpatch(model)
    for mine, other in zip(ours, results(), strict=True):
        assert mine.dtype == other.dtype and close(mine, other, 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("undone", [False, True])
@needs_transformers_5
def test_experts_patched_in_inference_mode_can_be_trained(undone):
    model = make("gpt-oss")
    with torch.inference_mode():
        fftune.patch(model)
        if undone:
            fftune.unpatch(model)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    logits(model, "gpt-oss").square().mean().backward()
    assert all(p.grad is not None for p in model.model.layers[0].mlp.experts.parameters())


@needs_transformers_5
def test_transposed_experts_are_laid_out_anew_and_back(tmp_path):
    model = make("gpt-oss")
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    before, strides = weight.detach().clone(), weight.stride()
    fftune.patch(model)
    assert model.model.layers[0].mlp.experts.gate_up_proj is weight
    assert weight.stride() != strides and torch.equal(weight, before)
    with torch.no_grad():
        right = logits(model, "gpt-oss")
        model.save_pretrained(tmp_path)
        assert close(logits(type(model).from_pretrained(tmp_path).eval(), "gpt-oss"), right, 1e-5)
    fftune.unpatch(model)
    assert weight.stride() == strides and torch.equal(weight, before)
