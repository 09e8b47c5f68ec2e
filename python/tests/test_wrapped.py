"""patch() on models with wrappers, adapters, hooks, parametrisations and weights that are elsewhere: all of
them are called, before patch() and after it, and nothing of a user's model is run by patch()."""
import copy
import inspect
import threading

import pytest
import torch
import torch.nn.utils.parametrizations as parametrizations
import transformers
from torch import nn
from torch.nn.utils import parametrize

import fftune
from fftune.patching import blocks, mlps, norms, recognise, rotary, trial
from models import MIXTURES, MODELS, Adapter
from ranks import start
from test_left_alone import GPT2, SIZES, close, copy_of_patched, ids, logits, make, static_logits, words_of

SMALL = dict(SIZES, num_hidden_layers=2)  # one layer is changed, and one is not
KINDS = {
    "LlamaConfig": SMALL, "Qwen3Config": dict(SMALL, head_dim=8), "GPT2Config": GPT2,
    "PhiConfig": SMALL, "MixtralConfig": dict(SMALL, num_local_experts=4)}
PARTS = {
    "LlamaConfig": ["self_attn", "self_attn.q_proj", "self_attn.o_proj", "mlp", "mlp.gate_proj",
                    "mlp.down_proj", "mlp.act_fn", "input_layernorm", "post_attention_layernorm", ""],
    "Qwen3Config": ["self_attn", "self_attn.q_norm", "self_attn.k_norm", "self_attn.v_proj"],
    "GPT2Config": ["attn", "attn.c_attn", "mlp", "mlp.c_fc", "mlp.c_proj", "mlp.act", "ln_1", "ln_2"],
    "PhiConfig": ["self_attn.dense", "mlp.fc1", "mlp.fc2", "input_layernorm"],
    "MixtralConfig": ["mlp", "mlp.gate", "mlp.experts", "mlp.experts.act_fn",
                      "post_attention_layernorm"]}


def scaled(result):
    """A wrapper's result: the first of several is scaled."""
    return (scaled(result[0]), *result[1:]) if isinstance(result, tuple) else result * 1.5


class Wrapper(Adapter):
    def forward(self, *given, **options):
        return scaled(self.inner(*given, **options))


class Scale(nn.Module):
    def forward(self, weight):
        return weight * 1.5


def wrapped(parent, name):
    setattr(parent, name, Wrapper(getattr(parent, name)))


def hooked(parent, name):
    getattr(parent, name).register_forward_hook(lambda module, given, result: scaled(result))


def hooked_before(parent, name):
    getattr(parent, name).register_forward_pre_hook(
        lambda module, given, options: (scaled(given) if given else given, {
            key: value * 1.5 if key == "hidden_states" else value for key, value in options.items()}),
        with_kwargs=True)


def with_another_forward(parent, name):
    module = getattr(parent, name)
    inner = module.forward
    module.forward = lambda *given, **options: scaled(inner(*given, **options))


def of_a_subclass(parent, name):
    module = getattr(parent, name)
    kind = type(module)

    class Other(kind):
        def forward(self, *given, **options):
            return scaled(kind.forward(self, *given, **options))

    module.__class__ = Other


def with_a_parametrisation(parent, name):
    module = getattr(parent, name)
    for weight in ("weight", "down_proj"):
        if isinstance(module._parameters.get(weight), nn.Parameter):
            parametrize.register_parametrization(module, weight, Scale())
            return
    pytest.skip("it has no weight")


def with_weight_norm(parent, name):
    module = getattr(parent, name)
    if type(module) is not nn.Linear:
        pytest.skip("it is no Linear")
    parametrizations.weight_norm(module)
    with torch.no_grad():
        module.parametrizations.weight.original0.mul_(1.5)


CHANGES = [wrapped, hooked, hooked_before, with_another_forward, of_a_subclass, with_a_parametrisation,
           with_weight_norm]


def parent_of(model, part):
    layers = getattr(model.base_model, "layers", None) or model.base_model.h
    path = part.rpartition(".")
    if not part:
        return layers, "0"
    return layers[0].get_submodule(path[0]), path[2]


# Every change of a Llama, whose parts are those of most models.
@pytest.mark.parametrize("kind, part, change", [
    pytest.param(kind, part, change, marks=() if kind == "LlamaConfig" or change in (
        wrapped, hooked, with_another_forward) else pytest.mark.further)
    for kind, parts in PARTS.items() for part in parts for change in CHANGES])
def test_what_comes_between_is_called(kind, part, change):
    model = make(kind, **KINDS[kind])
    plain = logits(model)
    right = copy.deepcopy(model)
    change(*parent_of(right, part))
    expected, expected_static = logits(right), static_logits(right)
    for before in (True, False):
        for options in (dict(projections=True), dict(attention=True, whole_layers=True)):
            if before:
                own = copy.deepcopy(model)
                change(*parent_of(own, part))
                report = str(fftune.patch(own, **options))
            else:
                own, report = copy_of_patched(kind, KINDS[kind], **options)
                if change is of_a_subclass and "forward" in parent_of(own, part)[0].get_submodule(
                        parent_of(own, part)[1]).__dict__:
                    continue  # another class for a module whose forward was replaced has no effect
                change(*parent_of(own, part))
            assert close(logits(own), expected), (before, options, report)
            assert close(static_logits(own), expected_static), (before, options, report)
            with torch.enable_grad():
                assert close(own(input_ids=ids(), use_cache=False).logits, expected)
    # Logits of a router are not used, and a norm makes nothing of a scaled input.
    assert part == "mlp.gate" or change is hooked_before or not close(plain, expected)


def a_hook_on_the_rotary_embedding(model):
    model.model.rotary_emb.register_forward_hook(lambda module, given, result: (result[0] * 1.5, result[1]))


def another_forward_of_the_rotary_embedding(model):
    with_another_forward(model.model, "rotary_emb")


def another_rotary_embedding(model):
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def another_scale_of_cosines(model):
    model.model.rotary_emb.attention_scaling = 1.5


def a_hook_that_changes_cosines(model):
    model.model.layers[0].register_forward_pre_hook(lambda module, given, options: (given, {
        **options, "position_embeddings": tuple(t * 0.5 for t in options["position_embeddings"])}),
        with_kwargs=True)


def another_attention(model):
    layer = model.model.layers[0]
    before, layer.self_attn = layer.self_attn, type(layer.self_attn)(model.config, 0).eval()
    layer.self_attn.load_state_dict(before.state_dict())


def another_layer(model):
    before = model.model.layers[0]
    model.model.layers[0] = type(before)(model.config, 0).eval()
    model.model.layers[0].load_state_dict(before.state_dict())


def one_more_layer(model):
    model.config.num_hidden_layers += 1
    if hasattr(model.config, "layer_types"):
        model.config.layer_types = [*model.config.layer_types, "full_attention"]
    layers = model.model.layers
    layers.append(type(layers[0])(model.config, len(layers)).eval())
    layers[-1].load_state_dict(layers[0].state_dict())


def a_layer_that_is_unpatched(model):
    fftune.unpatch(model.model.layers[0])


def a_rotary_embedding_that_is_unpatched(model):
    fftune.unpatch(model.model.rotary_emb)


@pytest.mark.parametrize("change", [
    a_hook_on_the_rotary_embedding, another_forward_of_the_rotary_embedding, another_rotary_embedding,
    another_scale_of_cosines, a_hook_that_changes_cosines, another_attention, another_layer, one_more_layer,
    a_layer_that_is_unpatched, a_rotary_embedding_that_is_unpatched])
def test_modules_that_came_after_patch_are_given_cosines_and_sines(change):
    """Patched attentions take angles in their place, which nobody else can read."""
    model = make("Qwen3Config", **{**SIZES, "num_hidden_layers": 2}, head_dim=8)
    right = copy.deepcopy(model)
    change(right)
    expected, expected_static = logits(right), static_logits(right)
    for before in (True, False):
        for options in (dict(projections=True), dict(whole_layers=True)):
            own = copy.deepcopy(model)
            if before:
                change(own)
            fftune.patch(own, **options)
            if not before:
                change(own)
            assert close(logits(own), expected), (before, options)
            assert close(static_logits(own), expected_static), (before, options)


@pytest.mark.parametrize("projections", [False, True])
def test_a_layer_alone_takes_cosines_and_sines(projections):
    model = make("LlamaConfig", **SIZES)
    x, places = torch.randn(2, 5, 32), torch.arange(5)[None]
    given = {"position_embeddings": model.model.rotary_emb(x, places), "position_ids": places}
    right = model.model.layers[0](x, **given)
    fftune.patch(model, projections=projections)
    assert close(model.model.layers[0](x, **given), right)


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES])
@pytest.mark.parametrize("whole_layers", [False, True])
def test_nothing_of_the_model_is_run_or_changed(name, whole_layers, monkeypatch):
    from models import make

    model = make(name)
    own, ran = set(map(id, model.modules())), []
    call = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *given, **options: (
        ran.append(type(self).__name__) if id(self) in own else None,
        call(self, *given, **options))[1])
    weights = {name: (p, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    fftune.patch(model, projections=True, attention=True, whole_layers=whole_layers)
    assert not ran
    for name, parameter in model.named_parameters():
        kept, _, value = weights[name]
        assert parameter is kept and torch.equal(parameter, value)


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES])
def test_forwards_have_the_signatures_of_their_classes(name):
    """generate() and Trainer choose arguments by them."""
    from models import make

    model = make(name)
    signatures = lambda: [inspect.signature(module.forward) for module in model.modules()]
    right = signatures()
    for options in dict(projections=True, attention=True), dict(attention=True, whole_layers=True):
        assert fftune.patch(model, **options).replaced
        assert signatures() == right
        fftune.unpatch(model)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "phi", "gpt2", "mixtral", "deepseek"])
def test_a_model_on_meta_is_patched_or_left_alone(name):
    from models import make

    model = make(name)
    with torch.no_grad():
        right = model(ids(), use_cache=False).logits
    state = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    empty = copy.deepcopy(model).to("meta")
    fftune.patch(empty, projections=True, attention=True, whole_layers=True)
    empty.load_state_dict(state, assign=True)
    for place, buffer in buffers.items():
        parent, _, own = place.rpartition(".")
        empty.get_submodule(parent)._buffers[own] = buffer
    with torch.no_grad():
        assert close(empty(ids(), use_cache=False).logits, right)


def test_the_model_can_run_between_the_steps_of_patch(monkeypatch):
    """Recognition works on copies, so a call of the model during patch() gives the right result."""
    model = make("LlamaConfig", **SIZES)
    right, results = logits(model), []
    make_copy, replace = recognise.stand_in, trial.replace_forward

    def copied(module, *arguments, **options):
        own = make_copy(module, *arguments, **options)
        results.append(close(logits(model), right))
        return own

    def replaced(module, *arguments):
        # The rotary embedding and its users are replaced together.
        if not type(module).__name__.endswith(("Attention", "RotaryEmbedding")):
            results.append(close(logits(model), right))
        replace(module, *arguments)

    for module in (recognise, norms, mlps, blocks, rotary):
        for name, function in (("stand_in", copied), ("replace_forward", replaced)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)
    fftune.patch(model)
    assert len(results) > 5 and all(results)


@pytest.mark.parametrize("patches", [False, True])
def test_patching_while_another_thread_runs_a_model_of_the_same_class(patches):
    running, other = make("LlamaConfig", **SIZES), make("LlamaConfig", **SIZES)
    given, results, stop = ids(), [], threading.Event()  # random numbers are those of the process

    def called():
        with torch.no_grad():
            return running(input_ids=given, use_cache=False).logits

    right = called()
    if patches:
        fftune.patch(running)

    def run():
        while not stop.is_set():
            try:
                results.append(close(called(), right))
            except Exception:
                results.append(False)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(5):
        fftune.patch(other)
        fftune.unpatch(other)
    stop.set()
    thread.join()
    assert results and all(results)


def test_a_model_that_once_gave_hidden_states():
    model = make("LlamaConfig", **SIZES)
    right = model(ids(), output_hidden_states=True, use_cache=False)
    first = str(fftune.patch(copy.deepcopy(make("LlamaConfig", **SIZES)), projections=True))
    assert str(fftune.patch(model, projections=True)) == first
    ours = model(ids(), output_hidden_states=True, use_cache=False)
    assert len(ours.hidden_states) == len(right.hidden_states)
    assert all(map(close, ours.hidden_states, right.hidden_states))
    for each in (ours, right):
        assert each.attentions is None
    model.set_attn_implementation("eager")
    with torch.no_grad():
        both = model(ids(), output_attentions=True, output_hidden_states=True, use_cache=False)
    assert len(both.attentions) == 4 and all(map(close, both.hidden_states, right.hidden_states))


@pytest.mark.parametrize("name", ["fftune", "eager", "sdpa"])
def test_the_attention_that_a_user_chose_stays(name):
    fftune.register_attention()
    model = make("LlamaConfig", **SIZES)
    model.set_attn_implementation(name)
    right = logits(model)
    for options in ({}, {}, dict(attention=True), dict(whole_layers=True), {}):
        fftune.patch(model, **options)
        assert close(logits(model), right)
        if name == "fftune":
            assert model.config._attn_implementation == "fftune"
    fftune.unpatch(model)
    assert {module.config._attn_implementation for module in model.modules()
            if hasattr(module, "config")} == {name}
    fftune.patch(model)
    model.set_attn_implementation("eager")
    assert fftune.unpatch(model).config._attn_implementation == "eager"


def _sharded(rank, store, mixed, kind):
    import torch.distributed as distributed
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make(kind, **KINDS[kind])
    right = model(ids(), use_cache=False).logits
    right.square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if mixed else {}
    tolerance = 0.05 if mixed else 1e-5
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=1)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    fftune.patch(model, projections=True, attention=True, whole_layers=True)
    ours = model(ids(), use_cache=False).logits
    assert close(ours, right, tolerance)
    ours.square().mean().backward()
    for mine, other in zip(model.parameters(), gradients):
        assert close(mine.grad.full_tensor(), other, 4 * tolerance if mixed else 2e-4)


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3Config"])
@pytest.mark.parametrize("mixed", [False, True])
def test_layers_that_are_sharded(tmp_path, mixed, kind):
    """FSDP2 makes its state in the first call of the whole model. With mixed precision it casts all
    floating-point arguments of layers."""
    start(_sharded, 1, str(tmp_path / "store"), mixed, kind)


def test_models_are_patched_twice_as_once():
    model = make("LlamaConfig", **SIZES)
    first = fftune.patch(model, projections=True, attention=True, whole_layers=True)
    second = fftune.patch(model, projections=True, attention=True, whole_layers=True)
    assert words_of(first.replaced) == words_of(second.replaced)
    assert words_of(first.left) == words_of(second.left)


def test_weights_of_another_class_put_in_later():
    class Doubled(torch.Tensor):
        """A weight that stands for another one, as quantised ones do."""

        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ["inner"], None

        @staticmethod
        def __tensor_unflatten__(inner, meta, size, stride):
            return Doubled(inner["inner"])

        @classmethod
        def __torch_dispatch__(cls, function, types, given=(), options=None):
            if function is torch.ops.aten.detach.default:
                return cls(given[0].inner)
            plain = lambda t: t.inner * 2 if isinstance(t, Doubled) else t
            return function(*torch.utils._pytree.tree_map(plain, given),
                            **torch.utils._pytree.tree_map(plain, options or {}))

    model = make("LlamaConfig", **SIZES)
    own = copy.deepcopy(model)
    fftune.patch(own, projections=True, whole_layers=True)
    for each in (model, own):
        for module in each.modules():
            if isinstance(module, nn.Linear) or "RMSNorm" in type(module).__name__:
                module._parameters["weight"] = nn.Parameter(Doubled(module.weight.detach()), False)
    with torch.no_grad():
        assert close(logits(own), logits(model))
        assert close(static_logits(own), static_logits(model))
