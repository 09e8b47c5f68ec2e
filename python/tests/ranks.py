"""Processes of a test, one for each rank."""
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import sys
import traceback

import torch.distributed
import torch.multiprocessing as mp

SECONDS = 400  # of a work, behind which its ranks print where they are and end
# A rank is forked from a process that has imported these, and has run nothing: to import them takes seconds.
START = "forkserver"
multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed", "transformers", "fftune"])


def start(work, ranks: int, *arguments) -> None:
    """Runs work(rank, *arguments) in a process for each rank; raises what one raises. A work keeps its
    process group: to drop one of gloo holds Python's lock while it waits for a thread that may need it."""
    mp.start_processes(_run, (work, *arguments), nprocs=ranks, start_method=START)


def _run(rank: int, work, *arguments) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.distributed.destroy_process_group = None
    work(rank, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python does not end in the usual way: a thread of gloo that then drops a tensor aborts the process
    # (github.com/pytorch/pytorch/pull/179291).
    os._exit(0)


class Team:
    """Processes that stay for several works, because importing torch and opening a GPU takes seconds. A work
    leaves nothing behind in its process; those that end a rank use start()."""

    def __init__(self, ranks: int):
        self._ranks, self._processes, self._pipes = ranks, [], []

    def run(self, work, *arguments) -> None:
        """Runs work(rank, *arguments) on each rank; raises if one raises or ends."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((work, arguments))
        waiting = dict(enumerate(self._pipes))
        failures = []
        while waiting and not failures:
            ready = multiprocessing.connection.wait(list(waiting.values()))
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answer = waiting.pop(rank).recv()
                except EOFError:
                    answer = "its process ended"
                if answer:
                    failures.append(f"rank {rank}: {answer}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self._ranks):
            own, theirs = spawn.Pipe()
            self._processes.append(spawn.Process(target=_serve, args=(rank, theirs), daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(own)


def _serve(rank: int, pipe) -> None:
    while True:
        work, arguments = pipe.recv()
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        answer = ""
        try:
            work(rank, *arguments)
        except BaseException:
            answer = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
