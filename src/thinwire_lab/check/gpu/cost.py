"""What would a step cost elsewhere? A model of it, from what one bucket takes, for a real run to refute."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
HOST, OWN, LAUNCH = 35e-6, 14e-6, 5e-6  # seconds a launch: of Python for ours and a model's, and of the device
FEW, CAPTURED = 4, 1.1e-3  # more launches than so many are captured; then a bucket keeps the host busy for so long
BANDWIDTH, RATE = 3e12, 230e12  # bytes a second, and a model's operations, as our GPT does them on an H100
LAYER_LAUNCHES, PARAMETERS_A_LAYER = 100, 8e6  # of forward and backward together
BUCKET = 25 << 20  # bytes
MODELS: Mapping[str, tuple[float, int]] = {  # parameters, and each rank's tokens: few, and the host sets the pace
    "BERT-base": (110e6, 16384),
    "GPT of 124 M, 4,096 tokens": (124e6, 4096),
    "GPT of 124 M": (124e6, 16384),
    "GPT of 1.3 B": (1.3e9, 16384),
}
LINKS: Mapping[str, float] = {
    "10 Gbit/s": 10e9,
    "25 Gbit/s": 25e9,
    "100 Gbit/s": 100e9,
    "400 Gbit/s": 400e9,
    "NVLink": 3.6e12,
}
EVEN, BASELINE = "faster than bf16 up to Gbit/s", "bf16"
_HALVINGS = 40


def predicted(rows: Sequence[Row]) -> list[Row]:
    """Return a step's milliseconds for each recipe, model and link, from rows of buckets of float32 in six tensors.

    And up to which link, in Gbit/s, it is faster than with bf16: 0 if on none, None if no row is of bf16.
    """
    baseline = next((row for row in rows if row["recipe"] == BASELINE), None)
    return [found for row in rows for found in _of(row, baseline)]


def _of(row: Row, baseline: Row | None) -> Iterator[Row]:
    for model, (parameters, tokens) in MODELS.items():
        steps = {link: round(1e3 * step(row, parameters, tokens, rate), 1) for link, rate in LINKS.items()}
        even = None if baseline is None else _break_even(row, baseline, parameters, tokens)
        yield {"recipe": row["recipe"], "model": model} | steps | {EVEN: even}


def step(row: Row, parameters: float, tokens: int, rate: float) -> float:
    """Return the seconds of a step over links of so many bits a second.

    Host and device take what was measured of a bucket, or else what its launches and bytes should take.
    """
    buckets = math.ceil(4 * parameters / BUCKET)
    computing = 6 * parameters * tokens / RATE
    launches, scale = sum(row["launches"].values()), BUCKET / 4 / row["elements"]
    if "captured" in row:
        ours, busy = 1e-6 * row["captured"]["host_us"]["all"], 1e-3 * sum(row["busy_ms"].values()) * scale
    else:
        ours = CAPTURED if launches > FEW else HOST * launches
        busy = max(LAUNCH * launches, row["bytes"] * scale / BANDWIDTH)
    host = OWN * parameters / PARAMETERS_A_LAYER * LAYER_LAUNCHES + buckets * ours
    travelling = buckets * row["sent_bytes"] * scale * 8 / rate
    return max(host, computing + buckets * busy) + max(0.0, travelling - computing * 2 / 3)


def _break_even(row: Row, baseline: Row, parameters: float, tokens: int) -> float:
    """Return the fastest link, up to NVLink, on which the one is faster than the other."""
    slow, fast = 1e6, max(LINKS.values())

    def faster(rate: float) -> bool:
        return step(row, parameters, tokens, rate) < step(baseline, parameters, tokens, rate)

    if not faster(slow) or faster(fast):
        return fast / 1e9 if faster(slow) else 0.0
    for _ in range(_HALVINGS):  # on a logarithmic scale
        middle = math.sqrt(slow * fast)
        slow, fast = (middle, fast) if faster(middle) else (slow, middle)
    return float(f"{slow / 1e9:.3g}")
