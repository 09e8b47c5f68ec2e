"""Lines in vLLM's log, and the reasons that they give. Only loggers below "vllm" have a handler."""
import functools


def log(message: str) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.fftune").info("fftune: %s", message)


@functools.cache
def log_once(message: str) -> None:
    log(message)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class Unfit(Exception):
    """Why a model, or a layer of it, stays vLLM's."""


def reason_of(error: Exception) -> str:
    """Its words; another error than Unfit is another vLLM than the one that is known."""
    return str(error) if isinstance(error, Unfit) else one_line(error)
