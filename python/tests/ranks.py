"""Processes of a test, one for each rank."""
import os
import sys

import torch.multiprocessing as mp


def start(work, ranks: int, *arguments) -> None:
    """Runs work(rank, *arguments) in a process for each rank; raises what one raises."""
    mp.start_processes(_run, (work, *arguments), nprocs=ranks, start_method="spawn")


def _run(rank: int, work, *arguments) -> None:
    work(rank, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python does not end in the usual way: a thread of gloo that then drops a tensor aborts the process
    # (github.com/pytorch/pytorch/pull/179291).
    os._exit(0)
