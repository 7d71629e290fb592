"""Send parameters as they are, in fewer bytes."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class Lossless:
    """Code the exponents of parameters without loss, and send the rest as it is (ZipNN, Hershcovitch et al. 2024).

    Exponents of weights carry two or three bits, not eight: bfloat16 takes about 0.7 of its bytes, float32 0.85, and
    other dtypes travel as they are. Nothing is kept, and every gather sends. On a GPU the host waits for
    the length of what is sent.
    """
