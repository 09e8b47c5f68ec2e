"""The entry point of vLLM's plugin: when it applies, and that it never stops an engine."""
import importlib
import importlib.util
import logging
import sys
from pathlib import Path

import pytest

ORACLES = "vllm.model_executor.layers.fused_moe.oracle"
MODELS = "vllm.model_executor.models"


def register():
    importlib.import_module("fftune.vllm").register()


def module(name):
    return importlib.import_module(name)


def is_patched(part: str) -> bool:
    if part == "experts":
        return all(hasattr(module(f"{ORACLES}.{name}").backend_to_kernel_cls, "_fftune_original")
                   for name in ("unquantized", "fp8"))
    classes = {"llama": "LlamaModel", "mistral": "MistralModel", "qwen2": "Qwen2Model",
               "qwen3": "Qwen3Model", "qwen3_moe": "Qwen3MoeModel"}
    return all(hasattr(getattr(module(f"{MODELS}.{name}"), cls).__call__, "_fftune_original")
               for name, cls in classes.items())


def test_package_declares_it():
    tomllib = pytest.importorskip("tomllib")
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]
    # A logits processor would make vLLM 0.24 choose its older runner.
    assert points == {"vllm.general_plugins": {"fftune": "fftune.vllm:register"}}
    home, name = points["vllm.general_plugins"]["fftune"].split(":")
    assert callable(getattr(module(home), name))


@pytest.mark.parametrize("version", ["0.24.0", "0.24.1rc1+cu130", "0.33.0", "0.34.0", "1.24.0", "dev"])
def test_versions_are_judged_by_their_interfaces(vllm, monkeypatch, caplog, version):
    monkeypatch.setenv("STAND_IN_VERSION", version)
    with caplog.at_level(logging.INFO):
        register()
    assert is_patched("experts") and is_patched("layers") and not caplog.records


def test_other_interfaces(vllm, monkeypatch, caplog):
    """A part whose functions are known is on, another one is off, with a line that says why."""
    register()
    llama = module(f"{MODELS}.llama")
    llama.LlamaModel.__call__ = llama.LlamaModel.__call__._fftune_original
    monkeypatch.setattr(llama.LlamaModel, "forward", lambda self, input_ids, inputs_embeds, positions: None)
    with caplog.at_level(logging.INFO):
        register()
    assert not hasattr(llama.LlamaModel.__call__, "_fftune_original") and is_patched("experts")
    line, = (record.getMessage() for record in caplog.records)
    assert line == ("fftune: vllm.model_executor.models.llama stays vLLM's: LlamaModel.forward of this vLLM takes "
                    "(self, input_ids, inputs_embeds, positions), and not (self, input_ids, positions, "
                    "intermediate_tensors, inputs_embeds)")


def test_experts_with_other_arguments(vllm, monkeypatch, caplog):
    register()
    triton = module("vllm.model_executor.layers.fused_moe.experts.triton_moe").TritonExperts
    apply = triton.apply
    monkeypatch.setattr(triton, "apply", lambda self, output, more: apply(self, output))
    oracle = module(f"{ORACLES}.unquantized")
    with caplog.at_level(logging.INFO):
        found = oracle.backend_to_kernel_cls("TRITON")
    assert triton in (found if isinstance(found, list) else [found])
    assert "experts stay vLLM's: TritonExperts.apply of this vLLM takes (self, output, more)" in caplog.text


def test_nothing_is_imported_or_initialised(run_python):
    path = str(Path(__file__).parent / "stand_ins")
    assert run_python(f"""
        import sys
        sys.path.insert(0, {path!r})
        from fftune.vllm import register
        register()
        import torch
        print(sorted(name for name in sys.modules if name.startswith("vllm.model_executor")),
              torch.cuda.is_initialized(), "fftune.ops" in sys.modules)
    """) == "[] False False"


def test_without_vllm(run_python):
    program = "from fftune.vllm import register; register(); register(); print('alive')"
    assert run_python(program) == "alive"


def test_modules_that_are_imported_already(vllm):
    oracle, llama = module(f"{ORACLES}.fp8"), module(f"{MODELS}.llama")
    register()
    assert hasattr(oracle.backend_to_kernel_cls, "_fftune_original")
    assert hasattr(llama.LlamaModel.__call__, "_fftune_original")
    assert is_patched("experts") and is_patched("layers")


def test_twice(vllm):
    oracle = module(f"{ORACLES}.fp8")
    original = oracle.backend_to_kernel_cls
    register()
    register()
    llama = module(f"{MODELS}.llama")
    register()
    assert oracle.backend_to_kernel_cls._fftune_original is original
    assert not hasattr(llama.LlamaModel.__call__._fftune_original, "_fftune_original")
    assert len([f for f in sys.meta_path if type(f).__module__ == "fftune.vllm.imports"]) == 1


def test_a_search_for_a_module_is_no_import(vllm):
    register()
    # As vLLM does to find the source of a model.
    assert importlib.util.find_spec(f"{MODELS}.llama").origin.endswith("llama.py")
    assert importlib.util.find_spec(f"{MODELS}.llama") is not None
    assert is_patched("layers")


@pytest.mark.parametrize("given, parts", [
    ("", "experts layers"), ("1", "experts layers"), ("experts", "experts"), ("layers", "layers"),
    (" layers , experts ", "experts layers"), ("0", ""), ("norms", ""), ("experts,0", ""),
    ("prompts, layers", "layers"), ("prompts", ""), ("layers,ranks", "layers"), ("experts,ranks", "")])
def test_parts(vllm, monkeypatch, caplog, given, parts):
    monkeypatch.setenv("FFTUNE_VLLM", given)
    with caplog.at_level(logging.INFO):
        register()
    assert [part for part in ("experts", "layers") if is_patched(part)] == parts.split()
    assert bool(caplog.records) == (not parts)
    for part, alone in (("prompts", "prompts"), ("ranks", "experts,ranks")):
        assert (f"{part} are of layers, so name both" in caplog.text) == (given == alone)


@pytest.mark.parametrize("capability, applies", [
    ((8, 0), True), ((8, 9), True), ((9, 0), True), ((10, 0), True), ((12, 1), True), ((7, 5), False),
    (None, False)])
def test_devices(vllm, monkeypatch, caplog, capability, applies):
    platforms = module("vllm.platforms")
    monkeypatch.setattr(platforms.NvmlCudaPlatform, "capability", capability)
    with caplog.at_level(logging.INFO):
        register()
    assert is_patched("experts") == is_patched("layers") == applies
    assert len(caplog.records) == (not applies)


def test_other_platforms(vllm, monkeypatch, caplog):
    platforms = module("vllm.platforms")
    monkeypatch.setattr(platforms.NvmlCudaPlatform, "is_cuda", lambda self: False)
    with caplog.at_level(logging.INFO):
        register()
    assert not is_patched("experts") and "no CUDA device" in caplog.text


def test_without_nvml(vllm, monkeypatch, caplog):
    """Nobody asks for the capability: that would initialise CUDA."""
    platforms = module("vllm.platforms")

    class NonNvmlCudaPlatform(platforms.NvmlCudaPlatform):
        def get_device_capability(self):
            raise AssertionError

    monkeypatch.setattr(platforms, "current_platform", NonNvmlCudaPlatform())
    with caplog.at_level(logging.INFO):
        register()
    assert not is_patched("experts") and "NVML is not there" in caplog.text


@pytest.mark.parametrize("name", ["VLLM_BATCH_INVARIANT", "FFTUNE_BATCH_INVARIANT"])
def test_batch_invariance_without_prompts(vllm, monkeypatch, caplog, name):
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("FFTUNE_VLLM", "experts,layers")
    with caplog.at_level(logging.INFO):
        register()
    assert is_patched("experts") and not is_patched("layers")
    assert f"layers stay vLLM's: {name} is set" in caplog.text


@pytest.mark.parametrize("name", ["VLLM_BATCH_INVARIANT", "FFTUNE_BATCH_INVARIANT"])
@pytest.mark.parametrize("given", ["", "1", "experts,layers,prompts"])
def test_batch_invariance_with_prompts(vllm, monkeypatch, caplog, name, given):
    """All batches run by the ops then."""
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("FFTUNE_VLLM", given)
    with caplog.at_level(logging.INFO):
        register()
    assert is_patched("experts") and is_patched("layers") and not caplog.records
    assert module("fftune.vllm.plugin")._decide().parts == ("experts", "layers", "prompts")


def test_errors_inside(vllm, monkeypatch, caplog):
    platforms = module("vllm.platforms")

    def fails(self):
        raise RuntimeError("no\ndriver")

    monkeypatch.setattr(platforms.NvmlCudaPlatform, "get_device_capability", fails)
    with caplog.at_level(logging.INFO):
        register()
    assert not is_patched("experts")
    assert "nothing is replaced: RuntimeError: no driver" in caplog.text


def test_errors_of_the_logger(vllm, monkeypatch):
    def fails(name):
        raise RuntimeError

    monkeypatch.setenv("FFTUNE_VLLM", "norms")
    monkeypatch.setattr(module("vllm.logger"), "init_logger", fails)
    register()


def test_modules_without_what_is_replaced(vllm, monkeypatch, caplog):
    """Their import does not fail."""
    register()
    monkeypatch.delitem(module("fftune.vllm.plugin").MODELS, f"{MODELS}.llama")
    with caplog.at_level(logging.INFO):
        llama = module(f"{MODELS}.llama")
    assert not hasattr(llama.LlamaModel.__call__, "_fftune_original")
    assert f"{MODELS}.llama stays vLLM's: KeyError" in caplog.text
