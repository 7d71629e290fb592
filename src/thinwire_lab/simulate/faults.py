"""Goodput: what share is done of the work of as many workers that neither fail nor wait for each other."""

import re
from dataclasses import dataclass
from typing import Self, final

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = rf"(\d+(?:\.\d+)?) *({'|'.join(_UNITS)})"
_NOTICED = 4.0  # seconds for which `thinwire.outer` waits for a worker that is gone without a word


@final
@dataclass(frozen=True, kw_only=True)
class Faults:
    """Each worker fails after `between` seconds on average, whenever it may be, and works again after `gone` more."""

    between: float
    gone: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``24h/5min``. Raises ValueError for anything else or a time of 0."""
        match = re.fullmatch(rf"{_TIME} */ *{_TIME}", text.strip(), re.ASCII)
        if not match or not (between := float(match[1]) * _UNITS[match[2]]):
            raise ValueError(
                f"faults {text!r}: expected how long a worker runs on average and until it is back, such as 24h/5min"
            )
        return cls(between=between, gone=float(match[3]) * _UNITS[match[4]])

    def together(self, workers: int) -> float:
        """Return the share of the time in which workers compute that stand still whenever one is gone."""
        return 1 / (1 + workers * self.gone / self.between)

    def apart(self, workers: int, lost: float) -> float:
        """Return that share where the others go on, and a fault costs so many seconds of a worker's own steps."""
        return self.between / (self.between + self.gone + lost) / (1 + workers * _NOTICED / self.between)
