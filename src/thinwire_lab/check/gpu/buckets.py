"""What does one bucket take? Launches, host time, and the device's time, by phase and recipe.

The group is one whose ranks all send what this one sends, so nothing travels and everything else is real.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.futures import Future

from thinwire import trace
from thinwire.collectives import Staging
from thinwire.kernels import replay
from thinwire.memories import AppliedMomentum, MomentumCorrection
from thinwire.planner.candidates import PLANNED
from thinwire.recipes import METHODS
from thinwire.reducer import Bucket, Mean, Reducer, Round, Segment
from thinwire.reducer.base import Segments
from thinwire.waits import Verdict
from thinwire_lab.check.gpu.counting import counting, fake_group, forget, gpu_path, patched

WORLD = 4
PHASES = ("encode", "exchange", "decode")
RECIPES = (
    "dense", "bf16", "topk", "sampled_topk", "dgc", "dragonn", "fading", "orthogonal", "qsgd", "terngrad", "signsgd",
)  # fmt: skip
OTHERS = (
    "gtopk", "doubling", "owner", "s2_union", "s2_reducer", "fft", "mstopk", "dct_dp", "dct_steered", "randomk",
    "powersgd",
)  # fmt: skip
"""What takes rounds, or is not for GPUs in the first place: only whether it waits is looked at."""
_WARM_UP, _TIMED = 14, 9  # steps: by then a step's kernels are captured
_MARK = "thinwire: "


@dataclass(frozen=True, kw_only=True)
class Case:
    """A bucket of `numel` elements in so many tensors: of these shapes, or all of one size."""

    recipe: str
    tensors: int
    dtype: str
    numel: int
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        """What results call it."""
        return f"{self.recipe}, {self.tensors} of {self.numel // self.tensors} {self.dtype}"

    def segments(self) -> Segments:
        """Return where its gradients lie."""
        shapes = self.shapes or [(self.numel // self.tensors // 64, 64)] * self.tensors
        places = zip(shapes, accumulate(map(prod, shapes), initial=0), strict=False)
        return Segments(
            Segment(name=f"tensor {i}", offset=offset, length=prod(shape), shape=shape)
            for i, (shape, offset) in enumerate(places)
        )


@dataclass
class Work:
    """A recipe at work on one bucket, step after step."""

    case: Case
    device: torch.device
    listeners: tuple[trace.Listener, ...] = ()
    count: int = 0
    recipe: Reducer = field(init=False)
    group: Any = field(init=False)
    verdict: Verdict = field(init=False)

    def __post_init__(self) -> None:
        self.segments = self.case.segments()
        self.recipe = made(self.case.recipe, self.segments.names)
        drawn = torch.randn(2, self.segments[-1].offset + self.segments[-1].length, device=self.device)
        self.gradients = drawn.to(getattr(torch, self.case.dtype))
        self.flat = self.gradients[0].clone()
        self.group, self.staging = fake_group(WORLD), Staging()

    def prepare(self) -> None:
        """Fill the bucket with new gradients."""
        self.flat.copy_(self.gradients[self.count % 2])

    def step(self) -> None:
        """Reduce the bucket, and take the step."""
        self.start().wait()
        self.end()

    def start(self) -> "Future[Mean]":
        """Start reducing the bucket."""
        self.staging.turn()
        self.verdict = Verdict()
        told: dict[str, Any] = {"listeners": self.listeners, "verdict": self.verdict, "staging": self.staging}
        at = Round(step=self.count, group=self.group, scale=1 / WORLD, **told)
        self.recipe.begin(at)
        return self.recipe.reduce(Bucket(flat=self.flat, segments=self.segments), at)

    def end(self) -> None:
        """Take the step."""
        for memory in self.recipe.memories():
            memory.commit()
        self.count += 1


def made(name: str, parameters: Sequence[str]) -> Reducer:
    """Return a recipe that has taken over the momentum of these parameters from an optimizer."""
    recipe = {**METHODS, **PLANNED}[name].make()
    for memory in recipe.memories():
        if isinstance(memory, MomentumCorrection):
            memory.adopt(0.9, nesterov=False)
        if isinstance(memory, AppliedMomentum):
            memory.adopt(dict.fromkeys(parameters, 0.9))
    return recipe


def counted(case: Case) -> dict[str, Any]:
    """Count a step's launches on tensors that have no elements and take a GPU's path: no GPU is needed."""
    recorder = _Spans()
    with gpu_path(), FakeTensorMode(allow_non_fake_inputs=True), counting() as count:
        work = Work(case, torch.device("cpu"), (recorder,))
        for _ in range(3):
            work.prepare()
            count.clear()
            recorder.clear()
            work.step()
    forget()
    launches = {phase: here["operators"] + here["triton"] for phase, here in count.phases.items()}
    return {
        "launches": {phase: launches.get(phase, 0) for phase in PHASES},
        "copies": sum(here["copies"] for here in count.phases.values()),
        "bytes": sum(here["bytes"] for here in count.phases.values()),
        "sent_bytes": recorder.totals["sent_bytes"],
    }


def measured(case: Case, device: torch.device) -> dict[str, Any]:
    """Measure a step on a GPU: launches, the host's microseconds and the device's milliseconds, by phase.

    `captured` has the step as it is from some step on; the rest is of one whose kernels are launched one by one.
    """
    work = Work(case, device, (_Spans(),))
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    captured = _timed(work, device, _WARM_UP)
    room = torch.cuda.max_memory_allocated(device) - held
    with patched((replay, "LANES", {})):
        work = Work(case, device, (_Spans(),))
        found = _timed(work, device, 3)
        found |= _profiled(work, device)  # not of graphs: NVIDIA's profiler does not survive many of them
    rest = {"room_bytes": room, "floor_ms": _copying(work.flat, work.gradients[0])}
    return {"captured": captured} | found | rest


def _timed(work: Work, device: torch.device, warm_up: int) -> dict[str, Any]:
    """Return what steps take, after some that are not timed."""
    (recorder,), host, whole, spent = work.listeners, dict[str, list[float]](), list[float](), list[float]()
    assert isinstance(recorder, _Spans)
    for number in range(warm_up + _TIMED):
        work.prepare()
        torch.cuda.synchronize(device)
        recorder.clear()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        work.step()
        end.record()
        took = time.perf_counter() - start
        torch.cuda.synchronize(device)
        if number >= warm_up:
            whole.append(took)
            spent.append(begin.elapsed_time(end))
            for phase in PHASES:
                host.setdefault(phase, []).append(recorder.seconds(phase))
    return {
        "host_us": {phase: 1e6 * median(found) for phase, found in host.items()} | {"all": 1e6 * median(whole)},
        "device_ms": median(spent),
        "sent_bytes": recorder.totals["sent_bytes"],
    }


def _profiled(work: Work, device: torch.device) -> dict[str, Any]:
    """Return what a step launches, and how long that keeps the device busy, by phase; and each of its streams."""
    marks = _Marks()
    work.listeners = (*work.listeners, marks)
    work.prepare()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.synchronize(device)
        with torch.profiler.record_function(f"{_MARK}begin"):
            pass
        work.step()
        with torch.profiler.record_function(f"{_MARK}commit"):
            pass
        torch.cuda.synchronize(device)
    events = list(profile.profiler.kineto_results.events())
    phases = list(_phases(events))
    busy = {e.correlation_id(): e.duration_ns() for e in events if e.device_type() == DeviceType.CUDA}
    launches, spent = Counter[str](), Counter[str]()
    for event in events:
        if event.name().startswith("cu") and any(part in event.name() for part in ("Launch", "Memcpy", "Memset")):
            phase = next((name for begin, end, name in phases if begin <= event.start_ns() < end), "")
            launches[phase] += 1
            spent[phase] += busy.get(event.correlation_id(), 0)
    found = [name for _, _, name in phases]
    streams = Counter[int]()
    for event in events:
        if event.device_type() == DeviceType.CUDA:
            streams[event.device_resource_id()] += event.duration_ns()
    return {
        "launches": {name: launches[name] for name in found},
        "busy_ms": {name: spent[name] / 1e6 for name in found},
        "streams_ms": [nanoseconds / 1e6 for _, nanoseconds in streams.most_common()],
    }


class _Spans(trace.Recorder):
    """A recorder that reads no tensors: it would wait for the device, or for what a fake one does not have."""

    def add(self, name: str, amount: float | Tensor) -> None:
        """Add to the total, unless it is a tensor."""
        if not isinstance(amount, Tensor):
            super().add(name, amount)


class _Marks:
    """Leaves a mark in a profile where a phase ends."""

    def took(self, name: str, start: float, end: float) -> None:
        """Leave one."""
        with torch.profiler.record_function(_MARK + name):
            pass

    def add(self, name: str, amount: float | Tensor) -> None:
        """Leave none."""


def _phases(events: list[Any]) -> Iterator[tuple[int, int, str]]:
    """Yield each phase of a profiled step: where it begins and ends (ns), and its name."""
    ours = [e for e in events if e.device_type() == DeviceType.CPU and e.name().startswith(_MARK)]
    for (begin, _), (end, name) in pairwise(sorted((e.start_ns(), e.name().removeprefix(_MARK)) for e in ours)):
        yield begin, end, name


def _copying(out: Tensor, x: Tensor) -> float:
    """Return the milliseconds of a copy of the bucket: one pass that reads, and one that writes."""
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out.copy_(x)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)
