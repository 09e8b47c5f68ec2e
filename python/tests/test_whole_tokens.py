"""Whole tokens of models with layers of several kinds: the op `decode` beside its reference, and generate()."""
import copy

import pytest
import torch

import fftune
from fftune import reference
from fftune._custom import OPS, call
from fftune._layer_kinds import Kinds, parse_kinds
from test_layers_with_states import make, patched, pytestmark  # noqa: F401
from whole_layers import steps  # noqa: F401

# Models, and the kinds of their four layers.
KINDS = {"lfm2-moe": "bacc", "qwen3-next": "bbab", "olmo-hybrid": "bbab",
         "bamba": "bbab", "granite-hybrid-moe": "bbab", "kimi-linear": "bbac"}


def greedy(model, ids, **options):
    options = dict(max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0) | options
    return model.generate(ids, **options)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_the_models(name, steps):
    model = make(name)
    own, _ = patched(model)
    ids = torch.randint(3, 96, (2, 5))
    right = greedy(model, ids)
    assert torch.equal(fftune.generate(own, ids, 7, stop=[]), right)
    # The first token is the prompt's.
    assert len(steps) == 6
    form, = {next(a for a in step if isinstance(a, str) and "weights=" in a) for step in steps}
    assert form.split(" @ ")[1] == KINDS[name]
    assert torch.equal(greedy(own, ids), right)
    assert len(steps) == 12


def test_the_reference_is_the_op(steps):
    own, _ = patched(make("qwen3.5"))
    fftune.generate(own, torch.randint(3, 96, (3, 5)), 3, stop=[])
    arguments = list(steps[0])
    arguments[3] = torch.tensor([0, 1, 0], dtype=torch.int32)  # one that has ended
    ours, theirs = copy.deepcopy(arguments), copy.deepcopy(arguments)
    with torch.no_grad():
        right = reference.decode(*theirs)
        assert torch.equal(call(OPS.decode, *ours)[0][::2], right[0][::2])
    for before, mine, wanted in zip(arguments[11], ours[11], theirs[11]):
        assert (mine - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp(min=1.0)
        if mine.dim() == 3 or mine.shape[1] == 4:  # states of convolutions and of heads
            assert torch.equal(mine[1], before[1]) and not torch.equal(mine[0], before[0])
    for mine, wanted in zip(ours[:5], theirs[:5]):
        assert torch.equal(mine, wanted)


def test_what_has_padding_or_a_past_is_as_the_models(steps):
    model = make("lfm2")
    own, _ = patched(model)
    ids = torch.randint(3, 96, (2, 6))
    mask = torch.ones_like(ids)
    ids[0, :2], mask[0, :2] = 0, 0
    assert torch.equal(greedy(own, ids, attention_mask=mask), greedy(model, ids, attention_mask=mask))
    for later in (1, 4):
        found = []
        for one in (model, own):
            first = greedy(one, ids[1:], return_dict_in_generate=True)
            more = torch.cat((first.sequences, ids[:1, 2:2 + later]), -1)
            found.append(greedy(one, more, past_key_values=first.past_key_values))
        assert torch.equal(*found)


def test_sequences_stop_where_the_models_do(steps):
    model = make("bamba")
    own, _ = patched(model)
    ids = torch.randint(3, 96, (3, 4))
    free = greedy(model, ids)
    stop = int(free[1, 6])
    right = greedy(model, ids, eos_token_id=stop)
    assert torch.equal(fftune.generate(own, ids, 7, stop=stop), right) and steps
    drawn = [fftune.generate(own, ids, 7, stop=[], temperature=2.0, seeds=5) for _ in range(2)]
    assert torch.equal(*drawn) and not torch.equal(drawn[0], free)


def test_a_weight_that_is_changed_later_is_seen(steps):
    own, _ = patched(make("qwen3-next"))
    ids = torch.randint(3, 96, (1, 5))
    before = fftune.generate(own, ids, 6, stop=[])
    model = copy.deepcopy(own)
    fftune.unpatch(model)
    with torch.no_grad():
        for one in (own, model):
            one.model.layers[0].linear_attn.in_proj_qkvz.weight.data *= -1.5
    assert torch.equal(fftune.generate(own, ids, 6, stop=[]), greedy(model, ids, max_new_tokens=6))
    assert not torch.equal(fftune.generate(own, ids, 6, stop=[]), before) and steps


def test_forms_of_kinds():
    kinds = Kinds(("weights=a", "weights=b"), (1, 1, 0) * 3)
    assert kinds.text() == "weights=a | weights=b @ bbabbabba" and parse_kinds(kinds.text()) == kinds
    assert kinds.pattern == "bba" and Kinds(kinds.forms, (1, 0, 1)).pattern == "ba"
    assert Kinds(("weights=a",)).text() == "weights=a" == parse_kinds("weights=a").forms[0]


def test_wrong_numbers_of_tensors_are_refused(steps):
    own, _ = patched(make("lfm2"))
    fftune.generate(own, torch.randint(3, 96, (1, 5)), 3, stop=[])
    arguments = list(steps[0])
    arguments[10] = arguments[10][:-1]
    with torch.no_grad(), pytest.raises(fftune.Error, match="weights and .* caches: give"):
        call(OPS.decode, *arguments)
