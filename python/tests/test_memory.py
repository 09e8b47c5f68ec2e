"""patch(memory=): the backward pass computes norms again, and gradients stay the same."""
import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fftune
from fftune.patching import memory
from models import inputs, make

MODES = ["fast", "balanced", "small"]


@pytest.fixture
def made(monkeypatch):
    """The objects that stood in the place of a norm's output."""
    found = []
    init = memory._Again.__init__

    def spy(self, *arguments):
        init(self, *arguments)
        self.storage = StorageWeakRef(arguments[-1].untyped_storage())
        found.append(self)

    monkeypatch.setattr(memory._Again, "__init__", spy)
    return found


def loss_of(model, name):
    torch.manual_seed(5)
    return model(**inputs(name), use_cache=False).logits.square().mean()


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def patched(name, mode, **options):
    model = make(name).train()
    fftune.patch(model, memory=mode, **options)
    return model


# Norms in front of attention and of the MLP, in all layers of two; T5 has those of MLPs alone.
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5-gated"])
@pytest.mark.parametrize("projections", ["auto", True])
def test_gradients_are_the_same_bits(made, name, projections):
    found = {}
    for mode in MODES:
        model = patched(name, mode, projections=projections)
        made.clear()  # those of patch() itself
        loss = loss_of(model, name)
        loss.backward()
        found[mode] = gradients(model)
        assert bool(made) == (mode != "fast")
        for each in made:
            assert each.saved > 0 and each.read == each.saved and each.value is None
    for n, gradient in found["fast"].items():
        assert torch.equal(gradient, found["balanced"][n]), n
        assert torch.allclose(gradient, found["small"][n], rtol=1e-4, atol=1e-6), n


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_may_change_as_soon_as_their_gradients_are_there(name, mode):
    found = []
    for freed in (False, True):
        model = patched(name, mode)
        optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

        def take(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        if freed:
            for p in optimizers:
                p.register_post_accumulate_grad_hook(take)
        for _ in range(2):
            model(**inputs(name), labels=inputs(name)["input_ids"], use_cache=False).loss.backward()
            for p in optimizers:
                assert (p.grad is None) == freed
                take(p)
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(*each) for each in zip(*found))


def test_a_graph_that_is_kept_can_be_used_again(made):
    model = patched("llama", "balanced")
    loss = loss_of(model, "llama")
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert made and all(torch.allclose(2 * once[n], g, rtol=1e-5) for n, g in gradients(model).items())


def test_no_output_of_a_norm_outlives_the_forward_pass(made):
    model = patched("llama", "balanced")
    made.clear()
    loss = loss_of(model, "llama")
    assert len(made) == 2 * len(model.model.layers)
    assert all(each.storage.expired() for each in made)
    loss.backward()


def test_inputs_of_norms_are_freed_in_the_backward_pass(monkeypatch):
    found = []
    init = memory._Again.__init__
    monkeypatch.setattr(memory._Again, "__init__",
                        lambda self, *given: found.append(weakref.ref(self)) or init(self, *given))
    model = patched("llama", "balanced")
    found.clear()  # those of patch() itself
    gc.disable()
    try:
        loss_of(model, "llama").backward()
        assert len(found) == 2 * len(model.model.layers) and not any(each() for each in found)
    finally:
        gc.enable()


def saved_bytes(module, x):
    """The sizes of the storages that autograd saves beside parameters."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found = {}

    def pack(saved):
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes(), saved  # held, so that no other has its address
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = module(x)
    return sorted(size for size, _ in found.values()), y


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("mode", MODES)
def test_experts_save_what_their_gradients_need(name, mode):
    model = patched(name, mode)
    experts = model.model.layers[0].mlp
    config = model.config
    hidden = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    chosen, tokens = config.num_experts_per_tok, 24
    found, _ = saved_bytes(experts, torch.randn(2, tokens // 2, config.hidden_size, requires_grad=True))
    gates = [4 * tokens * chosen * hidden] * 2
    x, routing = 4 * tokens * config.hidden_size, 3 * 4 * tokens * max(chosen, 8)
    assert [size for size in found if size > routing] == sorted([x, *([] if mode == "small" else gates)])


def _with_weights():
    """Calls with an input, routing weights and the op's own weights, by the op that derives them."""
    from fftune import ops
    w_norm, mask = torch.randn(24), torch.arange(6) % 3 == 0
    weights = [torch.randn(40, 24), torch.randn(40, 24), torch.randn(24, 40)]
    ids = torch.tensor([[0, 2], [1, 2], [2, 0], [1, 0], [0, 1], [2, 1]])
    experts = [torch.stack([w, w * 0.5, w.roll(1, 0)]) for w in weights]
    both = [torch.cat(experts[:2], 1), experts[2]]
    biases = [torch.randn(3, 80), torch.randn(3, 24)]
    for recompute in (False, True):
        yield "ffn", weights, lambda x, _, *w, r=recompute: ops.ffn(x, *w, recompute=r)
        yield "ffn", weights, lambda x, _, *w, r=recompute: ops.ffn(x, *w, act="none", recompute=r)
        yield "ffn", weights, lambda x, _, *w, r=recompute: ops.ffn_block(x, None, w_norm, *w, recompute=r)
        yield "masked_ffn", weights * 2, lambda x, _, *w, r=recompute: ops.masked_ffn(
            x, mask, *w, recompute=r)
        for weigh in ("after", "before"):
            yield "moe_ffn", experts, lambda x, shares, *w, r=recompute, how=weigh: ops.moe_ffn(
                x, ids, shares, *w, weigh=how, recompute=r)
            yield "moe_ffn", both + biases, lambda x, shares, *w, r=recompute, how=weigh: ops.moe_ffn(
                x, ids, shares, w[0], None, w[1], biases=w[2:], weigh=how, recompute=r)
    yield "rmsnorm", [w_norm], lambda x, _, w: ops.rmsnorm(x, w)
    yield "rmsnorm", [w_norm], lambda x, _, w: torch.cat(ops.add_rmsnorm(x, x * 2, w))
    yield "layernorm", [w_norm, w_norm + 1], lambda x, _, w, b: ops.layernorm(x, w, b)
    yield "bias_gelu", [w_norm], lambda x, _, b: ops.bias_gelu(x, b)
    yield "masked_linear", weights[:2], lambda x, _, *w: ops.masked_linear(x, mask, *w)


def test_frozen_weights_have_no_gradients(monkeypatch):
    from fftune._custom import OPS
    torch.manual_seed(0)
    for op, weights, call in _with_weights():
        x, shares = torch.randn(6, 24, requires_grad=True), torch.rand(6, 2, requires_grad=True)
        calls, found = [], {}
        for name in (f"{op}_backward", f"{op}_frozen_backward"):
            own = getattr(OPS, name)
            monkeypatch.setattr(own, "kernel", lambda *a, run=own.kernel, name=name: (
                calls.append(name) or run(*a)))
        for trained in (weights, weights[:1], []):
            given = [w.clone().requires_grad_(any(w is t for t in trained)) for w in weights]
            y = call(x, shares, *given)
            found[len(trained)] = torch.autograd.grad(y.square().sum(), (x, shares), allow_unused=True)
        monkeypatch.undo()
        assert calls == [f"{op}_backward"] * 2 + [f"{op}_frozen_backward"]
        for one, other in zip(found[0], found[len(weights)]):
            assert one is other is None or torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_frozen_weights_of_an_mlp_and_sinks_have_no_gradients(monkeypatch):
    from fftune import ops
    from fftune._custom import OPS
    torch.manual_seed(0)
    calls = []
    for name in ("linear_backward", "attention_backward"):
        own = getattr(OPS, name)
        monkeypatch.setattr(own, "kernel", lambda *a, run=own.kernel: calls.append(a) or run(*a))
    x = torch.randn(6, 24, requires_grad=True)
    tensors = torch.randn(40, 24), torch.randn(24, 40), torch.randn(40), torch.randn(24)
    right = None
    for needs in ((True,) * 4, (False,) * 4, *(tuple(i == j for j in range(4)) for i in range(4))):
        given = [t.clone().requires_grad_(need) for t, need in zip(tensors, needs)]
        ops.mlp(x, *given, act="gelu").square().sum().backward()
        found = [t.grad for t in (x, *given)]
        x.grad = None
        right = found if right is None else right
        for got, want, need in zip(found, right, (True, *needs)):
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-4) if need else got is None
    assert len(calls) == 4  # both products with all gradients, and one with that of x and its weight
    q, k, v = (torch.randn(1, 5, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    sinks, results = torch.randn(4), []
    for need in (True, False):
        y = ops.attention(q, k, v, causal=True, sinks=sinks.clone().requires_grad_(need))
        results.append(torch.autograd.grad(y.square().sum(), (q, k, v)))
    assert [call[13] is not None for call in calls[-2:]] == [True, False]
    assert all(map(torch.allclose, *results))


def test_hooks_of_others_see_every_tensor(made):
    model = patched("llama", "balanced")
    made.clear()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        loss_of(model, "llama").backward()
    assert seen and not made


def test_a_weight_that_changed_is_an_error():
    model = patched("llama", "balanced")
    loss = loss_of(model, "llama")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(2)
    with pytest.raises((fftune.Error, RuntimeError), match="changed in place|modified by an inplace"):
        loss.backward()


def test_other_words_are_refused():
    with pytest.raises(fftune.Error, match="memory is 'tiny': give one of fast, balanced, small"):
        fftune.patch(make("llama"), memory="tiny")
