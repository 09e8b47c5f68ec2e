"""fftune.generate() beside transformers' generate(): the same ids, in one graph for all steps on a GPU."""
import copy
import functools

import pytest
import torch
import transformers

import fftune
from fftune._custom import call
from fftune.patching import decoding, layers
from models import inputs, make

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5,
                                reason="transformers is older than 5")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def patched(name):
    model = make(name, device=DEVICE)
    model.generation_config.eos_token_id = None
    own = copy.deepcopy(model)
    fftune.patch(own, whole_layers=True)
    return model, own


def right(model, ids, count, **options):
    return model.generate(ids, max_new_tokens=count, do_sample=False, **options)


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen3", "gemma", "gemma2", "phi", "phi3", "gpt2",
                                  "olmo2", "mixtral", "mistral-window"])
@pytest.mark.parametrize("batch, tokens", [(1, 9), (3, 40)])
def test_greedy_ids_are_transformers(name, batch, tokens, monkeypatch):
    model, own = patched(name)
    seen = loops(monkeypatch)
    ids = inputs(name, batch, tokens, DEVICE)["input_ids"]
    assert torch.equal(fftune.generate(own, ids, 20), right(model, ids, 20))
    # The sequences exceed the window.
    assert (seen[0].state is None) == (name in ("gpt2", "mistral-window"))
    monkeypatch.setattr(decoding, "whole_of", lambda head: 1 / 0)
    assert torch.equal(fftune.generate(own, ids, 20), right(model, ids, 20))
    assert seen[1].state is None


@pytest.mark.parametrize("name, is_whole", [
    ("llama", True), ("llama3", True), ("qwen3", True), ("gemma", True), ("phi", True), ("phi3", True),
    ("olmo2", True), ("mixtral", True), ("mistral-window", True), ("gemma2", True), ("gpt2", False)])
def test_models_whose_steps_are_one_op(name, is_whole):
    _, own = patched(name)
    head = decoding.head_of(own)
    if not is_whole:
        with pytest.raises(decoding.Unfit):
            decoding.whole_of(head)
        return
    whole = decoding.whole_of(head)
    width = own.config.hidden_size ** 0.5
    assert whole.scale == pytest.approx(width if "gemma" in name else 1.0)


def test_an_embedding_that_scales_its_rows_is_not_known():
    model, own = patched("llama")
    for one in (model, own):
        torch.manual_seed(3)
        old = one.model.embed_tokens
        one.model.embed_tokens = torch.nn.Embedding(*old.weight.shape, max_norm=1.0).to(old.weight)
    with pytest.raises(decoding.Unfit, match="greatest norm"):
        decoding.whole_of(decoding.head_of(own))
    ids = inputs("llama", 2, 9, DEVICE)["input_ids"]
    assert torch.equal(fftune.generate(own, ids, 12), right(model, ids, 12))


def test_an_embedding_that_is_more_than_a_product_is_not_known(monkeypatch):
    _, own = patched("llama")
    head = decoding.head_of(own)
    own.model.embed_tokens.register_forward_hook(lambda *_: None)
    with pytest.raises(decoding.Unfit, match="hooks"):
        decoding.whole_of(head)
    own.model.embed_tokens._forward_hooks.clear()

    class Shifted(torch.nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) + 1

    own.model.embed_tokens.__class__ = Shifted
    with pytest.raises(decoding.Unfit, match="something else than an embedding"):
        decoding.whole_of(head)


def test_sequences_stop_each_at_its_own_id():
    model, own = patched("llama")
    ids = inputs("llama", 4, 9, DEVICE)["input_ids"]
    free = right(model, ids, 40)[:, 9:]
    # An id that sequences meet at different steps; behind it there is padding.
    stop = next(int(i) for i in free.unique()
                if len(set((free == i).int().argmax(-1).tolist())) > 1)
    theirs = right(model, ids, 40, eos_token_id=stop, pad_token_id=0)
    assert torch.equal(fftune.generate(own, ids, 40, stop=stop, pad=0), theirs)
    every = [int(i) for i in free[:, 5].unique()]
    theirs = right(model, ids, 40, eos_token_id=every, pad_token_id=0)
    ours = fftune.generate(own, ids, 40, stop=every)
    assert torch.equal(ours, theirs) and ours.shape[1] < 49


def test_the_model_says_what_ends_a_sequence():
    model, own = patched("llama")
    ids = inputs("llama", 1, 9, DEVICE)["input_ids"]
    free = right(model, ids, 40)[0, 9:].tolist()
    own.generation_config.eos_token_id = free[3]
    assert fftune.generate(own, ids, 40)[0, 9:].tolist() == free[:free.index(free[3]) + 1]
    assert fftune.generate(own, ids, 40, stop=[])[0, 9:].tolist() == free


def test_steps_behind_the_end_are_few():
    _, own = patched("llama")
    ids = inputs("llama", 2, 5, DEVICE)["input_ids"]
    steps = []
    advance = decoding.Loop.advance
    decoding.Loop.advance = lambda self, ids: (steps.append(1), advance(self, ids))
    try:
        out = fftune.generate(own, ids, 100, stop=list(range(96)))
    finally:
        decoding.Loop.advance = advance
    assert out.shape == (2, 6) and len(steps) <= 3 * decoding._LOOKS


def test_draws_depend_on_seeds_alone():
    model, own = patched("llama")
    ids = inputs("llama", 1, 9, DEVICE)["input_ids"].expand(3, -1)
    draw = lambda **of: fftune.generate(own, ids, 12, temperature=1.5, top_k=20, **of)
    first = draw(seeds=torch.tensor([1, 2, 1]))
    assert torch.equal(first, draw(seeds=torch.tensor([1, 2, 1])))
    assert torch.equal(first[0], first[2]) and not torch.equal(first[0], first[1])
    torch.manual_seed(0)
    by_generator = draw()
    torch.manual_seed(0)
    assert torch.equal(by_generator, draw())
    assert torch.equal(fftune.generate(own, ids, 12, temperature=0.0), right(model, ids, 12))


def test_numbers_beyond_int32_are_no_ids_and_no_smaller_numbers():
    _, own = patched("llama")
    ids = inputs("llama", 2, 9, DEVICE)["input_ids"]
    free = fftune.generate(own, ids, 8, stop=[])
    beyond = [id + sign * 2**32 for id in set(free[:, ids.shape[1]:].flatten().tolist()) for sign in (1, -1)]
    assert torch.equal(fftune.generate(own, ids, 8, stop=beyond, pad=0), free)
    draw = lambda top_k: fftune.generate(own, ids, 8, stop=[], temperature=2.0, seeds=3, top_k=torch.tensor(
        [top_k] * len(ids)))
    assert torch.equal(draw(2**32 + 1), draw(0)) and not torch.equal(draw(1), draw(0))


def test_the_model_is_as_it_was():
    model, own = patched("gemma2")
    ids = inputs("gemma2", 2, 9, DEVICE)["input_ids"]
    before = own(ids).logits
    fftune.generate(own, ids, 4)
    assert torch.equal(own(ids).logits, before)
    fftune.unpatch(own)
    assert torch.allclose(own(ids).logits, model(ids).logits, atol=1e-5)


def test_what_is_not_known_is_refused_in_one_line():
    def refused(model, *arguments, **options):
        with pytest.raises(fftune.Error) as caught:
            fftune.generate(model, *arguments, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    model, own = patched("llama")
    ids = inputs("llama", 1, 9, DEVICE)["input_ids"]
    assert "patch(model, whole_layers=True)" in refused(model, ids, 4)
    assert "give input_ids" in refused(own, ids[0], 4)
    assert "give 1 or more" in refused(own, ids, 0)
    assert "give temperature" in refused(own, ids, 4, top_k=3)
    assert "stop is" in refused(own, ids, 4, stop=["</s>"])
    assert "stop is" in refused(own, ids, 4, stop=3.5)
    assert "pad is" in refused(own, ids, 4, pad="</s>")
    for name, value in (("temperature", "1"), ("top_k", [3]), ("top_p", "all"), ("seeds", 1.5j), ("seeds", [1]),
                        ("seeds", 2**63), ("seeds", torch.arange(7))):
        assert f"{name} is" in refused(own, ids, 4, **{"temperature": 1.0, name: value})
    hook = own.lm_head.register_forward_hook(lambda *_: None)
    assert "hooks" in refused(own, ids, 4)
    hook.remove()
    _, scaled = patched("cohere")
    scaled.logit_scale = -0.25  # the best id is then the least of the product
    assert "not those of a linear layer" in refused(scaled, ids, 4)
    own.train()
    assert "model.eval()" in refused(own, ids, 4)


@pytest.mark.parametrize("name, attribute, value, factor", [
    ("cohere", "logit_scale", 0.25, 0.25), ("granite", "config.logits_scaling", 8.0, 1 / 8),
    ("cohere", "logit_scale", 3, 3)])
def test_logits_times_a_number(name, attribute, value, factor, monkeypatch):
    model, own = patched(name)
    *path, last = attribute.split(".")
    for one in (model, own):
        setattr(functools.reduce(getattr, path, one), last, value)
    assert decoding.head_of(own).factor == pytest.approx(factor)
    ids = inputs(name, 2, 9, DEVICE)["input_ids"]
    assert torch.equal(fftune.generate(own, ids, 12), right(model, ids, 12))
    seen, wanted = loops(monkeypatch), dict(cache_implementation="static", disable_compile=True)
    assert torch.equal(right(own, ids, 12, **wanted), right(model, ids, 12, **wanted)) and len(seen) == 1
    # A draw by a temperature is one from the product alone by another.
    drawn = fftune.generate(own, ids, 12, temperature=0.7, top_p=0.9, seeds=5)
    setattr(functools.reduce(getattr, path, own), last, 1)
    assert torch.equal(fftune.generate(own, ids, 12, temperature=0.7 / factor, top_p=0.9, seeds=5), drawn)


def loops(monkeypatch):
    """The loops that run from now on."""
    seen = []
    run = decoding.Loop.run
    monkeypatch.setattr(decoding.Loop, "run", lambda self, ids: (seen.append(self), run(self, ids))[1])
    return seen


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3-moe"])
def test_greedy_calls_of_generate_run_by_the_loop(name, monkeypatch):
    model, own = patched(name)
    seen = loops(monkeypatch)
    ids = inputs(name, 3, 9, DEVICE)["input_ids"]
    wanted = dict(cache_implementation="static", disable_compile=True)
    free = right(model, ids, 30, **wanted)
    assert torch.equal(right(own, ids, 30, **wanted), free) and len(seen) == 1
    assert torch.equal(right(own, ids[:1], 30, **wanted), right(model, ids[:1], 30, **wanted))
    stop = dict(eos_token_id=[int(free[0, 14]), int(free[1, 12])], pad_token_id=0)
    ours = right(own, ids, 30, attention_mask=torch.ones_like(ids), **stop, **wanted)
    assert torch.equal(ours, right(model, ids, 30, **stop, **wanted)) and len(seen) == 3


@pytest.mark.parametrize("name, is_static", [("llama", True), ("gpt2", True), ("mistral-window", False)])
def test_a_call_with_a_growing_cache_of_its_own_has_a_static_one(name, is_static, monkeypatch):
    model, own = patched(name)
    seen = loops(monkeypatch)
    ids = inputs(name, 2, 9, DEVICE)["input_ids"]
    wanted = right(model, ids, 30)
    assert torch.equal(right(own, ids, 30), wanted) and len(seen) == is_static
    # Others see these caches, or a long one would not fit.
    seen.clear()
    cache = transformers.DynamicCache(config=own.config)
    assert torch.equal(right(own, ids, 30, past_key_values=cache), wanted)
    assert cache.get_seq_length() == 38 and not seen
    own.generation_config.return_dict_in_generate = True
    assert torch.equal(right(own, ids, 30).sequences, wanted) and not seen
    own.generation_config.return_dict_in_generate = False
    monkeypatch.setattr(decoding, "free_bytes", lambda device: 10000)
    assert torch.equal(right(own, ids, 30), wanted) and not seen


@pytest.mark.parametrize("options", [
    dict(repetition_penalty=1.3), dict(no_repeat_ngram_size=2), dict(num_beams=2),
    dict(output_logits=True, return_dict_in_generate=True), dict(cache_implementation="dynamic"),
    dict(stopping_criteria=[lambda ids, _: torch.ones(len(ids), dtype=torch.bool, device=DEVICE)]),
    dict(attention_mask=torch.tensor([[0] + [1] * 8, [1] * 9], device=DEVICE)),
    dict(prompt_lookup_num_tokens=2), dict(min_new_tokens=8, eos_token_id=5)],
    ids=lambda options: next(iter(options)))
def test_other_calls_of_generate_run_as_before(options, monkeypatch):
    model, own = patched("llama")
    seen = loops(monkeypatch)
    ids = inputs("llama", 1 if "prompt_lookup_num_tokens" in options else 2, 9, DEVICE)["input_ids"]
    given = {"disable_compile": True, "pad_token_id": 0, **options}
    if "prompt_lookup_num_tokens" not in options:
        given = {"cache_implementation": "static", **given}
    ours, theirs = (m.generate(ids, max_new_tokens=8, do_sample=False, **given) for m in (own, model))
    if "return_dict_in_generate" in options:
        ours, theirs = ours.sequences, theirs.sequences
    assert torch.equal(ours, theirs) and not seen
    fftune.unpatch(own)
    assert "generate" not in vars(own)


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen3", "mixtral"])
@pytest.mark.parametrize("draft", ["lookup", "assistant"])
def test_drafts_are_verified_by_the_op(name, draft, monkeypatch):
    model, own = patched(name)
    assistant = make(name, device=DEVICE)
    assistant.generation_config.eos_token_id = None
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    with torch.no_grad():  # some drafts are wrong
        weight = assistant.lm_head.weight
        weight += 0.02 * torch.randn_like(weight)
    ids = inputs(name, 1, 9, DEVICE)["input_ids"].repeat(1, 2)
    options = dict(prompt_lookup_num_tokens=3, max_matching_ngram_size=1) if draft == "lookup" else \
        dict(assistant_model=assistant)
    seen = []
    monkeypatch.setattr(layers, "call", lambda op, x, *a: (seen.append(x.shape[1]), call(op, x, *a))[1])
    wanted = right(model, ids, 30)
    assert torch.equal(right(own, ids, 30, **options), wanted)
    groups = len(own._modules["model"]._fftune_layers.groups)
    # The draft's tokens and the last one; some drafts are taken, and others taken back.
    assert 2 <= max(seen[groups:]) <= 8 and len(seen) - groups < 30 * groups
    stop = int(wanted[0, -12])
    free = right(model, ids, 30, eos_token_id=stop, pad_token_id=0)
    assert torch.equal(right(own, ids, 30, eos_token_id=stop, pad_token_id=0, **options), free)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_drafts_may_go_on_behind_the_last_place(tokens):
    model, own = patched("llama")
    with torch.no_grad():  # they repeat the last id, so that all drafts are taken
        for one in (model, own):
            for p in one.model.layers.parameters():
                p.zero_()
            one.lm_head.weight.copy_(one.model.embed_tokens.weight)
            one.model.norm.weight.fill_(1)
    ids = torch.tensor([[7, 9, 9, 9, 9, 9, 9, 9]], device=DEVICE)
    wanted = right(model, ids, tokens, prompt_lookup_num_tokens=5)
    assert torch.equal(right(own, ids, tokens, prompt_lookup_num_tokens=5), wanted)
    assert wanted[0, 8:].tolist() == [9] * tokens


def test_drafts_of_a_model_with_a_full_window_run_as_before(monkeypatch):
    model, own = patched("mistral-window")
    seen = []
    monkeypatch.setattr(layers, "call", lambda op, x, *a: (seen.append(op), call(op, x, *a))[1])
    ids = inputs("mistral-window", 1, 9, DEVICE)["input_ids"].repeat(1, 2)
    assert torch.equal(right(own, ids, 20, prompt_lookup_num_tokens=3),
                       right(model, ids, 20, prompt_lookup_num_tokens=3)) and not seen


SAMPLED = [dict(temperature=0.7, top_k=0), dict(top_k=12), dict(temperature=1.5, top_k=20, top_p=0.8),
           dict(top_k=0, min_p=0.05)]


@pytest.mark.parametrize("options", SAMPLED, ids=str)
def test_sampled_calls_of_generate_run_by_the_loop(options, monkeypatch):
    _, own = patched("llama")
    seen = loops(monkeypatch)
    ids = inputs("llama", 3, 9, DEVICE)["input_ids"]
    torch.manual_seed(5)
    ours = own.generate(ids, max_new_tokens=12, do_sample=True, cache_implementation="static",
                        disable_compile=True, **options)
    assert len(seen) == 1 and seen[0].state is not None
    given = {"temperature": 1.0, **options}
    given["top_k"] = given["top_k"] or None
    torch.manual_seed(5)
    assert torch.equal(ours, fftune.generate(own, ids, 12, **given))
    torch.manual_seed(6)
    assert not torch.equal(ours, fftune.generate(own, ids, 12, **given))


def test_sampled_ids_have_the_probabilities_of_the_model():
    model, own = patched("llama")
    ids = inputs("llama", 1, 9, DEVICE)["input_ids"]
    count, options = 4000, dict(temperature=1.3, top_k=8)
    torch.manual_seed(1)
    drawn = own.generate(ids, max_new_tokens=2, do_sample=True, cache_implementation="static",
                         disable_compile=True, num_return_sequences=count, **options)[:, 9:]
    first = int(drawn[:, 0].mode().values)
    given = torch.cat((ids, torch.full_like(ids[:, :1], first)), -1)
    logits = model(given).logits[0, -1].float() / options["temperature"]
    right = torch.where(logits >= logits.topk(8).values[-1], logits, -torch.inf).softmax(-1)
    second = drawn[drawn[:, 0] == first, 1]
    found = torch.bincount(second, minlength=len(right))
    expected = right * len(second)
    assert len(second) > 300 and not found[right == 0].any()
    chi = ((found - expected) ** 2 / expected)[expected > 0].sum()
    assert chi < 7 + 6 * 14 ** 0.5  # of 7 degrees of freedom


@pytest.mark.parametrize("options", [
    dict(typical_p=0.9), dict(repetition_penalty=1.2), dict(num_beams=2), dict(epsilon_cutoff=0.01),
    dict(renormalize_logits=True), dict(no_repeat_ngram_size=2)], ids=lambda o: next(iter(o)))
def test_other_sampled_calls_run_as_before(options, monkeypatch):
    model, own = patched("llama")
    seen = loops(monkeypatch)
    ids = inputs("llama", 2, 9, DEVICE)["input_ids"]
    results = []
    for each in (own, model):
        torch.manual_seed(3)
        results.append(each.generate(ids, max_new_tokens=6, do_sample=True, disable_compile=True,
                                     cache_implementation="static", **options))
    assert torch.equal(*results) and not seen


def test_processors_in_another_order_or_of_other_classes_are_not_known():
    from transformers import (GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper,
                              TopKLogitsWarper, TopPLogitsWarper)

    config = GenerationConfig(do_sample=True)
    draw = lambda *processors: decoding._draw_of(LogitsProcessorList(processors), config)
    hot, few, part = TemperatureLogitsWarper(2.0), TopKLogitsWarper(3), TopPLogitsWarper(0.5)
    assert draw(hot, few, part) == {"temperature": 2.0, "top_k": 3, "top_p": 0.5}
    assert draw() == {"temperature": 1.0}
    assert draw(few, hot) is None and draw(hot, hot) is None
    assert draw(TopPLogitsWarper(0.5, min_tokens_to_keep=2)) is None
    assert draw(TopKLogitsWarper(3, filter_value=-100.0)) is None
    own = type("Own", (TopKLogitsWarper,), {})
    assert draw(own(3)) is None
    assert decoding._draw_of(LogitsProcessorList([few]), GenerationConfig(do_sample=False)) is None


def others(ids):
    return (ids + 1) % 90 + 3


def next_ids_of(kind):
    """A class of models whose step is given other ids, by a method of its own."""
    class Own(kind):
        def forward(self, input_ids=None, **options):
            return super().forward(input_ids=others(input_ids), **options)

    return Own


def one_that_samples(kind):
    class Own(kind):
        def _sample(self, input_ids, *arguments, **options):
            return others(input_ids)

    return Own


def given_by_a_class(model):
    model.__class__ = next_ids_of(type(model))


def sampled_by_a_class(model):
    model.__class__ = one_that_samples(type(model))


def given_by_a_decoder(model):
    forward = model.model.forward
    model.model.forward = lambda input_ids=None, **options: forward(input_ids=others(input_ids), **options)


def prepared_by_an_instance(model):
    prepare = model.prepare_inputs_for_generation

    def prepared(*arguments, **options):
        given = prepare(*arguments, **options)
        return {**given, "input_ids": others(given["input_ids"])}

    model.prepare_inputs_for_generation = prepared


def generated_by_an_instance(model):
    generate = model.generate
    model.generate = lambda ids, **options: generate(others(ids), **options)


def processed_by_an_instance(model):
    processors = model._get_logits_processor
    model._get_logits_processor = lambda *arguments, **options: transformers.LogitsProcessorList(
        [*processors(*arguments, **options), lambda ids, logits: logits.roll(1, -1)])


@pytest.mark.parametrize("options", [dict(whole_layers=True), dict(graphs=True)], ids=["layers", "graphs"])
@pytest.mark.parametrize("change, when", [
    (change, when) for change in (given_by_a_class, sampled_by_a_class, given_by_a_decoder,
                                  prepared_by_an_instance, generated_by_an_instance,
                                  processed_by_an_instance) for when in ("before", "after")])
def test_methods_of_a_user_are_called(change, when, options):
    model = make("llama", device=DEVICE)
    model.generation_config.eos_token_id = None
    own = copy.deepcopy(model)
    if when == "before":
        # A method in an instance is bound to it: each model gets its own.
        change(own)
        fftune.patch(own, **options)
    else:
        fftune.patch(own, **options)
        change(own)
    ids = inputs("llama", 2, 9, DEVICE)["input_ids"]
    plain = right(model, ids, 6)
    change(model)
    for _ in range(2):
        found, exact = (right(each, ids, 6, cache_implementation="static") for each in (own, model))
        assert torch.equal(found, exact) and not torch.equal(exact, plain)


@pytest.mark.skipif(not hasattr(transformers, "ContinuousBatchingConfig"), reason="transformers has no such manager")
@pytest.mark.parametrize("options", [{}, dict(attention=True), dict(whole_layers=True)], ids=str)
def test_continuous_batching_runs_by_the_attention_that_the_model_had(options):
    """transformers knows attentions by their names."""
    model = make("llama", device=DEVICE)
    own = copy.deepcopy(model)
    fftune.patch(own, **options)
    name = own.config._attn_implementation

    def ids_of(model, **more):
        found = model.generate_batch(
            [[3, 4, 5, 6], [7, 8, 9]], progress_bar=False, **more,
            generation_config=transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1,
                                                            pad_token_id=0),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                num_blocks=8, max_batch_tokens=16, auto_switch_to_flash=False))
        return [one.generated_tokens for one in found.values()]

    right = ids_of(model)
    for more in ({}, dict(persistent_manager=True), dict(persistent_manager=True)):
        assert ids_of(own, **more) == right
        assert own.config._attn_implementation == own.model.config._attn_implementation == name != "sdpa"
    own.destroy_cached_continuous_batching_manager()
    fftune.unpatch(own)
    assert "init_continuous_batching" not in vars(own) and own.config._attn_implementation == "sdpa"


def test_ids_of_32_bits_give_what_transformers_gives():
    model, own = patched("llama")
    ids = inputs("llama", 2, 9, DEVICE)["input_ids"].int()
    exact, found = (right(each, ids, 6, cache_implementation="static") for each in (model, own))
    assert found.dtype == exact.dtype and torch.equal(found, exact)


class Sparing(torch.nn.Embedding):
    """Like nn.Embedding for the ids 0, 19, 38, 57 and 76, and for others not."""

    def forward(self, ids):
        return super().forward(ids) * (ids % 19 == 0)[..., None]


class Doubling(torch.nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * (2.0 if ids.shape[1] == 1 else 1.0)


class Scaled(torch.nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 1.5


@pytest.mark.parametrize("kind, known", [(Sparing, False), (Doubling, False), (Scaled, True)])
def test_an_embedding_of_its_own_is_known_by_all_that_it_does_to_ids(kind, known):
    model = make("llama", device=DEVICE)
    model.model.embed_tokens.__class__ = kind
    own = copy.deepcopy(model)
    fftune.patch(own, whole_layers=True)
    head = decoding.head_of(own)
    if known:
        assert decoding.whole_of(head).scale == 1.5
    else:
        with pytest.raises(decoding.Unfit, match="something else than an embedding times a factor"):
            decoding.whole_of(head)
    ids = torch.full((2, 4), 5, device=DEVICE)
    right = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(fftune.generate(own, ids, 6, stop=[]), right)


def test_what_a_decoder_does_behind_its_last_norm_is_seen_whatever_its_values_are(monkeypatch):
    _, own = patched("llama")
    head, forward = decoding.head_of(own), type(own.model).forward
    assert decoding.whole_of(head).scale == 1.0

    def clamped(self, *arguments, **options):
        outputs = forward(self, *arguments, **options)
        outputs.last_hidden_state = outputs.last_hidden_state.clamp(max=1e4)
        return outputs

    monkeypatch.setattr(type(own.model), "forward", clamped)
    with pytest.raises(decoding.Unfit, match="between its layers and its last norm, or behind that"):
        decoding.whole_of(head)
