"""What should the kernels reach, and did they?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire_lab.studies.kernels.rows import Row
from thinwire_lab.studies.kernels.runner import TARGET_DENSITY

Figure = Callable[[Sequence[Row]], float | None]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure, taken from the rows of the largest size, and its limit."""

    what: str
    figure: Figure
    limit: float
    at_least: bool = False

    def met(self, measured: float) -> bool:
        """Whether the limit is kept."""
        return measured >= self.limit if self.at_least else measured <= self.limit


def _of(name: str, attribute: str, workers: int | None = None) -> Figure:
    def figure(rows: Sequence[Row]) -> float | None:
        found = [row for row in rows if row.name == name and workers in (None, row.workers)]
        value: float | None = getattr(found[0], attribute) if found else None
        return value

    return figure


def _spread(rows: Sequence[Row]) -> float | None:
    """Return the ratio of the slowest to the fastest decode, from 2 to 16 workers."""
    times = [
        row.seconds["p50"] for row in rows if row.name == "decode" and row.seconds and 2 <= (row.workers or 0) <= 16
    ]
    return max(times) / min(times) if len(times) > 1 else None


_WIRE = [
    Target(what="wire_fp16, bits per kept element", figure=_of("wire_fp16", "bits_per_kept"), limit=32),
    Target(what="wire_offset8, bits per kept element", figure=_of("wire_offset8", "bits_per_kept"), limit=22),
]
_CPU = [
    Target(what="encode_ef over residual.add_(g)", figure=_of("encode_ef", "ratio_to_floor"), limit=1.25),
    Target(
        what="encode_ef, times faster than exact topk",
        figure=_of("encode_ef", "ratio_to_torch"),
        limit=25,
        at_least=True,
    ),
    Target(
        what="encode_ef, times faster than mask and nonzero",
        figure=_of("encode_ef", "ratio_to_mask"),
        limit=6,
        at_least=True,
    ),
    Target(what="decode of 16 payloads over zero_()", figure=_of("decode", "ratio_to_floor", 16), limit=1.5),
    Target(what="decode, slowest over fastest of 2 to 16 payloads", figure=_spread, limit=1.15),
    Target(what="offset_float_encode over copy_", figure=_of("offset_float_encode", "ratio_to_floor"), limit=1.5),
    Target(what="offset_float_decode over copy_", figure=_of("offset_float_decode", "ratio_to_floor"), limit=1.5),
    Target(what="fft_encode over rfft", figure=_of("fft_encode", "ratio_to_floor"), limit=2),
]
_GPU = [
    Target(what="encode_ef over 3 passes at the copy rate", figure=_of("encode_ef", "ratio_to_floor"), limit=1.25),
    Target(what="decode of 16 payloads over zero_()", figure=_of("decode", "ratio_to_floor", 16), limit=1.5),
]


def targets(*, on_gpu: bool) -> list[Target]:
    """Return the targets for a device."""
    return (_GPU if on_gpu else _CPU) + _WIRE


def concerned(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a target: the largest size and, if density matters, 0.001."""
    most = max((row.d for row in rows), default=0)
    fixed = {row.name for row in rows if row.density != TARGET_DENSITY} - {
        row.name for row in rows if row.density == TARGET_DENSITY
    }
    return [row for row in rows if row.d == most and (row.density == TARGET_DENSITY or row.name in fixed)]
