"""What the host does not wait for, it notes: is that what it would have raised, and is nothing written from it?"""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
import torch.distributed as dist
from cases import CODECS, OFFSET_8, vector
from ranks import Ranks
from torch import Tensor

from thinwire import codecs, waits
from thinwire.codecs import Codec
from thinwire.errors import PayloadError
from thinwire.exchanges import AllGather
from thinwire.exchanges.all_gather import received
from thinwire.kernels import dispatch
from thinwire.memories import MomentumCorrection
from thinwire.payloads import Payload
from thinwire.reducer import Bucket, Compressed, Round, Segment
from thinwire.waits import Verdict


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host must not read real tensors, either."""
    _act_as_gpu(monkeypatch)


def _act_as_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(waits, "HOST", frozenset())


def _damaged(buffers: Tensor) -> Iterator[Tensor]:
    """Yield the buffers with bytes changed: in the header, throughout, and here and there."""
    for place in (0, 1, 4, 9, 15):
        damaged = buffers.clone()
        damaged[1, place] ^= 5
        yield damaged
    for start, byte in product((16, 24, buffers.shape[1] // 2), (0, 255)):
        damaged = buffers.clone()
        damaged[0, start:] = byte
        yield damaged
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        damaged = buffers.clone()
        place = int(torch.randint(16, buffers.shape[1], (1,), generator=generator))
        damaged[1, place] = int(torch.randint(256, (1,), generator=generator))
        yield damaged


def _payload(codec: Codec, seed: int) -> Payload:
    """Return what two parameters make, each with a region of its own."""
    parts = [codec.encode(vector(600, seed).view(20, 30), seed=seed), codec.encode(vector(90, seed + 9), seed=seed + 1)]
    return type(parts[0]).assemble(parts, [10, 610], 710)


def _said(check: Callable[[], object]) -> str:
    """Return what the check raises."""
    try:
        check()
    except PayloadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.usefixtures("unread")
def test_what_is_noted_is_what_would_be_raised_and_nothing_is_written(codec: str) -> None:
    mine = _payload(CODECS[codec].codec, 3)
    theirs = _payload(CODECS[codec].codec, 3 if CODECS[codec].codec.shared_seed else 4)
    buffers = torch.stack([mine.to_buffer(), theirs.to_buffer()])
    verdict = Verdict()
    assert torch.equal(received(mine, buffers, verdict).dense(), mine.from_buffers(buffers).dense())
    verdict.read()
    refused = 0
    for damaged in _damaged(buffers):
        verdict = Verdict()
        total = received(mine, damaged, verdict).dense()
        raised, noted = _said(lambda: mine.from_buffers(damaged)), _said(verdict.read)  # noqa: B023 - called at once
        assert noted == raised
        expected = torch.zeros(710) if raised else mine.from_buffers(damaged).dense()
        assert torch.equal(total.nan_to_num(7), expected.nan_to_num(7).to(total.dtype))
        refused += bool(raised)
    assert refused >= 5, "every header is checked"


HALF = {
    "codes": codecs.TopK(density=0.02, values=OFFSET_8),
    "spectra": codecs.FFT(density=0.02, block=300, values=OFFSET_8),
    "chunks": codecs.ChunkTopK(density=0.02, values=OFFSET_8),
    "as they are": codecs.TopK(density=0.02),
}


def _sixteen_bits(codec: str, gpu: bool) -> list[Tensor]:
    """Return means and memory of steps in float16, of which sums leave the range, and the last is not finite."""
    group, memory = dist.group.WORLD, MomentumCorrection(momentum=0.5)
    assert group is not None
    reducer, found = Compressed(memory=memory, codec=HALF[codec], exchange=AllGather()), []
    segments = (Segment(name="a", offset=0, length=900, shape=(30, 30)), Segment(name="b", offset=900, length=300))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_ONLY_REFERENCE", True)
        if gpu:
            _act_as_gpu(patch)
        for step in range(12):
            flat = (40_000 * vector(1200, step).abs()).clamp(max=60_000).half()
            flat[5] = torch.inf if step == 11 else flat[5]
            verdict = Verdict() if gpu else None
            reducer.reduce(
                Bucket(flat=flat, segments=segments), Round(step=step, group=group, scale=0.5, verdict=verdict)
            ).wait()
            found.append(flat.clone())
            memory.commit() if flat.isfinite().all() else memory.rollback()
    return [*found, *(x for fields in memory.state().values() for x in fields.values())]


@pytest.mark.parametrize("codec", HALF)
def test_sums_beyond_float16_are_clamped_without_a_look(ranks: Ranks, codec: str) -> None:
    plain, unread = (ranks.run(2, _sixteen_bits, codec, gpu) for gpu in (False, True))
    for before, now in zip(plain, unread, strict=True):
        assert not before[11].isfinite().all()
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, now, strict=True))
