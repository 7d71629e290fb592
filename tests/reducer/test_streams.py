"""On a GPU, does every stream wait for those whose results it reads? Every recipe takes steps on imitated streams."""

import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install -e '.[triton]'", allow_module_level=True)
from imitated_streams import CPU, Event, Group, Stream, imitating, raced

from thinwire.codecs import Identity, TopK
from thinwire.collectives import gathers, thread
from thinwire.exchanges import AllGather
from thinwire.integrations.training import outcomes
from thinwire.kernels.streams import stream_of
from thinwire.memories import ErrorFeedback
from thinwire.reducer import Reducer
from thinwire.reducer.owners import ToOwners
from thinwire.waits import Verdict, noting
from thinwire_lab.check.gpu.buckets import OTHERS, RECIPES, WORLD, Case, Work, made
from thinwire_lab.check.gpu.counting import fake_group

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
RECIPE: dict[str, Callable[[], Reducer]] = {
    **{
        name: partial(made, name, [f"tensor {i}" for i in range(3)])
        for name in (*RECIPES, *OTHERS, "demo", "fp16", "qsgd_l2")
    },
    "topk to owners": lambda: ToOwners(memory=ErrorFeedback(), codec=TopK(density=0.01)),
}
FEW = {"topk", "fading", "bf16", "orthogonal", "topk to owners", "gtopk"}
NEVER = {"dense", "bf16", "fp16", "powersgd", "dct_dp", "dct_steered", "topk to owners"}
"""What is not captured: what takes a launch or two, or rounds, and what the host takes notes of."""
ROUNDS = {"gtopk", "doubling", "owner", "s2_union", "s2_reducer"}  # whose shapes depend on what is sent
REPLAYED = {
    "topk": (4, 3), "sampled_topk": (4, 3), "dgc": (4, 3), "dragonn": (6, 3), "fading": (5, 3), "orthogonal": (47, 3),
    "qsgd": (3, 2), "terngrad": (3, 2), "signsgd": (4, 3),
}  # fmt: skip
"""At most so many kernels are captured to encode and to decode equal vectors, those that copy what must last too."""
EQUAL, RAGGED = ((32, 64),) * 3, ((7,), (2048,), (515,))
BUCKETS = [(EQUAL, "float32"), (RAGGED, "float32"), (RAGGED, "bfloat16")]
APART = pytest.mark.parametrize("apart", [True, False], ids=["collectives apart", "collectives in the current stream"])


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    """Leave no group to the tests that follow."""
    fake_group(WORLD)
    yield
    dist.destroy_process_group()


def _cases() -> Iterator[Any]:
    for (shapes, dtype), name in product(BUCKETS, RECIPE):
        often = name in FEW if shapes is EQUAL else (name, dtype) == ("topk", "bfloat16")
        bucket = f"{name}-{'equal' if shapes is EQUAL else 'ragged'}-{dtype}"
        yield pytest.param(name, shapes, dtype, id=bucket, marks=() if often else pytest.mark.slow)


@APART
@pytest.mark.parametrize(("name", "shapes", "dtype"), [*_cases()])
def test_no_stream_touches_what_it_has_not_waited_for(
    name: str, shapes: tuple[tuple[int, ...], ...], dtype: str, apart: bool
) -> None:
    races = raced(RECIPE[name], apart=apart, shapes=shapes, dtype=dtype, fake=name not in ROUNDS)
    assert not races.found
    assert (races.replays > 0) == (name not in NEVER | ROUNDS)
    if shapes is EQUAL and name in REPLAYED:
        assert all(map(int.__le__, (max(races.launches), races.launches[-1]), REPLAYED[name]))


@pytest.mark.parametrize("name", ["topk", "fading", "bf16", "topk to owners"])
def test_what_gloo_copies_back_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its futures, which may be done at once, know of no stream."""
    monkeypatch.setattr(gathers, "_DIRECT", 0)  # fake tensors lie in main memory
    races = raced(RECIPE[name], apart=True, gloo=True, shapes=EQUAL, dtype="float32")
    assert not races.found
    assert (races.replays > 0) == (name not in NEVER)


@APART
@pytest.mark.parametrize("module", ["thinwire.collectives.queued", "thinwire.kernels.replay"])
def test_a_stream_that_does_not_wait_is_noticed(module: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module(module), "follow", lambda stream, other: None)
    assert raced(RECIPE["topk"], apart=apart, shapes=RAGGED, dtype="bfloat16").found


@pytest.mark.parametrize("name", ["gtopk", "s2_union"])
def test_a_thread_that_does_not_wait_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "_after", lambda ready, stream, work: work())
    assert raced(RECIPE[name], apart=True, shapes=EQUAL, dtype="float32", fake=False).found


def test_a_host_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "synchronize", lambda self: None)
    assert raced(RECIPE["qsgd"], apart=True, shapes=EQUAL, dtype="float32").found


def test_no_replay_writes_to_what_listeners_hold() -> None:
    held = list[Any]()
    listener = SimpleNamespace(took=lambda *_: None, add=lambda name, x: held.append(x) if name == "values" else None)
    raced(RECIPE["topk"], apart=True, shapes=EQUAL, dtype="float32", steps=9, listeners=(listener,))
    assert len({x.untyped_storage()._cdata for x in held}) == len(held) == 18


def test_replays_run_in_streams_of_their_own_and_backward_does_not_wait_for_the_encoders() -> None:
    case, waited = Case(recipe="topk", tensors=1, dtype="float32", numel=2048), list[bool]()
    with imitating() as imitated, closing(Group(apart=True)) as group:
        work, (encodes, decodes) = Work(case, CPU), (stream_of(CPU, purpose) for purpose in ("encode", "decode"))
        work.group = group
        for _ in range(9):
            work.prepare()
            future = work.start()
            if encodes in imitated.replayed:
                waited.append(imitated.stream.knows(imitated.replayed[encodes]))
            future.wait()
            work.end()
    assert imitated.replayed.keys() == {encodes, decodes}
    assert encodes is not decodes
    assert waited[-4:] == [False] * 4  # of both sets of buffers, once they are captured


def test_later_buckets_make_no_streams() -> None:
    def made(steps: int) -> int:
        before = Stream.made
        raced(RECIPE["topk"], apart=True, shapes=EQUAL, dtype="float32", steps=steps)
        return Stream.made - before

    assert made(5) == made(9)


def test_the_host_reads_an_outcome_once_it_has_arrived_in_pinned_memory() -> None:
    with imitating() as imitated:
        there, ready = outcomes.to_host(torch.ones(3))
        arrived = dict(imitated.stream.clock)
        assert imitated._number(there) in imitated._pinned
        assert not imitated.host.knows(arrived)
        ready()
        assert imitated.host.knows(arrived)
        assert not imitated.found


def test_what_is_gathered_lasts_until_it_is_read() -> None:
    with imitating() as imitated, closing(Group(apart=True)) as group, noting(Verdict()):
        future = AllGather().start(Identity().encode(torch.empty(64)), group)
        future.then(lambda done: cast(Tensor, done.value().buffers).sum())
        del future
        gc.collect()
        assert not imitated.found


def test_neighbours_in_one_storage_do_not_wait_for_each_other() -> None:
    with imitating() as imitated:
        x = torch.empty(16, dtype=torch.bfloat16)
        x[:7].fill_(1)
        imitated.stream = Stream()
        x[7:].fill_(2)
        assert not imitated.found
        x[6:8].fill_(3)
        assert imitated.found
