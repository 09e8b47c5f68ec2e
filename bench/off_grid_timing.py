"""How off_grid_peers.py and off_grid_states.py time the contenders of a problem."""
import torch

import contenders
from contenders import microseconds

TOLERANCE = 0.02  # of the largest relative difference between fftune's result and a peer's
ERROR_ROWS = 64


def tensors_in(group):
    return group.items() if isinstance(group, dict) else enumerate(group)


def copied(group):
    return {key: tensor.clone() for key, tensor in tensors_in(group)}


def restore(group, values):
    for key, tensor in tensors_in(group):
        tensor.copy_(values[key])


def synchronise():
    if contenders.DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(row, sets, calls, rows=ERROR_ROWS):
    """Times the contenders that run, and compares fftune's first rows with the first other's. Each
    begins with the same tensors, some of which are updated in place."""
    kept, results = {}, {}
    first = copied(sets[0])
    for name, call in calls.items():
        try:
            value = call(sets[0], 0)
            synchronise()
            results[name] = value[:rows].double()
            restore(sets[0], first)
            kept[name] = call
        except Exception as error:
            row.setdefault("left_out", {})[name] = str(error).splitlines()[0][:120] if str(error) else repr(error)
    not_captured = {}
    row["us"] = microseconds(kept, sets, not_captured)
    if not_captured:
        row["left_out"] = row.get("left_out", {}) | not_captured
        results = {name: value for name, value in results.items() if name not in not_captured}
    own, other = results.pop("fftune", None), next(iter(results.values()), None)
    if own is None:
        row["failed"] = "fftune: " + row["left_out"]["fftune"]
    elif other is not None:
        row["difference"] = float((own - other).norm() / other.norm())
        if not row["difference"] <= TOLERANCE:
            row["failed"] = f"its result differs from the peer's by {row['difference']:.1e}"


def planned(library, problem, tensors_of):
    """A call of the problem's plan: tensors_of(set, index) are its buffers, the last one the result."""
    plan = library.plan(problem)
    space = library.workspace(plan)

    def call(s, i):
        tensors = tensors_of(s, i)
        library.run(plan, tensors, space)
        return tensors[-1]

    return plan, call
