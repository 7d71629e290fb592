"""What follows work on a GPU's stream: in which stream, and when. No GPU is needed, as streams are imitated."""

import importlib
import threading
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import pytest
import torch
from imitated_streams import Event, Stream
from torch import Tensor
from torch.futures import Future

from thinwire.collectives import of_torch, used_here
from thinwire.collectives.queued import Queued, queued
from thinwire.collectives.thread import Worker
from thinwire.kernels import memory
from thinwire.kernels.streams import PURPOSES, follow_all, stream_of
from thinwire.reducer.base import Mean, completed, joined
from thinwire.waits import Verdict, noting

GPU = torch.device("cuda", 0)
HERE = threading.local()


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each thread has a current stream of its own, as with CUDA."""

    def current(_: object = None) -> Stream:
        HERE.stream = getattr(HERE, "stream", None) or Stream()
        return HERE.stream

    monkeypatch.setattr(Stream, "device", GPU)
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "current_device": lambda: 0,
        "current_stream": current,
        "set_stream": lambda stream: setattr(HERE, "stream", stream),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    real = importlib.import_module("thinwire.collectives.queued")
    monkeypatch.setattr(real, "Future", lambda devices=(): Future())
    yield
    HERE.stream = None


class OnGpu:
    """What stands for a tensor there: it notes which streams use it."""

    is_cuda, device = True, GPU

    def __init__(self) -> None:
        self.used_by: list[Any] = []
        self.record_stream = self.used_by.append

    @staticmethod
    def get_device() -> int:
        """Return the GPU's number."""
        return 0


class Private:
    """What torch cannot look into: its futures pickle what they hold."""

    def __reduce__(self) -> NoReturn:
        raise AssertionError("it is pickled")


def test_a_job_comes_after_what_is_queued_and_what_follows_comes_after_it() -> None:
    worker, seen = Worker("a test's"), list[Any]()
    before = torch.cuda.current_stream().tick()  # type: ignore[attr-defined]  # of an imitated stream

    def work() -> Private:
        stream: Any = torch.cuda.current_stream()
        assert stream.knows(before.clock)
        seen.append(stream)
        stream.tick()
        return Private()

    def follows(done: "Future[Private]") -> Private:
        seen.append(torch.cuda.current_stream())
        return done.value()

    assert isinstance(worker.submit(work, GPU).then(follows).wait(), Private)
    here: Any = torch.cuda.current_stream()
    assert seen[0] is seen[1] is not here
    assert seen[0].priority < 0
    assert here.knows(seen[0].clock)
    worker.close()


def test_what_a_job_raises_reaches_whoever_waits_also_through_torch() -> None:
    worker = Worker("a test's")

    def work() -> NoReturn:
        raise ConnectionError("a peer is gone")

    future = worker.submit(work, GPU).then(lambda done: done.value())
    with pytest.raises(ConnectionError, match="a peer is gone"):
        future.wait()
    with pytest.raises(RuntimeError, match="ConnectionError: a peer is gone"):
        of_torch(future).wait()
    worker.close()


def test_a_bucket_in_several_parts_is_done_with_the_last_and_nobody_waits_before() -> None:
    worker, go, x = Worker("a test's"), threading.Event(), torch.ones(3)
    late: Any = worker.submit(lambda: (go.wait(), Mean(True, x))[1], GPU)
    early: Any = Queued[Mean](Stream()).run(lambda: Mean(False, x))
    for parts in ([early, late], [late, early]):
        whole: Any = joined(parts, x)
        assert not whole.done()
    arrived = of_torch(whole.then(lambda done: done.value().flat))
    go.set()
    assert not whole.wait().finite
    assert arrived.wait() is x
    here: Any = torch.cuda.current_stream()
    assert all(here.knows(each.stream.clock) for each in (early, late))
    worker.close()


def test_a_bucket_in_one_part_is_handed_on_as_it_is() -> None:
    parts: list[Any] = [Future(), Queued[Mean](Stream())]
    assert all(joined([part], torch.ones(3)) is part for part in parts)


def test_every_bucket_ends_in_the_same_stream() -> None:
    stream_of.cache_clear()
    with noting(Verdict()):
        ends: list[Any] = [queued(completed(Mean(True, torch.ones(3))), cast(Tensor, OnGpu())) for _ in "ab"]
    assert [end.stream for end in ends] == [stream_of(GPU, "decode")] * 2
    stream_of.cache_clear()


def test_torch_is_given_a_value_in_the_stream_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()

    class Noting(Future[Any]):
        def set_result(self, result: Any) -> None:
            seen.append(torch.cuda.current_stream())
            super().set_result(result)

    stream = Stream()
    done = Queued[str](stream).run(lambda: "a mean")
    monkeypatch.setattr(importlib.import_module("thinwire.collectives.queued"), "Future", lambda devices=(): Noting())
    assert of_torch(done).wait() == "a mean"  # type: ignore[arg-type]  # as good as torch's
    assert seen == [stream]


def test_what_is_kept_is_waited_for_once_and_its_memory_lasts() -> None:
    x: Any = OnGpu()
    made = torch.cuda.current_stream().tick()  # type: ignore[attr-defined]  # of an imitated stream
    shared = memory._Shared(x)
    torch.cuda.set_stream(other := cast(Any, Stream()))
    assert all(shared.here() is x for _ in range(2))
    assert other.knows(made.clock)
    assert x.used_by == [other]


def test_tensors_that_cross_streams_are_recorded() -> None:
    x: Any = OnGpu()
    used_here(x)
    assert x.used_by == [torch.cuda.current_stream()]


def test_a_stream_can_follow_all_of_ours() -> None:
    stream_of.cache_clear()
    made = [stream_of(GPU, purpose).tick() for purpose in PURPOSES]
    follow_all(GPU)
    current: Any = torch.cuda.current_stream()
    assert all(current.knows(event.clock) for event in made)
    stream_of.cache_clear()


def test_streams_of_our_own_go_before_backward() -> None:
    stream_of.cache_clear()
    assert stream_of(GPU, "encode").priority < 0
    stream_of.cache_clear()
