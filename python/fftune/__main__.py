"""The tool: `fftune ...` or `python -m fftune ...`."""
import os
import sys

from ._library import Error, nvrtc_folders, tool_path


def tool_environment() -> dict[str, str]:
    """This environment, in which the tool finds NVRTC and cuBLASLt in PyTorch's packages after the
    folders that are searched already."""
    environment = dict(os.environ)
    folders = [environment.get("LD_LIBRARY_PATH", ""), *map(str, nvrtc_folders())]
    if path := ":".join(filter(None, folders)):
        environment["LD_LIBRARY_PATH"] = path
    return environment


def main() -> None:
    tool = tool_path()
    try:
        os.execve(tool, ["fftune", *sys.argv[1:]], tool_environment())
    except OSError as error:
        raise SystemExit(f"fftune: cannot run {tool}: {error.strerror}: install the wheel again, "
                         "or set FFTUNE_TOOL") from Error(str(error))


if __name__ == "__main__":
    main()
