"""Ranks as processes on Gloo, started once and used by every test that needs a group."""

import multiprocessing
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LOT = 5
TIMEOUT = 120.0


class RankError(AssertionError):
    """A rank failed; the message is its traceback."""


class Ranks:
    """Runs a function on each of `world_size` ranks and returns their results in order."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: object) -> list[Any]:
        """Call `function(*args)` with a default process group in place; raise RankError if a rank raises."""
        self._start(world_size)
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self._pipes[:world_size]):
                pipe.send((str(Path(folder) / "store"), rank, world_size, function, args))
            return self._collect(self._pipes[:world_size])

    def stop(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self, count: int) -> None:
        """Have at least `count` ranks; they come in lots, as each takes seconds to start."""
        context = multiprocessing.get_context("spawn")
        for _ in range(len(self._processes), count if count > LOT else LOT):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def _collect(self, pipes: list[Connection]) -> list[Any]:
        results: dict[Connection, Any] = {}
        while len(results) < len(pipes):
            ready = wait([pipe for pipe in pipes if pipe not in results], TIMEOUT)
            failed = not ready
            for pipe in ready:
                assert isinstance(pipe, Connection)
                ok, results[pipe] = pickle.loads(pipe.recv_bytes())
                failed |= not ok
            if failed:
                self.stop()  # the others may hang in a collective
                raise RankError("\n".join(str(r) for r in results.values()) or f"no answer within {TIMEOUT:g} s")
        return [results[pipe] for pipe in pipes]


def told(function: Callable[..., Any], *args: object) -> str:
    """Return what `function(*args)` raises, in words: to be run where all ranks raise, so that none need be ended."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        store, rank, world_size, function, args = pipe.recv()
        try:
            files = dist.FileStore(store, world_size)  # type: ignore[attr-defined]  # torch's stubs do not export it
            dist.init_process_group(
                "gloo", store=files, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
            )
            result = function(*args)
            dist.destroy_process_group()
            pipe.send_bytes(pickle.dumps((True, result)))  # tensors by value, not by file descriptor
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, f"rank {rank}: {traceback.format_exc()}")))
