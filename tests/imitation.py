"""An imitation of CUDA graphs, for tensors in main memory: what work does is listed, and done again on the same memory.

As with a graph, numbers that the host had are those of the capture, and what a replay computes lies where the capture's
results lay. Graphs of a lane share memory: a replay overwrites what others have computed. So a step that depends on
more than `kernels.replay` knows of comes out wrong here, too.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from thinwire.kernels import dispatch, replay
from thinwire.kernels.replay import Recording
from thinwire_lab.check.gpu.counting import patched

_LAUNCHED: list[Callable[..., None]] = []


class Imitation:
    """A lane of the host's own."""

    pinned = False
    replays = 0
    """How often anything was replayed."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.followed, self._listed = nullcontext, weakref.WeakSet[_Listed]()

    def taken(self, *, alone: bool = False) -> Any:
        """Return a context that does nothing."""
        return nullcontext()

    def captured(self, work: Callable[[], Any]) -> "_Listed":
        """Do work, and list what it does."""
        return _Listed(work, self._listed)


class _Listed:
    def __init__(self, work: Callable[[], Any], lane: "weakref.WeakSet[_Listed]") -> None:
        self._calls: list[Callable[[], None]] = []
        self._made: list[Tensor] = []
        self._lane = lane
        lane.add(self)
        self._over = True  # unlike a capture, listing does what is listed
        _LAUNCHED.append(lambda run: self._calls.append(run))
        try:
            with _Lister(self._calls, self._made):
                self.result = work()
        finally:
            _LAUNCHED.pop()

    @staticmethod
    def wait() -> None:
        """Wait for nothing."""

    def replay(self) -> None:
        """Do it again."""
        Imitation.replays += 1
        for x in [x for other in self._lane if other is not self for x in other._made]:
            torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).fill_(255)
        for call in [] if self._over else self._calls:
            call()
        self._over = False


class _Lister(TorchDispatchMode):
    def __init__(self, calls: list[Callable[[], None]], own: list[Tensor]) -> None:
        super().__init__()
        self._calls, self._own = calls, own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        made = [x.untyped_storage()._cdata not in given for x in found]
        self._own += [x for x, own in zip(found, made, strict=True) if own]

        def again() -> None:
            now = func(*args, **(kwargs or {}))
            tensors = ([x for x in tree_leaves(found) if isinstance(x, Tensor)] for found in (out, now))
            for old, new, own in zip(*tensors, made, strict=True):
                if own:
                    old.copy_(new)

        if not func.is_view:
            self._calls.append(again)
        return out


@contextmanager
def imitating() -> Iterator[None]:
    """Capture work on tensors in main memory, which take a GPU's path."""
    send = Recording.send
    dispatch.triton_is_there()
    launch = import_module("thinwire.kernels.triton").launch

    def launched(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        def run() -> None:
            with _disable_current_modes():
                launch(kernel, programs, *args, **constants)

        run()
        if _LAUNCHED:
            _LAUNCHED[-1](run)

    def sent(self: Recording, *args: Any) -> Tensor:
        with _disable_current_modes():  # the host does this, and no graph does it again
            return send(self, *args)

    modules = [m for n, m in sys.modules.items() if n.startswith("thinwire.kernels.") and n.endswith(".triton")]
    launches = [(module, "launch", launched) for module in modules if hasattr(module, "launch")]
    replay._lane.cache_clear()
    with patched((replay, "LANES", {"cpu": Imitation}), (Recording, "send", sent), *launches):
        yield
    replay._lane.cache_clear()
