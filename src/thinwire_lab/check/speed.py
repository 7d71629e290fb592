"""How long do encode and decode take, in copies of the same memory?"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any

import torch

from thinwire.codecs import Codec, HashedSlots, SampledThreshold
from thinwire.memories import ErrorFeedback, Memory, MomentumCorrection
from thinwire.payloads import Sparse
from thinwire.planner.probe.measure import timed
from thinwire_lab.show.table import milliseconds

_DENSITY, _RANKS, _REPEATS = 1e-3, 16, 7
Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is timed, and how many copies of the same memory it may take: `passes` at the rate of a copy, × `slack`."""

    make: Callable[[int, torch.device], Work]
    passes: int
    slack: float = 1.25

    @property
    def goal(self) -> float:
        """The goal, in copies."""
        return self.passes * self.slack / 2  # a copy reads once and writes once


def _encoding(memory: Callable[[], Memory], codec: Codec) -> Callable[[int, torch.device], Work]:
    def make(numel: int, device: torch.device) -> Work:
        gradients = [torch.randn(numel, device=device) for _ in range(2)]
        kept, steps = memory(), iter(range(1 << 30))

        def encode() -> None:
            step = next(steps)
            signal = kept.compensate("weight", gradients[step % 2], 1.0, seed=step)
            payload = codec.encode_signal(signal, seed=step)
            payload.to_buffer()
            kept.retain(["weight"], payload)
            kept.commit()

        return encode

    return make


def _decoding(numel: int, device: torch.device) -> Work:
    count = max(1, round(_DENSITY * numel))
    indices = torch.arange(count, dtype=torch.int32, device=device) * (numel // count)
    payloads = [
        Sparse(indices=indices + rank, values=torch.randn(count, device=device), numel=numel) for rank in range(_RANKS)
    ]
    rows, out = torch.stack([payload.to_buffer() for payload in payloads]), torch.empty(numel, device=device)
    return lambda: payloads[0].from_buffers(rows).write(out)


ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "encode, sampled threshold": Row(make=_encoding(ErrorFeedback, SampledThreshold(density=_DENSITY)), passes=3),
        "encode, hashed slots": Row(make=_encoding(ErrorFeedback, HashedSlots(density=_DENSITY)), passes=3),
        "encode, momentum correction": Row(
            make=_encoding(lambda: MomentumCorrection(momentum=0.9), SampledThreshold(density=_DENSITY)), passes=5
        ),
        f"decode of {_RANKS} payloads": Row(make=_decoding, passes=1, slack=1.5),
    }
)
"""What is timed, by name."""


def check_speed(name: str, device: torch.device, size: int, figures: dict[str, Any]) -> tuple[None, str]:
    """Time one row. That it is slow is no failure; that it raises is one."""
    row = ROWS[name]
    pairs = beside_copy(row.make(size, device), 8 * size, device, _REPEATS)
    (ours, copied), copies = map(median, zip(*pairs, strict=True)), median(mine / copy for mine, copy in pairs)
    figures |= {"elements": size, "seconds": ours, "copy_seconds": copied, "copies": copies, "goal": row.goal}
    return None, (
        f"{copies:.2f} copies, goal {row.goal:.2f}; {milliseconds(ours)} ms for {size:,} elements, "
        f"a copy {milliseconds(copied)} ms"
    )


def beside_copy(work: Work, moved: int, device: torch.device, repeats: int) -> list[tuple[float, float]]:
    """Return the seconds of some work, and of a copy that reads and writes `moved` bytes together, pair by pair."""
    source = torch.ones(max(1, moved // 8), device=device)
    spare = torch.empty_like(source)
    pairs = [(timed(work, device), timed(lambda: spare.copy_(source), device)) for _ in range(2 + repeats)]
    return pairs[2:]  # the first two compile, and take memory
