"""What would a step take? From counts alone, so that the first run on a cluster can refute it.

A recipe's hook keeps the host busy for each bucket, and the device with launches and passes over it. Both run
beside the model's own: whichever is busier sets the pace. What travels overlaps with backward, two thirds of computing,
and only the rest is waited for.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

HOST, OWN, LAUNCH = 35e-6, 14e-6, 5e-6  # seconds a launch: of Python for ours and a model's, and of the device
FEW, CAPTURED = 5, 0.5e-3  # more launches than so many are captured; then a bucket keeps the host busy for so long
BANDWIDTH, RATE = 3e12, 230e12  # bytes a second, and a model's operations, as our GPT does them on an H100
LAYER_LAUNCHES, PARAMETERS_A_LAYER = 100, 8e6  # of forward and backward together
BUCKET = 25 << 20  # bytes
TOKENS = 16384  # of each rank
MODELS: Mapping[str, float] = {"BERT-base": 110e6, "GPT of 124 M": 124e6, "GPT of 1.3 B": 1.3e9}
LINKS: Mapping[str, float] = {
    "10 Gbit/s": 10e9,
    "25 Gbit/s": 25e9,
    "100 Gbit/s": 100e9,
    "400 Gbit/s": 400e9,
    "NVLink": 3.6e12,
}
Row = dict[str, Any]


def predicted(rows: Sequence[Row]) -> list[Row]:
    """Return a step's milliseconds for each recipe, model and link, from rows of buckets of float32 in six tensors."""
    found = []
    for row in rows:
        for model, parameters in MODELS.items():
            steps = {link: round(1e3 * _step(row, parameters, rate), 1) for link, rate in LINKS.items()}
            found.append({"recipe": row["recipe"], "model": model} | steps)
    return found


def _step(row: Row, parameters: float, rate: float) -> float:
    buckets = math.ceil(4 * parameters / BUCKET)
    computing = 6 * parameters * TOKENS / RATE
    launches, scale = sum(row["launches"].values()), BUCKET / 4 / row["elements"]
    ours = CAPTURED if launches > FEW else HOST * launches
    host = OWN * parameters / PARAMETERS_A_LAYER * LAYER_LAUNCHES + buckets * ours
    device = computing + buckets * max(LAUNCH * launches, row["bytes"] * scale / BANDWIDTH)
    travelling = buckets * row["sent_bytes"] * scale * 8 / rate
    return max(host, device) + max(0.0, travelling - computing * 2 / 3)
