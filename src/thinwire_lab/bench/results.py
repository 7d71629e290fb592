"""What a bench run measured, as a JSON document of schema ``thinwire.bench/2``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from thinwire_lab.inputs import write_atomically

SCHEMA = "thinwire.bench/2"
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


@dataclass(frozen=True, kw_only=True)
class Row:
    """One recipe's run. A number that is not finite, such as a diverged loss, is null in the document and NaN here.

    ``loss_curve`` holds (training seconds, bytes sent per worker, held-out loss), the first two cumulative; it may go
    on past ``steps``, where ``final_loss`` is taken, in search of ``seconds_to_target``. ``speedup_vs_dense`` is
    dense's median step over this row's. ``boundary`` is the share of activations sent between pipeline stages, 1
    without a pipeline. ``spread`` is there, and in the document, if the row was trained with several seeds: then losses
    are means, and times and bytes medians. ``outer``, in the document if not 0: the inner steps between outer ones;
    then times are means over so many steps, and losses those of the global parameters. ``served``, in the document if
    true: trained asynchronously on parameter servers; its steps and bytes are the first trainer's, and its replicas are
    not compared.
    """

    recipe: str
    density: float
    boundary: float
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
    outer: int = 0
    served: bool = False

    @property
    def label(self) -> str:
        """``dgc 0.01`` for a sparsifier, the bare recipe where every entry is sent, ``| 0.05`` for its boundaries.

        ``diloco, H 30`` for outer steps, and ``dgc 0.01, served`` on parameter servers.
        """
        return label(self.recipe, self.density, self.boundary, self.outer, served=self.served)

    @property
    def is_dense(self) -> bool:
        """Whether everything was sent uncompressed."""
        return self.recipe == "dense" and self.boundary == 1 and not self.served

    @classmethod
    def from_json(cls, document: object, where: str = "row") -> Row:
        """Read one entry of ``rows``; ``where`` is its place, named in errors."""
        row: Row = _dataclass(cls, document, where)
        return row


def label(recipe: str, density: float, boundary: float, outer: int = 0, *, served: bool = False) -> str:
    """Return the name of a row."""
    name = recipe if density == 1 else f"{recipe} {density:.3g}"
    name += f", H {outer}" if outer else ""
    name += ", served" if served else ""
    return name if boundary == 1 else f"{name} | {boundary:g}"


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
        workers += f" and {_counted(self.servers, 'server')}" if self.servers else ""
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

    def to_json(self) -> dict[str, Any]:
        """The document, made of plain JSON values."""
        rows = [_without(_plain(asdict(row)), spread=None, outer=0, served=False) for row in self.rows]
        document = {"schema": SCHEMA, "environment": _plain(self.environment), "rows": rows}
        return document if self.then is None else document | {"then": self.then.to_json()}

    @classmethod
    def from_json(cls, document: object) -> Results:
        """Check and read a parsed document; ValueError names the key that is wrong."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"schema: expected a document of {SCHEMA!r}")
        entries = _object(document, "document", ("schema", "environment", "rows", "then"), optional=("then",))
        return cls(
            environment=_typed(entries["environment"], "environment", dict),
            rows=_value(tuple[Row, ...], entries["rows"], "rows"),
            then=cls.from_json(entries["then"]) if "then" in entries else None,
        )

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a document that ``write`` left."""
        return cls.from_json(json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write the document; an earlier file stays whole if that fails."""
        write_atomically(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _without(entries: Mapping[str, Any], **absent: Any) -> dict[str, Any]:
    """Return the entries without those that are what their absence says."""
    return {key: entry for key, entry in entries.items() if key not in absent or entry != absent[key]}


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _value(hint: Any, value: object, where: str) -> Any:
    """Read ``value`` as the type ``hint`` of the field it fills."""
    if get_origin(hint) is UnionType:
        return None if value is None else _value(get_args(hint)[0], value, where)
    if get_origin(hint) is tuple:
        return _tuple(get_args(hint), _typed(value, where, list), where)
    if is_dataclass(hint):
        return _dataclass(hint, value, where)
    if hint is float:
        return math.nan if value is None else float(_typed(value, where, (int, float)))
    return _typed(value, where, hint)


def _dataclass(kind: Any, value: object, where: str) -> Any:
    hints = get_type_hints(kind)
    entries = _object(value, where, hints, optional=[f.name for f in fields(kind) if f.default is not MISSING])
    return kind(**{key: _value(hints[key], entry, f"{where}.{key}") for key, entry in entries.items()})


def _tuple(hints: tuple[Any, ...], values: list[Any], where: str) -> tuple[Any, ...]:
    if hints[-1] is Ellipsis:
        hints = (hints[0],) * len(values)
    if len(hints) != len(values):
        raise ValueError(f"{where}: expected {len(hints)} entries, found {len(values)}")
    places = (f"{where}[{index}]" for index in range(len(values)))
    return tuple(map(_value, hints, values, places))


def _object(value: object, where: str, keys: Iterable[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    entries: dict[str, Any] = _typed(value, where, dict)
    if missing := [key for key in keys if key not in entries and key not in optional]:
        raise ValueError(f"{where}: missing key {missing[0]!r}")
    if unknown := [key for key in entries if key not in keys]:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}")
    return entries


def _typed(value: Any, where: str, kind: Any) -> Any:
    # Python counts bool as an int; a reader of the document does not
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: found {value!r:.40}, which has the wrong type")
    return value
