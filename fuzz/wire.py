"""Feed atheris's bytes to every reader of payloads: `python fuzz/wire.py -max_total_time=300 [corpus]`.

Each must raise PayloadError or return something whose indices lie within bounds, and leave the buffer alone. Real
buffers of every coding, which `python fuzz/wire.py --seed corpus` writes, make a good start. Needs atheris (PyPI).
"""

import sys
from contextlib import suppress
from pathlib import Path

import atheris
import torch

from thinwire import codecs
from thinwire.errors import PayloadError

# Instrumented are the readers alone: Numba cannot compile kernels that are.
for name in [name for name in sys.modules if name.startswith("thinwire.payloads")]:
    del sys.modules[name]
with atheris.instrument_imports():
    from thinwire.payloads import Blocks, Chunks, Dense, Keyed, Payload, Sparse, Spectral, exponents

READERS = (Dense, Sparse, Blocks, Spectral)


def singles() -> list[Payload]:
    """Return payloads of one region."""
    picks = torch.arange(40, dtype=torch.int32) * 5
    one = Sparse(indices=picks, values=torch.ones(40), numel=200)
    empty = torch.full((40,), 199, dtype=torch.int32)
    slots = Sparse(indices=empty, values=torch.zeros(40).half(), numel=200, seeds=(1,))
    block = Blocks(keys=picks[:8], values=torch.ones(16), numel=80, width=2)
    made = codecs.ChunkTopK(density=0.1).encode(torch.arange(80.0).view(16, 5))
    chunks = Chunks(positions=made.positions, values=made.values, numel=80, chunkings=made.chunkings)
    return [one, slots, block, chunks]


RECEIVERS = [type(one).assemble([one, one], [10, 300], 600) for one in singles()]
"""They know their regions and sizes, and take rows of other ranks."""
WEIGHTS = [torch.logspace(-3, 0, 700).to(dtype) for dtype in (torch.bfloat16, torch.float32)]
"""What exponents are coded of."""


def check(payload: Payload) -> None:
    """Raise AssertionError unless what was read lies within bounds."""
    table = payload.coefficients if isinstance(payload, Spectral) else payload
    if isinstance(table, Keyed):
        assert table.rows.shape[0] == table.keys.numel()
        assert not table.keys.numel() or 0 <= int(table.keys.min()) <= int(table.keys.max()) < table.key_space


def read(data: bytes) -> None:
    """Give a buffer to every reader of its kind."""
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    before = buffer.clone()
    for reader in READERS:
        try:
            check(reader.from_buffer(buffer))
        except PayloadError:
            assert torch.equal(buffer, before)
    for receiver in RECEIVERS:
        out = torch.full((600,), 7.0)
        try:
            total = receiver.from_buffers(buffer[None])
            check(total)
            total.write(out)
        except PayloadError:
            assert bool((out == 7).all())
        assert bool((out[:10] == 7).all())
        assert bool((out[500:] == 7).all())
    for like in WEIGHTS:
        frame = torch.full((like.numel() + 128,), 7, dtype=like.dtype)
        with suppress(PayloadError):
            exponents.unpack(frame[64:-64], buffer)
        assert bool((frame[:64] == 7).all())
        assert bool((frame[-64:] == 7).all())


def write_seeds(folder: Path) -> None:
    """Write buffers of every kind and coding."""
    folder.mkdir(parents=True, exist_ok=True)
    picks = torch.arange(30, dtype=torch.int32)
    payloads: list[Payload] = [
        *RECEIVERS,
        *singles(),
        Dense(values=torch.ones(9).half()),
        Sparse(indices=picks.flip(0), values=torch.ones(30), numel=90, ascending=False),
        *(
            Blocks(keys=torch.arange(0, 30, step, dtype=torch.int32), values=torch.ones(60 // step), numel=60, width=2)
            for step in (1, 2, 30)
        ),
    ]
    table = Blocks(keys=picks[:5], values=torch.ones(10), numel=132, width=2)
    payloads.append(Spectral(coefficients=table, block=64, numel=100))
    buffers = [*(payload.to_buffer() for payload in payloads), *map(exponents.pack, WEIGHTS)]
    for i, buffer in enumerate(buffers):
        (folder / f"{i}.bin").write_bytes(bytes(buffer.tolist()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--seed"]:
        write_seeds(Path(sys.argv[2]))
    else:
        atheris.Setup(sys.argv, read)
        atheris.Fuzz()
