"""Measuring what compressed gathers of parameters cost, by the elements of a rank's shard."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from thinwire.collectives import Group
from thinwire.gathers import Differences
from thinwire.payloads import exponents
from thinwire.planner.probe.measure import gathered, longest, synchronize
from thinwire.planner.profile import Cost, Curve

_REPEATS = 3
_NOTHING = Curve(((1.0, 0.0),))
_Coding = tuple[Tensor, Callable[[], object]]
"""What travels of a rank's shard, and what decodes everybody's."""


def probe_gathers(group: Group, device: torch.device, sizes: Sequence[int], dtype: torch.dtype) -> dict[str, Cost]:
    """Time `Lossless` and `Differences`, by name, on random shards of these sizes and this dtype; a collective."""
    lots = torch.Generator(device=device).manual_seed(0)
    drawn = (torch.randn(size, device=device, generator=lots) for size in sorted(set(sizes)))
    shards = [(0.02 * x).to(dtype) for x in drawn]  # as weights are
    return {name: _cost(coder, group, shards) for name, coder in _CODERS.items()}


def _cost(coder: Callable[[Tensor, int], _Coding], group: Group, shards: Sequence[Tensor]) -> Cost:
    points = {}
    for x in shards:
        coder(x, group.size())[1]()  # compiles kernels
        longest(0.0, group, x.device)  # start together, as ranks of one machine share its cores
        taken = [_timed(coder, x, group.size()) for _ in range(_REPEATS)]
        points[x.numel()] = gathered(list(map(median, zip(*taken, strict=True))), group, x.device).mean(dim=0).tolist()
    encode, decode, nbytes = (Curve.through((size, point[i]) for size, point in points.items()) for i in range(3))
    return Cost(encode=encode, decode=decode, each=_NOTHING, exchange=_NOTHING, nbytes=nbytes)


def _timed(coder: Callable[[Tensor, int], _Coding], x: Tensor, ranks: int) -> tuple[float, float, float]:
    """Return the seconds of encoding and of decoding, and the bytes that travel."""
    synchronize(x.device)
    start = time.perf_counter()
    sent, decode = coder(x, ranks)
    synchronize(x.device)
    encoded = time.perf_counter()
    decode()
    synchronize(x.device)
    return encoded - start, time.perf_counter() - encoded, float(sent.nbytes)


def _lossless(x: Tensor, ranks: int) -> _Coding:
    packed, out = exponents.pack(x), torch.empty_like(x)

    def decode() -> None:
        for _ in range(ranks - 1):
            exponents.unpack(out, packed)

    return packed, decode


def _differences(x: Tensor, ranks: int) -> _Coding:
    payload = Differences().encode(x.float() - x.roll(1).float(), [x.numel()])
    sent, copies = payload.to_buffer(), x.expand(ranks, -1)

    def decode() -> None:
        arrived = payload.of_each(sent.expand(ranks, -1).contiguous())
        copies.contiguous().add_(arrived).clone()  # once for FSDP, once to be kept

    return sent, decode


_CODERS: Mapping[str, Callable[[Tensor, int], _Coding]] = {"lossless": _lossless, "differences": _differences}
