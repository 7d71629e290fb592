"""One training step, timed and split."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from thinwire import trace


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one step on one rank, and the bytes its payloads declared.

    `exchange` is what of the communication backward could not hide: from the last gradient computed until backward
    returns, less the decoding in between. Work inside callbacks of PyTorch's own hooks counts there too.
    """

    compute: float
    encode: float
    exchange: float
    decode: float
    sent_bytes: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.encode + self.exchange + self.decode


def timed_step(forward: Callable[[], Tensor], update: Callable[[], Any]) -> StepTimes:
    """Run forward, backward and update, and tell where the time went."""
    computed: list[float] = []

    def mark_computed() -> None:
        computed.append(time.perf_counter())

    with trace.listen(trace.Recorder()) as recorder:
        start = time.perf_counter()
        loss = forward()
        # Queued before DDP's own callback, so it runs when the last gradient is there and before backward waits.
        loss.register_hook(lambda _: Variable._execution_engine.queue_callback(mark_computed))
        loss.backward()
        reduced = time.perf_counter()
        update()
        end = time.perf_counter()
    encode = recorder.seconds("encode")
    decode = recorder.seconds("decode", since=computed[0])
    exchange = reduced - computed[0] - decode - recorder.seconds("encode", since=computed[0])
    return StepTimes(
        compute=end - start - encode - decode - exchange,
        encode=encode,
        exchange=exchange,
        decode=decode,
        sent_bytes=recorder.totals.get("sent_bytes", 0.0),
    )
