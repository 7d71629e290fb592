"""What a bench run measured, as a JSON document of schema ``thinwire.bench/2``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

SCHEMA = "thinwire.bench/2"
HALF = frozenset({"torch_bf16", "torch_fp16", "bf16", "fp16"})
"""Rows that everybody has: all values, in 16 bits."""
UNTHROTTLED = "UNTHROTTLED"


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """The 20th, 50th and 80th percentile, in the unit of what they describe."""

    p20: float
    p50: float
    p80: float


@dataclass(frozen=True, kw_only=True)
class Split:
    """Where the time of a step goes, in seconds."""

    compute: float
    encode: float
    exchange: float
    decode: float


@dataclass(frozen=True, kw_only=True)
class WireBytes:
    """Bytes one worker sends in a step: counted on the link, declared by the codec, and float32 all-reduce's.

    ``measured`` is None where the link cannot be counted, ``declared`` where the payload is not ours.
    """

    measured: float | None
    declared: float | None
    dense: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that thinwire takes on the first worker: `thinwire.handle.MemoryUse`. Copies of parameters are staging."""

    waiting: int
    staging: int
    scratch: int


@dataclass(frozen=True, kw_only=True)
class Process:
    """Bytes of the first worker, as measured when a row ends.

    ``tensors``: of all that the row keeps between steps: parameters, gradients, the optimizer's state and thinwire's.
    ``resident`` and ``peak``: what the system has given the process, which trains all rows, now and since the row
    began; None where the system does not tell.
    """

    tensors: int
    resident: int | None
    peak: int | None


Point = tuple[float, float, float]
"""Training seconds and bytes sent per worker, both cumulative, and the held-out loss."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far the runs of a row lie apart that differ in their seed alone; each tuple has a figure for each seed.

    ``loss_deviation`` is the standard deviation of ``final_loss``, with N - 1 below the line, and ``curve_deviation``
    that of each point of the row's curve.
    """

    seeds: tuple[int, ...]
    final_loss: tuple[float, ...]
    seconds_to_target: tuple[float | None, ...]
    loss_deviation: float
    curve_deviation: tuple[float, ...]


@dataclass(frozen=True)
class Setting:
    """What a row trains with: a recipe, its density, and the share of activations sent between pipeline stages.

    outer: the inner steps between two outer steps; 0 for a method that exchanges gradients at each step. served:
    asynchronously, on parameter servers. gathers: how FSDP2's all-gathers travel, in bfloat16; "" for FSDP2 alone.
    """

    recipe: str
    density: float
    boundary: float = 1.0
    outer: int = 0
    served: bool = False
    gathers: str = ""

    @property
    def label(self) -> str:
        """``dgc 0.01`` for a sparsifier, the bare recipe where every entry is sent, ``| 0.05`` for its boundaries.

        ``diloco, H 30`` for outer steps, and ``dgc 0.01, served`` on parameter servers.
        """
        name = self.recipe if self.density == 1 else f"{self.recipe} {self.density:.3g}"
        name += f", H {self.outer}" if self.outer else ""
        name += ", served" if self.served else ""
        name += f", gathers {self.gathers}" if self.gathers else ""
        return name if self.boundary == 1 else f"{name} | {self.boundary:g}"

    @property
    def is_dense(self) -> bool:
        """Whether everything was sent uncompressed."""
        return self.recipe == "dense" and self.boundary == 1 and not self.served


@dataclass(frozen=True, kw_only=True)
class Row(Setting):
    """One recipe's run. A number that is not finite, such as a diverged loss, is null in the document and NaN here.

    ``loss_curve`` holds (training seconds, bytes sent per worker, held-out loss), the first two cumulative; it may go
    on past ``steps``, where ``final_loss`` is taken, in search of ``seconds_to_target``. ``speedup_vs_dense`` is
    dense's median step over this row's. What has a default is in the document only if it is something else, but for
    ``boundary``. ``spread``: of a row that was trained with several seeds; then losses are means, and times and bytes
    medians. With ``outer`` steps times are means over so many, losses those of the global parameters, and
    ``outer_exchange_seconds``, a median, what the first worker waits for in an outer step; ``waited_for`` has the
    seconds that each worker has waited for each, where one is slow or vanishes. If ``served``, steps and bytes are the
    first trainer's, and replicas are not compared. ``memory``: if thinwire's handle has told it. ``process``: of
    sharded models.
    """

    steps: int
    step_seconds: Quantiles
    split_seconds: Split
    wire_bytes_per_step: WireBytes
    loss_curve: tuple[Point, ...]
    final_loss: float
    seconds_to_target: float | None
    speedup_vs_dense: float | None
    replicas_identical: bool
    spread: Spread | None = None
    outer_exchange_seconds: float | None = None
    waited_for: tuple[tuple[float, ...], ...] | None = None
    memory: Memory | None = None
    process: Process | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Row:
        """Read one entry of ``rows``."""
        row: Row = _value(cls, document)
        return row


@dataclass(frozen=True, kw_only=True)
class Results:
    """A whole run: its environment, and its finished rows in the order they ran.

    ``then`` has those of the second act, which trained with another optimizer, if the run got there.
    """

    environment: Mapping[str, Any]
    rows: tuple[Row, ...]
    then: Results | None = None

    @property
    def acts(self) -> list[Results]:
        """This act, and those after it."""
        return [self] if self.then is None else [self, *self.then.acts]

    @property
    def throttled(self) -> bool:
        """Whether the link was limited; false unless the run recorded that it was."""
        return self.environment.get("throttled") is True

    @property
    def title(self) -> str:
        """Model, workers and link, on one line."""
        link = str(self.environment.get("link", "unknown link"))
        if not self.throttled and not link.startswith(UNTHROTTLED):
            link = UNTHROTTLED if link == UNTHROTTLED.lower() else f"{UNTHROTTLED} ({link})"
        count = self.environment.get("workers", "?")
        workers = "1 worker" if count == 1 else f"{count} workers"
        workers += f" and {self.servers} server{'s' if self.servers > 1 else ''}" if self.servers else ""
        split = f" in pipelines of {self.stages}" if self.stages > 1 else ""
        split += f" in islands of {self.shards}" if self.islands else ""
        split += " that hold one model" if self.shards > 1 and not self.islands else ""
        optimizer = self.environment.get("optimizer", "sgd")
        trained = "" if optimizer == "sgd" and self.then is None else f" with {optimizer}"
        return f"{self.environment.get('model', 'model')}{trained} · {workers}{split} · {link}"

    @property
    def seeds(self) -> int:
        """How many seeds each row was trained with."""
        return len(self.environment.get("seeds", [0]))

    @property
    def stages(self) -> int:
        """How many workers share a replica of the model."""
        return int(self.environment.get("pipeline", 1))

    @property
    def shards(self) -> int:
        """How many workers hold a model together, each a shard of it."""
        return int(self.environment.get("shard", 1))

    @property
    def servers(self) -> int:
        """How many parameter servers there were."""
        return int(self.environment.get("servers", 0))

    @property
    def islands(self) -> bool:
        """Whether shards have replicas, in islands whose workers share a link."""
        return 1 < self.shards != self.environment.get("workers")

    @property
    def sender(self) -> str:
        """Whose bytes are counted: those of all who share a link."""
        return "island" if self.islands else "worker"

    @property
    def incomplete(self) -> str | None:
        """Why rows are missing, or None for a run that reached its end."""
        if self.environment.get("complete") is True:
            return None
        reason = self.environment.get("reason") or "the run did not reach its end"
        return f"INCOMPLETE: {str(reason).rstrip('.')}. Only finished rows are shown."

    @property
    def target_loss(self) -> float | None:
        """The held-out loss that ``seconds_to_target`` is the time to, if there is one."""
        target = self.environment.get("target_loss")
        return None if target is None or not math.isfinite(target) else float(target)

    @property
    def free_step_seconds(self) -> float | None:
        """Median seconds of an uncompressed step without a limit on the link, if measured."""
        quantiles = self.environment.get("free_network_step_seconds")
        return float(quantiles["p50"]) if quantiles else None

    @property
    def dense(self) -> Row | None:
        """The uncompressed row the others are compared with, if it was run."""
        return next((row for row in self.rows if row.is_dense), None)

    @property
    def baseline(self) -> Row | None:
        """The row with the shortest step of those that need no compression, in float32 or 16 bits, if any was run."""
        rows = [row for row in self.rows if row.is_dense or (row.recipe in HALF and row.boundary == 1)]
        return min(rows, key=lambda row: row.step_seconds.p50, default=None)

    def to_json(self) -> dict[str, Any]:
        """The document, made of plain JSON values."""
        optional = [each for each in fields(Row) if each.default is not MISSING and each.name != "boundary"]
        absent = {each.name: each.default for each in optional}
        rows = [
            {k: v for k, v in _plain(asdict(row)).items() if k not in absent or v != absent[k]} for row in self.rows
        ]
        document = {"schema": SCHEMA, "environment": _plain(self.environment), "rows": rows}
        return document if self.then is None else document | {"then": self.then.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Results:
        """Read a parsed document. Raises ValueError if it is of another schema."""
        if document["schema"] != SCHEMA:
            raise ValueError(f"a document of schema {document['schema']!r}; expected {SCHEMA!r}")
        then = cls.from_json(document["then"]) if "then" in document else None
        return cls(environment=document["environment"], rows=tuple(map(Row.from_json, document["rows"])), then=then)


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_hints = cache(get_type_hints)


def _value(hint: Any, value: Any) -> Any:
    """Read ``value`` as the type ``hint`` of the field that it fills."""
    if value is None:
        return math.nan if hint is float else None
    if get_origin(hint) is UnionType:
        return _value(get_args(hint)[0], value)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = _hints(hint)
        return hint(**{key: _value(hints[key], entry) for key, entry in value.items()})
    if get_origin(hint) is tuple:
        first, *others = get_args(hint)
        return tuple(map(_value, [first] * len(value) if others == [...] else [first, *others], value))
    return value
