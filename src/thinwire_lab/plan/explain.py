"""Why are several hosts slower than one? What each way to train sends in a step, and how long this network takes."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from thinwire.exchanges import AllReduce
from thinwire.planner import Plan, Profile
from thinwire_lab.inputs import BadInput
from thinwire_lab.show.table import Column, Table, tabulated
from thinwire_lab.show.units import human_bytes, milliseconds

_LOSSLESS, _DIFFERENCES = 11.15 / 8, (4 + 32 / 128) / 8  # bytes a value, scales included
_LEVELS = (4 + 32 / 512) / 8  # of qsgd()


class Sent(NamedTuple):
    """What one way to train sends: bytes of a rank in a step, the seconds that takes, and those of computing."""

    name: str
    nbytes: float
    exchange: float
    computing: float


_COLUMNS: tuple[Column[Sent], ...] = (
    Column(heading="way to train", text=lambda way: way.name, left=True),
    Column(heading="sends\na step", text=lambda way: human_bytes(way.nbytes)),
    Column(heading="exchange\nms", text=lambda way: milliseconds(way.exchange), rank=lambda way: way.exchange),
    Column(heading="x\ncomputing", text=lambda way: f"{way.exchange / way.computing:.2f}"),
)


class Explained:
    """The ways to train that several hosts have, and what helps each most."""

    key: ClassVar[str] = "explained"
    title: ClassVar[str] = "What crosses the network?"
    notes: ClassVar[tuple[str, ...]] = (
        "exchange: at the measured latency and bandwidth. What is longer than computing cannot hide behind it.",
        "FSDP2 gathers bfloat16 parameters twice and reduces gradients in 16 bits. Lossless() is counted with 11.15 "
        "bits a weight, as measured of trained ones. Differences() sends frozen parameters once, which is not counted.",
    )

    def table(self, plan: Plan) -> Table:
        """Return a row for each way. Raises BadInput for a single worker."""
        return tabulated(_COLUMNS, sent(plan), title=self.title)

    def conclusion(self, plan: Plan) -> str:
        """Name what helps most: a model in DDP, a sharded one that a host could hold, and one that none can."""
        ddp, narrow, planned, fsdp, *gathered = sent(plan)
        best = min(ddp, narrow, planned, key=_exchange)
        return " ".join(
            (
                f"Computing takes {1e3 * ddp.computing:.0f} ms a step.",
                _change("DDP", ddp, best, best.name),
                _change("FSDP2, if a host can hold the model", fsdp, planned, "HSDP with thinwire.shard"),
                _change("FSDP2, if none can", fsdp, min(gathered, key=_exchange), "gathers=Differences() and qsgd"),
            )
        )

    def document(self, plan: Plan) -> list[dict[str, Any]]:
        """Return the rows as plain JSON values."""
        return [way._asdict() for way in sent(plan)]


def sent(plan: Plan) -> Sequence[Sent]:
    """Return what each way to train sends. Raises BadInput for a single worker, who sends nothing."""
    profile = plan.profile
    if profile.world_size < 2:
        raise BadInput("--explain is about what crosses a network; expected 2 workers or more")
    trained = sum(gradient.numel for gradient in profile.timeline.gradients)
    both = trained + int(profile.made.get("frozen_elements", 0))
    return (
        _reduced("DDP in float32", profile, 4.0 * trained),
        _reduced("DDP in 16 bits", profile, 2.0 * trained),
        _planned("thinwire.attach as planned", plan),
        _sharded("FSDP2 in bfloat16", profile, 4.0 * both, 2.0 * trained),
        _sharded("the same, gathers=Lossless(), qsgd", profile, 2 * _LOSSLESS * both, _LEVELS * trained),
        _sharded("the same, gathers=Differences(), qsgd", profile, _DIFFERENCES * trained, _LEVELS * trained),
    )


def _reduced(name: str, profile: Profile, nbytes: float) -> Sent:
    ranks = profile.world_size
    seconds = AllReduce().seconds(nbytes, ranks, profile.links["all_reduce"])
    return Sent(name, 2 * (ranks - 1) / ranks * nbytes, seconds, profile.timeline.computed)


def _planned(name: str, plan: Plan) -> Sent:
    """What the plan compresses is gathered, in a message to each rank for each bucket; the rest goes in a ring."""
    profile, others = plan.profile, plan.profile.world_size - 1
    dense = sum(row.nbytes for row in plan.rows if row.name not in plan.choice)
    gathered, link = others * (sum(row.nbytes for row in plan.rows) - dense), profile.links["all_gather"]
    ring = _reduced(name, profile, dense)
    buckets = len(profile.timeline.buckets) if gathered else 0
    seconds = gathered / link.bandwidth + others * link.latency * buckets + (ring.exchange if dense else 0.0)
    return ring._replace(nbytes=ring.nbytes + gathered, exchange=seconds)


def _sharded(name: str, profile: Profile, gathered: float, reduced: float) -> Sent:
    """Rings: each rank passes on all shares but one."""
    others = profile.world_size - 1
    pairs = (profile.links["all_gather"], gathered), (profile.links["all_reduce"], reduced)
    passed = [(link, others / profile.world_size * nbytes) for link, nbytes in pairs]
    seconds = sum(nbytes / link.bandwidth + others * link.latency for link, nbytes in passed)
    return Sent(name, sum(nbytes for _, nbytes in passed), seconds, profile.timeline.computed)


def _exchange(way: Sent) -> float:
    return way.exchange


def _change(what: str, now: Sent, then: Sent, by: str) -> str:
    if then.exchange > 0.8 * now.exchange or now.exchange < 0.05 * now.computing:
        return f"{what}: nothing here helps much."
    return f"{what}: with {by} the exchange takes {1e3 * then.exchange:.0f} ms instead of {1e3 * now.exchange:.0f}."
