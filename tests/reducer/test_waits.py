"""Does the host ever wait for a GPU within a step? Every codec, memory and exchange goes through one, without a GPU.

Fake tensors have a shape and no elements, so that whatever asks for one raises. They lie on a GPU where torch is built
for CUDA. On other builds they lie on the CPU, and `thinwire.waits` is told that the host may not read there.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CODECS, EXCHANGES, MEMORIES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire import waits
from thinwire.codecs import Codec
from thinwire.exchanges import Exchange
from thinwire.kernels import dispatch
from thinwire.memories import Memory
from thinwire.reducer import Bucket, Compressed, Round, Segment

WORLD = 3
DEVICE = torch.device("cuda", 0) if torch.backends.cuda.is_built() else torch.device("cpu")
aten = torch.ops.aten


class Wait(Exception):
    """The host would have waited."""


class NoWaits(TorchDispatchMode):
    """Refuses what makes the host wait although no element is asked for: copies to a GPU from pageable memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.lift_fresh.default:
            raise Wait("torch.tensor(...) copies numbers to the GPU")
        if func in (aten.index_put_.default, aten.index_put.default) and args[2].dim() == 0:
            raise Wait("x[indices] = number copies the number to the GPU")
        out = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default and out.device != args[0].device and not kwargs.get("non_blocking"):
            raise Wait(f"a copy from {args[0].device} to {out.device}")
        if func is aten.copy_.default and args[1].device != args[0].device and not (args[2:] and args[2]):
            raise Wait(f"a copy from {args[1].device} to {args[0].device}")
        return out


class _Generator(torch.Generator):
    """One for any device: a GPU's would need a driver."""

    def __new__(cls, device: object = None) -> "_Generator":
        return super().__new__(cls)


def _forget_cached_tensors() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("thinwire."):
            for held in vars(module).values():
                if isinstance(held, functools._lru_cache_wrapper):
                    held.cache_clear()


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors are fake, and take the GPU's path."""
    monkeypatch.setattr(waits, "HOST", frozenset())
    monkeypatch.setattr(dispatch, "_GPUS", {"cpu", "cuda"})
    monkeypatch.setattr(torch, "Generator", _Generator)
    _forget_cached_tensors()
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
    _forget_cached_tensors()


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    """A group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _bucket(dtype: torch.dtype = torch.float32) -> Bucket:
    flat = torch.empty(2600, dtype=dtype, device=DEVICE)
    segments = (
        Segment(name="matrix", offset=100, length=2000, shape=(40, 50)),
        Segment(name="vector", offset=2100, length=500, shape=(500,)),
    )
    return Bucket(flat=flat, segments=segments)


def _two_steps(
    memory: Memory, codec: Codec, exchange: Exchange, group: dist.ProcessGroup, dtype: torch.dtype = torch.float32
) -> None:
    """Take two steps. In the first, constants may be copied to the GPU, where they stay."""
    reducer = Compressed(memory=memory, codec=codec, exchange=exchange)
    names = ["matrix", "vector"]

    def step(number: int) -> None:
        at = Round(step=number, group=group, scale=1 / WORLD, verdict=waits.Verdict())
        reducer.reduce(_bucket(dtype), at).wait()
        memory.commit(names)

    step(0)
    with NoWaits():
        step(1)


CELLS = [
    pytest.param(codec, memory, exchange, id=f"{codec}, {memory}, {exchange}")
    for codec in CODECS
    for memory in MEMORIES
    for exchange in EXCHANGES
]


@pytest.mark.parametrize(("codec", "memory", "exchange"), CELLS)
@pytest.mark.usefixtures("on_a_gpu")
def test_no_step_makes_the_host_wait(codec: str, memory: str, exchange: str, group: dist.ProcessGroup) -> None:
    _two_steps(MEMORIES[memory](), CODECS[codec].codec, EXCHANGES[exchange].exchange, group)
