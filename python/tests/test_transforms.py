"""Every op under the transforms of torch.func, and with sizes that are symbols."""
import pytest
import torch
from torch import Tensor, nn

import fftune
from cases import BACKWARDS, CASES, fp8_arguments, moe_fp8_arguments, representative
from fftune import ops
from models import inputs, make
from test_ops import DIFFERENTIABLE, each, error, leaves, listed, op_of, with_gradients

IN_PLACE = [case for case in CASES + BACKWARDS if case.updated]
PURE = [case for case in CASES + BACKWARDS if not case.updated]


def floats(case, arguments):
    return [i for i, a in enumerate(arguments)
            if isinstance(a, Tensor) and a.is_floating_point() and i not in case.constants]


def replaced(arguments, places, tensors):
    new = list(arguments)
    for i, tensor in zip(places, tensors):
        new[i] = tensor
    return new


def scalar(case, arguments):
    """The op as a function of its tensors of floating point, added up with weights."""
    places = floats(case, arguments)
    shapes = [t.shape for t in listed(op_of(case)(*arguments))[:case.outputs]]
    seeds = [torch.randn(shape) for shape in shapes]

    def function(*tensors):
        results = listed(op_of(case)(*replaced(arguments, places, tensors)))[:case.outputs]
        return sum((result * seed).sum() for result, seed in zip(results, seeds))
    return function, [arguments[i] for i in places]


@each(DIFFERENTIABLE)
def test_grad(case):
    arguments = case.arguments()
    function, tensors = scalar(case, arguments)
    argnums = tuple(range(len(tensors)))
    ours = torch.func.grad(function, argnums)(*tensors)
    _, back = torch.func.vjp(function, *tensors)
    own = [t.clone().requires_grad_() for t in tensors]
    right = torch.autograd.grad(function(*own), own)
    for mine, again, other in zip(ours, back(torch.ones(())), right, strict=True):
        assert error(mine, other) < 1e-5 and error(again, other) < 1e-5


@each(DIFFERENTIABLE)
def test_gradients_of_each_sample(case):
    arguments = case.arguments()
    function, tensors = scalar(case, arguments)
    many = torch.stack([tensors[0], tensors[0] * 0.5, tensors[0] + 1])
    ours = torch.func.vmap(torch.func.grad(function), (0, *(None,) * (len(tensors) - 1)))(
        many, *tensors[1:])
    for mine, one in zip(ours, many):
        assert error(mine, torch.func.grad(function)(one, *tensors[1:])) < 1e-5


@each(PURE)
def test_vmap(case):
    """Over one tensor, at its first and its last dimension, and over all at once."""
    arguments = case.arguments()
    places = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]
    function = lambda *tensors: tuple(listed(op_of(case)(*replaced(arguments, places, tensors))))
    tensors = [arguments[i] for i in places]
    other = case.arguments()
    for mapped in ([places[0]], [places[-1]], places):
        for at in (0, -1):
            dims = tuple(at if i in mapped else None for i in places)
            many = [torch.stack((t, other[i]), at) if i in mapped else t
                    for i, t in zip(places, tensors)]
            ours = torch.func.vmap(function, dims)(*many)
            for sample in range(2):
                right = function(*(t if d is None else t.select(d, sample)
                                   for t, d in zip(many, dims)))
                # masked_ffn_preact gives the rows of its products in an order of its own.
                count = 1 if case.op == "masked_ffn_preact" else None
                for mine, result in zip(ours[:count], right[:count], strict=True):
                    assert error(mine[sample], result) < 1e-5


@each(PURE)
def test_vmap_over_no_sample(case):
    arguments = case.arguments()
    places = floats(case, arguments)
    if not places:
        return
    call = lambda *tensors: tuple(listed(op_of(case)(*replaced(arguments, places, tensors))))
    for batched in (places[:1], places):
        given = [arguments[i].new_zeros(0, *arguments[i].shape) if i in batched else arguments[i] for i in places]
        got = torch.func.vmap(call, tuple(0 if i in batched else None for i in places))(*given)
        for none, one in zip(got, listed(op_of(case)(*arguments)), strict=True):
            assert none.dtype == one.dtype
            assert none.shape == (0, *one.shape) or not one.numel()  # a result that was not asked for


@pytest.mark.parametrize("op, arguments", [
    ("ffn_fp8", fp8_arguments(True)), ("moe_ffn_fp8", moe_fp8_arguments("token"))],
    ids=["ffn_fp8", "moe_ffn_fp8"])
def test_vmap_in_fp8(op, arguments):
    run = lambda x: getattr(torch.ops.fftune, op)(x, *arguments[1:])
    many = torch.stack((arguments[0].float(), arguments[0].float() * 0.5)).to(torch.float8_e4m3fn)
    for mine, x in zip(torch.func.vmap(run)(many), many):
        assert torch.equal(mine, run(x))


@each(IN_PLACE)
def test_vmap_of_what_writes_in_place_is_an_error(case):
    arguments = case.arguments()
    function = lambda x: op_of(case)(x, *arguments[1:])
    with pytest.raises(fftune.Error, match="it writes to its arguments"):
        torch.func.vmap(function)(torch.stack((arguments[0],) * 2))


def test_jacobians_are_those_of_pytorch():
    x, w = torch.randn(3, 8), torch.rand(8)
    theirs = lambda x: nn.functional.rms_norm(x, (8,), w, 1e-6)
    assert error(torch.func.jacrev(lambda x: ops.rmsnorm(x, w))(x),
                 torch.func.jacrev(theirs)(x)) < 1e-5
    weight = torch.randn(4, 8)
    cubes = lambda f: lambda x: f(x, weight).pow(3).sum()
    hessian = torch.func.jacrev(torch.func.jacrev(cubes(ops.linear)))(x)
    assert error(hessian, torch.func.jacrev(torch.func.jacrev(cubes(nn.functional.linear)))(x)) < 1e-5


@each([case for case in DIFFERENTIABLE
       if case.op not in ("linear", "rope", "rope_qk") and not case.op.startswith("linear_packed")])
def test_a_second_derivative_is_an_error(case):
    """But of `linear`, and of `rope` and packed weights, whose gradients depend on no input."""
    function, tensors = scalar(case, case.arguments())
    with pytest.raises(fftune.Error, match="has no gradient itself"):
        torch.func.grad(lambda *t: sum(g.sum() for g in torch.func.grad(
            function, tuple(range(len(t))))(*t)))(*tensors)


@each([case for case in DIFFERENTIABLE if case.op.startswith("linear_packed")])
def test_a_second_derivative_by_packed_weights_is_an_error(case):
    """Where the gradient that comes from behind depends on the input."""
    arguments = case.arguments()
    square = lambda x: op_of(case)(x, *arguments[1:]).square().sum()
    with pytest.raises(fftune.Error, match="has no gradient itself"):
        torch.func.grad(lambda x: torch.func.grad(square)(x).sum())(arguments[0])


@each(DIFFERENTIABLE)
def test_forward_mode_is_an_error(case):
    arguments = case.arguments()
    places = floats(case, arguments)
    with pytest.raises(fftune.Error, match="no derivative in forward mode"):
        torch.func.jvp(lambda t: op_of(case)(*replaced(arguments, places[:1], (t,))),
                       (arguments[places[0]],), (arguments[places[0]],))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_patched_models_have_derivatives_in_forward_mode(name):
    """There the ops, which have none, are left to PyTorch."""
    model = make(name)
    model.set_attn_implementation("eager")
    ids = inputs(name)["input_ids"]
    weights = {key: p.detach() for key, p in model.named_parameters()}
    tangents = {key: torch.randn_like(w) for key, w in weights.items()}

    def derivative():
        call = lambda own: torch.func.functional_call(model, own, (ids,), {"use_cache": False}).logits
        return torch.func.jvp(call, (weights,), (tangents,))[1]

    right = derivative()
    for options in {}, dict(projections=True, memory="small"):
        fftune.patch(model, **options)
        assert torch.allclose(derivative(), right, rtol=1e-4, atol=1e-4 * right.abs().max().item())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("options", [{}, dict(memory="small")], ids=str)
def test_patched_models_in_training_have_gradients_of_torch_func(name, options):
    model = make(name).train()
    ids = inputs(name)["input_ids"]
    weights = {key: p.detach() for key, p in model.named_parameters()}

    def loss(own):
        outputs = torch.func.functional_call(model, own, (ids,), {"labels": ids, "use_cache": False})
        return outputs.loss + outputs.logits.square().mean()

    right = torch.func.grad(loss)(weights)
    fftune.patch(model, **options)
    ours = torch.func.grad(loss)(weights)
    for key, gradient in right.items():
        assert torch.allclose(ours[key], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item()), key


def test_a_functional_call_of_modules():
    module = fftune.nn.GatedMLP(8, 12)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(5, 8)
    loss = lambda p, x: torch.func.functional_call(module, p, (x,)).square().sum()
    each_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    together = torch.func.grad(loss)(parameters, x)
    for name, gradient in together.items():
        assert error(each_sample[name].sum(0), gradient) < 1e-5


@each(CASES + BACKWARDS)
def test_meta(case):
    arguments = case.arguments()
    on_meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
    fakes, right = listed(op_of(case)(*on_meta)), listed(op_of(case)(*arguments))
    for ours, theirs in zip(fakes, right, strict=True):
        assert ours.is_meta and ours.shape == theirs.shape and ours.dtype == theirs.dtype


def call_of(case):
    places = [i for i, a in enumerate(case.arguments()) if isinstance(a, Tensor)]

    def run(arguments, tensors):
        return tuple(listed(op_of(case)(*replaced(arguments, places, tensors))))
    return places, run


# Sizes that say how many tokens, sequences or keys there are stay symbols; ids of ngram-block are
# rows of logits.
@each(representative(CASES + BACKWARDS))
def test_export_keeps_sizes_symbolic(case):
    if not hasattr(torch.export.Dim, "AUTO"):
        pytest.skip("this PyTorch has no Dim.AUTO")
    arguments = case.arguments()
    places, run = call_of(case)

    class Module(nn.Module):
        def forward(self, *tensors):
            return run(arguments, tensors)

    tensors = tuple(arguments[i] for i in places)
    dims = tuple({d: torch.export.Dim.AUTO for d in range(t.dim())} for t in tensors)
    exported = torch.export.export(Module(), tensors, dynamic_shapes={"tensors": dims})
    first = next(n for n in exported.graph.nodes if n.op == "placeholder").meta["val"]
    fixed = [d for d, size in enumerate(first.shape)
             if not isinstance(size, torch.SymInt) and tensors[0].shape[d] > 1]
    assert not fixed, f"{list(first.shape)}"
    own = tuple(t.clone() for t in tensors)
    for mine, other in zip(exported.module()(*own), run(arguments, tensors), strict=True):
        assert torch.equal(mine, other) or error(mine, other) < 1e-5


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


PATCHES = [{}, {"attention": True}, {"projections": True}]


@pytest.mark.parametrize("options", PATCHES, ids=str)
def test_patched_models_are_exported_for_any_length(options):
    from models import make

    model = make("llama")
    fftune.patch(model, **options)
    auto = torch.export.Dim.AUTO
    with torch.no_grad():
        exported = torch.export.export(Logits(model), (torch.randint(3, 96, (2, 9)),),
                                       dynamic_shapes={"ids": {0: auto, 1: auto}})
        ids = torch.randint(3, 96, (3, 70))
        assert error(exported.module()(ids), model(input_ids=ids).logits) < 1e-5


@pytest.mark.parametrize("options", [PATCHES[1], *(pytest.param(options, marks=pytest.mark.further)
                                                   for options in (PATCHES[0], PATCHES[2]))], ids=str)
def test_patched_models_are_compiled_once_for_all_lengths(options):
    from models import make

    model = make("llama")
    fftune.patch(model, **options)
    torch._dynamo.reset()  # other models have guards of their own
    compiled = torch.compile(Logits(model), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (9, 14, 70):
            ids = torch.randint(3, 96, (2, tokens))
            assert error(compiled(ids), model(input_ids=ids).logits) < 1e-5
