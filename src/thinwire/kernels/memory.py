"""Memory for results, in huge pages if it is large; numbers on their way to a device, and tensors kept there."""

import struct
from collections.abc import Callable
from functools import lru_cache, update_wrapper
from typing import Any, Generic, ParamSpec, final

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.replay import recording

P = ParamSpec("P")
_LARGE = 1 << 22
_CACHE_LINE = 64


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor (numel). A large one in main memory begins at a multiple of 64 bytes.

    From 4 MiB on, NumPy asks the system for huge pages, and torch does not. That matters: in small pages, the first
    write to 127 MB takes several times as long as the second one.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < _LARGE:
        return torch.empty(numel, dtype=dtype, device=device)
    room = torch.from_numpy(np.empty(nbytes + _CACHE_LINE, np.uint8))
    start = -room.data_ptr() % _CACHE_LINE
    return room[start : start + nbytes].view(dtype)


@final
class kept(Generic[P]):  # noqa: N801 - a decorator
    """Have a function compute a tensor once, as long as it is among the last 1,024. Nobody may write to it.

    Streams of a GPU share it: each waits, once, until it is there, and its memory is not reused before each has
    finished with it.
    """

    def __init__(self, make: Callable[P, Tensor]) -> None:
        self._make: Any = lru_cache(maxsize=1024)(lambda *args, **kwargs: _Shared(make(*args, **kwargs)))
        self.cache_clear = self._make.cache_clear
        update_wrapper(self, make)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """Return the tensor."""
        found: _Shared = self._make(*args, **kwargs)
        recorder = recording()
        if recorder is not None:
            recorder.keep(found.x)
        there = found.ready is None or (recorder is not None and recorder.capturing)  # it was there in the rehearsal
        return found.x if there else found.here()


class _Shared:
    """A tensor, the event after which it is there if it lies on a GPU, and which streams know that it is."""

    def __init__(self, x: Tensor) -> None:
        recorder = recording()
        if recorder is not None and recorder.capturing:  # it would be made anew in every replay, and only then
            recorder.refuse()
        self.x, self._streams = x, set[int]()
        self.ready: Any = torch.cuda.current_stream(x.get_device()).record_event() if x.is_cuda else None

    def here(self) -> Tensor:
        """Return it for the current stream."""
        stream = torch.cuda.current_stream(self.x.get_device())
        if stream.cuda_stream not in self._streams:
            stream.wait_event(self.ready)
            self.x.record_stream(stream)
            self._streams.add(stream.cuda_stream)  # last: another thread may queue to this stream
        return self.x


@kept
def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on a device, kept because layouts stay the same."""
    if not numbers:
        return torch.empty(0, dtype=dtype, device=device)
    wide, code = (torch.float64, "d") if dtype.is_floating_point else (torch.int64, "q")
    packed = bytearray(struct.pack(f"={len(numbers)}{code}", *numbers))
    return sent(torch.frombuffer(packed, dtype=wide).to(dtype), device)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor in main memory on a device. The host does not wait, as the copy leaves from pinned memory."""
    return sent_anew(lambda: x, device)


def sent_anew(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Do the same with what `make` returns. Where the work is captured, it is made and sent again at every replay."""
    recorder = recording()
    return _sent(make(), device) if recorder is None else recorder.send(make, _sent, device)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return x
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")
    return pinned.copy_(x).to(device, non_blocking=True)
