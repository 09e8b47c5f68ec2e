"""The loss of causal language models in training, without their logits.

The model's own forward runs with a head that gives hidden states as they are, and a loss function that
makes the loss from these and the head's weights. Logits are computed where somebody reads them.
"""
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .._library import Error
from .._versions import pytree
from .decoding import _Given
from .recognise import (Numbers, Unfit, address_of, are_plain, has_kernels, method_of, trying, undoable, view_of,
                        watched)
from .trial import Trial, expect_to_run


class _Changed(Exception):
    """The model makes something else of its head's logits than it did in patch()."""


class _Hidden(nn.Module):
    """In the place of a head: its input, which it remembers as long as the call lasts."""

    def __init__(self, head: nn.Module | None = None, is_scaled: bool = False):
        super().__init__()
        self.__dict__["head"] = head  # no part of this module
        self.is_scaled = is_scaled  # the model multiplies what it is given by a number, as it does logits
        self.seen = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return hidden


class _GivenDecoder(_Given):
    """Also where the model calls the decoder of its decoder, as OPT does."""

    @property
    def decoder(self) -> nn.Module:
        return self


def _loss(given: _Hidden, logits: Tensor, labels: Tensor, vocab_size: int,
          num_items_in_batch: Tensor | None = None, ignore_index: int = -100,
          shift_labels: Tensor | None = None, **_) -> Tensor:
    """transformers' ForCausalLMLoss, where `logits` are the hidden states."""
    if logits is not given.seen:
        if not given.is_scaled:
            raise _Changed
        given.seen = logits  # the product of these is the product of the others, times the number
    head = given.head
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    hidden = logits.flatten(0, -2)
    loss = functools.partial(
        ops.linear_cross_entropy, hidden, head.weight, shift_labels.reshape(-1).to(hidden.device),
        head.bias, ignore_index=ignore_index)
    if _is_divisor(num_items_in_batch):
        return loss(items=num_items_in_batch)
    # The quotient has the shape and type that PyTorch gives it.
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(hidden.device)
    return loss(reduction="sum") / num_items_in_batch


def _is_divisor(items) -> bool:
    """Whether a float32 divided by it is a float32, so that the op may divide."""
    if isinstance(items, Tensor):
        return not items.dim() and items.dtype not in (torch.float64, torch.complex64, torch.complex128)
    return items is None or type(items) in (int, float)


def _head_name(model: nn.Module) -> str:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, part in model._modules.items():
        if part is head and part is not None:
            return name
    return ""


def _has_whole_vectors(head: nn.Linear) -> bool:
    return not head.weight.is_cuda or not (head.in_features % 8 or head.out_features % 8)


def _dtype_of(head: nn.Linear) -> torch.dtype:
    """The element type of its product in a call."""
    device = head.weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype


def _is_fast(head: nn.Linear) -> bool:
    """Whether products are those of the tensor cores."""
    if not head.weight.is_cuda:
        return True
    return _dtype_of(head) in (torch.bfloat16, torch.float16) and _has_whole_vectors(head)


def _is_transformers_loss(model: nn.Module) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss


def _of_head(self, hidden: Tensor, labels: Tensor) -> Tensor:
    """The loss as a head makes it where it is tried."""
    return ops.linear_cross_entropy(hidden, self.weight, labels, self.bias)


def patch_loss(model: nn.Module, known: dict) -> str | None:
    """Computes the loss of a model in the place of its head and loss function."""
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) or not hasattr(
            model, "loss_function"):
        return None
    name = _head_name(model)
    head = model._modules.get(name)
    if type(head) is not nn.Linear or head._parameters.get("weight") is None:
        raise Unfit("the loss stays the model's: its head is no linear layer with a weight")
    if not _is_transformers_loss(model):
        raise Unfit("the loss stays the model's: its loss_function is not transformers' ForCausalLMLoss")
    if "forward" in model.__dict__ or watched(model, head):
        raise Unfit("the loss stays the model's: it or its head has hooks or a forward of its own")
    if not are_plain(head.weight, head.bias) or not has_kernels(head.weight):
        raise Unfit(f"the loss stays the model's: no kernels for a head of {head.weight.dtype} on "
                    f"{head.weight.device.type}")
    if not _has_whole_vectors(head):
        raise Unfit(f"the loss stays the model's: rows of {head.in_features} features or "
                    f"{head.out_features} logits are no multiples of 8, for which the kernels of a GPU "
                    "are slow")
    is_scaled = _expect_known_forward(model, name, head)
    expect_to_run(head, _of_head, (), Trial(lambda numbers, like: (
        numbers(3, head.in_features), torch.arange(3) % head.out_features)), known)
    model.__dict__["_fftune_head"], model.__dict__["_fftune_scaled"] = name, is_scaled
    # torch.compile cannot trace how a view is made; this one is of the model as it is now.
    model.__dict__["_fftune_view"] = _view(model, name, head)
    model.__dict__["_fftune_view"].training = True
    model.__dict__["_fftune_plain"] = tuple(
        key for key, value in vars(model).items() if not key.startswith("_") and key != "training"
        and isinstance(value, (bool, int, float, str, type(None))))
    model.__dict__["forward"] = method_of(model, _forward)
    return f"loss of {type(model).__name__} by linear-cross-entropy, in training"


@torch.no_grad()
def _expect_known_forward(model: nn.Module, name: str, head: nn.Linear) -> bool:
    """That the model gives its head's logits, or these times a number, and the loss function's loss of these and the
    labels, as they are. Gives whether there is such a number. Stand-ins of its decoder, head and loss function show
    what it passes on."""
    base = model.base_model_prefix
    if base not in model._modules:
        raise Unfit(f"the loss stays the model's: it has no decoder {base!r}")
    numbers = Numbers(11)
    hidden, loss = numbers(2, 5, head.in_features, like=head.weight), numbers(1).squeeze()
    # A model with a loss of its own takes the stand-in's hidden states for logits: a label beyond them
    # would be an assertion in a kernel, after which the process can use its GPU no more.
    labels = (numbers(2, 5).abs() * 1000).long().to(head.weight.device) % min(head.weight.shape)
    given = []

    def loss_function(logits, labels, vocab_size, **options):
        given.append(dict(options, logits=logits, labels=labels, vocab_size=vocab_size))
        return loss

    asked = _Hidden()
    view = view_of(model, {(base,): _GivenDecoder(hidden, model._modules[base]), (name,): asked})
    view.__dict__["_loss_function"] = loss_function
    with trying("the loss stays the model's: it needs more of its decoder and head than hidden states"):
        outputs = view(input_ids=labels, labels=labels, use_cache=False)
    # _forward() knows them by being the same tensor: logits divided by 1 are other ones.
    is_scaled = outputs.logits is not asked.seen
    if is_scaled and not (head.bias is None and _is_linear(model, name)):
        raise Unfit("the loss stays the model's: its logits are not those of its head alone, nor, without a bias, "
                    "these times a number")
    right = {"logits": outputs.logits, "labels": labels, "vocab_size": head.out_features}
    # Some models pass on all options of a call. The loss function ignores those that it does not know.
    if outputs.loss is not loss or len(given) != 1 or given[0].keys() - {"use_cache"} != right.keys() or not all(
            _is_same(given[0][key], value) for key, value in right.items()):
        raise Unfit("the loss stays the model's: it is not that of the logits and labels")
    return is_scaled


@torch.no_grad()
def _is_linear(model: nn.Module, name: str) -> bool:
    """Whether the model multiplies its logits by a number and does nothing else with them. Stand-ins for its decoder
    and head on the CPU give numbers of any size for logits."""
    numbers = Numbers(12)
    logits = numbers(1, 64, 8).double() * 10 ** (8 * numbers(1, 64, 1).double())
    base, ids = model.base_model_prefix, torch.zeros(1, 64, dtype=torch.long)
    view = _view_with(model, {(base,): _GivenDecoder(logits, model._modules[base]), (name,): _Hidden()},
                      lambda *_, **__: logits.new_zeros(()))
    try:
        scaled = type(model).forward(view, input_ids=ids, labels=ids, use_cache=False).logits
    except Exception:
        return False
    factor = scaled.flatten()[0] / logits.flatten()[0]
    return scaled.dtype == logits.dtype and torch.allclose(scaled, logits * factor, rtol=1e-12, atol=0)


def _is_same(one, other) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def _view(model: nn.Module, name: str, head: nn.Linear) -> nn.Module:
    given = _Hidden(head, model.__dict__["_fftune_scaled"])
    return _view_with(model, {(name,): given}, functools.partial(_loss, given))


def _view_with(model: nn.Module, parts: dict, loss_function: Callable) -> nn.Module:
    """The model before patch(), with other parts and another loss function."""
    view = view_of(model, parts)
    for own in ("forward", "_fftune_view"):
        view.__dict__.pop(own, None)
    view.__dict__["_loss_function"] = loss_function
    return view


@undoable
def _forward(self, *arguments, **options):
    name = self.__dict__["_fftune_head"]
    head = self._modules.get(name)
    compiles = torch.compiler.is_compiling()
    if not _serves(self, head, options) or compiles and not _is_as_viewed(self, name, head):
        return type(self).forward(self, *arguments, **options)
    view = self._fftune_view if compiles else _view(self, name, head)
    given = view._modules[name]
    try:
        if given.is_scaled and not compiles and not _is_linear(self, name):
            raise _Changed
        outputs = type(self).forward(view, *arguments, **options)
        if outputs.logits is not given.seen:
            raise _Changed
    except _Changed:
        if not compiles:
            self.__dict__["_fftune_head"] = ""  # until the next patch()
        return type(self).forward(self, *arguments, **options)
    finally:
        given.seen = None
    return _with_logits(outputs, head)


def _is_as_viewed(model: nn.Module, name: str, head: nn.Linear) -> bool:
    """Whether the view that was made in patch() still is of this model."""
    view = model._fftune_view
    return (view._modules[name].head is head and getattr(model, "_loss_function", None) is None
            and all(view._modules.get(other) is part for other, part in model._modules.items()
                    if other != name)
            and all(getattr(model, key) == getattr(view, key) for key in model._fftune_plain))


def _serves(model: nn.Module, head, options: dict) -> bool:
    """Whether this call trains, and nobody but the loss has to see the logits."""
    return (model.training and torch.is_grad_enabled() and options.get("labels") is not None
            and options.get("return_dict") is not False and model.config.return_dict
            and type(head) is nn.Linear and are_plain(head.weight, head.bias)
            and has_kernels(head.weight) and _is_fast(head) and not watched(head)
            # In float16 hidden states times a small number lose digits.
            and not (model._fftune_scaled and _dtype_of(head) == torch.float16)
            and (torch.compiler.is_compiling() or _is_transformers_loss(model)))


def _with_logits(outputs, head: nn.Linear):
    hidden = outputs.logits
    values = {name: value for name, value in outputs.items() if name != "logits"}
    if torch.compiler.is_compiling():
        return type(outputs)(**values)
    made = _lazy(type(outputs))(**values)
    device = hidden.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    weights = head.weight, head.bias  # a functional_call takes them away again
    object.__setattr__(made, "_fftune_hidden", (hidden, weights, cast, _states_of(weights)))
    _made[id(made.loss)] = made
    return made


def _states_of(weights: tuple) -> list:
    """Differs where one of the weights was changed in place, or got other memory."""
    return [(address_of(w), None if w.is_inference() else w._version) for w in weights if w is not None]


# Outputs by their loss: whoever makes new ones of their items, as accelerate does, keeps the logits.
_made: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


@functools.cache
def _lazy(kind: type) -> type:
    """That kind of outputs, whose logits are computed when they are read. They are none of the keys, as
    a value of None is none, so that whoever passes the outputs on does not compute them."""

    def post_init(self):
        kind.__post_init__(self)
        other = _made.get(id(self.loss)) if self.__dict__.get("_fftune_logits") is None else None
        if other is not None and other.loss is self.loss:
            object.__setattr__(self, "_fftune_hidden", other.__dict__["_fftune_hidden"])

    def logits(self):
        if self.__dict__.get("_fftune_logits") is None and "_fftune_hidden" in self.__dict__:
            hidden, weights, cast, states = self.__dict__["_fftune_hidden"]
            if _states_of(weights) != states:
                raise Error("logits: the weights of the head have changed since this call: read logits "
                            "before the optimizer's step, or call patch(model, loss=False)")
            with torch.autocast(hidden.device.type, dtype=cast, enabled=cast is not None):
                object.__setattr__(self, "_fftune_logits", nn.functional.linear(hidden, *weights))
        return self.__dict__.get("_fftune_logits")

    def put(self, value):
        object.__setattr__(self, "_fftune_logits", value)
        if value is not None and len(self):  # behind __init__; transformers 4 does it for its keys alone
            OrderedDict.__setitem__(self, "logits", value)

    def plain(self):
        return kind(**{**dict(self.items()), "logits": self.logits})

    def getitem(self, key):
        if key == "logits":
            return self.logits
        if key == 0 and self.loss is not None:
            return self.loss
        return kind.__getitem__(self, key) if isinstance(key, str) else plain(self).to_tuple()[key]

    made = type(kind.__name__, (kind,), {
        "__module__": kind.__module__, "__doc__": kind.__doc__, "__getitem__": getitem,
        "__reduce__": lambda self: plain(self).__reduce__(),
        "__post_init__": post_init, "to_tuple": lambda self: plain(self).to_tuple(),
        "get": lambda self, key, default=None: self[key] if key in self or key == "logits" else default,
        "logits": property(logits, put)})

    def of_items(values, context):
        keys, held = context
        other = made(**dict(zip(keys, values)))
        other.__dict__.update(held.values)
        return other

    pytree.SUPPORTED_NODES.pop(made, None)  # what transformers makes of a subclass
    pytree.register_pytree_node(
        made, lambda self: (list(self.values()), (list(self.keys()), _Held(self))), of_items)
    return made


class _Held:
    """The logits of outputs as PyTorch takes these apart and makes new ones of their items: under
    DistributedDataParallel, say, where the loss is another one. All of them are equal."""

    def __init__(self, outputs):
        self.values = {name: value for name, value in vars(outputs).items()
                       if name.startswith("_fftune_")}

    def __eq__(self, other) -> bool:
        return isinstance(other, _Held)

    __hash__ = None
