"""patch() on layers whose MLP is no module: fc1, an activation and fc2 in the forward of a layer."""
import copy

import pytest
import torch
import transformers
from torch import nn

import fftune
from models import Adapter

_BART = dict(vocab_size=96, d_model=32, decoder_layers=2, decoder_ffn_dim=48, decoder_attention_heads=4,
             encoder_layers=2, encoder_ffn_dim=48, encoder_attention_heads=4,
             max_position_embeddings=64, is_decoder=True, is_encoder_decoder=False, dropout=0.0)
_BERT = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, max_position_embeddings=64, is_decoder=True, pad_token_id=0)
CONFIGS = {
    "opt": lambda: transformers.OPTConfig(vocab_size=96, hidden_size=32, ffn_dim=48, dropout=0.0,
                                          num_hidden_layers=2, num_attention_heads=4,
                                          word_embed_proj_dim=32, max_position_embeddings=64),
    "bart": lambda: transformers.BartConfig(**_BART),
    "pegasus": lambda: transformers.PegasusConfig(**_BART),
    "bert": lambda: transformers.BertConfig(**_BERT),
    "roberta-prelayernorm": lambda: transformers.RobertaPreLayerNormConfig(**_BERT),
    "bloom": lambda: transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4),
    "xlnet": lambda: transformers.XLNetConfig(vocab_size=96, d_model=32, n_layer=2, n_head=4,
                                              d_inner=48),
}


def make(name):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return model.eval()


@pytest.fixture
def runs(monkeypatch):
    """The shape of x in every run of the op."""
    from fftune.patching import inline_mlps

    seen, original = [], inline_mlps.plain_mlp
    monkeypatch.setattr(inline_mlps, "plain_mlp",
                        lambda *given: (seen.append(given[1].shape), original(*given))[1])
    return seen


def error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("name", CONFIGS)
def test_values(name, runs):
    model = make(name)
    own = copy.deepcopy(model)
    report = fftune.patch(own)
    assert any("by ffn without a gate" in words for _, words in report.replaced), str(report)
    runs.clear()
    ids = torch.randint(3, 96, (2, 7))
    padded = torch.ones_like(ids)
    padded[1, :3] = 0
    with torch.no_grad():
        for call in (dict(), dict(attention_mask=padded)):
            assert error(own(ids, **call).logits, model(ids, **call).logits) < 1e-5
    assert len(runs) == 4
    other = copy.deepcopy(own)
    with torch.no_grad():
        assert error(other(ids).logits, model(ids).logits) < 1e-5
        assert len(runs) == 6
        fftune.unpatch(own)
        assert torch.equal(own(ids).logits, model(ids).logits) and len(runs) == 6
    assert own.state_dict().keys() == model.state_dict().keys()


def test_as_before(runs):
    """With gradients, under autocast, with hooks on a part, or another part in its place."""
    model = make("opt")
    own = copy.deepcopy(model)
    fftune.patch(own)
    runs.clear()
    ids = torch.randint(3, 96, (2, 7))
    own(ids).logits.sum().backward()
    layer, seen = own.model.decoder.layers[0], []
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            own(ids)
        assert not runs
        handle = layer.fc2.register_forward_hook(lambda *_: seen.append(1))
        assert error(own(ids).logits, model(ids).logits) < 1e-5
        assert len(seen) == 1 and len(runs) == 1
        handle.remove()

        class Doubled(Adapter):
            def forward(self, x):
                return 2 * self.inner(x)

        layer.fc1 = Doubled(layer.fc1)
        model.model.decoder.layers[0].fc1 = Doubled(model.model.decoder.layers[0].fc1)
        assert error(own(ids).logits, model(ids).logits) < 1e-5 and len(runs) == 2


class Layer(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.fc1, self.fc2, self.activation_fn = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()
        self.drop, self.step = nn.Dropout(0.1), step

    def forward(self, x):
        return x + self.step(self, x)


def _stored(self, x):
    self.last = self.fc1(x)
    return self.fc2(self.activation_fn(self.last))


def _twice(self, x):
    return self.fc2(self.activation_fn(self.fc1(x))) + self.fc2(self.activation_fn(self.fc1(-x)))


def _doubled(self, x):
    return self.fc2(self.activation_fn(self.fc1(x)) * 2)


def _beside(self, x):
    hidden = self.fc1(x)
    return self.fc2(self.activation_fn(hidden)) + hidden.mean()


@pytest.mark.parametrize("step", [_stored, _twice, _doubled, _beside,
                                  lambda self, x: self.fc2(self.fc1(x)),
                                  lambda self, x: self.fc2(self.activation_fn(self.fc1(x).float()))])
def test_other_computations_are_left_alone(step):
    assert "ffn" not in str(fftune.patch(nn.ModuleList([Layer(step)]).eval()))


def test_dropout_between_them(runs):
    def step(self, x):
        return self.drop(self.fc2(self.drop(self.activation_fn(self.fc1(x)))))

    layers = nn.ModuleList([Layer(step)]).eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        right = layers[0](x)
        assert "ffn without a gate (gelu)" in str(fftune.patch(layers))
        runs.clear()  # those of patch() itself
        assert error(layers[0](x), right) < 1e-5 and len(runs) == 1
        layers.train()
        layers[0](x)
    assert len(runs) == 1
