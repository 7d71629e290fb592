"""Numbers with units, rounded for a reader."""

import math

UNKNOWN = "—"


def milliseconds(seconds: float) -> str:
    """Seconds as bare milliseconds: ``118``, ``2.3``."""
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f}"


def duration(seconds: float) -> str:
    """Seconds for a reader: ``41.2 s``, ``12 min 05 s``, ``3 h 12 min``."""
    if seconds < 600:
        return f"{seconds:.{1 if seconds < 100 else 0}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def human_bytes(count: float | None) -> str:
    """Bytes in decimal units, as links are rated: ``4.38 MB``."""
    if count is None:
        return UNKNOWN
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:#.3g}".rstrip(".") + f" {unit}"


def loss_text(loss: float) -> str:
    """A loss to three decimals; ``diverged`` where it is no longer a number."""
    return f"{loss:.3f}" if math.isfinite(loss) else "diverged"
