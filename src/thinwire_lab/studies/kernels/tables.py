"""The rows for a reader."""

from collections.abc import Callable, Sequence

from thinwire_lab.show.table import Column, Table, tabulated
from thinwire_lab.show.units import UNKNOWN
from thinwire_lab.studies.kernels.rows import Row
from thinwire_lab.studies.kernels.targets import Target, concerned, targets


def size_table(numel: int, rows: Sequence[Row]) -> Table:
    """Return the rows of one size."""
    return tabulated(COLUMNS, rows, title=f"{numel:,} elements")


def _timed(text: Callable[[Row], str]) -> Callable[[Row], str]:
    """Show nothing where a wrong result left a kernel without times."""
    return lambda row: "" if row.seconds is None or row.bytes_moved is None else text(row)


def _spread(row: Row) -> str:
    if row.seconds is None or row.bytes_moved is None:
        return "WRONG"
    low, middle, high = (_milliseconds(row.seconds[name]) for name in ("p20", "p50", "p80"))
    return f"{middle} ({low}-{high})"


def _rate(row: Row) -> str:
    return "" if row.seconds is None or row.bytes_moved is None else _number(row.bytes_moved / row.seconds["p50"] / 1e9)


def complaints(rows: Sequence[Row]) -> list[str]:
    """Say what is wrong with each kernel that has no times, once per kernel."""
    return list(
        dict.fromkeys(f"{row.name}, at {row.checked_at:,} elements: {row.why}" for row in rows if not row.correct)
    )


def target_table(rows: Sequence[Row], *, on_gpu: bool) -> Table:
    """Return the targets beside the measurements."""
    here = concerned(rows)

    def verdict(target: Target) -> str:
        measured = target.figure(here)
        return UNKNOWN if measured is None else "met" if target.met(measured) else "MISSED"

    columns: tuple[Column[Target], ...] = (
        Column(heading="target", text=lambda target: target.what, left=True),
        Column(heading="limit", text=lambda target: f"{'≥' if target.at_least else '≤'} {target.limit:g}"),
        Column(heading="measured", text=lambda target: _number(target.figure(here))),
        Column(heading="", text=verdict, wrong=lambda target: verdict(target) == "MISSED"),
    )
    size = f"{max((row.d for row in rows), default=0):,}"
    return tabulated(columns, targets(on_gpu=on_gpu), title=f"Targets, at {size} elements, density 0.001")


def _milliseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


COLUMNS: tuple[Column[Row], ...] = (
    Column(heading="kernel", text=lambda row: row.name, left=True),
    Column(heading="backend", text=lambda row: row.backend, left=True),
    Column(heading="density", text=lambda row: UNKNOWN if row.density is None else f"{row.density:g}"),
    Column(heading="workers", text=lambda row: str(row.workers or UNKNOWN)),
    Column(heading="ms p50\n(p20-p80)", text=_spread, wrong=lambda row: _spread(row) == "WRONG"),
    Column(heading="floor\nms", text=_timed(lambda row: _milliseconds(row.floor_seconds))),
    Column(heading="over\nfloor", text=_timed(lambda row: _number(row.ratio_to_floor))),
    Column(heading="faster\nthan torch", text=_timed(lambda row: _number(row.ratio_to_torch))),
    Column(heading="than\nmask", text=_timed(lambda row: _number(row.ratio_to_mask))),
    Column(heading="GB/s", text=_rate),
    Column(heading="bits per\nkept", text=_timed(lambda row: _number(row.bits_per_kept))),
)
