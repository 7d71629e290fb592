"""Is memory that crosses streams recorded, and do numbers leave for a GPU without a wait? Seen without a GPU."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import OFFSET_8
from ranks import Ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire
from thinwire.codecs import FFT, Codec, TopK
from thinwire.collectives import used_here
from thinwire.exchanges import AllGather, Exchange, GlobalTopKTree, OwnerSharded, UnionAllReduce, all_gather
from thinwire.integrations.attachments import attachment
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


def _unrecorded_exchange(exchange: Exchange, codec: Codec) -> int:
    """Return how many of the tensors that an exchange uses on another stream were not recorded before."""
    used: set[int] = set()
    group, module = dist.group.WORLD, sys.modules[type(exchange).start.__module__]
    assert group is not None
    payload = codec.encode(torch.randn(2000))
    read = [x.data_ptr() for x in payload.tensors()]
    received = all_gather.received

    def receiving(mine: Payload, buffers: Tensor, verdict: object) -> Payload:
        read[:] = [buffers.data_ptr()]  # the payload is the hook's own
        return received(mine, buffers, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "used_here", lambda *tensors: used.update(x.data_ptr() for x in tensors))
        patch.setattr(all_gather, "received", receiving)
        exchange.prepare(group)
        exchange.start(payload, group).wait()
    return len(set(read) - used)


@pytest.mark.parametrize("exchange", [AllGather(), OwnerSharded(), UnionAllReduce(), GlobalTopKTree()])
def test_what_an_exchange_uses_on_another_stream_is_recorded(ranks: Ranks, exchange: Exchange) -> None:
    assert ranks.run(2, _unrecorded_exchange, exchange, TopK(density=0.05)) == [0, 0]


def _recorded_means() -> int:
    """Return how many means were recorded where gradients accumulate over two reductions."""
    used: list[int] = []
    model = nn.parallel.DistributedDataParallel(nn.Linear(30, 40))
    thinwire.attach(model, thinwire.recipes.topk(density=0.1, minimum_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attachment, "used_here", lambda *tensors: used.extend(x.numel() for x in tensors))
        for _ in range(2):
            model(torch.ones(2, 30)).sum().backward()
    return sum(used)


def test_a_mean_that_is_added_to_is_recorded(ranks: Ranks) -> None:
    assert ranks.run(2, _recorded_means) == [30 * 40 + 40] * 2
