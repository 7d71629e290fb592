"""The rows and the document they make."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "thinwire.kernels/1"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel or step at one size. If it is not `correct`, there are no times, and `why` says what is wrong.

    `seconds` are the 20th, 50th and 80th percentile. `ratio_to_floor` is the median of paired ratios. The other ratios
    are a torch expression's median over ours: above 1 if ours is faster, None if not measured. `checked_at` is the size
    at which the backend was checked against the reference.
    """

    name: str
    group: str
    backend: str
    d: int
    density: float | None
    workers: int | None
    seconds: Mapping[str, float] | None = None
    floor_seconds: float | None = None
    ratio_to_floor: float | None = None
    ratio_to_torch: float | None = None
    ratio_to_mask: float | None = None
    bytes_moved: int | None = None
    bits_per_kept: float | None = None
    correct: bool
    checked_at: int
    floor: str
    baseline: str
    repeats: int = 0
    why: str | None = None


def document(rows: Sequence[Row], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON document."""
    return {"schema": SCHEMA, "environment": dict(environment), "rows": [asdict(row) for row in rows]}
