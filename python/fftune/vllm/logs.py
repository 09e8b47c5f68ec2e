"""Lines in vLLM's log. Only loggers below "vllm" have a handler."""
import functools


def log(message: str) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.fftune").info("fftune: %s", message)


@functools.cache
def log_once(message: str) -> None:
    log(message)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
