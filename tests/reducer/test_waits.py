"""Does the host ever wait for a GPU within a step? Every codec, memory and exchange goes through one, without a GPU.

Fake tensors have a shape and no elements, so whatever asks for an element raises. Where there is a GPU they
lie on it. Elsewhere they lie on `meta`, where, too, the host must not read, and what is sent is seen to leave.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CODECS, EXCHANGES, MEMORIES, RECIPES, vector
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire import codecs, waits
from thinwire.codecs import Codec, HashedSlots, RandomK, SampledThreshold, TopK
from thinwire.exchanges import AllGather, AllReduce, merging
from thinwire.exchanges.merging import Rounds, table
from thinwire.integrations.attachments.attachment import Attachment
from thinwire.integrations.membership import state
from thinwire.integrations.momentum.correction import Correction
from thinwire.integrations.momentum.fading import Fading, fading
from thinwire.integrations.training import outcomes
from thinwire.kernels import dispatch
from thinwire.memories import AppliedMomentum, ErrorFeedback, MomentumCorrection, Noted
from thinwire.payloads import Keyed, Payload
from thinwire.reducer import Bucket, Compressed, Reducer, Round, Segment, power_sgd
from thinwire.reducer.owners import ToOwners
from thinwire.schedules import FollowLearningRate
from thinwire.waits import Verdict
from thinwire_lab.check.gpu.counting import forget

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: pip install -e '.[triton]'"
)
WORLD = 2
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("meta")
NAMES = ["matrix", "vector"]
aten = torch.ops.aten


class WaitError(AssertionError):
    """The host would have waited."""


class NoWaits(TorchDispatchMode):
    """Refuses what makes the host wait although it asks for no element: copies to or from pageable memory."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.index_put_.default, aten.index_put.default) and args[2].dim() == 0:
            raise WaitError("x[indices] = number copies the number to the GPU")
        out, named = func(*args, **(kwargs or {})), kwargs or {}
        if named.get("pin_memory"):
            self._pinned.append(out.untyped_storage())
        if func is aten._to_copy.default:
            self._copied(args[0], out, at_once=not named.get("non_blocking"))
        if func is aten.copy_.default:
            self._copied(args[1], args[0], at_once=not any(args[2:]))
        return out

    def _copied(self, x: Tensor, to: Tensor, *, at_once: bool) -> None:
        host = x if x.device.type == "cpu" else to
        pinned = any(host.untyped_storage()._cdata == each._cdata for each in self._pinned)
        if x.device != to.device and (at_once or not pinned):
            raise WaitError(f"a copy from {x.device} to {to.device}")


def _refused(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise WaitError("the host waits for the device")


def _tensor(*args: Any, **kwargs: Any) -> Tensor:
    if kwargs.get("device") not in (None, "cpu"):  # operators do not see it; the device of fakes is never named so
        raise WaitError("torch.tensor(...) copies numbers to the GPU")
    return PLAIN_TENSOR(*args, **kwargs)


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if "cpu" in (*args[:1], kwargs.get("device")):
        raise WaitError("a copy to the CPU")
    return PLAIN_TO(self, *args, **kwargs)


PLAIN_TO: Callable[..., Tensor] = Tensor.to
PLAIN_TENSOR: Callable[..., Tensor] = torch.tensor


@contextmanager
def no_waits() -> Iterator[None]:
    """Refuse what makes the host wait: of operators, and of calls that fake tensors on a CPU do not notice."""
    with pytest.MonkeyPatch.context() as patch, NoWaits():
        for place in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            patch.setattr(place, "synchronize", _refused)
        patch.setattr(Tensor, "cpu", _refused)
        patch.setattr(torch, "tensor", _tensor)
        patch.setattr(Tensor, "to", _to)
        yield


class _Generator(torch.Generator):
    """One for any device: a GPU's would need a driver."""

    def __new__(cls, device: object = None) -> "_Generator":
        return super().__new__(cls)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors are fake, and take the GPU's path; Triton's kernels do nothing."""
    monkeypatch.setattr(waits, "HOST", frozenset())
    monkeypatch.setattr(dispatch, "_GPUS", {"cpu", "cuda", "meta"})
    monkeypatch.setattr(torch, "Generator", _Generator)
    forget()
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
    forget()


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def _bucket(dtype: torch.dtype = torch.float32) -> Bucket:
    segments = (
        Segment(name="matrix", offset=100, length=2000, shape=(40, 50)),
        Segment(name="vector", offset=2100, length=500, shape=(500,)),
    )
    return Bucket(flat=torch.empty(2600, device=DEVICE, dtype=dtype), segments=segments)


def _two_steps(
    reducer: Reducer, group: dist.ProcessGroup, done: bool = True, dtype: torch.dtype = torch.float32
) -> None:
    """Take two steps, or begin them. In the first, constants are copied to the GPU, where they stay."""
    for step in range(2):
        with no_waits():
            at = Round(step=step, group=group, scale=1 / WORLD, verdict=Verdict())
            future = reducer.reduce(_bucket(dtype), at)
            assert future.done() == done
            if done:
                future.wait()
            for memory in reducer.memories():
                memory.commit(NAMES)


ONE_COLLECTIVE = {f"{name}, all-gather": (case.codec, AllGather()) for name, case in CODECS.items()} | {
    f"{name}, all-reduce": (case.codec, AllReduce())
    for name, case in CODECS.items()
    if isinstance(case.exchange, AllReduce)
}


@pytest.mark.grid
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("sent", ONE_COLLECTIVE)
@pytest.mark.usefixtures("fakes")
def test_the_host_never_waits_within_a_step(sent: str, memory: str, group: dist.ProcessGroup) -> None:
    codec, exchange = ONE_COLLECTIVE[sent]
    _two_steps(Compressed(memory=MEMORIES[memory](), codec=codec, exchange=exchange), group)


@pytest.mark.parametrize("codec", [TopK, SampledThreshold, RandomK, HashedSlots])
@pytest.mark.usefixtures("fakes")
def test_a_density_that_changes_at_every_step_makes_nobody_wait(
    codec: Callable[..., Codec], group: dist.ProcessGroup
) -> None:
    density = FollowLearningRate(learning_rate=lambda step: 1 / (1 + step), smoothness=1.0)
    _two_steps(Compressed(memory=ErrorFeedback(), codec=codec(density=density), exchange=AllGather()), group)


METHODS = {name: case for name, case in RECIPES.items() if name == case.method.name}
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "waits.md"


def _made(name: str) -> Reducer:
    """Return a recipe that has taken over an optimizer's momentum."""
    recipe = METHODS[name].make()
    for memory in recipe.memories():
        if isinstance(memory, MomentumCorrection):
            memory.adopt(0.9, nesterov=False)
        if isinstance(memory, AppliedMomentum):
            memory.adopt(dict.fromkeys(NAMES, 0.9))
    return recipe


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name, case in METHODS.items() if not case.rounds])
@pytest.mark.usefixtures("fakes")
def test_no_recipe_of_one_or_two_collectives_waits(name: str, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    _two_steps(_made(name), group, dtype=dtype)


@pytest.mark.parametrize("codec", ["topk", "topk 8 bits", "sampled threshold", "fft", "qsgd_l2"])
@pytest.mark.usefixtures("fakes")
def test_sending_to_owners_does_not_wait(codec: str, group: dist.ProcessGroup) -> None:
    _two_steps(ToOwners(memory=ErrorFeedback(), codec=CODECS[codec].codec), group)


class _Later:
    """A communication thread that has not come to it yet."""

    def submit(self, work: object, device: torch.device) -> "Future[Any]":
        return Future()


@pytest.mark.parametrize("name", [name for name, case in METHODS.items() if case.rounds])
@pytest.mark.usefixtures("fakes")
def test_no_recipe_of_several_rounds_waits_in_the_hook(
    name: str, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (merging, power_sgd):
        monkeypatch.setattr(module, "communication_thread", lambda group: _Later())
    recipe = _made(name)
    for memory in recipe.memories():
        if isinstance(memory, Noted):
            memory.note("matrix").write(torch.empty(50 * 2, device=DEVICE))
    _two_steps(recipe, group, done=False)


def test_the_page_says_which_recipes_wait() -> None:
    never, in_rounds = (
        set(re.findall(r"`(\w+)`", row)) for row in re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.M)
    )
    assert never == {name for name, case in METHODS.items() if not case.rounds}
    assert in_rounds == {name for name, case in METHODS.items() if case.rounds}


def _is_keyed(codec: Codec) -> bool:
    payload = codec.encode(vector(100))
    return isinstance(payload, Keyed) and payload.coded is None


SEVERAL_ROUNDS = {name: case.exchange for name, case in EXCHANGES.items() if isinstance(case.exchange, Rounds)}
KEYED = {name: case.codec for name, case in CODECS.items() if _is_keyed(case.codec)}
SIZES = pytest.mark.xfail(
    strict=True,
    raises=(DataDependentOutputException, DynamicOutputShapeException),
    reason="how many rows a merged table has, only its keys say",
)


@pytest.mark.grid
@pytest.mark.parametrize("exchange", [pytest.param(name, marks=SIZES) for name in SEVERAL_ROUNDS])
@pytest.mark.parametrize("codec", KEYED)
@pytest.mark.usefixtures("fakes")
def test_exchanges_of_several_rounds_do_not_wait(exchange: str, codec: str, group: dist.ProcessGroup) -> None:
    """They do, on the communication thread, so backward goes on meanwhile."""
    run, payload = SEVERAL_ROUNDS[exchange], KEYED[codec].encode(torch.empty(2000, device=DEVICE))
    assert isinstance(run, Rounds)
    assert isinstance(payload, Keyed)
    run.run(table(payload), group, [0])


@dataclass(frozen=True)
class _Asks(codecs.Codec):
    """Sends everything, but only after a look at it."""

    def encode_signal(self, signal: Any, *, seed: int = 0) -> Payload:
        signal.tensor()[0].item()
        return codecs.Identity().encode_signal(signal)


@dataclass(frozen=True)
class _Waits(codecs.Codec):
    """Sends everything, after something else."""

    first: Callable[[Tensor], object]

    def encode_signal(self, signal: Any, *, seed: int = 0) -> Payload:
        self.first(signal.tensor())
        return codecs.Identity().encode_signal(signal)


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (_Asks(), "_local_scalar_dense"),
        (_Waits(lambda x: torch.tensor(2.0).to(x.device)), "a copy from cpu"),
        (_Waits(lambda x: torch.tensor(2.0, device=x.device)), "copies numbers"),
        (_Waits(lambda x: torch.ones(2).to(x.device, non_blocking=True)), "a copy from cpu"),  # it is not pinned
        (_Waits(lambda x: x.cpu()), "the host waits"),
        (_Waits(lambda x: x.to("cpu")), "a copy to the CPU"),
    ],
)
@pytest.mark.usefixtures("fakes")
def test_a_wait_is_found(codec: Codec, said: str, group: dist.ProcessGroup) -> None:
    with pytest.raises(Exception, match=said):
        _two_steps(Compressed(memory=ErrorFeedback(), codec=codec, exchange=AllReduce()), group)


def test_synchronising_is_a_wait() -> None:
    places: list[Any] = [torch.cuda, torch.cuda.Event, torch.cuda.Stream]
    for place in places:
        with no_waits(), pytest.raises(WaitError):
            place.synchronize(None)


# --- around the recipe: what `attach` does in DDP's hook ---


class _Model(nn.Module):
    """Two parameters, whose gradients lie in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = (nn.Parameter(torch.empty(*shape, device=DEVICE)) for shape in ((40, 50), (500,)))


def _attached(recipe: Reducer, model: _Model, group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> Attachment:
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
    names, memories = {p: name for name, p in parameters.items()}, recipe.memories()
    moved = Fading(recipe, [optimizer], names, group) if fading(memories) else Correction(memories, [optimizer], names)
    return Attachment(
        recipe, parameters, [group], handover=moved, divisor=lambda *_: float(WORLD), scaler=None, may_be_unused=False
    )


def _everyone_says(mine: object, group: dist.ProcessGroup) -> list[object]:
    return [mine] * group.size()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand in for the one read of a step, and count how many outcomes each had to read."""
    counts: list[int] = []

    def read(sent: outcomes.Sent) -> list[outcomes.Reduced]:
        counts.append(len(sent.outcomes))
        return [outcomes.Reduced()] * len(sent.outcomes)

    monkeypatch.setattr(outcomes, "to_host", lambda x: (x, None))
    monkeypatch.setattr(outcomes.Sent, "read", read)
    monkeypatch.setattr(state, "all_gather_plain", _everyone_says)
    return counts


@pytest.mark.parametrize("name", [name for name, case in METHODS.items() if not case.rounds])
@pytest.mark.usefixtures("fakes")
def test_an_attached_step_reads_once_when_all_buckets_are_there(
    name: str, group: dist.ProcessGroup, reads: list[int]
) -> None:
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    attachment = _attached(METHODS[name].make(), model, group, optimizer)
    for step in range(3):
        with no_waits() if step else nullcontext():
            for p in reversed(list(model.parameters())):  # each in a bucket of its own
                flat = torch.empty(p.numel(), device=DEVICE)
                p.grad = flat.view_as(p)
                attachment.reduce(flat, [p]).wait()
            optimizer.step()
        assert len(reads) <= step, "a step is read when the next one begins"
