"""The rows for a reader."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from kernels_parts.rows import Row
from kernels_parts.targets import concerned, targets
from thinwire.tools.show.units import UNKNOWN


def size_table(numel: int, rows: Sequence[Row]) -> Table:
    """Return the rows of one size."""
    table = _table(f"{numel:,} elements", "kernel", "backend")
    headings = ("density", "workers", "ms p50\n(p20-p80)", "floor\nms", "over\nfloor", "faster\nthan torch")
    for heading in (*headings, "than\nmask", "GB/s", "bits per\nkept"):
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(row.name, row.backend, *_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    place = (UNKNOWN if row.density is None else f"{row.density:g}", str(row.workers or UNKNOWN))
    if row.seconds is None or row.bytes_moved is None:
        return (*place, "[bold red]WRONG")
    low, middle, high = (_milliseconds(row.seconds[name]) for name in ("p20", "p50", "p80"))
    return (
        *place,
        f"{middle} ({low}-{high})",
        _milliseconds(row.floor_seconds),
        _number(row.ratio_to_floor),
        _number(row.ratio_to_torch),
        _number(row.ratio_to_mask),
        _number(row.bytes_moved / row.seconds["p50"] / 1e9),
        _number(row.bits_per_kept),
    )


def complaints(rows: Sequence[Row]) -> list[str]:
    """Say what is wrong with each kernel that has no times, once per kernel."""
    return list(
        dict.fromkeys(f"{row.name}, at {row.checked_at:,} elements: {row.why}" for row in rows if not row.correct)
    )


def target_table(rows: Sequence[Row], *, on_gpu: bool) -> Table:
    """Return the targets beside the measurements."""
    here = concerned(rows)
    size = f"{max((row.d for row in rows), default=0):,}"
    table = _table(f"Targets, at {size} elements, density 0.001", "target")
    for heading in ("limit", "measured", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for target in targets(on_gpu=on_gpu):
        measured = target.figure(here)
        verdict = UNKNOWN if measured is None else "met" if target.met(measured) else "[bold red]MISSED"
        limit = f"{'≥' if target.at_least else '≤'} {target.limit:g}"
        table.add_row(target.what, limit, _number(measured), verdict)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True, vertical="bottom")
    return table


def _milliseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"
