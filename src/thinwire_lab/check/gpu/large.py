"""Is a bucket whole whose counts pass 2^31? What is delivered and what waits make up its gradients, to the last bit."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.recipes import topk
from thinwire_lab.check.findings import Wrong
from thinwire_lab.check.gpu import buckets
from thinwire_lab.check.gpu.buckets import Case, Work
from thinwire_lab.check.gpu.counting import patched
from thinwire_lab.check.gpu.late import LateGroup

_COARSE = -16  # as bits: leaves bfloat16 four that count, so that up to 16 shares of a gradient add up exactly
_SLICE = 1 << 26  # elements that are compared at a time


@dataclass(frozen=True, kw_only=True)
class Large:
    """A bucket of one vector in bfloat16, how many ranks send it, and the bytes that an element takes."""

    numel: int
    world: int
    density: float
    bytes_each: int
    sampled: bool = False


LARGE: Mapping[str, Large] = {
    "n = 2^31 - 1": Large(numel=2**31 - 1, world=2, density=0.001, bytes_each=30),
    "n = 2^31 - 1, sampled": Large(numel=2**31 - 1, world=2, density=0.001, bytes_each=30, sampled=True),
    "K k > 2^31": Large(numel=2**28 + 64, world=16, density=0.5, bytes_each=400),
}
TINY: Mapping[str, Large] = {
    "n = 2^11 - 1": Large(numel=2**11 - 1, world=2, density=0.01, bytes_each=30),
    "K k > 2^11": Large(numel=2**8 + 64, world=16, density=0.5, bytes_each=400),
}
"""What the interpreter is given instead."""


def checked(large: Large, device: torch.device) -> dict[str, Any]:
    """Check one; or say that there is no room for it. Raises Wrong."""
    needed = large.numel * large.bytes_each
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else needed
    if free < needed:
        return {"left_out": f"{free / 1e9:.0f} GB are free; expected {needed / 1e9:.0f}"}
    case = Case(recipe="dense", tensors=1, dtype="bfloat16", numel=0, shapes=((large.numel,),))
    work = Work(case, device)
    work.gradients.view(torch.int16).bitwise_and_(_COARSE)
    work.recipe = topk(density=large.density, sampled=large.sampled, minimum_size=0)
    with closing(LateGroup(device, large.world, prompt=True)) as work.group, patched((buckets, "WORLD", large.world)):
        work.prepare()
        work.step()
    return {"elements": large.numel, "ranks": large.world, "delivered": _delivered(work, large.world)}


def _delivered(work: Work, world: int) -> int:
    """Return how many elements were. Raises Wrong if the rest does not wait."""
    memory = next(memory for memory in work.recipe.memories() if memory.stateful)
    waiting, count = memory.state()["tensor 0"]["residual"], 0
    for begin in range(0, work.flat.numel(), _SLICE):
        mean, rest, gradient = (x[begin : begin + _SLICE] for x in (work.flat, waiting, work.gradients[0]))
        there = mean != 0
        wrong = torch.where(there, (mean != gradient) | (rest != 0), rest * world != gradient)
        if bool(wrong.any()):
            at = begin + int(wrong.nonzero()[0])
            raise Wrong(f"element {at} of {work.flat.numel()} is neither delivered nor kept whole, the first of some")
        count += int(there.sum())
    return count
