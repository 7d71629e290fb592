"""What follows a collective of a GPU, queued at once to a stream of its own.

Why not torch's `then`? NCCL's futures are done for the host as soon as the collective is queued, so what follows is
called at once there, too, but on the next of 32 streams, whose memory no other reuses; and torch pickles what it
returns, to find its tensors. Both cost more than what follows.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast, final

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.kernels.streams import follow, stream_of, within
from thinwire.waits import noted_in

T = TypeVar("T")


@final
class Queued(Generic[T]):
    """A future whose work a GPU's stream gets: then it is done for the host. Whoever hands in work names what it reads.

    Args:
        stream: Where the work goes.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self._error = stream, cast("Exception | None", None)
        self._there: Future[None] = Future()  # tells the host, and holds no tensor

    def run(self, work: Callable[[], T]) -> "Queued[T]":
        """Do the work now, once. It returns the value, or raises what waiting raises."""
        with within(self.stream):
            try:
                self._value = work()
            except Exception as error:
                self._error = error
        self._there.set_result(None)
        return self

    def done(self) -> bool:
        """Whether the stream has the work."""
        return self._there.done()

    def value(self) -> T:
        """Return the value, or raise the error, once the stream has the work."""
        self._there.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self) -> T:
        """Have the current stream wait, and return the value, or raise the error."""
        self._there.wait()
        follow(torch.cuda.current_stream(self.stream.device_index), self.stream)
        return self.value()

    def then(self, work: "Callable[[Queued[T]], Any]") -> "Queued[Any]":
        """Do what follows, in the same stream: now, or by whoever does the work."""
        after = Queued[Any](self.stream)
        self._there.add_done_callback(lambda _: cast(None, after.run(lambda: work(self))))
        return after

    def add_done_callback(self, work: "Callable[[Queued[T]], None]") -> None:
        """Call `work` in the stream: now, or by whoever does the work."""
        self.then(work)

    def of_torch(self) -> "Future[T]":
        """Return it as torch's."""
        future: Future[Any] = Future(devices=[self.stream.device])
        if self.done() and self._error is None:
            with within(self.stream):
                future.set_result(self._value)
            return future
        self._there.add_done_callback(lambda _: future.set_result(None))
        return future.then(lambda _: self.wait())  # torch's own `set_exception` is nothing that C++ knows of


def queued(future: "Future[T]", x: Tensor) -> "Future[T]":
    """Return the future of a bucket's collective of `x`, as `Queued` if it is done for the host and `x` on a GPU.

    What the communication thread starts, it waits for in its own stream.
    """
    if not x.is_cuda or noted_in() is None or not future.done():
        return future
    stream = stream_of(x.device, "decode")
    follow(stream, torch.cuda.current_stream(x.get_device()))  # some groups' futures wait for no stream
    return cast("Future[T]", Queued[T](stream).run(future.wait))


def of_torch(future: "Future[T]") -> "Future[T]":
    """Return a future that is torch's own: DDP takes no other."""
    return future.of_torch() if isinstance(future, Queued) else future


def promised(futures: "Sequence[Future[Any]]", device: torch.device) -> "Future[Any]":
    """Return a future for what comes of several, to be fulfilled: `Queued` if all of them are."""
    if {*map(type, futures)} == {Queued}:
        return cast("Future[Any]", Queued(futures[0].stream))  # type: ignore[attr-defined]  # they are
    return Future(devices=[device] if device.type == "cuda" else [])


def fulfil(future: "Future[T]", work: Callable[[], T]) -> None:
    """Do the work, and have the future hold its value or error."""
    if isinstance(future, Queued):
        future.run(work)
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)  # type: ignore[arg-type]  # torch has it for a result
