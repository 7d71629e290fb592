"""Numbers in few bits, frequencies, and payload sizes."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.codecs import FFT, SampledThreshold
from thinwire.formats import Coded, OffsetFloat
from thinwire.payloads import Narrow, Spectral
from thinwire.signals import Plain
from thinwire_lab.studies.kernels.work import Case, Place, Work

_BLOCK, _DENSITY = 4096, 0.15
_TEN_BITS = OffsetFloat.balanced(bits=10, mantissa=5, max=1.0, rounding="nearest")  # as in the recipe
_EIGHT_BITS = OffsetFloat.balanced(bits=8)


def _offset_float_encode(place: Place) -> Work:
    x = place.gradient()
    spare = torch.empty_like(x)

    def outcome() -> tuple[Tensor, Tensor]:
        coded = Coded.of(x, _EIGHT_BITS)
        return coded.packed(), coded.scales

    return Work(run=outcome, floor=lambda: spare.copy_(x), moved=x.nbytes + x.numel() * _EIGHT_BITS.bits // 8)


def _offset_float_decode(place: Place) -> Work:
    x = place.gradient()
    coded, spare = Coded.of(x, _EIGHT_BITS), torch.empty_like(x)
    buffer, scales = coded.packed(), coded.scales

    def run() -> Tensor:
        Coded.unpack(buffer, scales, (place.numel,), _EIGHT_BITS).decode_into(spare)
        return spare

    return Work(
        run=run,
        floor=lambda: spare.copy_(x),
        reset=lambda: spare.fill_(torch.nan),
        moved=x.nbytes + buffer.nbytes,
    )


def _fft_encode(place: Place) -> Work:
    x = place.gradient()
    codec = FFT(density=_DENSITY, block=_BLOCK, values=_TEN_BITS)
    width = min(_BLOCK, place.numel)
    blocks = pad(x, (0, -place.numel % width)).view(-1, width)

    def by_torch() -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(blocks, norm="ortho").view(-1)
        keys = spectrum.abs().topk(round(_DENSITY * spectrum.numel()), sorted=False).indices
        return keys, spectrum[keys]

    return Work(
        run=lambda: codec.encode_signal(Plain(x)).to_buffer(),
        floor=lambda: torch.fft.rfft(blocks, norm="ortho"),
        outcome=lambda: codec.encode_signal(Plain(x)),
        alike=_same_spectrum,
        others={"torch": by_torch},
        moved=x.nbytes,
    )


def _same_spectrum(found: Spectral, expected: Spectral) -> bool:
    """Whether the coefficients match, unless a rounding error decides between two for the last place."""
    mine, other = found.coefficients.keys, expected.coefficients.keys
    energies = [float(payload.values.double().square().sum()) for payload in (found, expected)]
    different = mine.numel() - int(torch.isin(mine, other).sum())
    close = abs(energies[0] - energies[1]) <= 1e-5 * energies[1]
    return mine.numel() == other.numel() and different <= 1e-4 * mine.numel() and close


def _wire(place: Place, values: Narrow) -> Work:
    payload = SampledThreshold(density=place.density, values=values).encode_signal(Plain(place.gradient()))
    buffer = payload.to_buffer()
    spare = torch.empty_like(buffer)

    def outcome() -> tuple[object, ...]:
        made = payload.to_buffer()
        back = payload.from_buffers(made[None])
        right = torch.equal(back.indices, payload.indices) and torch.equal(back.values, payload.values)
        return made, right, made.numel() == payload.nbytes

    return Work(
        run=payload.to_buffer,
        floor=lambda: spare.copy_(buffer),
        outcome=outcome,
        alike=lambda found, expected: torch.equal(found[0], expected[0]) and all(found[1:] + expected[1:]),
        moved=payload.indices.nbytes + payload.values.nbytes + buffer.nbytes,
        bits=8 * payload.nbytes / max(1, int(payload.values.count_nonzero())),
    )


CASES = {
    "offset_float_encode": Case(make=_offset_float_encode, group="codes", floor="copy_(x)", most=1 << 24),
    "offset_float_decode": Case(make=_offset_float_decode, group="codes", floor="copy_(x)", most=1 << 24),
    "fft_encode": Case(
        make=_fft_encode,
        group="steps",
        floor="rfft of the blocks",
        baseline="rfft, abs, topk, gather",
        density=_DENSITY,
        most=1 << 22,
    ),
    "wire_fp16": Case(
        make=lambda place: _wire(place, torch.float16), group="wire", floor="copy_ of the buffer", sweep=True
    ),
    "wire_offset8": Case(
        make=lambda place: _wire(place, _EIGHT_BITS), group="wire", floor="copy_ of the buffer", sweep=True
    ),
}
