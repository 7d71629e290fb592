"""Buffers of every codec against a decoder written from docs/explanation/wire-format.md, whole and damaged."""

import struct
from functools import cache

import plain_decoder
import pytest
import torch
from cases import CODECS, vector
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.payloads import Blocks, Chunks, Dense, Keyed, Payload, Sketch, Sparse, Spectral

READERS = (Dense, Sparse, Blocks, Spectral)
SIZES = (150, 1, 333)
TRANSFORMS = {None: 0, "dct": 1, "hadamard": 2}
OFFSETS, NUMEL = (7, 200, 300), 700
names = st.sampled_from(sorted(CODECS))


@cache
def _bucket(name: str) -> Payload:
    """Return three tensors with gaps between them."""
    parts = [CODECS[name].codec.encode(vector(numel, seed=numel), seed=numel) for numel in SIZES]
    return type(parts[0]).assemble(parts, OFFSETS, NUMEL)


@cache
def _single(name: str) -> Payload:
    return CODECS[name].codec.encode(vector(1000), seed=3)


def _bytes(x: Tensor) -> bytes:
    return bytes(x.contiguous().view(torch.uint8).tolist()) if x.numel() else b""


def _plain(payload: Payload, buffer: Tensor) -> plain_decoder.Plain:
    coded = getattr(payload.coefficients if isinstance(payload, Spectral) else payload, "coded", None)
    runs = payload.runs if isinstance(payload, Sparse) else [0] * len(payload.regions)
    tensors = [(at, n, m) for (at, n), m in zip(payload.regions, runs, strict=True)]
    cut = payload.chunkings if isinstance(payload, Chunks) else ()
    cuts = [plain_decoder.Cut(c.numel, c.columns, c.height, c.width, c.kept, TRANSFORMS[c.transform]) for c in cut]
    scales = coded.scales.numel() if coded else 0
    return plain_decoder.decode(_bytes(buffer), scales=scales, tensors=tensors, cuts=cuts)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("make", [_bucket, _single])
def test_a_decoder_written_from_the_page_reads_every_codecs_buffer(name: str, make: type[Payload]) -> None:
    payload: Payload = make(name)  # type: ignore[call-arg]
    plain = _plain(payload, payload.to_buffer())
    table = payload.coefficients if isinstance(payload, Spectral) else payload
    coded = getattr(table, "coded", None)
    if coded is None:
        assert b"".join(plain.values) == _bytes(table.values)
    else:
        assert b"".join(plain.scales) == _bytes(coded.scales)
        assert plain.codes == coded.codes.tolist()
    if isinstance(table, Keyed):
        assert plain.indices == table.keys.tolist()
    if isinstance(payload, Chunks):
        assert plain.indices == payload.positions.tolist()
    assert plain.numel == (payload.values.numel() if isinstance(payload, Dense | Sketch) else payload.numel)


def test_every_coding_occurs_among_the_cases() -> None:
    buffers = [make(name).to_buffer() for make in (_bucket, _single) for name in CODECS]
    found = {(int(buffer[1]), int(buffer[15])) for buffer in buffers} | {
        (3, int(buffer[16 + 15])) for buffer in buffers if buffer[1] == 4
    }
    assert found >= {(1, 0), (2, 2), (2, 3), (3, 0), (3, 1), (3, 2), (4, 0)}


@st.composite
def damage(draw: st.DrawFn) -> tuple[str, int, bytes]:
    what = draw(st.sampled_from(["overwrite", "flip", "cut", "extend", "replace"]))
    return what, draw(st.integers(0, 10**6)), draw(st.binary(min_size=1, max_size=40))


def _damaged(buffer: Tensor, how: tuple[str, int, bytes]) -> Tensor:
    what, place, noise = how
    bad, start = bytearray(_bytes(buffer)), place % buffer.numel()
    if what == "overwrite":
        bad[start : start + len(noise)] = noise[: len(bad) - start]
    elif what == "flip":
        bad[start] ^= 1 << noise[0] % 8
    elif what == "cut":
        del bad[start:]
    elif what == "extend":
        bad += noise
    else:
        bad = bytearray(noise)
    return torch.frombuffer(bad, dtype=torch.uint8) if bad else torch.empty(0, dtype=torch.uint8)


@given(names, st.booleans(), damage())
@settings(max_examples=600)
@example("topk", True, ("flip", 15, b"\0"))
def test_damaged_rows_are_refused_or_stay_within_their_spans(
    name: str, bucket: bool, how: tuple[str, int, bytes]
) -> None:
    """RefusedError whenever the page says so, and then nothing is written; otherwise nothing beyond the regions is."""
    payload = _bucket(name) if bucket else _single(name)
    good = payload.to_buffer()
    bad = _damaged(good, how)
    rows = torch.stack([good, bad]) if bad.numel() == good.numel() else bad[None]
    out = torch.full((payload.numel,), 7.0)
    try:
        payload.from_buffers(rows).write(out)
    except PayloadError:
        assert bool((out == 7).all())
        return
    for (offset, length), (after, _) in zip(payload.regions, [*payload.regions[1:], (payload.numel, 0)], strict=True):
        assert bool((out[offset + length : after] == 7).all())
    assert _plain(payload, bad) is not None, "the page refuses it"


@given(names, damage(), st.sampled_from(READERS))
@settings(max_examples=1000)
def test_damaged_buffers_are_refused_as_the_page_says(
    name: str, how: tuple[str, int, bytes], reader: type[Dense]
) -> None:
    bad = _damaged(_single(name).to_buffer(), how)
    if how[1] % 2 and bad.numel() > 1:
        reader = READERS[int(bad[1]) % 4 - 1]  # type: ignore[assignment]  # so that most reach the right one
    _agree(bad, reader)


def _one_of_each() -> list[Payload]:
    """Return small payloads of every kind and coding, all with padding."""
    few = torch.tensor([2, 2, 11, 13, 28, 29, 30, 60, 61, 61, 89], dtype=torch.int32)
    half = torch.ones(11).half()
    picks = torch.tensor([3, 9, 17], dtype=torch.int32)
    slots = kernels.hashed_slots(picks, picks, 7, 29, 5)
    slots.masked_fill_(slots < 0, 28)
    many = torch.tensor([0, 1, *range(60, 840, 60)], dtype=torch.int32)
    coefficients = Blocks(keys=few[4:7] - 28, values=half[:6], numel=18, width=2)
    return [
        Dense(values=half),
        Sparse(indices=few.flip(0), values=half, numel=90, ascending=False),
        Sparse(indices=few, values=half, numel=90),
        Sparse(indices=slots, values=half[:7], numel=29, seeds=(5,)),
        Blocks(keys=few[5:6], values=half[:3], numel=270, width=3),
        Blocks(keys=few[2:9], values=half[:7], numel=70, width=1),
        Blocks(keys=many, values=half.repeat(15), numel=9900, width=11),
        Spectral(coefficients=coefficients, block=4, numel=9),
    ]


def test_every_bit_flipped_is_read_or_refused_as_the_page_says() -> None:
    payloads = _one_of_each()
    assert [int(payload.to_buffer()[15]) for payload in payloads] == [0, 0, 2, 3, 0, 1, 2, 0]
    for payload in payloads:
        good, reader = payload.to_buffer(), type(payload)
        assert torch.equal(reader.from_buffer(good).dense(), payload.dense())  # type: ignore[attr-defined]
        for bit in range(8 * good.numel()):
            bad = good.clone()
            bad[bit // 8] ^= 1 << bit % 8
            _agree(bad, reader)  # type: ignore[arg-type]


@given(st.sampled_from(READERS), st.tuples(*[st.integers(0, n) for n in (4, 20, 20, 3)]), st.binary(max_size=96))
@settings(max_examples=600)
def test_random_bodies_are_refused_as_the_page_says(
    reader: type[Dense], head: tuple[int, int, int, int], body: bytes
) -> None:
    dtype, count, numel, coding = head
    first = struct.pack("<BBBBIQ", 2, READERS.index(reader) + 1, dtype, 0, count, numel | coding << 56)
    for padded in (body, body[: len(body) // 8 * 8], body + bytes(16)):
        _agree(torch.frombuffer(bytearray(first + padded), dtype=torch.uint8), reader)


def _agree(buffer: Tensor, reader: type[Dense]) -> None:
    """Hold `from_buffer` against the plain decoder: both refuse, or both read the same."""
    before = buffer.clone()
    try:
        plain = plain_decoder.decode(_bytes(buffer))
        refused = plain.kind != READERS.index(reader) + 1 or buffer[2] == 4 or buffer[1:19:17].tolist() == [4, 4]
    except plain_decoder.RefusedError:
        refused = True
    try:
        payload: Payload = reader.from_buffer(buffer)
    except PayloadError:
        assert refused, "the page takes it"
        return
    assert not refused, "the page refuses it"
    assert torch.equal(buffer, before)
    _check_reads_alike(payload, plain)


def _check_reads_alike(payload: Payload, plain: plain_decoder.Plain) -> None:
    assert b"".join(plain.values) == _bytes(payload.values)
    table = payload.coefficients if isinstance(payload, Spectral) else payload
    if isinstance(table, Keyed):
        assert table.keys.tolist() == plain.indices
        assert all(0 <= key < table.key_space for key in plain.indices)
