"""Linear layers with weights of 4 and 8 bits inside a stand-in for vLLM."""
import importlib
import logging

import pytest
import torch
from torch import nn

from quantised_layers import packed

KERNELS = "vllm.model_executor.kernels.linear.mixed_precision"
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


def module(name):
    return importlib.import_module(name)


@pytest.fixture
def linears(vllm, monkeypatch):
    monkeypatch.setenv("FFTUNE_VLLM", "linears")
    module("fftune.vllm").register()
    return module("fftune.vllm.linears")


def parameter(tensor, **dims):
    own = nn.Parameter(tensor, requires_grad=False)
    for name, value in dims.items():
        setattr(own, name, value)
    return own


def packed_bytes(codes, dim):
    words = codes.movedim(dim, -1).to(torch.uint8).contiguous().view(torch.int32)
    return words.movedim(-1, dim).contiguous()


def a_layer(kernel="machete", layout="gptq", n=64, k=128, group=32, zeros=False, act_order=False,
            dtype=torch.bfloat16, bits=4):
    """(kernel, layer) with random codes, as GPTQ or compressed-tensors are loaded."""
    kinds = module(f"{KERNELS}.MPLinearKernel")
    q, s = torch.randint(0, 1 << bits, (k, n)), torch.rand(k // group if group > 0 else 1, n) * 0.1 + 0.01
    z = torch.randint(0, 16, s.shape)
    pack = packed if bits == 4 else packed_bytes
    layer = nn.Module()
    if layout == "gptq":
        layer.w = parameter(pack(q, 0), input_dim=0, output_dim=1)
        layer.s = parameter(s.to(dtype), input_dim=0, output_dim=1)
        layer.z = parameter(packed(z, 1), input_dim=0, output_dim=1)
    else:
        layer.w = parameter(pack(q.t().contiguous(), 1), input_dim=1, output_dim=0)
        layer.s = parameter(s.t().contiguous().to(dtype), output_dim=0)
        layer.z = parameter(packed(z.t().contiguous(), 0), input_dim=1, output_dim=0)
    index = torch.arange(k) // (group if group > 0 else k)
    layer.i = parameter((index[torch.randperm(k)] if act_order else index).int())
    config = kinds.MPLinearLayerConfig((k, n), (k, n), kinds.ScalarType(bits, 0 if zeros else 1 << bits - 1), dtype,
                                       group, zeros, act_order)
    cls = getattr(module(f"{KERNELS}.{kernel}"), f"{kernel.capitalize()}LinearKernel")
    return cls(config, "w", "s", "z", "i"), layer


def error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize("kernel", ("machete", "marlin"))
@pytest.mark.parametrize("options", (
    {}, {"layout": "compressed"}, {"zeros": True}, {"layout": "compressed", "zeros": True},
    {"group": -1}, {"act_order": True}, {"bits": 8}, {"bits": 8, "layout": "compressed", "group": -1}), ids=str)
def test_calls_run_by_linear_and_the_weight_is_in_memory_once(linears, caplog, kernel, options):
    kernel, layer = a_layer(kernel, **options)
    with caplog.at_level(logging.INFO):
        kernel.process_weights_after_loading(layer)
    assert "run by linear, with packed weights" in caplog.text
    assert not any(p.numel() for p in layer.parameters())
    bias = torch.randn(64, dtype=torch.bfloat16)
    for rows in (0, 1, 64, 300):
        kernel.calls = 0
        x = torch.randn(rows, 128, dtype=torch.bfloat16)
        y = kernel.apply_weights(layer, x, bias)
        assert kernel.calls == 0 and y.shape == (rows, 64)
        if rows:
            assert error(y, x.float() @ kernel.dense.float() + bias.float()) < 0.01


def test_many_tokens_of_requests_share_a_plan(linears, monkeypatch):
    from vllm.forward_context import set_forward_context

    plans, running = module("fftune.vllm.plans"), module("fftune._run")
    for name, value in (("EXACT", 16), ("most_rows", lambda: 50), ("COMPILES_BESIDE", False)):
        monkeypatch.setattr(plans, name, value)
    running.forget_plans()
    kernel, layer = a_layer()
    kernel.process_weights_after_loading(layer)

    def kinds_of(rows):
        running._plans.clear()
        x = torch.randn(rows, 128, dtype=torch.bfloat16)
        assert error(kernel.apply_weights(layer, x), x.float() @ kernel.dense.float()) < 0.01
        return {type(plan) for plan in running._plans.values()}

    try:
        assert kinds_of(40) == {running.Plan}, "of vLLM's profile run"
        with set_forward_context({}):
            assert [kinds_of(rows) for rows in (40, 16, 41, 51)] == [
                {running.PlanAt}, {running.Plan}, {running.PlanAt}, {running.Plan}]
    finally:
        running.forget_plans()


@pytest.mark.parametrize("given", ["linears", "1"])
def test_batch_invariance_leaves_them_to_vllm(vllm, monkeypatch, caplog, given):
    monkeypatch.setenv("FFTUNE_VLLM", given)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with caplog.at_level(logging.INFO):
        module("fftune.vllm").register()
    assert given == "1" or "linears stay vLLM's: VLLM_BATCH_INVARIANT is set, and kernels of weights with codes" in caplog.text
    cls = module(f"{KERNELS}.machete").MacheteLinearKernel
    assert not hasattr(cls.process_weights_after_loading, "_fftune_original")


def test_parameters_of_0_33(linears):
    """There is no order of columns, and no word for it."""
    from types import SimpleNamespace

    kernel, layer = a_layer()
    own, order = linears.packed_of(kernel, layer)
    config = {name: value for name, value in vars(kernel.config).items() if name != "has_g_idx"}
    newer = SimpleNamespace(config=SimpleNamespace(**config),
                            _get_weight_params=lambda layer: kernel._get_weight_params(layer)[:3])
    packed, newer_order = linears.packed_of(newer, layer)
    assert torch.equal(packed.w, own.w) and order is None and newer_order is None


def test_more_dimensions_and_traces(linears):
    kernel, layer = a_layer()
    kernel.process_weights_after_loading(layer)
    x = torch.randn(2, 3, 128, dtype=torch.bfloat16)
    right = x @ kernel.dense
    assert error(kernel.apply_weights(layer, x), right) < 0.01

    class Model(nn.Module):
        def forward(self, x):
            return kernel.apply_weights(layer, x) * 2

    compiled = torch.compile(Model(), fullgraph=True, backend="eager", dynamic=True)
    kernel.calls = 0
    for rows in (2, 40, 70):  # one trace for all
        rows = torch.randn(rows, 128, dtype=torch.bfloat16)
        assert error(compiled(rows), rows @ kernel.dense * 2) < 0.01
    assert kernel.calls == 0


@pytest.mark.parametrize("options, words", (
    ({"bits": 8, "zeros": True}, "weights of uint8 with zero points"), ({"dtype": torch.float32}, "activations of torch.float32"),
    ({"group": 16}, "groups of 16 for 128 inputs")), ids=str)
def test_others_stay(linears, caplog, options, words):
    kernel, layer = a_layer(**options)
    with caplog.at_level(logging.INFO):
        kernel.process_weights_after_loading(layer)
    assert "apply_weights" not in vars(kernel) and any(p.numel() for p in layer.parameters())
    assert f"linear layers by MacheteLinearKernel stay vLLM's: {words}" in caplog.text


def test_a_layer_that_computes_something_else_stays(linears, caplog, monkeypatch):
    kernel, layer = a_layer()
    made = linears._product_of
    monkeypatch.setattr(linears, "_product_of", lambda *given: made(*given)._replace(
        run=lambda *call: made(*given).run(*call) * 1.5))
    with caplog.at_level(logging.INFO):
        kernel.process_weights_after_loading(layer)
    assert "apply_weights" not in vars(kernel) and "results differ from vLLM's by 0.5" in caplog.text


def test_layers_of_one_kind_share_compiled_code(linears):
    texts = []

    def backend(graph, inputs):
        texts.append(graph.code)
        return graph

    for options in ({}, {}, {"zeros": True}):
        kernel, layer = a_layer(**options)
        kernel.process_weights_after_loading(layer)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.proj, self.kernel = layer, kernel

            def forward(self, x):
                return self.kernel.apply_weights(self.proj, x) * 2

        x = torch.randn(3, 128, dtype=torch.bfloat16)
        compiled = torch.compile(Model(), fullgraph=True, backend=backend)
        assert error(compiled(x), x @ kernel.dense * 2) < 0.01
    assert texts[0] == texts[1] != texts[2]


def test_compiled_code_has_a_key_of_the_layers_that_run_here(linears):
    from vllm import envs

    own = envs.compile_factors()
    keys = []
    for options in ({}, {}, {"group": 16}, {"zeros": True}):  # groups of 16 stay vLLM's
        kernel, layer = a_layer(**options)
        kernel.process_weights_after_loading(layer)
        keys.append(str(envs.compile_factors()))
        assert own.items() < envs.compile_factors().items()
    assert keys[0] != keys[1] == keys[2] != keys[3]
    layer._parameters.update(a_layer(zeros=True)[1]._parameters)
    kernel.process_weights_after_loading(layer)
    assert keys[-1] == str(envs.compile_factors()), "loaded again"


def load_as_vllm_does(layer, process, fresh):
    """Its layerwise reload: the layer has the tensors of a checkpoint while they are processed, and then its own again,
    into which vLLM copies parameters, and no buffers that are not persistent."""
    own = dict(layer._parameters), dict(layer._buffers)
    layer._parameters, layer._buffers = dict(fresh._parameters), {}
    process(layer)
    for name, parameter in own[0].items():
        parameter.data.copy_(layer._parameters[name].data)
    layer._parameters, layer._buffers = own


@pytest.mark.parametrize("options", ({}, {"zeros": True}, {"act_order": True}, {"bits": 8}), ids=str)
def test_weights_that_are_loaded_again_go_where_graphs_read_them(linears, options):
    kernel, layer = a_layer(**options)
    kernel.process_weights_after_loading(layer)
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    places = {name: tensor.data_ptr() for name, tensor in layer.named_buffers()}
    before, run = kernel.dense, kernel.apply_weights
    load_as_vllm_does(layer, kernel.process_weights_after_loading, a_layer(**options)[1])
    assert not torch.equal(kernel.dense, before) and kernel.apply_weights is run
    assert error(run(layer, x), x @ kernel.dense) < 0.01
    assert {name: tensor.data_ptr() for name, tensor in layer.named_buffers()} == places
    if "act_order" not in options:
        assert error(layer._fftune_packed.dense().T, kernel.dense) < 0.01
    assert not any(p.numel() for p in layer.parameters())
    with pytest.raises(RuntimeError, match="have another format than those that run"):
        linears.load_again(layer, lambda: None, lambda: linears.packed_of(*a_layer(group=64)))


def test_a_layer_that_stayed_vllms_stays_so_when_it_is_loaded_again(linears, monkeypatch):
    """Graphs that were captured read vLLM's weight."""
    kernel, layer = a_layer()
    made = linears._product_of
    monkeypatch.setattr(linears, "_product_of", lambda *given: made(*given)._replace(
        run=lambda *call: made(*given).run(*call) * 1.5))
    kernel.process_weights_after_loading(layer)
    monkeypatch.setattr(linears, "_product_of", made)
    load_as_vllm_does(layer, kernel.process_weights_after_loading, a_layer()[1])
    assert "apply_weights" not in vars(kernel) and any(p.numel() for p in layer.parameters())


def test_weights_that_are_offloaded_stay(linears, monkeypatch, caplog):
    """Packed ones would be on the device."""
    from types import SimpleNamespace

    products = module("fftune.vllm.products")
    offload = SimpleNamespace(offload_backend="auto", uva=SimpleNamespace(cpu_offload_gb=4))
    monkeypatch.setattr(products, "current", lambda: SimpleNamespace(offload_config=offload))
    kernel, layer = a_layer()
    with caplog.at_level(logging.INFO):
        kernel.process_weights_after_loading(layer)
    assert "stay vLLM's: weights that are offloaded" in caplog.text and "apply_weights" not in vars(kernel)


def test_an_unknown_key_of_compiled_code_leaves_layers_to_vllm(linears, monkeypatch, caplog):
    from vllm import envs

    monkeypatch.delattr(envs, "compile_factors")
    kernel, layer = a_layer()
    with caplog.at_level(logging.INFO):
        kernel.process_weights_after_loading(layer)
    assert "apply_weights" not in vars(kernel) and "vLLM's key of compiled code is not known" in caplog.text


@pytest.mark.parametrize("given, formats", [
    ("1", [4, 8]), ("int4-linears", [4]), ("experts,layers,linears", [4, 8]), ("int4-linears,linears", [4, 8]),
    ("experts,layers", [])])
def test_formats_that_are_asked_for(vllm, monkeypatch, caplog, given, formats):
    monkeypatch.setenv("FFTUNE_VLLM", given)
    module("fftune.vllm").register()
    found = []
    with caplog.at_level(logging.INFO):
        for bits in (4, 8):
            kernel, layer = a_layer(bits=bits)
            kernel.process_weights_after_loading(layer)
            found += [bits] * ("apply_weights" in vars(kernel))
    assert found == formats
    assert ("FFTUNE_VLLM=experts,layers,linears turns on" in caplog.text) == (formats == [4])


@pytest.mark.parametrize("device", [CUDA])
def test_on_a_gpu_in_a_captured_graph(linears, device):
    kernel, layer = a_layer(n=256, k=512, group=128, zeros=True, act_order=True)
    for name, own in list(layer._parameters.items()):
        dims = {d: getattr(own, d) for d in ("input_dim", "output_dim") if hasattr(own, d)}
        layer._parameters[name] = parameter(own.data.to(device), **dims)
    with torch.device(device):
        kernel.process_weights_after_loading(layer)
    x = torch.randn(4, 512, dtype=torch.bfloat16, device=device)
    kernel.apply_weights(layer, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.apply_weights(layer, x)
    x.normal_()
    graph.replay()
    assert error(y, x @ kernel.dense) < 0.01


def test_the_test_of_a_layer_draws_no_random_numbers_of_the_engine(linears):
    from fftune import ops
    from fftune.vllm import products

    w = torch.randn(48, 64)
    product = products.Product("a kind of a test", lambda x, w, bias: ops.linear(x, w), (w,), 48, 64)
    before = torch.get_rng_state()
    products.serve(nn.Module(), product, lambda x: x @ w.T + 0 * torch.rand(()), torch.float32, 64)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def timed(linears, monkeypatch, tmp_path):
    """Layers are timed: by their number of outputs, and of tokens, vLLM's milliseconds and fftune's."""
    products, faster = module("fftune.vllm.products"), module("fftune.vllm.faster")
    monkeypatch.setenv("FFTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(products, "_is_measured", lambda product: True)
    monkeypatch.setattr(faster, "BUDGET", 1e9)
    times, asked, ran = {}, [], []

    def compete(candidate):
        n = candidate.product.n
        own, run = candidate.own, candidate.product.run
        compete.original(candidate._replace(
            own=lambda x: (ran.append((0, n, len(x))), own(x))[1],
            product=candidate.product._replace(run=lambda x, *given: (ran.append((1, n, len(x))), run(x, *given))[1])))

    def milliseconds(own, mine, among=None, captured=True):
        found = []
        for side, run in enumerate((own, mine)):
            ran.clear()
            run()
            found.append(sum(times.get((n, rows), (2.0, 1.0))[side] for _, n, rows in ran))
        asked.append([n for side, n, _ in ran])
        return found

    compete.original = products._compete
    monkeypatch.setattr(products, "_compete", compete)
    monkeypatch.setattr(faster, "milliseconds", milliseconds)
    return times, asked


def loaded(*outputs):
    """Layers of these numbers of outputs, as a model loads them."""
    made = [a_layer(n=n) for n in outputs]
    for kernel, layer in made:
        kernel.process_weights_after_loading(layer)
    return made


def by_fftune(made):
    return ["apply_weights" in vars(kernel) and not any(p.numel() for p in layer.parameters()) for kernel, layer in made]


def test_layers_of_a_step_are_timed_together(timed, caplog):
    """One of them is slower for some tokens, and the step is not."""
    times, asked = timed
    times[64, 256] = 0.8, 1.0
    with caplog.at_level(logging.INFO):
        made = loaded(64, 96)
        assert by_fftune(made) == [False, False] and not asked, "they wait for the others of their layer"
        x = torch.randn(3, 128, dtype=torch.bfloat16)
        assert error(made[0][0].apply_weights(made[0][1], x), x @ made[0][0].dense) < 0.01 and made[0][0].calls
        made += loaded(64, 96)
    assert by_fftune(made) == [True] * 4 and set(map(tuple, asked)) == {(64, 96)}
    assert "stay vLLM's" not in caplog.text
    for kernel, layer in made:
        assert error(kernel.apply_weights(layer, x), x @ kernel.dense) < 0.01
    assert by_fftune(loaded(48)) == [True] and asked[-1] == [48], "a kind that comes later is timed by itself"


def test_a_kind_that_makes_the_step_slower_stays(timed, caplog):
    times, asked = timed
    times[64, 256] = 0.8, 4.0
    with caplog.at_level(logging.INFO):
        made = loaded(64, 96, 64, 96)
    assert by_fftune(made) == [False, True, False, True]
    assert "vLLM's kernel is faster; its time divided by fftune's, by tokens: 1: 2.00, 16: 2.00, 64: 2.00, 256: 0.20" in caplog.text
    assert [layer._buffers for _, layer in made[::2]] == [{}, {}]


@pytest.mark.parametrize("by", ["the key of compiled code", "the first call"])
def test_layers_of_a_model_of_one_layer_do_not_wait_forever(timed, by):
    from vllm import envs

    made = loaded(64, 96)
    envs.compile_factors() if by == "the key of compiled code" else module("fftune.vllm.layers")._examine(nn.Module(), False)
    assert by_fftune(made) == [True, True]


def test_a_measurement_that_fails_leaves_the_layers_to_vllm(timed, monkeypatch, caplog):
    def fails(*given, **named):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module("fftune.vllm.faster"), "milliseconds", fails)
    with caplog.at_level(logging.INFO):
        made = loaded(64, 96, 64)
    assert by_fftune(made) == [False] * 3 and "stay vLLM's: RuntimeError: out of memory" in caplog.text
