"""cross_entropy and linear_cross_entropy beside PyTorch's, and the loss of patched models."""
import copy
import pickle

import numpy
import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

import fftune
from fftune import ops
from models import make

SIZES = [(1, 1, 1), (5, 3, 2), (33, 24, 70), (70, 40, 1001)]


def error(ours, theirs):
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / (theirs.norm() + 1e-30)).item()


def labels_of(rows, vocab):
    labels = torch.randint(0, vocab, (rows,))
    if rows > 1:
        labels[::4] = -100
    return labels


@pytest.mark.parametrize("rules", [{}, {"label_smoothing": 0.1}, {"weighs": True},
                                   {"label_smoothing": 0.2, "weighs": True}], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_beside_pytorch(sizes, reduction, rules):
    torch.manual_seed(0)
    rows, d, vocab = sizes
    rules = dict(rules)
    weights = torch.rand(vocab) + 0.5 if rules.pop("weighs", False) else None
    labels = labels_of(rows, vocab)
    x, w = torch.randn(rows, d), torch.randn(vocab, d) * 2 / d**0.5
    leaves = [t.double().requires_grad_() for t in (x, w)]
    theirs = F.cross_entropy(leaves[0] @ leaves[1].T, labels, reduction=reduction,
                             weight=None if weights is None else weights.double(), **rules)
    seed = torch.rand(theirs.shape) + 0.5
    right = torch.autograd.grad(theirs, leaves, seed.double())
    for options in ({}, {"recompute": True}, {"workspace": 0.0}):
        own = [t.clone().requires_grad_() for t in (x, w)]
        ours = ops.linear_cross_entropy(*own, labels, reduction=reduction, class_weights=weights,
                                        **rules, **options)
        assert ours.shape == theirs.shape and ours.dtype == torch.float32
        assert error(ours, theirs) < 2e-6
        for mine, other in zip(torch.autograd.grad(ours, own, seed), right):
            assert error(mine, other) < 2e-5
    logits = (x @ w.T).requires_grad_()
    loss = ops.cross_entropy(logits, labels, reduction=reduction, class_weights=weights, **rules)
    assert error(loss, theirs) < 2e-6
    wide = logits.detach().double().requires_grad_()
    other, = torch.autograd.grad(
        F.cross_entropy(wide, labels, reduction=reduction,
                        weight=None if weights is None else weights.double(), **rules), wide,
        seed.double())
    assert error(torch.autograd.grad(loss, logits, seed)[0], other) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "none"}], ids=str)
def test_gradients_of_weights_are_added_to_an_accumulator(dtype, options):
    torch.manual_seed(0)
    w = (torch.randn(70, 24) / 2).bfloat16().requires_grad_()
    into = torch.randn(70, 24).to(dtype)
    right = into.double()
    for batch in range(8):
        x = torch.randn(33, 24).bfloat16().requires_grad_()
        labels = labels_of(33, 70)
        loss = ops.linear_cross_entropy(x, w, labels, **options).sum() / 8
        dx, dw = torch.autograd.grad(loss, (x, w))
        right += dw.double()
        loss = ops.linear_cross_entropy(x, w, labels, into=into, **options).sum() / 8
        loss.backward()
        assert torch.equal(x.grad, dx) and w.grad is None
    assert error(into, right) < (1e-6 if dtype == torch.float32 else 1e-2)
    with torch.no_grad():
        before = into.clone()
        ops.linear_cross_entropy(x, w, labels, into=into)
        assert torch.equal(into, before)


def test_an_accumulator_that_does_not_fit_is_refused():
    x, w, labels = torch.randn(3, 8), torch.randn(10, 8), torch.zeros(3, dtype=torch.int64)
    for into in (torch.zeros(10, 7), torch.zeros(10, 8).half(), torch.zeros(10, 8).requires_grad_(), 3):
        with pytest.raises(fftune.Error, match="linear-cross-entropy: into is .*: give a tensor like w"):
            ops.linear_cross_entropy(x, w, labels, into=into)


def test_nan_and_infinities_are_those_of_pytorch():
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, 1, 2], [inf, 0, 1], [-inf, 0, 1], [-inf, 0, 1], [nan, 0, 1],
                           [-inf, -inf, -inf], [nan, inf, 0]])
    labels = torch.tensor([0, 1, 0, 2, 1, 1, -100])
    for dtype in (torch.float32, torch.bfloat16):
        own, theirs = (logits.to(dtype).requires_grad_() for _ in range(2))
        ours = ops.cross_entropy(own, labels, reduction="none")
        right = F.cross_entropy(theirs.float(), labels, reduction="none")
        assert torch.allclose(ours, right, equal_nan=True)
        mine, = torch.autograd.grad(ours, own, torch.ones(7))
        other, = torch.autograd.grad(right, theirs, torch.ones(7))
        assert torch.allclose(mine[:6].float(), other[:6].float(), atol=1e-2, equal_nan=True)
        assert not mine[6].any()  # of an ignored row 0, where PyTorch multiplies NaN by 0
    nothing = ops.cross_entropy(logits[:2], torch.full((2,), -100))
    assert nothing.isnan()  # 0 / 0, as PyTorch's


@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}, {"recompute": True}])
def test_a_label_that_is_no_id_makes_its_row_nan(more):
    x, w = torch.randn(5, 16, requires_grad=True), torch.randn(10, 16, requires_grad=True)
    for label in (10, -1, -2**40, 2**40):
        labels = torch.tensor([1, label, -100, 9, 0])
        for name in ("cross_entropy", "linear_cross_entropy"):
            for reduction in ("none", "sum", "mean"):
                if name == "cross_entropy":
                    own = {n: value for n, value in more.items() if n != "recompute"}
                    loss = ops.cross_entropy(x @ w.T, labels, reduction=reduction, **own)
                else:
                    loss = ops.linear_cross_entropy(x, w, labels, reduction=reduction, **more)
                dx, = torch.autograd.grad(loss.sum(), x)
                assert dx.isnan().any(1).tolist() == [False, True, False, False, False]
                rows = [False, True, False, False, False] if reduction == "none" else True
                assert loss.isnan().tolist() == rows


def test_results_of_rows():
    torch.manual_seed(1)
    logits, labels = torch.randn(2, 6, 40) * 3, labels_of(12, 40).view(2, 6)
    counts = labels != -100
    loss, lse, logprob, entropy = ops.cross_entropy(logits, labels, reduction="none", lse=True,
                                                    logprobs=True, entropy=True)
    log_p = logits.double().log_softmax(-1)
    zero = torch.zeros((), dtype=torch.double)
    right = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0].where(counts, zero)
    assert error(lse, logits.double().logsumexp(-1).where(counts, zero)) < 1e-6
    assert error(logprob, right) < 1e-6 and torch.equal(loss, -logprob)
    assert error(entropy, -(log_p.exp() * log_p).sum(-1).where(counts, zero)) < 1e-6
    x, w = torch.randn(2, 6, 16), torch.randn(40, 16)
    total, entropy = ops.linear_cross_entropy(x, w, labels, entropy=True)
    log_p = (x @ w.T).double().log_softmax(-1)
    assert total.dim() == 0
    assert error(entropy, -(log_p.exp() * log_p).sum(-1).where(counts, zero)) < 1e-6


def test_items_and_ignored_rows():
    torch.manual_seed(2)
    x, w, labels = torch.randn(20, 16), torch.randn(50, 16), labels_of(20, 50)
    x.requires_grad_(), w.requires_grad_()
    right = F.cross_entropy(x @ w.T, labels, reduction="sum") / 33
    for items in (33, torch.tensor(33), torch.tensor([33.0])):
        assert error(ops.linear_cross_entropy(x, w, labels, items=items), right) < 1e-6
    skipped = ops.linear_cross_entropy(x, w, labels, items=33, skip_ignored=True)
    assert error(skipped, right) < 1e-6
    for mine, other in zip(torch.autograd.grad(skipped, (x, w)),
                           torch.autograd.grad(right, (x, w))):
        assert error(mine, other) < 1e-5
    with pytest.raises(fftune.Error, match="items with reduction='sum'"):
        ops.linear_cross_entropy(x, w, labels, items=3, reduction="sum")
    with pytest.raises(fftune.Error, match="skip_ignored with results for each row"):
        ops.linear_cross_entropy(x, w, labels, lse=True, skip_ignored=True)
    with pytest.raises(fftune.Error, match="give none, sum or mean"):
        ops.cross_entropy(x, labels, reduction="average")


def test_a_second_backward_pass():
    x, w, labels = torch.randn(6, 8), torch.randn(12, 8, requires_grad=True), labels_of(6, 12)
    for recompute in (False, True):
        loss = 3 * ops.linear_cross_entropy(x, w, labels, recompute=recompute)
        w.grad = None
        loss.backward(retain_graph=True)
        first = w.grad.clone()
        loss.backward()
        assert error(w.grad, 2 * first) < 1e-6


def test_compiled_and_accumulated():
    torch._dynamo.reset()  # whatever other tests have compiled
    torch.manual_seed(3)
    head = fftune.nn.LinearCrossEntropy(24, 70, bias=True)
    plain = torch.nn.Linear(24, 70)
    plain.load_state_dict(head.state_dict())
    compiled = torch.compile(lambda x, labels, items: head(x, labels, items=items), fullgraph=True,
                             backend="aot_eager")
    for _ in range(3):  # micro-batches, divided by the whole batch's items
        x, labels = torch.randn(4, 9, 24), labels_of(36, 70).view(4, 9)
        compiled(x, labels, torch.tensor(81)).backward()
        (F.cross_entropy(plain(x).flatten(0, 1), labels.flatten(), reduction="sum") / 81).backward()
    for mine, other in zip(head.parameters(), plain.parameters()):
        assert error(mine.grad, other.grad) < 1e-5


def test_frozen_weights():
    x, w, labels = torch.randn(6, 8, requires_grad=True), torch.randn(12, 8), labels_of(6, 12)
    for recompute in (False, True):
        x.grad = None
        ops.linear_cross_entropy(x, w, labels, recompute=recompute).backward()
        right, = torch.autograd.grad(F.cross_entropy(x @ w.T, labels), x)
        assert error(x.grad, right) < 1e-5


@pytest.mark.parametrize("options", [{}, {"items": 7}, {"reduction": "sum"}], ids=str)
def test_the_loss_of_no_rows_is_pytorch_s(options):
    """The mean of nothing is NaN, and its gradients are zeros."""
    labels = torch.zeros(0, dtype=torch.int64)
    x, w = torch.zeros(0, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    right = F.cross_entropy(x @ w.t(), labels, reduction="sum") / options.get("items", 1)
    if not options:
        right = F.cross_entropy(x @ w.t(), labels)
    for loss in (ops.linear_cross_entropy(x, w, labels, **options),
                 ops.cross_entropy(x @ w.t(), labels, **options)):
        torch.testing.assert_close(loss, right, equal_nan=True)
        assert all(not g.any() for g in torch.autograd.grad(loss, (x, w)))


TRAINED = pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "gpt2", "mixtral", "opt"])


def batch_of():
    torch.manual_seed(5)
    ids = torch.randint(3, 96, (2, 12))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def trained(model, **options):
    model.train()
    outputs = model(**batch_of(), use_cache=False, **options)
    outputs.loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters()}


@TRAINED
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(40)}], ids=str)
def test_a_patched_model_has_its_loss_gradients_and_logits(name, options):
    model = make(name)
    other = copy.deepcopy(model)
    report = fftune.patch(other)
    assert any("by linear-cross-entropy" in words for _, words in report.replaced)
    theirs, right = trained(model, **options)
    ours, gradients = trained(other, **options)
    assert error(ours.loss, theirs.loss) < 1e-5
    for parameter, gradient in right.items():
        if gradient.norm() > 1e-6:  # those of biases of keys are zeros, but for rounding
            assert error(gradients[parameter], gradient) < 2e-4, parameter
    assert "logits" not in dict(ours) and isinstance(ours, type(theirs))
    assert error(ours.logits, theirs.logits) < 1e-4
    assert ours["logits"] is ours.logits and torch.equal(ours[1], ours.logits)
    assert torch.equal(ours[0], ours.loss)
    assert len(ours.to_tuple()) == len(theirs.to_tuple())
    assert torch.equal(pickle.loads(pickle.dumps(ours)).logits, ours.logits)


def test_logits_that_are_read_have_gradients():
    model = make("llama")
    fftune.patch(model)
    model.train()
    outputs = model(**batch_of(), use_cache=False)
    outputs.logits.square().mean().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_calls_that_do_not_train_are_the_model_s_own():
    model = make("llama")
    fftune.patch(model)
    outputs = model(**batch_of())
    assert "logits" in dict(outputs)  # in evaluation
    model.train()
    with torch.no_grad():
        assert "logits" in dict(model(**batch_of()))
    assert "logits" in dict(model(input_ids=batch_of()["input_ids"]))
    assert isinstance(model(**batch_of(), return_dict=False), tuple)
    fftune.unpatch(model)
    assert "logits" in dict(model(**batch_of())) and "_fftune_head" not in model.__dict__
    fftune.patch(model, loss=False)
    assert "forward" not in model.__dict__


def test_models_whose_loss_is_another_s_are_left_alone():
    model = make("llama")
    model.loss_function = lambda logits, labels, **_: logits.sum()
    report = fftune.patch(model)
    assert any("loss_function is not transformers'" in words for _, words in report.left)
    model = make("llama")
    fftune.patch(model)
    model.train()
    model.loss_function = lambda logits, labels, **_: logits.sum()
    assert model(**batch_of()).loss.item() == pytest.approx(model(**batch_of()).logits.sum().item())
    assert any("not those of its head alone" in words for _, words in fftune.patch(make("gemma2")).left)
    model = make("cohere")  # logits times a number
    model.lm_head.bias = torch.nn.Parameter(torch.ones(model.config.vocab_size))
    assert any("without a bias" in words for _, words in fftune.patch(model).left)
    model = make("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    assert any("hooks" in words for _, words in fftune.patch(model).left)


def test_no_label_of_the_trial_is_beyond_a_model_s_own_loss(monkeypatch):
    model = make("llama")
    seen = []

    def forward(self, input_ids=None, labels=None, **options):
        outputs = self.model(input_ids=input_ids, **options)
        logits = self.lm_head(outputs.last_hidden_state)
        seen.append((labels.max(), logits.shape[-1]))
        return CausalLMOutputWithPast(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)

    monkeypatch.setattr(type(model), "forward", forward)
    assert "it is not that of the logits and labels" in str(fftune.patch(model, whole_layers=False))
    assert seen and all(most < classes for most, classes in seen)


def test_a_patched_model_compiles():
    torch._dynamo.reset()  # whatever other tests have compiled
    model = make("llama")
    other = copy.deepcopy(model)
    fftune.patch(other)
    theirs, right = trained(model)
    compiled = torch.compile(other, fullgraph=True)
    other.train()
    outputs = compiled(**batch_of(), use_cache=False)
    assert outputs.logits is None
    outputs.loss.backward()
    assert error(outputs.loss, theirs.loss) < 1e-5
    assert error(other.lm_head.weight.grad, right["lm_head.weight"]) < 2e-4


def test_autocast_and_checkpoints():
    model = make("llama")
    other = copy.deepcopy(model)
    fftune.patch(other)
    for one in (model, other):
        one.gradient_checkpointing_enable()
    with torch.autocast("cpu", torch.bfloat16):
        theirs, right = trained(model)
        ours, gradients = trained(other)
    assert ours.logits.dtype == torch.bfloat16
    assert error(ours.loss, theirs.loss) < 1e-2
    assert error(gradients["lm_head.weight"], right["lm_head.weight"]) < 5e-2


def capped_later(model):
    model.config.final_logit_softcapping = 2.0


def of_another_size(model):
    torch.manual_seed(0)
    model.resize_token_embeddings(104, mean_resizing=False)


def with_another_loss(model):
    model.loss_function = lambda logits, labels, **_: logits.float().square().mean()


def with_another_decoder(model):
    model.model = copy.deepcopy(model.model)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(1.2)


def weighing_otherwise(model):
    model.config.output_router_logits = True
    model.router_aux_loss_coef = 0.7


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name, change", [
    ("gemma2", capped_later), ("llama", of_another_size), ("llama", with_another_loss),
    ("llama", with_another_decoder), ("mixtral", weighing_otherwise)],
    ids=lambda value: getattr(value, "__name__", value))
def test_a_model_that_changes_after_patch(name, change, compiles):
    model = make(name)
    model.config.final_logit_softcapping = None
    other = copy.deepcopy(model)
    fftune.patch(other)
    assert "_fftune_head" in vars(other)
    for each in (model, other):
        change(each)
    theirs, _ = trained(model)
    for _ in range(2):
        other.train().zero_grad()
        run = torch.compile(other, backend="aot_eager") if compiles else other
        outputs = run(**batch_of(), use_cache=False)
        outputs.loss.backward()
        assert error(outputs.loss, theirs.loss) < 1e-5
        assert error(other.lm_head.weight.grad, model.lm_head.weight.grad) < 2e-4
        assert compiles or error(outputs.logits, theirs.logits) < 1e-4


@pytest.mark.parametrize("change", [
    lambda head: torch.optim.SGD(head.parameters(), 1.0).step(),
    lambda head: setattr(head.weight, "data", head.weight.data * 2)])
def test_logits_are_not_those_of_weights_of_later(change):
    model = make("llama")
    fftune.patch(model)
    first, second = trained(model)[0], trained(model)[0]
    before = first.logits
    change(model.lm_head)
    assert first.logits is before
    with pytest.raises(fftune.Error, match="before the optimizer's step"):
        second.logits


def test_logits_are_those_of_the_weights_that_were_there():
    model = make("llama")
    fftune.patch(model)
    first, second = trained(model)[0], trained(model)[0]
    before = first.logits
    model.lm_head.load_state_dict({"weight": model.lm_head.weight.detach() * 2}, assign=True)
    assert torch.equal(second.logits, before)


def test_outputs_that_are_made_anew_have_their_logits():
    model = make("llama")
    fftune.patch(model)
    outputs = trained(model)[0]
    again = [type(outputs)(**outputs), type(outputs)(dict(outputs.items())), copy.copy(outputs),
             torch.utils._pytree.tree_map(lambda value: value, outputs),
             torch.utils._pytree.tree_map(lambda value: value * 1, outputs)]
    for each in again:
        assert torch.equal(each.logits, outputs.logits)
        assert torch.equal(each.get("logits"), outputs.logits)
    assert outputs.get("nothing", 3) == 3 and outputs.get("loss") is outputs.loss
    other = trained(model)[0]
    leaves, tree = torch.utils._pytree.tree_flatten(outputs)
    assert tree == torch.utils._pytree.tree_flatten(other)[1]
    shape, outputs, again = outputs.logits.shape, None, None  # DistributedDataParallel keeps the leaves alone
    assert torch.utils._pytree.tree_unflatten([leaf + 1 for leaf in leaves], tree).logits.shape == shape
    other.logits = torch.zeros(1)
    assert not type(other)(**other).logits.any()
    assert not torch.utils._pytree.tree_map(lambda value: value * 1, other).logits.any()


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("items", [
    7, 7.5, True, numpy.int64(7), numpy.float32(7.5), torch.tensor(7), torch.tensor(7.5, dtype=torch.float64),
    torch.tensor([7]), torch.tensor([7, 9])], ids=repr)
def test_the_number_of_items_divides_as_in_the_model(items, compiles):
    if compiles and not (isinstance(items, torch.Tensor) and items.dim()):
        pytest.skip("one of them shows that both are the same")
    model = make("llama")
    other = copy.deepcopy(model)
    fftune.patch(other)
    losses = []
    for each in (model, other):
        run = torch.compile(each, backend="aot_eager") if compiles and each is other else each
        outputs = run.train()(**batch_of(), use_cache=False, num_items_in_batch=items)
        outputs.loss.sum().backward()
        losses.append(outputs.loss)
    assert losses[0].dtype == losses[1].dtype and losses[0].shape == losses[1].shape
    assert error(losses[1], losses[0]) < 1e-5
    assert error(other.lm_head.weight.grad, model.lm_head.weight.grad) < 2e-4


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name, change", [
    ("granite", lambda model: setattr(model.config, "logits_scaling", 8.0)),
    ("granite", lambda model: None),  # a scaling by 1, which gives another tensor
    ("cohere", lambda model: setattr(model, "logit_scale", -0.25))])
def test_a_model_that_multiplies_its_logits(name, change, compiles):
    model = make(name)
    if compiles:
        change(model)
    other = copy.deepcopy(model)
    assert any("by linear-cross-entropy" in words for _, words in fftune.patch(other).replaced)
    for one in (model, other):
        change(one)  # behind patch(), too
    _, right = trained(model)
    ours, gradients = trained(torch.compile(other, backend="eager") if compiles else other)
    assert "logits" not in dict(ours)
    for parameter, gradient in gradients.items():
        assert error(gradient, right[parameter.removeprefix("_orig_mod.")]) < 2e-4, parameter
    if not compiles:
        assert error(ours.logits, model(**batch_of()).logits) < 1e-4
        other.zero_grad()
        other.__class__ = type("Capped", (type(other),), {"forward": lambda self, *given, **options: capped(
            super(type(self), self).forward(*given, **options))})
        assert "logits" in dict(trained(other)[0])


def capped(outputs):
    outputs.logits = torch.tanh(outputs.logits)
    return outputs
