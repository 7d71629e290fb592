"""Ranks as processes on Gloo, started once and used by every test that needs a group."""

import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thinwire.collectives import thread

LOT = 5
PATIENCE, GLANCE = 120.0, 1.0  # seconds that ranks may idle before they count as stuck; between two looks at them
CROWDED = 150  # threads: those of groups that something still refers to slow every later test down
_MESHES: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}


class RankError(AssertionError):
    """A rank failed; the message is its traceback."""


def prepare(modules: Iterable[str] = ()) -> None:
    """Start the process that ranks are forked from, unless it runs. It imports what each would import for itself."""
    multiprocessing.set_forkserver_preload(["preloaded"])
    told = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PRELOADED": " ".join(modules)}
    with patch.dict(os.environ, told):  # it looks nowhere else, and forgives what it does not find
        forkserver.ensure_running()


class Ranks:
    """Runs a function on each of `world_size` ranks and returns their results in order.

    Joining takes as long as a short test, so ranks stay in their group while the next function wants as many of them.
    """

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._group: tuple[int, tempfile.TemporaryDirectory[str]] | None = None

    def run(self, world_size: int, function: Callable[..., Any], *args: object) -> list[Any]:
        """Call `function(*args)` with a default process group in place; raise RankError if a rank raises."""
        self._start(world_size)
        store = self._store(world_size)
        for rank, pipe in enumerate(self._pipes[:world_size]):
            pipe.send(((store, rank, world_size), function, args))
        results, traces, threads = zip(*self._collect(world_size), strict=True)
        if max(threads) > CROWDED:
            self.stop()
        elif not _agree(traces):
            self._leave()
        return list(results)

    def stop(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        self._leave()

    def _start(self, count: int) -> None:
        """Have at least `count` ranks; in lots, forked from a process that has imported what takes seconds."""
        if not all(process.is_alive() for process in self._processes):
            self.stop()  # somebody has ended one, as the system does where memory is short
        context = multiprocessing.get_context("forkserver")
        prepare()
        for _ in range(len(self._processes), count if count > LOT else LOT):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def _store(self, world_size: int) -> str:
        """Return the file by which a group of so many finds together: another one if they are to join anew."""
        if self._group is None or self._group[0] != world_size:
            self._leave()
            self._group = world_size, tempfile.TemporaryDirectory()
        return str(Path(self._group[1].name) / "store")

    def _leave(self) -> None:
        """Have the next function find a group of its own."""
        if self._group is not None:
            self._group[1].cleanup()
        self._group = None

    def _collect(self, world_size: int) -> list[Any]:
        pipes, results = self._pipes[:world_size], dict[Connection, Any]()
        while len(results) < len(pipes):
            ready = self._ready([pipe for pipe in pipes if pipe not in results], world_size)
            failed = not ready
            for pipe in ready:
                ok, results[pipe] = pickle.loads(pipe.recv_bytes())
                failed |= not ok
            if failed:
                self.stop()  # the others may hang in a collective
                raise RankError("\n".join(str(r) for r in results.values()) or f"ranks idled for {PATIENCE:g} s")
        return [results[pipe] for pipe in pipes]

    def _ready(self, pipes: list[Connection], world_size: int) -> list[Connection]:
        """Wait for answers and return who has some: nobody, if ranks have done nothing for long.

        What they compute, or wait for a core to compute, does not count, or a busy machine would fail them.
        """
        processes, idle = [process.pid for process in self._processes[:world_size]], 0.0
        busy = _busy(processes)
        while idle < PATIENCE:
            if ready := wait(pipes, GLANCE):
                return [pipe for pipe in ready if isinstance(pipe, Connection)]
            before, busy = busy, _busy(processes)
            idle += max(0.0, GLANCE - max(0.0, busy - before))
        return []


def _busy(processes: list[int]) -> float:
    """Return the seconds for which threads of processes have run or waited for a core, 0 if the kernel counts none."""
    nanoseconds = 0
    for process in processes:
        for task in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with suppress(OSError):  # the thread has just ended
                nanoseconds += sum(map(int, task.read_text().split()[:2]))
    return 1e-9 * nanoseconds


def told(function: Callable[..., Any], *args: object) -> str:
    """Return what `function(*args)` raises, in words: to be run where all ranks raise, so that none need be ended."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the library logs meanwhile."""
    said, listener, logger = list[str](), logging.Handler(), logging.getLogger("thinwire")
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(listener)
    yield said
    logger.removeHandler(listener)


def mesh_of(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of all ranks, the same one while they stay in their group.

    For each other one DTensor would work out anew how every operator is sharded, which takes longer than most tests.
    """
    found = _MESHES.get((shape, names))
    if found is None:
        found = _MESHES[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return found


def _serve(pipe: Connection) -> None:
    gc.freeze()  # what was imported is no garbage
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")  # see pyproject.toml
    joined = None
    while True:
        place, function, args = pipe.recv()
        try:
            if place != joined:
                _join(*place)
                joined = place
            result = function(*args)
            answer = result, _trace(), sum(1 for _ in Path("/proc/self/task").iterdir())
            pipe.send_bytes(pickle.dumps((True, answer)))  # tensors by value, not by file descriptor
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, f"rank {place[1]}: {traceback.format_exc()}")))


def _join(store: str, rank: int, world_size: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    _MESHES.clear()
    if "torch.distributed.tensor" in sys.modules:  # tests make meshes of their own, too
        # Imported here, as it imports Triton. It clears meshes whose groups are gone, and which equal later ones.
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    files = dist.FileStore(store, world_size)  # type: ignore[attr-defined]  # torch's stubs do not export it
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size, timeout=timedelta(seconds=PATIENCE))
    files.set(f"joined {rank}", "")  # who leaves at once would close connections that others still make
    files.wait([f"joined {each}" for each in range(world_size)])


def _trace() -> dict[str, int] | None:
    """Return how many collectives each group has seen, or None if there are groups that nobody will use again.

    The default group, those of `mesh_of`, and a communication thread's for each stay; they can be used again if these
    are the same numbers on all their ranks.
    """
    made = dist.distributed_c10d._world.pg_map
    stay = {dist.group.WORLD, *(group for mesh in _MESHES.values() for group in mesh.get_all_groups())} & set(made)
    if dist.group.WORLD not in stay or len(made) > len(stay) + sum(group in thread._open for group in stay):
        return None
    return {group.group_name: group._get_sequence_number_for_group() for group in stay}  # type: ignore[union-attr]


def _agree(traces: Sequence[dict[str, int] | None]) -> bool:
    counts: dict[str, int] = {}
    return all(
        trace is not None and all(counts.setdefault(group, count) == count for group, count in trace.items())
        for trace in traces
    )
