"""Custom ops that follow from the registry's description of an op.

A declaration adds to the description what is PyTorch's own: the order of the arguments, and what a
call may leave out.

    declare("linear", "linear", "x, w, bias?, residual?", "y", casts=True, by_row=True)

From both follow the checks, the problem of a call, and the schema, the kernel and the fake kernel, which
the build writes to `_generated_ops.py`.

An argument is `name=library:kind?!`: `library` is the buffer's or field's name where it differs, or
several with | between them; `kind` an element type that is cast or checked otherwise (KINDS), or the
type of a value in the schema; `?` may be None; `!` is written. A result is `name=library:like?given`:
`like` is an argument whose shape and type it has; `given` is the argument without which it is empty.
"""
import functools
import inspect
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from . import _generated_ops
from ._custom import OPS, call, define, fake, gradient as differentiate, is_disabled
from ._derived_form import DerivedForm
from ._description import Description, arguments_of, results_of
from ._library import Error
from ._run import find, finish, problem_of, ready


def declare(name: str, of: str, arguments: str, results: str, *, back: bool = False,
            label: str = "", fixed: Mapping[str, str] = {}, check: Callable | None = None,
            fill: Callable | None = None, sizes: Mapping[str, Callable] = {},
            prepare: Mapping[str, Callable] = {}, lays: Mapping[str, tuple] = {},
            words: Mapping[str, dict] = {}, loose: Sequence[str] = (),
            shapes: Mapping[str, str] = {}, names: Mapping[str, str] = {},
            keeps: Sequence[str] = (), returns: str = "", kernel: Callable | None = None,
            gradient: str = "", by_row: bool = False, **rules) -> DerivedForm:
    """Declares torch.ops.fftune.<name>, a form of the library's op `of`, which errors call `label`.

    `check(**arguments)` raises Error for what does not go together in Python's words. `fill(fields,
    **arguments)` changes options and sizes by the library's names. `sizes` has functions of sizes
    that are no extent. `prepare` has functions (tensor, ...) of arguments that the library takes in
    another form. `lays` has functions that return a tensor and its strides, with the strides' names,
    of tensors whose strides the library takes. Parameters of these functions are the arguments of
    the same name; x_, x_0 and x_1 are the results of x's function before. `words` has the
    library's words for the values of arguments. The options `loose` count only where their buffers
    are given. `shapes` and `names` are those of `arguments_of`. A list is returned, without the
    results that are not there, if `returns` is "Tensor[]". `kernel(form, *arguments)` runs the op
    where that does not follow: the library's other buffers have a "-" in front of their names.
    `gradient` is the op that computes it: its arguments are results' gradients (dy of y),
    arguments, and results, by name; its results are the gradients of arguments. `by_row`: all
    results have the leading dimensions of the tensors that begin with the tokens. The other rules
    are those of `_custom.define`. Returns what `run_into` takes.
    """
    # Tensors have their own extents, whatever strides the library takes of them.
    strides = dict.fromkeys([stride for _, names in lays.values() for stride in names], "")
    about = Description.of(of, back, tuple({**strides, **fixed}.items()), arguments)
    label = label or of
    every = arguments_of(arguments, about, shapes, names)
    form = DerivedForm(label, about, every, results_of(results, every), returns, check=check, fill=fill,
                       words=words, loose=loose, lays=lays, prepare=prepare, sizes=sizes, kernel=kernel)
    FORMS[name] = form
    fake_kernel = getattr(_generated_ops, f"{name}_fake")

    def fake_call(*arguments):
        if check and not is_disabled() and not any(map(_is_symbolic, arguments)):
            check(**{a.name: value for a, value in zip(form.declared, arguments)})
        return fake_kernel(form, *arguments)

    define(fake_kernel.schema, label, {a.name: a.kind for a in form.declared if a.kind},
           keeps=tuple(i for i, a in enumerate(form.declared) if a.name in keeps),
           rows=tuple(i for i, a in enumerate(form.declared) if by_row and a.leads),
           **rules)(functools.partial(kernel or getattr(_generated_ops, name), form))
    fake(name)(fake_call)
    if gradient:
        _differentiate(name, form, gradient)
    return form


FORMS: dict[str, DerivedForm] = {}  # of all ops that are declared
FROZEN = {"frozen": "yes"}  # the form of a backward pass that leaves out gradients of weights


def _differentiate(name: str, form: DerivedForm, backward: str) -> None:
    """Gives an op its gradient by another, which is declared later; or, where it gives all that are
    wanted, by the one of weights that are frozen. The places are those of the arguments and results
    in one row. Where x and a residual are added first, the backward op's x is their sum, and dx the
    gradient of both."""
    names = [a.name for a in form.arguments] + [r.name for r in form.results]
    count = len(form.arguments)
    adds = {"residual", "sum"} <= set(names)

    frozen = backward.replace("_backward", "_frozen_backward")

    @functools.cache
    def sources(backward: str) -> tuple:
        """For each argument of the backward op the place of the gradient, and of the value; the
        results that have no gradient; for each argument its gradient's place among the results."""
        back = FORMS[backward]
        of = {f"d{line}{n}": i for i, n in enumerate(names[count:]) for line in ("", "_")}
        places = {n: i for i, n in enumerate(names)}
        if adds:
            places["x"] = places["sum"]
        given = [(of.get(a.name), None if a.name in of else places.get(a.name))
                 for a in back.arguments]
        others = [count + k for k in range(len(form.results)) if k not in {g for g, _ in given}]
        made = {r.name: k for k, r in enumerate(back.results)}
        if adds:
            made["dresidual"] = made["dx"]
        return given, others, [made.get(f"d{n}", made.get(f"d_{n}")) for n in names[:count]]

    def setup(ctx, inputs, output):
        given, others, _ = sources(backward)
        row = *inputs, *(output if isinstance(output, tuple) else (output,))
        if others:
            ctx.mark_non_differentiable(*[row[i] for i in others])
        if adds or len(form.results) == len(others) + 1:
            ctx.set_materialize_grads(False)
        values = [None if i is None else row[i] for _, i in given]
        ctx.options = [None if isinstance(v, Tensor) else v for v in values]
        ctx.save_for_backward(*[v if isinstance(v, Tensor) else None for v in values])

    @differentiate(name, setup)
    def _(ctx, *gradients):
        given, _, made = sources(backward)
        if gradients[0] is None:  # none is where there are several to compute with
            return tuple(gradients[1] if adds and n in ("x", "residual") else None
                         for n in names[:count])
        values = {(g, v): gradients[g] if g is not None else option if saved is None else saved
                  for (g, v), option, saved in zip(given, ctx.options, ctx.saved_tensors)}
        name = backward
        if frozen in FORMS:
            of_frozen, _, made_frozen = sources(frozen)
            if not any(need and k is not None and made_frozen[i] is None
                       for i, (need, k) in enumerate(zip(ctx.needs_input_grad, made))):
                name, given, made = frozen, of_frozen, made_frozen
        results = call(getattr(OPS, name), *[values[key] for key in given])
        results = results if isinstance(results, tuple) else (results,)
        # A tensor that was left out has none, though the op gives an empty one.
        return tuple(results[k] if need and k is not None else None
                     for need, k in zip(ctx.needs_input_grad, made))


def _is_symbolic(argument) -> bool:
    """Whether a check of it would make a constant of a size."""
    sizes = argument.shape if isinstance(argument, Tensor) else (argument,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


class Into:
    """A run of the declared op `name` into results that are given, in two halves: plan() makes its plan, and
    run() enqueues it. For callers that compute with several ops in place: once all plans are there, no other
    part of a run fails. It is no custom op: for callers that torch.compile does not trace.

    `arguments` are those of torch.ops.fftune.<name>; tensors that are written have to be laid out as the kernels
    take them. `outputs` are all results, contiguous.
    """

    def __init__(self, name: str, arguments: Sequence, outputs: Sequence[Tensor]):
        self.form, self.outputs = FORMS[name], outputs
        self._found: tuple | None = None
        self._reference: Callable | None = None
        if is_disabled():
            self._reference = functools.partial(call, getattr(OPS, name), *arguments)
            return
        given = {a.name: value for a, value in zip(self.form.declared, arguments, strict=True)}
        laid, strides = dict(given), []
        for a in self.form.declared:
            if a.name in self.form.lays or not isinstance(given[a.name], Tensor):
                continue
            if a.name in self.form.prepare:
                prepare = self.form.prepare[a.name]
                laid[a.name] = prepare(given[a.name], *(given[n] for n in _further_parameters(prepare)))
            laid[a.name] = ready(laid[a.name])
        values = dict(given)
        for n, (function, _) in self.form.lays.items():
            laid[n], *own = function(given[n], *(values[parameter] for parameter in _further_parameters(function)))
            values |= {f"{n}_": laid[n], **{f"{n}_{k}": stride for k, stride in enumerate(own)}}
            strides += own
        for a in self.form.declared:
            if a.written and laid[a.name] is not given[a.name]:
                raise Error(f"{self.form.label}: {a.name} is written in place: give it as the kernels take it")
        order = [laid[a.name] for a in self.form.arguments]
        fields = tuple(order[i] for i in self.form.fields)
        self._options = ((*fields, *strides), tuple(range(len(outputs))))
        self._inputs = tuple(order[i] for i in self.form.places)

    def problem(self) -> tuple[int, dict] | None:
        """The device and the problem; None for a reference in PyTorch."""
        if self._reference is not None:
            return None
        return self.outputs[0].get_device(), problem_of(self.form, self._options, self._inputs)

    def plan(self) -> None:
        if self._reference is None:
            self._found = find(self.form, self._options, self._inputs)

    @property
    def workspace_bytes(self) -> int:
        """Memory that run() allocates, once there is a plan."""
        return 0 if self._found is None else getattr(self._found[0], "workspace_bytes", 0)

    def run(self) -> None:
        if self._reference is not None:
            results = self._reference()
            for output, result in zip(self.outputs, results if isinstance(results, tuple) else (results,)):
                output.copy_(result)
            return
        finish(self._found, self.outputs)


@functools.cache
def _further_parameters(function: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


def run_into(form: DerivedForm, arguments: Sequence, outputs: Sequence[Tensor]) -> None:
    """Runs a declared op with the declaration's arguments, prepared, and with all its results given."""
    finish(find(form, (tuple(arguments[i] for i in form.fields), tuple(range(len(outputs)))),
                tuple(arguments[i] for i in form.places)), outputs)
