"""What do gTop-k's own α and β predict (Shi et al. 2019)? Table I and Fig. 9."""

from math import log2

ALPHA, BETA = 0.436e-3, 3.6e-8
"""Seconds of a message, and seconds per element of 4 bytes, fitted by the authors between two of their machines."""
PUBLISHED = {
    4: (6.27, 8.94),
    8: (13.91, 13.42),
    16: (28.74, 17.89),
    32: (57.98, 22.36),
    64: (116.02, 26.83),
    128: (231.65, 31.30),
}
"""Milliseconds of all-gather and tree by the formulas of their Table I, as in Fig. 9 (left)."""


def gather_seconds(workers: float, picked: float) -> float:
    """Seconds of an all-gather, by Eq. 6, if every worker picks `picked` elements."""
    return log2(workers) * ALPHA + 2 * (workers - 1) * picked * BETA


def tree_seconds(workers: float, picked: float) -> float:
    """Seconds of the tree for the same, by Eq. 7."""
    return 2 * log2(workers) * ALPHA + 4 * log2(workers) * picked * BETA
