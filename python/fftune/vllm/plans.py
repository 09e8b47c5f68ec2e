"""Plans for batches of many tokens, whose numbers are ever new: one plan for any number of them, made beside
the engine, because kernels take seconds to compile."""
import threading

from .. import _run as running
from .._run import BATCH_INVARIANT
from .deployment import current

# Whether vLLM runs batches with prompts until the kernels of their sizes are compiled. With batch
# invariance it runs none.
COMPILES_BESIDE = not BATCH_INVARIANT
# The most tokens of vLLM's graphs, whose plans its warm-up makes.
EXACT = 512
_making = threading.Lock()
_begun: set[tuple] = set()  # problems that a thread has begun with


def serve_any_rows(device: int, problem: dict, most: int) -> None:
    """Has problems like this one share a plan above EXACT rows, up to `most`; once for each."""
    with _making:
        running.serve_any_rows(device, problem, EXACT, most)


def are_ready(problems: list[tuple[int, dict]], most: int) -> bool:
    """Whether the problems have such plans. If not, a thread begins to make them. It waits for a batch of
    requests: while vLLM captures its graphs, no other thread may load kernels."""
    left = [problem for problem in problems if not running.is_served(*problem)]
    if not left or not _has_requests():
        return True
    keys = {running.key_of(device, problem) for device, problem in left}
    if not keys <= _begun:
        _begun.update(keys)
        thread = threading.Thread(target=lambda: [serve_any_rows(*problem, most) for problem in left], daemon=True)
        thread.start()
        if not COMPILES_BESIDE:
            thread.join()
    return not COMPILES_BESIDE


def most_rows() -> int:
    """The most tokens of a batch of the engine whose model is loaded; 0 if that is not known."""
    config = current()
    return 0 if config is None else config.scheduler_config.max_num_batched_tokens


def prepare(rows: int, problems: list[tuple[int, dict]], most: int) -> None:
    """Begins with plans for any number of rows in the first batch that has more than EXACT."""
    if EXACT < rows <= most:
        are_ready(problems, most)


def _has_requests() -> bool:
    """Whether this call of a model is for requests, not vLLM's profile run."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return is_forward_context_available() and get_forward_context().attn_metadata is not None
