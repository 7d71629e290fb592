"""Is memory that crosses streams recorded, and do numbers leave for a GPU without a wait? Seen without a GPU."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import OFFSET_8
from ranks import Ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.codecs import FFT, Codec, TopK
from thinwire.collectives import used_here
from thinwire.kernels import memory
from thinwire.memories import ErrorFeedback
from thinwire.payloads import Payload, wire
from thinwire.reducer import Bucket, Round, Segment, owners
from thinwire.reducer.owners import ToOwners

ELSEWHERE = torch.device("meta")  # a device that is not the host, and which every machine has
aten = torch.ops.aten


class _OnGPU:
    """A tensor of a GPU, as far as `used_here` asks."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self) -> None:
        self.streams: list[object] = []

    def record_stream(self, stream: object) -> None:
        self.streams.append(stream)


def test_a_tensor_is_recorded_with_the_stream_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    mine, other = _OnGPU(), _OnGPU()
    used_here(mine, torch.zeros(1), other)  # type: ignore[arg-type]
    assert mine.streams == other.streams == ["stream of cuda:0"]


class _Copies(TorchDispatchMode):
    """Notes each copy to another device: from where, and whether the host goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._to_copy.default:
            self.seen.append((args[0].data_ptr(), bool(kwargs.get("non_blocking"))))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was allocated as pinned memory, which only a machine with a GPU has."""
    allocated, empty = [], torch.empty

    def allocate(*size: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = empty(*size, **kwargs)
        if pin_memory:
            allocated.append(made)
        return made

    monkeypatch.setattr(torch, "empty", allocate)
    return allocated


def test_numbers_leave_from_pinned_memory_and_the_host_goes_on(pinned: list[Tensor]) -> None:
    with _Copies() as copies:
        memory.sent(torch.arange(5), ELSEWHERE)
    (buffer,) = pinned
    assert copies.seen == [(buffer.data_ptr(), True)]
    assert buffer.tolist() == list(range(5))


def test_a_header_is_sent_once(pinned: list[Tensor]) -> None:
    header = b"the header of a test"
    assert wire.on(header, ELSEWHERE) is wire.on(header, ELSEWHERE)
    assert len(pinned) == 1


def _unrecorded(codec: Codec) -> int:
    """Return how many of the tensors that the callback decodes from were not recorded before."""
    used: set[int] = set()
    read: list[int] = []
    retain = ToOwners._retain

    def retaining(self: ToOwners, bucket: Bucket, payloads: list[Payload]) -> None:
        read.extend(x.data_ptr() for payload in payloads for x in payload.tensors())
        read.append(bucket.flat.data_ptr())
        assert used, "recorded first"
        retain(self, bucket, payloads)

    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owners, "used_here", lambda *tensors: used.update(x.data_ptr() for x in tensors))
        patch.setattr(ToOwners, "_retain", retaining)
        bucket = Bucket(flat=torch.randn(2000), segments=(Segment(name="m", offset=0, length=2000, shape=(40, 50)),))
        line = ToOwners(memory=ErrorFeedback(), codec=codec)
        line.reduce(bucket, Round(step=0, group=group, scale=0.5)).wait()
    return len(set(read) - used)


@pytest.mark.parametrize(
    "codec", [TopK(density=0.05), TopK(density=0.05, values=OFFSET_8), FFT(density=0.1, block=500)]
)
def test_what_a_callback_of_owners_reads_is_recorded(ranks: Ranks, codec: Codec) -> None:
    assert ranks.run(2, _unrecorded, codec) == [0, 0]
