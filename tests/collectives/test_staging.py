"""Buffers that travel are kept from step to step, and nobody has one that another still uses."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from cases import vector
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from thinwire.codecs import Cast, Codec, TopK
from thinwire.collectives import Staging, room, taking
from thinwire.exchanges import AllGather, AllReduce, Exchange
from thinwire.memories import ErrorFeedback
from thinwire.reducer import Bucket, Compressed, Round, Segment

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A group whose other rank sends what this one sends."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_buffer_is_free_in_the_next_turn_alone() -> None:
    staging = Staging()
    first = staging.take(100, CPU)
    staging.keep([first])
    assert staging.take(100, CPU) is not first, "used in this turn"
    assert staging.nbytes == 100
    staging.turn()
    assert staging.take(99, CPU) is not first
    assert staging.take(100, CPU) is first
    assert staging.take(100, CPU) is not first, "taken"


def test_a_buffer_that_nobody_wants_any_more_is_freed() -> None:
    staging = Staging()
    staging.keep([staging.take(100, CPU)])
    staging.turn()
    assert staging.nbytes == 100
    staging.turn()
    assert staging.nbytes == 0


def test_a_buffer_that_is_not_kept_is_not_lent_again() -> None:
    staging = Staging()
    lost = staging.take(100, CPU)
    staging.turn()
    assert staging.take(100, CPU) is not lost


def test_without_a_lender_every_buffer_is_new() -> None:
    staging = Staging()
    with taking(staging) as taken:
        lent = room(8, CPU)
    assert taken == [lent]
    assert room(8, CPU) is not lent
    assert len(taken) == 1


@pytest.mark.parametrize(
    ("codec", "exchange", "copies"), [(TopK(density=0.1), AllGather(), 3), (Cast(), AllReduce(), 0.5)], ids=str
)
def test_steps_use_the_same_buffers(codec: Codec, exchange: Exchange, copies: float, group: dist.ProcessGroup) -> None:
    """A gather takes room for what this rank sends and what two ranks sent; a sum, for the 16-bit values."""
    reducer, staging = Compressed(memory=ErrorFeedback(), codec=codec, exchange=exchange), Staging()
    flats: list[Tensor] = []
    for step in range(3):
        staging.turn()
        at = Round(step=step, group=group, scale=0.5, staging=staging)
        for name, numel in (("a", 1000), ("b", 1000), ("c", 500)):
            flats.append(vector(numel, step))
            bucket = Bucket(flat=flats[-1], segments=(Segment(name=name, offset=0, length=numel),))
            reducer.reduce(bucket, at).wait()
        if not step:
            before = {buffer.data_ptr() for buffer in staging._used}
    assert {buffer.data_ptr() for buffer in staging._used} == before
    whole = {"a": 1000, "b": 1000, "c": 500}
    payloads = [codec.encode(torch.ones(n)) for n in whole.values()]
    each = [p.nbytes if copies > 1 else 4 * p.numel for p in payloads]
    assert staging.nbytes == sum(int(copies * nbytes) for nbytes in each)
