"""patch(graphs=True): what a replayed step reads and gives. Without a GPU the steps run again, and write
into the same outputs each time, as a graph does."""
import copy
import functools
import threading
import types

import pytest
import torch
import transformers
from torch import nn

import fftune
from fftune import _versions
from fftune.patching.graphs import Steps
from models import inputs, make

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5,
                                reason="transformers is older than 5")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEW_TOKENS = 8


def generated(model, ids, graphs=True, **options):
    if graphs:
        options["compile_config"] = transformers.CompileConfig()
        options["compile_config"]._compile_all_devices = True
    return model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
                          **options)


def patched(name):
    """The model, a copy with graphs, their inputs, and what runs the steps of the copy."""
    model = make(name, device=DEVICE)
    own = copy.deepcopy(model)
    fftune.patch(own, graphs=True)
    runner = own.__dict__["get_compiled_call"].__self__
    return model, own, inputs(name, device=DEVICE)["input_ids"], runner


def replays(runner):
    return sum(step.graph is not None for step in runner._steps.values())


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral"])
def test_what_outlives_a_step_is_not_written_over(name):
    model, own, ids, runner = patched(name)
    for each in (model, own):
        each.set_attn_implementation("eager")  # which gives attentions
    wanted = dict(output_hidden_states=True, output_attentions=True, output_logits=True,
                  output_scores=True, return_dict_in_generate=True)
    right = generated(model, ids, False, cache_implementation="static", disable_compile=True, **wanted)
    ours = generated(own, ids, **wanted)
    assert replays(runner) == 1
    names = [name for name in right if name not in (*_versions.CACHE_NAMES, "sequences")]
    assert any("hidden_states" in name for name in names) and any("attentions" in n for n in names)
    assert torch.equal(ours.sequences, right.sequences)
    for name in names:
        mine, others = (torch.utils._pytree.tree_leaves(result[name]) for result in (ours, right))
        assert len(mine) == len(others)
        for one, other in zip(mine, others):  # scores have -inf
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), name


class Scaled(nn.Module):
    """As an adapter: what it adds depends on an attribute."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.scaling = layer, {"default": 1.0}

    def forward(self, x):
        return self.layer(x) * self.scaling["default"]


def moved(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().mul_(1.3)


def assigned(model):
    model.load_state_dict({name: tensor * 1.3 for name, tensor in model.state_dict().items()},
                          assign=True)


def adapted(model):
    mlp = model.model.layers[0].mlp
    mlp.down_proj = Scaled(mlp.down_proj)
    mlp.down_proj.scaling["default"] = 3.0


def hooked(model):
    model.model.layers[0].self_attn.register_forward_hook(
        lambda module, given, result: (result[0] * 3, *result[1:]))


def another_forward(model):
    layer = model.model.layers[0].self_attn
    inner = layer.forward
    layer.forward = lambda *given, **options: (lambda y: (y[0] * 3, *y[1:]))(inner(*given, **options))


def another_setting(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 4


@pytest.mark.parametrize("change", [moved, assigned, adapted, hooked, another_forward,
                                    another_setting])
def test_a_graph_is_of_the_weights_and_modules_of_today(change):
    model, own, ids, runner = patched("llama")
    before = generated(own, ids)
    assert torch.equal(before, generated(model, ids, False)) and replays(runner) == 1
    change(own), change(model)
    right = generated(model, ids, False)
    assert not torch.equal(before, right)
    for _ in range(2):
        assert torch.equal(generated(own, ids), right)


def test_an_adapter_that_is_set_to_another_scale():
    model, own, ids, _ = patched("llama")
    for each in (model, own):
        adapted(each)
    first = generated(own, ids)
    for each in (model, own):
        each.model.layers[0].mlp.down_proj.scaling["default"] = -4.0
    right = generated(model, ids, False)
    assert not torch.equal(first, right) and torch.equal(generated(own, ids), right)


def test_weights_that_change_between_two_steps():
    model, own, ids, _ = patched("llama")

    class Changing(transformers.StoppingCriteria):
        def __init__(self, model):
            self.model, self.calls = model, 0

        def __call__(self, *_, **__):
            self.calls += 1
            if self.calls == 4:
                moved(self.model)
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    right, ours = (generated(each, ids, graphs, stopping_criteria=[Changing(each)])
                   for each, graphs in ((model, False), (own, True)))
    assert torch.equal(ours, right)


@pytest.mark.parametrize("kind, settings", [
    ("GPTNeoConfig", dict(hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64,
                          window_size=4, attention_types=[[["global", "local"], 1]]))])
def test_models_that_cannot_be_compiled_whole_run_as_before(kind, settings):
    config = getattr(transformers, kind)(vocab_size=96, bos_token_id=1, eos_token_id=2, **settings)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
    ids = torch.randint(3, 96, (2, 7), device=DEVICE)
    right = generated(model, ids, False)
    report = fftune.patch(model, graphs=True)
    assert any("cannot be compiled whole" in words for _, words in report.left)
    assert model.generation_config.cache_implementation is None
    assert torch.equal(generated(model, ids), right)


class Small(nn.Module):
    """A step of generate() may do all of this: give an input back, read a setting and the cache."""

    def __init__(self):
        super().__init__()
        self.product = nn.Linear(4, 4, bias=False)
        self.config = types.SimpleNamespace(offset=1.0)

    @property
    def device(self):
        return self.product.weight.device

    def forward(self, x, scale=1.0, past_key_values=None):
        y = self.product(x) * scale + past_key_values.layers[0].keys.sum() + self.config.offset
        return {"x": x, "y": y}


class StaticLayer:  # by the name of transformers' own
    is_initialized = True

    def __init__(self, value):
        self.keys = self.values = torch.full((2, 4), value, device=DEVICE)
        self.cumulative_length = torch.zeros(1, dtype=torch.int64, device=DEVICE)


def cache_of(value=0.0):
    return types.SimpleNamespace(layers=[StaticLayer(value)])


@pytest.fixture
def steps():
    """A model's steps, called without gradients; what a call must give; and the number of replays."""
    model = Small().to(DEVICE)
    runner = Steps(model, None)

    def check(x, cache, mode=torch.no_grad, **options):
        with mode():
            ours, right = (each(x=x, past_key_values=cache, **options) for each in (runner, model))
        assert ours["x"] is x
        assert ours["y"].dtype == right["y"].dtype and torch.equal(ours["y"], right["y"])
        return ours

    return runner, check


def rows(count=2):
    return torch.randn(count, 4, device=DEVICE)


def test_a_step_is_captured_at_its_second_call_and_gives_its_own_input_back(steps):
    runner, check = steps
    cache, kept = cache_of(), []
    for call in range(4):
        x = rows()
        y = check(x, cache)["y"]
        kept.append((x, x.clone(), y, y.clone()))
        assert replays(runner) == (call > 0)
    for x, x_then, y, y_then in kept:  # none was written over
        assert torch.equal(x, x_then) and torch.equal(y, y_then)


def test_values_that_are_no_tensors_are_of_the_step(steps):
    runner, check = steps
    cache = cache_of()
    for scale in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0):
        check(rows(), cache, scale=scale)


def test_a_cache_that_follows_before_the_capture_is_that_of_the_graph(steps):
    runner, check = steps
    check(rows(), cache_of(1.0))
    cache = cache_of(2.0)
    check(rows(), cache)
    assert replays(runner) == 0
    check(rows(), cache)
    assert replays(runner) == 1
    check(rows(), cache_of(3.0))  # and one that follows later is copied into it


def test_a_cache_that_a_user_made_runs_as_before(steps):
    runner, check = steps
    cache = cache_of()
    cache._is_user_defined = True
    for _ in range(3):
        check(rows(), cache)
    assert not runner._steps


def test_a_configuration_that_changes_between_two_calls_of_generate(steps):
    runner, check = steps
    cache = cache_of()
    for offset in (1.0, 3.0):
        runner.model.config.offset = offset
        runner.look()
        for _ in range(3):
            check(rows(), cache)
    assert replays(runner) == 2


def test_a_model_that_generates_with_another_cache_keeps_it():
    model = make("llama", device=DEVICE)
    model.generation_config.cache_implementation = "quantized"
    report = fftune.patch(model, graphs=True)
    assert any("generates with the cache 'quantized'" in words for _, words in report.left)
    assert model.generation_config.cache_implementation == "quantized"


def test_unpatched_a_model_has_the_cache_that_it_had():
    model = make("llama", device=DEVICE)
    fftune.patch(model, graphs=True)
    assert model.generation_config.cache_implementation == "static"
    fftune.unpatch(model)
    assert model.generation_config.cache_implementation is None
    assert "get_compiled_call" not in vars(model)


def test_the_four_steps_that_were_used_last_are_kept(steps):
    runner, check = steps
    cache = cache_of()
    for count in (1, 2, 3, 4):
        for _ in range(2):
            check(rows(count), cache)
    assert replays(runner) == 4
    check(rows(1), cache)
    check(rows(5), cache)  # in the place of 2
    assert len(runner._steps) == 4 and replays(runner) == 3
    check(rows(1), cache)
    assert replays(runner) == 3
    check(rows(2), cache)  # anew
    assert replays(runner) == 2


def test_steps_with_gradients_run_as_before(steps):
    runner, check = steps
    for _ in range(3):
        assert check(rows(), cache_of(), mode=torch.enable_grad)["y"].requires_grad
    assert not runner._steps


@pytest.mark.parametrize("mode", [
    lambda: torch.autocast(DEVICE, torch.bfloat16), torch.inference_mode])
def test_a_mode_has_steps_of_its_own(steps, mode):
    runner, check = steps
    cache = cache_of()

    class Both:
        def __enter__(self):
            self.all = torch.no_grad(), mode()
            [each.__enter__() for each in self.all]

        def __exit__(self, *error):
            [each.__exit__(*error) for each in reversed(self.all)]

    for own in (torch.no_grad, Both, torch.no_grad, Both):
        for _ in range(3):
            check(rows(), cache, mode=own)
    assert replays(runner) == 2


def test_a_thread_has_steps_of_its_own(steps):
    runner, check = steps
    cache = cache_of()
    for _ in range(2):
        check(rows(), cache)
    thread = threading.Thread(target=check, args=(rows(), cache))
    thread.start()
    thread.join()
    assert len(runner._steps) == 2 and replays(runner) == 1


@pytest.mark.parametrize("options", [
    dict(prompt_lookup_num_tokens=3), "assistant", transformers.DynamicCache, transformers.StaticCache,
    transformers.GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=6, do_sample=False),
    "autocast"], ids=["prompt_lookup", "assistant", "dynamic", "static", "configuration", "autocast"])
def test_calls_that_cannot_have_a_static_cache_run_as_before(options):
    # Its keys keep the type of its norms under autocast, its values do not.
    model, assistant = make("qwen3" if options == "autocast" else "llama"), make("llama")
    for each in (model, assistant):
        each.generation_config.eos_token_id = None
    other = copy.deepcopy(model)
    fftune.patch(other, graphs=True)
    ids = inputs("llama", 1, 9)["input_ids"]

    def run(each):
        given = dict(max_new_tokens=6, do_sample=False, disable_compile=True)
        if options == "assistant":
            given["assistant_model"] = assistant
        elif isinstance(options, type):
            sizes = {} if options is transformers.DynamicCache else {"max_cache_len": 40}
            given["past_key_values"] = options(config=model.config, **sizes)
        elif isinstance(options, dict):
            given |= options
        elif options != "autocast":
            given = {"generation_config": options}
        with torch.autocast("cpu", torch.bfloat16, enabled=options == "autocast"):
            return each.generate(ids, **given)

    assert torch.equal(run(other), run(model))
    assert other.generation_config.cache_implementation == "static"
    fftune.unpatch(other)
    assert "generate" not in vars(other)


def test_a_prompt_of_an_adapter_stays_before_the_ids():
    peft = pytest.importorskip("peft")
    model = make("llama")
    model.generation_config.eos_token_id = None
    other = copy.deepcopy(model)
    fftune.patch(other, graphs=True, whole_layers=True)
    ids = inputs("llama", 2, 5)["input_ids"]
    found = []
    for each in (model, other):
        torch.manual_seed(2)
        adapted = peft.get_peft_model(each, peft.PromptTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
        found.append(adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5,
                                      do_sample=False))
    assert torch.equal(*found)


@pytest.mark.parametrize("name, patched, call", [
    ("llama", {"graphs": True}, {}), ("gemma2", {"graphs": True}, {}), ("mistral-window", {"graphs": True}, {}),
    ("llama", {"whole_layers": True}, {"prompt_lookup_num_tokens": 2}),
    ("llama", {"whole_layers": True, "graphs": True}, {})])
def test_another_call_goes_on_from_the_cache_that_generate_returned(name, patched, call):
    """Also after calls in between, whose steps a graph writes into the same memory."""
    model = make(name, device=DEVICE)
    model.generation_config.eos_token_id = None
    own = copy.deepcopy(model)
    fftune.patch(own, **patched)
    ids = inputs(name, 1, device=DEVICE)["input_ids"]
    results = []
    for one in (model, own):
        run = functools.partial(one.generate, do_sample=False, return_dict_in_generate=True, **call)
        first = run(ids, max_new_tokens=16)  # beyond the window
        run(ids.flip(-1), max_new_tokens=16), run(ids + 1, max_new_tokens=16)
        cache = _versions.cache_of(first)
        assert int(cache.get_seq_length()) == 24
        results.append(run(first.sequences, max_new_tokens=9, past_key_values=cache).sequences)
    assert torch.equal(*results)


def test_a_static_cache_that_was_asked_for_is_returned():
    own = make("llama", device=DEVICE)
    fftune.patch(own, graphs=True)
    ids = inputs("llama", 1, device=DEVICE)["input_ids"]
    outputs = own.generate(ids, max_new_tokens=4, return_dict_in_generate=True, cache_implementation="static")
    assert type(_versions.cache_of(outputs)).__name__ == "StaticCache"
