"""Counts what a step launches: torch's operators, our kernels and Triton's, by phase; and a group for one process."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire import trace, waits
from thinwire.kernels import Kernel, dispatch, memory
from thinwire.kernels.replay import recording

QUESTIONS = {"device", "promote_types", "scalar_tensor"}  # asked of fake tensors alone, or about numbers on the host
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "_unsafe_view"}


def fake_group(world: int) -> dist.ProcessGroup:
    """Return a group whose other ranks send what this one sends."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class _Count(TorchDispatchMode):
    """Counts what happens, phase by phase. Whoever ends a phase calls `took`, as a listener."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, Counter[str]] = {}
        self._now: Counter[str] = Counter()
        self._behind: dict[tuple[int, int], list[Tensor]] = {}
        self._tables: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in ALLOCATIONS | QUESTIONS:
            self._now["operators"] += 1
            self.moved((args, kwargs, out))
        return out

    def moved(self, given: Any) -> None:
        found = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        found += [y for x in found for y in self._behind.get(_place(x), ())]
        self._now["bytes"] += sum({id(x): x.nbytes for x in found}.values())

    def tabled(self, table: Tensor, columns: Sequence[Any]) -> None:
        """Note which tensors lie at the addresses in a column of a table."""
        self._tables.append(table)  # or another tensor could lie there
        self._behind |= {_place(table[i]): column.of for i, column in enumerate(columns) if hasattr(column, "of")}

    def add(self, name: str, amount: float | Tensor = 1) -> None:
        if name in ("kernels", "triton", "copies"):
            self._now[name] += int(amount)

    def took(self, name: str, start: float, end: float) -> None:
        self.phases.setdefault(name, Counter()).update(self._now)
        self._now.clear()

    def clear(self) -> None:
        self.phases.clear()
        self._now.clear()


@contextmanager
def counting() -> Iterator[_Count]:
    """Count operators, calls of our kernels, Triton's launches, and copies of the host's numbers, by phase."""
    plain, count, send = Kernel.__call__, _Count(), memory._sent

    def call(self: Kernel[..., Any], *args: Any, **kwargs: Any) -> Any:
        count.add("kernels")
        return plain(self, *args, **kwargs)

    def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        if programs:  # nothing runs on fake tensors
            count.add("triton")
            count.moved(args)

    def tabled(device: torch.device, columns: Callable[[], Sequence[Any]]) -> Tensor:
        found, recorder = plain_table(device, columns), recording()
        # Of work that is recorded, what changes with the step may be read here, as it is when it is sent.
        count.tabled(found, columns() if recorder is None else recorder.reading(columns)[0])
        return found

    def sent(x: Tensor, device: torch.device) -> Tensor:
        count.add("copies")
        return send(x, device)

    patches: list[tuple[Any, str, Any]] = [(Kernel, "__call__", call), (memory, "_sent", sent)]
    dispatch.triton_is_there()
    plain_table = import_module("thinwire.kernels.triton").table_of
    for module in [m for n, m in sys.modules.items() if n.startswith("thinwire.kernels.") and n.endswith(".triton")]:
        counted = (("launch", launch), ("table_of", tabled), ("addresses", _Addresses))
        patches += [(module, name, value) for name, value in counted if hasattr(module, name)]
    with patched(*patches), trace.listen(count), count:  # type: ignore[arg-type]  # any listener will do
        yield count


class _Addresses(list[int]):
    """As many zeros as tensors, which are kept."""

    def __init__(self, xs: Sequence[Tensor]) -> None:
        super().__init__([0] * len(xs))
        self.of = list(xs)


def _place(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage()._cdata, int(x.storage_offset())


@contextmanager
def gpu_path() -> Iterator[None]:
    """Have tensors in main memory take a GPU's path: the host must not look at them."""
    for kernel in [each for each in vars(sys.modules["thinwire.kernels"]).values() if isinstance(each, Kernel)]:
        _ = kernel.gpu  # imports what it needs
    with patched((waits, "HOST", frozenset()), (dispatch, "_GPUS", {"cpu", "cuda"}), (torch, "Generator", _Lots)):
        yield


def forget() -> None:
    """Empty caches, which may keep fake tensors. Other modules' caches note what must happen once in a process."""
    keep = ("thinwire.kernels.", "thinwire.payloads.", "thinwire.formats.")
    for module in [module for name, module in sys.modules.items() if name.startswith(keep)]:
        for held in vars(module).values():
            if hasattr(held, "cache_clear") and held.__module__.startswith(keep):
                held.cache_clear()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Lots(torch.Generator):
    """One for any device."""

    def __new__(cls, device: object = None) -> "_Lots":
        return super().__new__(cls)


@contextmanager
def patched(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes for a while: each (place, name, value)."""
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(mock.patch.object(*place))
        yield
