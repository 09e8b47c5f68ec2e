"""docs/examples/run_model.cpp beside transformers: ids and logits of tiny models of every kind."""
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from fftune._library import library_path
from models import make
from quantised_layers import with_expert_modules
from test_ops import error

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "run_model.cpp"
KINDS = ["llama", "llama3", "linear", "mistral-window", "qwen2", "qwen3", "gemma", "gemma2",
         "gemma3", "phi", "phi3", "gpt2", "mixtral", "qwen3-moe"]
PROMPT = [3, 17, 5, 60, 31, 8, 44]
TOKENS = 70  # more than a window of 64


@pytest.fixture(scope="session")
def run_model(tmp_path_factory):
    """The program, compiled as its documentation says; $FFTUNE_RUN_MODEL is one that is."""
    if given := os.environ.get("FFTUNE_RUN_MODEL"):
        return given
    compiler = shutil.which("g++")
    if compiler is None or not Path("/usr/include/nlohmann/json.hpp").exists():
        pytest.skip("there is no g++ with nlohmann/json here")
    library = library_path()
    headers = Path(os.environ.get("FFTUNE_INCLUDE", library.parents[1] / "include"))
    program = tmp_path_factory.mktemp("run-model") / "run-model"
    subprocess.run([compiler, "-std=c++20", "-O1", f"-I{headers}", str(EXAMPLE), "-o", str(program),
                    str(library), f"-Wl,-rpath,{library.parent}", "-ldl"], check=True)
    return str(program)


def run(program, folder, *options, prompt=PROMPT, tokens=TOKENS, vocabulary=96):
    """(ids, logits) that the program gives."""
    done = subprocess.run(
        [program, str(folder), "--prompt-ids", ",".join(map(str, prompt)), "--tokens", str(tokens),
         "--logits", str(folder / "logits"), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ids = [int(word) for word in done.stdout.split("\n")[0].split()]
    logits = torch.frombuffer(bytearray((folder / "logits").read_bytes()), dtype=torch.float32)
    return ids, logits.view(len(ids), vocabulary)


@torch.no_grad()
def logits_of(model, ids, prompt=PROMPT):
    """Those that transformers' eager attention gives for each of the ids behind the prompt."""
    model.config._attn_implementation = "eager"
    given = torch.tensor([prompt + ids[:-1]], device=model.device)
    return model(given, use_cache=False).logits[0, len(prompt) - 1:].float().cpu()


@pytest.mark.parametrize("name", KINDS)
def test_ids_and_logits(name, run_model, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path)
    ids, logits = run(run_model, tmp_path)
    right = logits_of(model, ids)
    assert error(logits, right) < 1e-5
    assert ids == right.argmax(-1).tolist()


@pytest.mark.parametrize("name", KINDS)
def test_ids_without_logits(name, run_model, tmp_path):
    """They are chosen on the device, and all steps of models whose layers are alike run there."""
    model = make(name)
    model.save_pretrained(tmp_path)
    ids, _ = run(run_model, tmp_path)
    done = subprocess.run([run_model, str(tmp_path), "--prompt-ids", ",".join(map(str, PROMPT)),
                           "--tokens", str(TOKENS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split("\n")[0].split()] == ids


def test_benchmark(run_model, tmp_path):
    make("llama").save_pretrained(tmp_path)
    call = [run_model, str(tmp_path), "--benchmark", "--prompt-tokens", "9", "--tokens", "20"]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "time to the first of 20 tokens, prompt of 9:" in done.stdout
    assert "tokens/s" in done.stdout and "% of it" in done.stdout
    share = float(done.stdout.split("): ")[1].split("%")[0])
    assert 0 < share < 100
    refused = subprocess.run([*call, "--prompt-ids", "1"], capture_output=True, text=True)
    assert refused.returncode == 1 and "usage" in refused.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_logits_on_a_gpu(name, dtype, run_model, tmp_path):
    """No further from those of float32 than transformers' in the same type are, about."""
    model = make(name, dtype, "cuda")
    model.save_pretrained(tmp_path)
    ids, logits = run(run_model, tmp_path, "--device", "0")
    narrow, right = logits_of(model, ids), logits_of(model.float(), ids)
    # A token in the middle: rounding may send another one to other experts.
    ours, theirs = (torch.tensor([error(*rows) for rows in zip(given, right)]).median()
                    for given in (logits, narrow))
    assert ours < 2 * theirs


def changed(config):
    """Configurations as older versions of transformers wrote them."""
    config = dict(config)
    kinds = config.pop("layer_types", None)
    rope = config.pop("rope_parameters", {})
    if kinds:  # of each type
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        config["sliding_window_pattern"] = 3
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    return config


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_older_configurations(name, run_model, tmp_path):
    import json

    model = make(name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(changed(config)))
    ids, logits = run(run_model, tmp_path)
    assert error(logits, logits_of(model, ids)) < 1e-5


CLASSES = {"LlamaConfig": 4, "MistralConfig": 8, "Qwen2Config": 32, "Qwen3Config": 32, "GemmaConfig": 16,
           "Gemma2Config": 4, "Gemma3TextConfig": 4, "PhiConfig": 4, "Phi3Config": 4, "GPT2Config": 4,
           "MixtralConfig": 8, "Qwen3MoeConfig": 4}  # and heads: those of k and v are the class' own
SIZES = ("model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_local_experts", "num_experts", "moe_intermediate_size", "n_embd", "n_layer",
         "n_head", "n_positions")


def save_with(folder, model, **changes):
    """Saves the model, and its configuration with other values; None removes a key."""
    import json

    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def model_of(config):
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def saved_without_defaults(name, layers, folder):
    """A model whose saved configuration lacks all that is as its class has it."""
    cls, heads = getattr(transformers, name), CLASSES[name]
    sizes = (dict(n_embd=32, n_layer=2, n_head=4, n_positions=128) if name == "GPT2Config" else
             dict(hidden_size=8 * heads, intermediate_size=48, num_attention_heads=heads, num_hidden_layers=layers))
    if name == "Qwen3MoeConfig":
        sizes |= dict(moe_intermediate_size=16, num_experts=8)
    if name in ("LlamaConfig", "PhiConfig", "Phi3Config"):
        sizes |= dict(max_position_embeddings=128)
    model = model_of(cls(**sizes, vocab_size=96, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    defaults, own = cls().to_dict(), model.config.to_dict()
    save_with(folder, model, **{key: None for key in own if key not in SIZES and own[key] == defaults.get(key)},
              layer_types=None)
    return model


@pytest.mark.parametrize("name", CLASSES)
def test_keys_that_are_missing_have_transformers_values(name, run_model, tmp_path):
    model = saved_without_defaults(name, 7 if "Gemma3" in name else 3, tmp_path)
    ids, logits = run(run_model, tmp_path, tokens=12)
    assert error(logits, logits_of(model, ids)) < 1e-5


@pytest.mark.parametrize("name, changes", (
    ("gemma", dict(hidden_act="gelu")), ("gemma", dict(hidden_act="gelu", hidden_activation="relu")),
    ("gemma2", dict(hidden_act="gelu")), ("gemma3", dict(attn_logit_softcapping=2.0)),
    ("qwen2", dict(layer_types=None, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    ("qwen3", dict(layer_types=None, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    ("qwen3", dict(layer_types=None, use_sliding_window=True, sliding_window=8)),
    ("qwen2", dict(layer_types=None, sliding_window=8)),
    ("qwen2", dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=8)),
    ("qwen3-moe", dict(sliding_window=8, use_sliding_window=True)), ("qwen3-moe", dict(sliding_window=8)),
    ("llama", dict(sliding_window=8)), ("phi3", dict(sliding_window=8)), ("mixtral", dict(sliding_window=8)),
    ("llama", dict(rope_theta=500.0)), ("gpt2", dict(scale_attn_weights=False)),
    ("llama", dict(rope_scaling=dict(rope_type="linear", factor=2.0), rope_parameters=None))), ids=str)
def test_configurations(name, changes, run_model, tmp_path):
    save_with(tmp_path, make(name), **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float().eval()
    ids, logits = run(run_model, tmp_path, tokens=20)
    assert error(logits, logits_of(model, ids)) < 1e-5


# Models, changes of their config.json that nothing of fftune computes, and words of the error.
REFUSED = (
    ("llama", dict(is_causal=False), "is_causal false"),
    ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention true"),
    ("qwen2", dict(attention_chunk_size=8), "attention_chunk_size 8"), ("phi", dict(qk_layernorm=True), "qk_layernorm"),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx true"),
    ("llama", dict(hidden_act="gelu_10"), "hidden_act gelu_10"),
    ("gemma2", dict(layer_types=["chunked_attention"] * 2), "layer_types"),
    ("llama", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0)), "rope_type yarn"))


@pytest.mark.parametrize("name, changes, words", (
    *REFUSED, ("llama", dict(model_type="granite"), "model_type granite, whose layers are not known")), ids=str)
def test_keys_that_are_refused(name, changes, words, run_model, tmp_path):
    save_with(tmp_path, make(name), **changes)
    done = subprocess.run([run_model, str(tmp_path), "--prompt-ids", "1"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr


def test_a_model_without_its_head(run_model, tmp_path):
    """GPT-2 as it was published: no prefix, and constants beside the weights."""
    from safetensors.torch import save_file

    model = make("gpt2")
    model.save_pretrained(tmp_path)
    tensors = {name: t.contiguous() for name, t in model.transformer.state_dict().items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    ids, logits = run(run_model, tmp_path, tokens=5)
    assert error(logits, logits_of(model, ids)) < 1e-5


def test_weights_that_no_layer_has_are_refused(run_model, tmp_path):
    model = make("llama")
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    model.save_pretrained(tmp_path)
    done = subprocess.run([run_model, str(tmp_path), "--prompt-ids", "1"], capture_output=True,
                          text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "model.layers.1.self_attn.sinks is not of a layer that is known" in done.stderr


# checkpoints with weights of 4 bits

def save_quantised(model, folder, method, **options):
    """The model, quantised as GPTQModel, AutoAWQ or compressed-tensors save it, and with what its
    configuration says. Its layers of PyTorch are returned."""
    import json

    from safetensors.torch import save_file

    from quantised_layers import (AWQ_ORDER, TorchLinear, packed, quantise_by_gptq, unpacked)

    quantise_by_gptq(model, **options)
    tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
    config = {"quant_method": method, "bits": 4, "group_size": 32}
    for name, module in model.named_modules():
        if type(module) is not TorchLinear or method == "gptq":
            continue
        codes = unpacked(module.qweight, 0)[:module.in_features]
        zeros = unpacked(module.qzeros + (0x11111111 if module.version == 1 else 0), 1)
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{name}.{part}"]
        if method == "awq":
            def places(t):
                own = torch.empty_like(t)
                for place, output in enumerate(AWQ_ORDER):
                    own[:, place::8] = t[:, output::8]
                return packed(own, 1)
            own = {"qweight": places(codes), "qzeros": places(zeros), "scales": module.scales}
        else:
            own = {"weight_packed": packed(codes.t().contiguous(), 1),
                   "weight_scale": module.scales.t().contiguous(),
                   "weight_shape": torch.tensor([module.out_features, module.in_features])}
        tensors |= {f"{name}.{part}": t for part, t in own.items()}
    if method == "gptq":
        config |= {"desc_act": options.get("desc_act", False), "sym": True,
                   "checkpoint_format": "gptq_v2" if options.get("version") == 2 else "gptq"}
    elif method == "awq":
        config |= {"zero_point": True, "version": "gemm"}
    else:
        config |= {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}}}
    model.config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"quantization_config": config}))
    save_file(tensors, folder / "model.safetensors")


DEVICES = ["cpu", pytest.param("0", marks=pytest.mark.skipif(not torch.cuda.is_available(),
                                                            reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, method, options", (
    ("llama", "gptq", {}), ("llama", "gptq", {"version": 2}), ("llama", "gptq", {"desc_act": True}),
    ("qwen2", "gptq", {}), ("qwen3", "awq", {}), ("llama", "compressed-tensors", {}),
    ("qwen3_moe", "gptq", {}), ("qwen3_moe", "awq", {}), ("qwen3_moe", "compressed-tensors", {}),
    ("qwen3_moe", "gptq", {"skip": ("lm_head", "down_proj")}),
    ("llama", "compressed-tensors", {"skip": ("lm_head", "up_proj")})), ids=str)
def test_weights_of_4_bits(name, method, options, device, run_model, tmp_path):
    model = small(name)
    save_quantised(model, tmp_path, method, **{"group": 32, **options})
    ids, logits = run(run_model, tmp_path, "--device", device, tokens=12)
    assert error(logits, logits_of(model, ids)) < 1e-5
    assert ids == logits.argmax(-1).tolist()


def test_modules_with_bits_and_groups_of_their_own(run_model, tmp_path):
    """GPTQModel's `dynamic`: groups of 64 in one kind of module, 8 bits in another."""
    import json

    from safetensors.torch import load_file, save_file

    from quantised_layers import quantise_by_gptq

    model, kinds = small("llama"), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
    quantise_by_gptq(model, group=64, skip=("lm_head", *kinds))
    save_quantised(model, tmp_path, "gptq", group=32, skip=("lm_head", "up_proj"))
    tensors = load_file(tmp_path / "model.safetensors")
    for name, module in model.named_modules():
        if not name.endswith("up_proj"):
            continue
        rows = module.weight.data.unflatten(1, (-1, 32))
        scale = (rows.abs().amax(-1, keepdim=True) / 127).half().float()
        codes = (rows / scale).round().clamp(-127, 127)
        module.weight.data = (codes * scale).flatten(1)
        bytes_of = (codes.flatten(1) + 128).to(torch.uint8).t().contiguous()  # [k, n]
        words = bytes_of.view(-1, 4, bytes_of.shape[1]).transpose(1, 2).contiguous().view(torch.int32).squeeze(-1)
        groups, n = scale.shape[1], scale.shape[0]
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.qweight": words, f"{name}.scales": scale.squeeze(-1).t().half().contiguous(),
                    f"{name}.qzeros": torch.full((groups, n // 4), 0x7f7f7f7f, dtype=torch.int32),
                    f"{name}.g_idx": torch.arange(32 * groups, dtype=torch.int32) // 32}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {r".*down_proj": {"group_size": 64}, r".*up_proj": {"bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids, logits = run(run_model, tmp_path, tokens=12)
    assert error(logits, logits_of(model, ids)) < 1e-5


def small(name):
    import transformers

    config = transformers.AutoConfig.for_model(
        name, vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        **(dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64) if "moe" in name else {}))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1)
    return with_expert_modules(model)


def save_in_bytes(model, folder, method):
    """The model with fp8 or int8 weights, and scales of blocks or rows; it has the weights that these are."""
    import json

    from safetensors.torch import save_file

    tensors, block = {}, 32
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or name == "lm_head":
            continue
        w = module.weight.detach()
        size = (block, block) if method == "fp8" else (1, w.shape[1])
        most = 127 if method == "int-quantized" else 448
        blocks = w.unflatten(0, (-1, size[0])).unflatten(2, (-1, size[1]))
        scale = (blocks.abs().amax((1, 3)) / most).bfloat16().float()
        wide = scale.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
        codes = (w / wide).round().clamp(-127, 127).to(torch.int8) if most == 127 else (
            w / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        module.weight.data = codes.float() * wide
        tensors |= {f"{name}.weight": codes,
                    f"{name}.weight_scale{'_inv' if method == 'fp8' else ''}": scale}
    config = {"quant_method": "fp8", "weight_block_size": [block, block]} if method == "fp8" else {
        "quant_method": "compressed-tensors", "format": method, "config_groups": {"group_0": {
            "weights": {"num_bits": 8, "strategy": "channel"}}}}
    model.config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"quantization_config": config}))
    save_file({**{name: t.contiguous() for name, t in model.state_dict().items()}, **tensors},
              folder / "model.safetensors")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, method", (("llama", "fp8"), ("llama", "float-quantized"),
                                          ("llama", "int-quantized"), ("qwen3_moe", "fp8"),
                                          ("qwen3_moe", "int-quantized")))
def test_weights_of_8_bits(name, method, device, run_model, tmp_path):
    model = small(name)
    save_in_bytes(model, tmp_path, method)
    ids, logits = run(run_model, tmp_path, "--device", device, tokens=12)
    assert error(logits, logits_of(model, ids)) < 1e-5
    assert ids == logits.argmax(-1).tolist()


def test_quantised_models_that_cannot_be_run(run_model, tmp_path):
    import json

    model = make("llama")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for own, words in (({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
                        "the GPTQ layout 'marlin' is not known"),
                       ({"quant_method": "compressed-tensors", "format": "pack-quantized",
                         "transform_config": {"config_groups": {"u": {}}}}, "turns activations")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
        done = subprocess.run([run_model, str(tmp_path), "--prompt-ids", "1"], capture_output=True,
                              text=True)
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and words in done.stderr
