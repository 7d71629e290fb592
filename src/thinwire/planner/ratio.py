"""The least compression that pays (Wang et al. 2020, Eq. 4)."""

import math


def minimum_ratio(network: float, *, convert: float, transform: float, pack: float, select: float) -> float:
    """Return the ratio of uncompressed to compressed bytes above which compression saves time; infinite if none does.

    All arguments are throughputs in bytes per second: of the network, of conversion to 16 bits (T_m), of the Fourier
    transform (T_f), of packing (T_p) and of selection (T_s). k > 1 / (1 − 2·T_comm·(2/T_m + 1/T_f + 1/T_p + 1/T_s)):
    sender and receiver each take every pass once. Raises ValueError unless all are above 0.
    """
    speeds = {"network": network, "convert": convert, "transform": transform, "pack": pack, "select": select}
    for name, speed in speeds.items():
        if not speed > 0:
            raise ValueError(f"{name} is {speed}; expected bytes per second, above 0 (math.inf for what costs nothing)")
    passes = 2 / convert + 1 / transform + 1 / pack + 1 / select
    left = 1 - 2 * network * passes if passes else 1.0
    return 1 / left if left > 0 else math.inf
