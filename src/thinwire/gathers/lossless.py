"""Send parameters as they are, in fewer bytes."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class Lossless:
    """Code the exponents of parameters without loss, and send the rest as it is (ZipNN, Hershcovitch et al. 2024).

    Exponents of weights carry two or three bits of information, not eight. bfloat16 shrinks to about 0.7 of its bytes,
    float32 to 0.85. Other dtypes travel as they are. It keeps no copy, so every gather sends. On a GPU the host waits
    for the length of what is sent.
    """
