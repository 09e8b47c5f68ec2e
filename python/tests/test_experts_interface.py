"""experts_implementation="fftune" of transformers, beside the experts' own forward."""
import copy
import warnings

import pytest
import torch
import transformers

import fftune
from fftune import _run
from models import MIXTURES, inputs, make

pytestmark = pytest.mark.skipif(not hasattr(transformers.modeling_utils, "ALL_EXPERTS_FUNCTIONS"),
                                reason="transformers before 5.8 takes no other experts")


@pytest.fixture(autouse=True)
def _registered():
    fftune.register_experts()


def close(ours, right, tolerance):
    return (ours - right).norm() <= tolerance * right.norm()


def ops_of(run):
    found = {}
    with _run.listening(found):
        result = run()
    return result, [problem["op"] for _, problem in found.values()]


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name):
    model = make(name).train()
    given = inputs(name)
    model.set_experts_implementation("eager")
    right = model(**given).logits
    grads = torch.autograd.grad(right.square().mean(), list(model.parameters()), allow_unused=True)
    model.set_experts_implementation("fftune")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, called = ops_of(lambda: model(**given).logits)
    assert set(called) == {"moe-ffn"}
    assert close(ours, right, 1e-5)
    mine = torch.autograd.grad(ours.square().mean(), list(model.parameters()), allow_unused=True)
    for (parameter, _), own, other in zip(model.named_parameters(), mine, grads):
        assert other is None or close(own, other, 2e-4), parameter


def experts_in(model):
    return next(m for m in model.modules() if "gate_up_proj" in m._parameters)


@pytest.mark.parametrize("name", MIXTURES)
def test_bfloat16(name):
    """The experts alone: in a whole model a rounding may change a choice."""
    model = make(name, torch.bfloat16)
    model.set_experts_implementation("eager")
    experts = experts_in(model)
    given = (torch.randn(33, 32), torch.stack([torch.randperm(6)[:2] for _ in range(33)]),
             torch.rand(33, 2))
    with torch.no_grad():
        right = copy.deepcopy(experts).double()(given[0].double(), given[1], given[2].double())
        given = given[0].bfloat16(), given[1], given[2].bfloat16()
        eager = experts(*given)
        model.set_experts_implementation("fftune")
        ours, called = ops_of(lambda: experts(*given))
    assert called == ["moe-ffn"]
    assert (ours - right).norm() <= 1.2 * (eager - right).norm() + 2e-3 * right.norm()


def test_it_is_an_option_of_from_pretrained(tmp_path):
    model = make("qwen3-moe")
    model.save_pretrained(tmp_path)
    model.set_experts_implementation("eager")
    given = inputs("qwen3-moe")
    again = type(model).from_pretrained(tmp_path, experts_implementation="fftune").eval()
    with torch.no_grad():
        ours, called = ops_of(lambda: again(**given).logits)
        assert "moe-ffn" in called and close(ours, model(**given).logits, 1e-5)


@pytest.mark.parametrize("name, runs_before", [
    ("mixtral", False), ("mixtral", True), ("gpt-oss", True)])
def test_compiled_as_a_whole(name, runs_before):
    model = make(name)
    model.set_experts_implementation("eager")
    given = inputs(name)
    with torch.no_grad():
        right = model(**given).logits
        model.set_experts_implementation("fftune")
        if runs_before:
            model(**given)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        ours, called = ops_of(lambda: compiled(**given).logits)
    assert "moe-ffn" in called and close(ours, right, 1e-5)


def test_transposed_weights_keep_their_values():
    model = make("gpt-oss")
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    before = weight.detach().clone()
    model.set_experts_implementation("fftune")
    with torch.inference_mode():
        model(**inputs("gpt-oss"))
    assert model.model.layers[0].mlp.experts.gate_up_proj is weight and torch.equal(weight, before)
    assert weight.transpose(1, 2).is_contiguous() and not weight.is_inference()


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_releases_with_fewer_traits(name):
    """transformers 5.8 to 5.17 set no has_post_expert_norm."""
    model = make(name)
    given = inputs(name)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        right = model(**given).logits
    for layer in model.model.layers:
        for trait in ("has_gate", "has_post_expert_norm", "is_concatenated"):
            layer.mlp.experts.__dict__.pop(trait, None)
    model.set_experts_implementation("fftune")
    with torch.no_grad():
        ours, called = ops_of(lambda: model(**given).logits)
    assert set(called) == {"moe-ffn"} and close(ours, right, 1e-5)


class _Clamped(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x.clamp(max=0.25))


@pytest.mark.parametrize("change, reason", [
    (lambda experts: setattr(experts, "act_fn", _Clamped()), "computes an activation"),
    (lambda experts: setattr(experts, "act_fn", torch.nn.ELU()), "computes an activation"),
    (lambda experts: setattr(experts, "has_post_expert_norm", True), "has a norm of its own"),
])
def test_experts_that_are_left_alone(change, reason):
    model = make("mixtral")
    for layer in model.model.layers:
        change(layer.mlp.experts)
    given = inputs("mixtral")
    model.set_experts_implementation("eager")
    with torch.no_grad():
        right = model(**given).logits
        model.set_experts_implementation("fftune")
        with pytest.warns(UserWarning, match=f"MixtralExperts {reason}"):
            ours, called = ops_of(lambda: model(**given).logits)
        assert not called and torch.equal(ours, right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_types_without_kernels(dtype):
    model = make("mixtral").to(dtype)
    given = inputs("mixtral")
    model.set_experts_implementation("eager")
    with torch.no_grad():
        right = model(**given).logits
        model.set_experts_implementation("fftune")
        ours, called = ops_of(lambda: model(**given).logits)
    assert not called and torch.equal(ours, right)


def test_the_users_random_numbers_stay():
    model, ids = make("mixtral"), torch.arange(3, 9)[None]
    model.set_experts_implementation("fftune")
    before = torch.get_rng_state()
    with torch.no_grad():
        model(ids)
    assert torch.equal(torch.get_rng_state(), before)
