"""What follows a collective of a GPU, queued at once to a stream of its own.

Why not torch's `then`? NCCL's futures are done for the host as soon as the collective is queued, so what follows is
called at once there, too, but on the next of 32 streams, whose memory no other reuses; and torch pickles what it
returns, to find its tensors. Both cost more than what follows.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast, final

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.kernels.streams import follow, stream_of, within
from thinwire.waits import noted_in

T = TypeVar("T")


@final
class Queued(Generic[T]):
    """A future whose work a GPU's stream has: it is done for the host. Whoever hands in work names what it reads.

    Args:
        stream: Where the work goes.
        work: What to do now. It returns the value, or raises what waiting raises.
    """

    def __init__(self, stream: Any, work: Callable[[], T]) -> None:
        self._stream, self._error = stream, cast("Exception | None", None)
        with within(stream):
            try:
                self._value = work()
            except Exception as error:
                self._error = error

    def done(self) -> bool:
        """Return True."""
        return True

    def value(self) -> T:
        """Return the value, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self) -> T:
        """Have the current stream wait, and return the value, or raise the error."""
        follow(torch.cuda.current_stream(self._stream.device_index), self._stream)
        return self.value()

    def then(self, work: "Callable[[Queued[T]], Any]") -> "Queued[Any]":
        """Do what follows, now."""
        return Queued(self._stream, lambda: work(self))

    def add_done_callback(self, work: "Callable[[Queued[T]], None]") -> None:
        """Call `work`, now."""
        with within(self._stream):
            work(self)

    def of_torch(self) -> "Future[T]":
        """Return it as torch's."""
        if self._error is not None:  # torch's own `set_exception` is nothing that C++ knows of
            failed: Future[None] = Future()
            failed.set_result(None)
            return failed.then(lambda _: self.value())
        future: Future[T] = Future(devices=[self._stream.device])
        with within(self._stream):
            future.set_result(self._value)
        return future


def queued(future: "Future[T]", x: Tensor) -> "Future[T]":
    """Return the future of a bucket's collective of `x`, as `Queued` if it is done for the host and `x` on a GPU.

    What the communication thread starts, it waits for in its own stream.
    """
    if not x.is_cuda or noted_in() is None or not future.done():
        return future
    stream = stream_of(x.device, "decode")
    follow(stream, torch.cuda.current_stream(x.get_device()))  # some groups' futures wait for no stream
    return cast("Future[T]", Queued(stream, future.wait))


def of_torch(future: "Future[T]") -> "Future[T]":
    """Return a future that is torch's own: DDP takes no other."""
    return future.of_torch() if isinstance(future, Queued) else future
