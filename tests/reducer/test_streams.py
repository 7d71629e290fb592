"""Is memory that crosses streams recorded, and do numbers leave for a GPU without a wait? Seen without a GPU."""

import math
import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import CODECS, OFFSET_8, vector
from ranks import Ranks, told
from torch import Tensor, nn
from torch._jit_internal import _extract_tensors
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire
from thinwire.codecs import FFT, Codec, TopK
from thinwire.collectives import Pool, Queued, Staging, gathers, of_torch, thread, used_here
from thinwire.errors import PayloadError
from thinwire.exchanges import AllGather, Exchange, Exchanged, GlobalTopKTree, OwnerSharded, UnionAllReduce, all_gather
from thinwire.integrations.attachments import attachment
from thinwire.integrations.training.outcomes import Questions, Reduced, look, settled
from thinwire.kernels import memory
from thinwire.memories import AppliedMomentum, ErrorFeedback, MomentumCorrection
from thinwire.payloads import Payload, wire
from thinwire.recipes import METHODS
from thinwire.reducer import Bucket, Mean, Reducer, Round, Segment, owners, power_sgd
from thinwire.reducer.base import completed, joined
from thinwire.reducer.owners import ToOwners
from thinwire.reducer.power_sgd import PowerSGD
from thinwire.waits import Verdict, noted_in

ELSEWHERE = torch.device("meta")  # a device that is not the host, and which every machine has
aten = torch.ops.aten


class _OnGPU:
    """A tensor of a GPU, as far as `used_here` asks."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self) -> None:
        self.streams: list[object] = []

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: object) -> None:
        self.streams.append(stream)


def test_a_tensor_is_recorded_with_the_stream_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    mine, other = _OnGPU(), _OnGPU()
    used_here(mine, torch.zeros(1), other)  # type: ignore[arg-type]
    assert mine.streams == other.streams == ["stream of 0"]


class _Logged:
    """A stream that writes down what it waits for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.waited = number, list[str]()

    def record_event(self) -> str:
        return f"event of {self.cuda_stream}"

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


def test_a_tensor_that_is_kept_is_there_for_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, made, now = [_Logged(number) for number in range(3)], list[_OnGPU](), list[_Logged]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])

    @memory.kept
    def constant(number: int) -> Any:
        made.append(_OnGPU())
        return made[-1]

    for stream in (*streams, *streams):
        now.append(stream)
        assert id(constant(1)) == id(made[0])
    assert id(constant(2)) == id(made[1])
    assert len(made) == 2
    assert made[0].streams == streams
    assert [stream.waited for stream in streams[:2]] == [["event of 0"], ["event of 0"]]


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


def test_what_is_kept_is_forgotten_when_it_is_one_of_very_many() -> None:
    made = list[int]()

    @memory.kept
    def constant(number: int) -> Tensor:
        made.append(number)
        return torch.tensor(number)

    for number in [0, 0, *range(1, 1025), 1, 0]:
        constant(number)
    assert made == [*range(1025), 0]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_tables_leave_from_pinned_memory_and_the_host_goes_on(pinned: list[Tensor]) -> None:
    tables, constant = import_module("thinwire.kernels.triton"), cast("Any", memory.constant)
    for make in (
        lambda: tables.tiles_of_each.__wrapped__((5, 9), ELSEWHERE),  # it may have been kept
        lambda: tables.table(ELSEWHERE, [5, 9]),
        lambda: constant.__wrapped__((5, 9), torch.int64, ELSEWHERE),
    ):
        pinned.clear()
        with _Copies() as copies:
            make()
        assert copies.seen == [(buffer.data_ptr(), True) for buffer in pinned]
        assert len(pinned) == 1


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


def _stale() -> str:
    """Return what owners say where a collective writes nothing, so that an earlier step's payloads are still there."""
    line, staging, group = ToOwners(memory=ErrorFeedback(), codec=TopK(density=0.05)), Staging(), dist.group.WORLD
    assert group is not None
    segments = (Segment(name="m", offset=0, length=2000, shape=(40, 50)),)
    for step in range(4):
        staging.turn()
        at = Round(step=step, group=group, scale=0.5, staging=staging)
        if step < 3:
            line.reduce(Bucket(flat=torch.randn(2000), segments=segments), at).wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owners, "all_to_all", lambda *_: completed(Mean(True, torch.empty(0))))
        return told(line.reduce(Bucket(flat=torch.randn(2000), segments=segments), at).wait)


def test_what_owners_received_a_step_before_is_noticed(ranks: Ranks) -> None:
    assert all("a header with version 0" in said for said in ranks.run(2, _stale))


def _follows_in_one_stream() -> list[bool]:
    """Return whether what follows a collective of owners is handed to `queued`, which asks whether the host waits."""
    found, verdict = list[bool](), Verdict()
    bucket = Bucket(flat=torch.randn(2000), segments=(Segment(name="m", offset=0, length=2000, shape=(40, 50)),))

    def queue(future: "Future[Any]", x: Tensor) -> "Future[Any]":
        found.append(noted_in() is verdict and x is bucket.flat)
        return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owners, "queued", queue)
        at = Round(step=0, group=_group(), scale=0.5, verdict=verdict)
        ToOwners(memory=ErrorFeedback(), codec=TopK(density=0.05)).reduce(bucket, at).wait()
    return found


def test_what_follows_a_collective_of_owners_is_queued_to_one_stream(ranks: Ranks) -> None:
    assert ranks.run(2, _follows_in_one_stream) == [[True]] * 2


def _unrecorded_exchange(exchange: Exchange, codec: Codec) -> int:
    """Return how many of the tensors that an exchange uses on another stream were not recorded before."""
    used: set[int] = set()
    group, module = dist.group.WORLD, sys.modules[type(exchange).start.__module__]
    assert group is not None
    payload = codec.encode(torch.randn(2000))
    read = [x.data_ptr() for x in payload.tensors()]
    received = all_gather.received

    def receiving(mine: Payload, buffers: Tensor, *_: object) -> Payload:
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


@contextmanager
def _futures() -> Iterator[list[object]]:
    """Yield what futures came to hold without any tensor: on a GPU, who waits for such a one waits for no stream."""
    barren: list[object] = []
    then, set_result = torch._C.Future.then, torch.futures.Future.set_result

    def look(value: object) -> None:
        if not _extract_tensors(value):
            barren.append(value)

    def watching(self: Any, callback: Any) -> Any:
        def called(done: Any) -> Any:
            value = callback(done)
            look(value)
            return value

        return then(self, called)

    def watched(self: Any, value: Any) -> None:
        look(value)
        set_result(self, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C.Future, "then", watching)
        patch.setattr(torch.futures.Future, "set_result", watched)
        yield barren


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _barren(recipe: Reducer) -> list[object]:
    shapes = {"a": (40, 50), "b": (3,), "c": (30, 40), "d": (20, 50)}
    ends = list(accumulate(math.prod(shape) for shape in shapes.values()))
    segments = tuple(
        Segment(name=name, offset=end - math.prod(shape), length=math.prod(shape), shape=shape)
        for (name, shape), end in zip(shapes.items(), ends, strict=True)
    )
    for memory_ in recipe.memories():
        if isinstance(memory_, MomentumCorrection):
            memory_.adopt(0.9, nesterov=False)
        if isinstance(memory_, AppliedMomentum):
            memory_.adopt(dict.fromkeys(shapes, 0.9))
    recipe.prepare(_group())
    with _futures() as barren:
        recipe.reduce(
            Bucket(flat=torch.randn(ends[-1]), segments=segments), Round(step=0, group=_group(), scale=0.5)
        ).wait()
    return list(map(repr, barren))


@pytest.mark.parametrize("name", METHODS)
def test_who_waits_for_a_recipes_future_waits_for_what_wrote_the_mean(ranks: Ranks, name: str) -> None:
    assert ranks.run(2, _barren, METHODS[name].make()) == [[], []]


def test_who_waits_for_owners_waits_for_what_wrote_the_mean(ranks: Ranks) -> None:
    assert ranks.run(2, _barren, ToOwners(memory=ErrorFeedback(), codec=TopK(density=0.05))) == [[], []]


def _barren_in_training() -> list[object]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(30, 40))
    thinwire.attach(model, thinwire.recipes.topk(density=0.1, minimum_size=100))
    with _futures() as barren:
        model(torch.ones(2, 30)).sum().backward()
    return list(map(repr, barren))


def test_who_waits_for_a_hooks_future_waits_for_what_wrote_the_mean(ranks: Ranks) -> None:
    assert ranks.run(2, _barren_in_training) == [[], []]


def test_parts_of_a_bucket_are_done_when_all_are_and_raise_what_any_raised() -> None:
    flat = torch.zeros(3)
    first, second = Future[Mean](), Future[Mean]()
    whole = joined([first, second], flat)
    second.set_result(Mean(False, flat))
    assert not whole.done()
    first.set_result(Mean(True, flat))
    assert whole.wait() == (False, flat)
    first, second = Future[Mean](), Future[Mean]()
    whole = joined([first, second], flat)
    second.set_exception(PayloadError("torn"))  # type: ignore[arg-type]  # as its stub has it
    first.set_result(Mean(True, flat))
    with pytest.raises(PayloadError, match="torn"):
        whole.wait()


class _Streams:
    """A GPU's streams, and a log of what is done in which."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log, self.made, self._now = list[tuple[object, ...]](), list["_Stream"](), threading.local()
        patch.setattr(torch.cuda, "Stream", self.make)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.now)
        patch.setattr(torch.cuda, "stream", self.within)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self._now, "stream", stream))

    def make(self, device: torch.device, priority: int = 0) -> "_Stream":
        self.made.append(_Stream(self.log, f"{device}, {priority}"))
        return self.made[-1]

    @property
    def now(self) -> "_Stream":
        found: _Stream = getattr(self._now, "stream", _Stream(self.log, "default"))
        return found

    @contextmanager
    def within(self, stream: "_Stream | None") -> Iterator[None]:
        before, self._now.stream = self.now, stream or self.now
        yield
        self._now.stream = before


class _Stream:
    device_index = 0

    def __init__(self, log: list[tuple[object, ...]], name: str) -> None:
        self._log, self.name, self.device = log, name, torch.device("cpu")

    def wait_stream(self, other: "_Stream") -> None:
        self._log.append((self.name, "waits for", other.name))

    def record_event(self) -> str:
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self._log.append((self.name, "waits for", event))


def test_the_communication_thread_has_a_stream_that_waits_for_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, gpu, asked = _Streams(monkeypatch), torch.device("cuda", 0), list[object]()

    class Told(Future[Any]):
        def __new__(cls, *, devices: list[torch.device]) -> "Told":
            asked.append(devices)
            return super().__new__(cls)

        def __init__(self, *, devices: list[torch.device]) -> None:
            super().__init__()

        def set_result(self, result: Any) -> None:
            streams.log.append((streams.now.name, "is what the future waits for"))
            super().set_result(result)

    monkeypatch.setattr(thread, "same_group", lambda group: group)
    monkeypatch.setattr(thread, "end_group", lambda group: None)
    line = thread.CommunicationThread("a group")  # type: ignore[arg-type]  # the work does not look at it
    assert line.submit(lambda group: streams.now.name, torch.device("cpu")).wait() == "default"
    monkeypatch.setattr(thread, "Future", Told)
    with streams.within(_Stream(streams.log, "hook")):
        for _ in range(2):
            assert line.submit(lambda group: streams.now.name, gpu).wait() == "cuda:0, -1"
    each = [("cuda:0, -1", "waits for", "event of hook"), ("cuda:0, -1", "is what the future waits for")]
    assert streams.log == 2 * each
    assert len(streams.made) == 1
    assert asked == [[gpu], [gpu]]
    line.close()


def test_what_follows_a_collective_is_queued_to_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams(monkeypatch)
    stream = streams.make(torch.device("cuda", 0), -1)
    hook = _Stream(streams.log, "hook")
    with streams.within(hook):
        first = Queued(stream, lambda: streams.now.name)
        second = first.then(lambda done: [done.value(), streams.now.name])
        assert streams.now is hook
        assert second.done()
        assert second.value() == ["cuda:0, -1", "cuda:0, -1"]
        assert streams.log == []
        second.wait()
    assert streams.log == [("hook", "waits for", "cuda:0, -1")]


def test_what_follows_a_collective_raises_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams(monkeypatch)
    flat = torch.zeros(3)

    def torn() -> Mean:
        raise PayloadError("torn")

    parts: Any = [Queued(streams.now, lambda: Mean(True, flat)), Queued(streams.now, torn)]
    assert joined(parts[:1], flat).wait() == (True, flat)
    with pytest.raises(PayloadError, match="torn"):
        joined(parts, flat).wait()
    late: Any = Future[Mean]()
    whole = joined([*parts, late], flat)
    assert not whole.done()
    late.set_result(Mean(True, flat))
    with pytest.raises(PayloadError, match="torn"):
        whole.wait()


def test_a_message_waits_for_the_streams_that_wrote_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, pool = _Streams(monkeypatch), Pool(0)
    on_gpu: Any = mock.Mock(wraps=torch.ones(2), is_cuda=True, nbytes=8)
    on_gpu.get_device.return_value = 0
    monkeypatch.setattr(gathers, "Future", lambda devices: Future())
    pool.gather(torch.ones(1))
    with streams.within(_Stream(streams.log, "encode")):
        pool.gather(on_gpu)
    assert pool.message().numel() == 12
    assert streams.log == [("default", "waits for", "event of encode")]


def _unrecorded_factors() -> int:
    """Return how many tensors of the hook's stream PowerSGD's rounds use that were not recorded before."""
    used, read = set[int](), list[int]()
    summed = PowerSGD._sum

    def summing(self: PowerSGD, matrices: Sequence[Tensor], *rest: Any) -> Any:
        read[:] = read or [x.data_ptr() for x in matrices]  # the first round's are the hook's own
        return summed(self, matrices, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(power_sgd, "used_here", lambda *tensors: used.update(x.data_ptr() for x in tensors))
        patch.setattr(PowerSGD, "_sum", summing)
        bucket = Bucket(flat=torch.randn(2000), segments=(Segment(name="m", offset=0, length=2000, shape=(40, 50)),))
        recipe = thinwire.recipes.powersgd(rank=2, start=0)
        recipe.prepare(_group())
        recipe.reduce(bucket, Round(step=0, group=_group(), scale=0.5)).wait()
    return len({*read, bucket.flat.data_ptr()} - used) + (not read)


def test_what_powersgd_uses_on_another_stream_is_recorded(ranks: Ranks) -> None:
    assert ranks.run(2, _unrecorded_factors) == [0, 0]


@pytest.mark.parametrize("name", CODECS)
def test_a_future_finds_all_tensors_of_what_was_exchanged(name: str) -> None:
    payload = CODECS[name].codec.encode(vector(400, 3), seed=1)
    exchanged = Exchanged(summed=payload, delivered=payload.with_values(payload.values * 2), sent_bytes=1)
    found = _extract_tensors(exchanged)
    assert all(isinstance(x, Tensor) for x in pickle.loads(pickle.dumps(exchanged)))  # nothing else is looked through
    pickled = _extract_tensors([payload, payload.with_values(payload.values * 2)])
    assert {x.data_ptr() for x in found} >= {x.data_ptr() for x in payload.tensors()}
    assert len(found) >= len(pickled) > 0


def test_an_empty_bucket_has_no_mean_that_is_not_finite() -> None:
    bucket = Bucket(flat=torch.empty(0), segments=[Segment(name="w", offset=0, length=0)])
    verdict = Verdict()
    verdict.note(torch.zeros(2, dtype=torch.bool), lambda: PayloadError("torn"))
    (found,) = settled([look(bucket, {}, Questions(True, frozenset()), verdict, watch=True)])
    assert found == Reduced()


def test_an_error_reaches_torchs_own_future(monkeypatch: pytest.MonkeyPatch) -> None:
    def torn() -> Mean:
        raise PayloadError("torn")

    with pytest.raises(RuntimeError, match="torn"):  # as C++ raises it, and DDP's reducer
        of_torch(cast("Future[Mean]", Queued(_Streams(monkeypatch).now, torn))).wait()
