"""Copies of patched models by deepcopy, pickle, torch.save, copy.copy and DataParallel."""
import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fftune
from models import MIXTURES, MODELS, inputs, make

OPTIONS = [{}, dict(projections=True, attention=True), dict(whole_layers=True, graphs=True)]
NAMES = [*MODELS, "mixtral", "gpt-oss", "deepseek"]


def logits(model, name):
    torch.manual_seed(1)
    with torch.no_grad():
        return model(**inputs(name), use_cache=False).logits


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def replica(model):
    """As torch.nn.parallel.replicate() makes one, whose parameters are plain tensors."""
    modules = list(model.modules())
    made = [module._replicate_for_data_parallel() for module in modules]
    place = {id(module): i for i, module in enumerate(modules)}
    for module, own in zip(modules, made):
        for name, child in module._modules.items():
            own._modules[name] = None if child is None else made[place[id(child)]]
        for name, parameter in module._parameters.items():
            if parameter is None:
                own._parameters[name] = None
            else:
                setattr(own, name, parameter.detach() * 1.5)
    return made[0]


def traces_of(model):
    return [key for module in model.modules() for key, value in vars(module).items()
            if "fftune" in key or hasattr(value, "_fftune") or key.startswith("__")]


# torch.save() pickles, and OPTIONS[0] replaces less than the others.
@pytest.mark.parametrize("way, name, options", [pytest.param(
    way, name, options, marks=() if (options if way is pickled else name in ("llama", "mixtral", "deepseek"))
    or name == "llama" else pytest.mark.further)
    for way in (pickled, saved) for name in NAMES for options in OPTIONS], ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_pickle_is_that_of_the_model_as_it_was(way, name, options):
    model = make(name)
    right = logits(model, name)
    names, generation = list(model.state_dict()), model.generation_config.to_dict()
    fftune.patch(model, **options)
    again = way(model)
    assert not traces_of(again)
    assert torch.allclose(logits(again, name), right, atol=1e-5)
    assert list(again.state_dict()) == names
    assert again.generation_config.to_dict() == generation
    assert {m.config._attn_implementation for m in again.modules() if hasattr(m, "config")} == {
        make(name).config._attn_implementation}
    owners = [m for m in again.modules() if hasattr(m, "config")]
    model_owners = [m for m in model.modules() if hasattr(m, "config")]
    assert len({id(m.config) for m in owners}) == len({id(m.config) for m in model_owners})
    for p in again.parameters():
        p.data.mul_(1.01)
    assert not torch.equal(logits(again, name), right)
    # The patched one is as it was.
    assert torch.allclose(logits(model, name), right, atol=1e-4) and traces_of(model)
    assert fftune.patch(again, **options).replaced


def test_a_layer_alone_and_a_wrapper_of_the_model():
    model = make("llama")
    right = logits(model, "llama")
    fftune.patch(model, whole_layers=True)
    assert not traces_of(pickled(model.model.layers[0]))
    wrapper = nn.ModuleDict({"model": model, "first": model.model.layers[0]})
    again = pickled(wrapper)
    assert again["first"] is again["model"].model.layers[0]
    assert torch.equal(logits(again["model"], "llama"), right)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "deepseek"])
def test_replicas_run_on_their_own_weights(name, options):
    model = make(name)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    fftune.patch(model, **options)
    assert torch.allclose(logits(replica(model), name), logits(other, name), atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_deep_copies_are_patched_and_shallow_ones_are_not(name, options):
    model = make(name)
    right = logits(model, name)
    fftune.patch(model, **options)
    deep = copy.deepcopy(copy.deepcopy(model))
    assert sorted(traces_of(deep)) == sorted(traces_of(model))
    for module in deep.modules():
        for value in vars(module).values():
            owner = getattr(value, "__self__", None) or (getattr(value, "args", None) or [None])[0]
            assert not isinstance(owner, nn.Module) or owner is module
    own = set(map(id, deep.parameters()))
    assert not own & set(map(id, model.parameters()))
    with torch.no_grad():
        for parameter in deep.parameters():
            parameter.zero_()
    assert not logits(deep, name).any() and torch.allclose(logits(model, name), right, atol=1e-4)
    shallow = copy.copy(model)
    assert "forward" not in vars(shallow) and shallow.lm_head is model.lm_head
    fftune.unpatch(deep)
    assert not traces_of(deep)


@pytest.mark.parametrize("way", [pickled, saved, copy.copy])
def test_a_pickle_of_quantised_layers_has_their_codes(way):
    pytest.importorskip("safetensors")
    from test_quantised import bits_of, llama

    model = llama("Qwen2", group=32)
    ids, bits = torch.randint(3, 96, (2, 9)), bits_of(model)
    with torch.no_grad():
        right = model(ids).logits
        fftune.patch(model)
        again = way(model)
        assert way is copy.copy or not traces_of(again)
        assert bits_of(again) == bits and torch.allclose(again(ids).logits, right, atol=1e-4)
        assert [name for name, _ in again.named_buffers() if "_fftune" in name] == [
            name for name, _ in model.named_buffers() if "_fftune" in name and way is copy.copy]
        assert bits_of(model) == bits and torch.allclose(model(ids).logits, right, atol=1e-4)


def test_a_class_with_a_deepcopy_of_its_own():
    model = make("llama")

    class Own(type(model.model.norm)):
        def __deepcopy__(self, memo):
            made = type(self)(32)
            made.weight = nn.Parameter(self.weight.detach() * 2)
            return made

    model.model.norm.__class__ = Own
    right = logits(copy.deepcopy(model), "llama")
    fftune.patch(model)
    assert torch.allclose(logits(copy.deepcopy(model), "llama"), right, atol=1e-5)
