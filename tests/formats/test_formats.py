"""Format laws, over every row of the list, and the papers' numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import vector
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.formats import Coded, Format, Levels, Magnitudes, OffsetFloat, Sign, Ternary, balanced_eps
from thinwire.kernels.parts import together
from thinwire_lab.papers.fft.offset_float import tuned_eps

Bound = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class FormatCase:
    """`bound` takes magnitudes and their scales, float64, and returns the largest error of each."""

    form: Format
    bound: Bound
    stochastic: bool = False
    biased: bool = False  # although it is stochastic


def _offset(share: float, **options: Any) -> FormatCase:
    """Errors are at most `share` of the step between neighbours, the step below the smallest being the smallest."""
    form = OffsetFloat.balanced(**options)

    def bound(x: Tensor, scale: Tensor) -> Tensor:
        step = (x.log2().floor() - form.mantissa).exp2()
        return share * torch.where(x < form.eps * scale, form.eps * scale, step)

    return FormatCase(form=form, bound=bound, stochastic=form.rounding == "stochastic")


FORMATS = {
    "offset float": _offset(1.0),
    "offset float nearest": _offset(0.5, rounding="nearest"),
    "offset float stochastic": _offset(1.0, rounding="stochastic"),
    "offset float of 6 bits by groups": _offset(0.5, bits=6, mantissa=2, rounding="nearest", group_size=100),
    "offset float of 10 bits": _offset(1.0, bits=10, mantissa=5, max=2.0, rounding="stochastic"),
    "offset float of 4 bits": _offset(1.0, bits=4, mantissa=0, rounding="stochastic"),
    "offset float unscaled": _offset(0.5, max=4.0, rounding="nearest", scaled=False),
    "offset float of 15 bits": _offset(1.0, bits=15, mantissa=9),
    "levels, nearest": FormatCase(
        form=Levels(norm="max", rounding="nearest", group_size=128), bound=lambda x, scale: scale / 14 * (1 + 1e-6)
    ),
    "levels": FormatCase(form=Levels(), bound=lambda x, scale: scale / 7, stochastic=True),
    "levels of 3 bits by norm max": FormatCase(
        form=Levels(bits=3, norm="max", group_size=None), bound=lambda x, scale: scale / 3, stochastic=True
    ),
    "levels of 15 bits": FormatCase(
        form=Levels(bits=15, group_size=64), bound=lambda x, scale: scale / (2**14 - 1), stochastic=True
    ),
    "ternary": FormatCase(form=Ternary(), bound=lambda x, scale: scale, stochastic=True),
    "ternary by groups": FormatCase(form=Ternary(group_size=32), bound=lambda x, scale: scale, stochastic=True),
    "ternary clipped": FormatCase(form=Ternary(clip=2.5), bound=torch.maximum, stochastic=True, biased=True),
    "sign": FormatCase(form=Sign(), bound=torch.maximum),
    "magnitudes": FormatCase(
        form=Magnitudes(levels=(0.57, 1.89)), bound=lambda x, scale: torch.maximum(x, 1.89 * scale)
    ),
    "magnitudes of 3 bits": FormatCase(
        form=Magnitudes(levels=(0.31, 0.95, 1.68, 2.70), group_size=None),
        bound=lambda x, scale: torch.maximum(x, 2.70 * scale),
    ),
}
UNBIASED = {name: case for name, case in FORMATS.items() if case.stochastic and not case.biased}
STOCHASTIC = {name: case for name, case in FORMATS.items() if case.stochastic}
DETERMINISTIC = {name: case for name, case in FORMATS.items() if not case.stochastic}
formats = pytest.mark.parametrize("case", FORMATS.values(), ids=FORMATS)
unbiased = pytest.mark.parametrize("case", UNBIASED.values(), ids=UNBIASED)
stochastic = pytest.mark.parametrize("case", STOCHASTIC.values(), ids=STOCHASTIC)
deterministic = pytest.mark.parametrize("case", DETERMINISTIC.values(), ids=DETERMINISTIC)
sizes = pytest.mark.parametrize("numel", [0, 1, 7, 63, 100, 1000])


def _decoded(form: Format, x: Tensor, seed: int = 0) -> Tensor:
    return Coded.of(x, form, seed=seed).values(torch.float32)


def _scales(coded: Coded) -> Tensor:
    """Return the scale of each value, float64."""
    numel = coded.codes.numel()
    return coded.scales.repeat_interleave(coded.format.width(numel))[:numel].double()


@pytest.mark.grid
@formats
@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_error_is_within_the_bound(case: FormatCase, numel: int, dtype: torch.dtype) -> None:
    x = vector(numel, dtype=dtype)
    before = x.clone()
    coded = Coded.of(x, case.form, seed=3)
    assert torch.equal(x, before), "the input was changed"
    assert coded.codes.dtype == (torch.uint8 if case.form.bits <= 8 else torch.int16)
    assert coded.scales.numel() == case.form.scale_count(numel)
    error = (coded.values(torch.float64) - x.double()).abs()
    assert bool((error <= case.bound(x.double().abs(), _scales(coded)) * (1 + 1e-6) + 1e-12).all())


@deterministic
def test_what_was_decoded_is_encoded_to_itself(case: FormatCase) -> None:
    """Where the largest magnitude was rounded down to max/2, the scale halves: other codes for the same values."""
    coded = Coded.of(vector(1000), case.form)
    values = coded.values(torch.float32)
    again = Coded.of(values, case.form, seed=1)
    assert torch.equal(again.values(torch.float32), values)
    kept = _scales(again) == _scales(coded)
    assert torch.equal(again.codes[kept], coded.codes[kept])
    assert float(kept.float().mean()) >= 0.5


@unbiased
def test_unbiased(case: FormatCase) -> None:
    """The mean over seeds is within six standard deviations, computed from the neighbours on the format's own grid."""
    x, seeds = torch.cat([vector(90), torch.linspace(-2e-4, 2e-4, 10)]), 1200
    coded = [Coded.of(x, case.form, seed=seed) for seed in range(seeds)]
    mean = torch.stack([each.values(torch.float64) for each in coded]).mean(0)
    scale, table = _scales(coded[0]), case.form.table().double()
    grid = table[~table.isnan()].sort().values
    ratio = x.double() / scale
    above = torch.searchsorted(grid, ratio).clamp(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    width, variance = (high - low) * scale, ((ratio - low) * (high - ratio)).clamp(min=0) * scale**2
    # Where a step is rare the mean is not normal, hence the second term (Bernstein).
    bound = 6 * (variance / seeds).sqrt() + 12 * width / seeds + 1e-6 * scale
    assert bool(((mean - x).abs() <= bound).all())
    deviation = float((variance.sum() / seeds).sqrt())
    along = float(((mean - x) * x.sign()).sum())
    assert abs(along) <= 6 * deviation + 1e-6 * float(scale.sum()), "biased along the vector"


@stochastic
def test_other_seeds_draw_other_codes(case: FormatCase) -> None:
    x = vector(1000)
    assert torch.equal(case.form.encode(x, seed=5)[0], case.form.encode(x, seed=5)[0])
    assert not torch.equal(case.form.encode(x, seed=5)[0], case.form.encode(x, seed=6)[0])


@formats
def test_global_random_state_is_left_alone(case: FormatCase) -> None:
    before = torch.random.get_rng_state()
    case.form.encode(vector(1000), seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.grid
@formats
@sizes
def test_packed_and_unpacked(case: FormatCase, numel: int) -> None:
    coded = Coded.of(vector(numel), case.form)
    packed = coded.packed()
    assert packed.dtype == torch.uint8
    assert packed.numel() == math.ceil(numel * case.form.bits / 8)
    assert torch.equal(kernels.unpack_bits(packed, numel, case.form.bits, coded.codes.dtype), coded.codes)


@formats
def test_cat(case: FormatCase) -> None:
    parts = [Coded.of(vector(numel, seed=numel), case.form) for numel in (130, 0, 1, 999)]
    whole = Coded.cat([Coded.cat(parts[:2]), *parts[2:]])
    room = torch.full((2, 1130), math.nan, dtype=torch.float64)
    for out in (room[1], room.t()[:, 0]):
        whole.format.decode_into(out, whole.codes, whole.scales, whole.runs)
    assert torch.equal(room, whole.values(torch.float64).expand(2, -1))
    assert whole.runs == (130, 0, 1, 999)
    assert torch.equal(whole.values(torch.float32), torch.cat([part.values(torch.float32) for part in parts]))
    assert torch.equal(whole.codes, torch.cat([part.codes for part in parts]))
    assert torch.equal(whole.scales, torch.cat([part.scales for part in parts]))


@formats
def test_several_vectors_in_one_call_are_as_alone(case: FormatCase) -> None:
    xs, seeds = [vector(numel, seed=numel) for numel in (130, 0, 1, 999)], [7, 8, 2**33 + 9, 10]
    whole = Coded.of_each(together(xs), case.form, seeds=seeds)
    alone = Coded.cat([Coded.of(x, case.form, seed=seed) for x, seed in zip(xs, seeds, strict=True)])
    assert torch.equal(whole.codes, alone.codes)
    assert torch.equal(whole.scales, alone.scales)
    assert torch.equal(whole.values(torch.float32), alone.values(torch.float32))


@pytest.mark.grid
@formats
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e39])
def test_a_group_that_is_not_finite_is_nan_throughout(case: FormatCase, poison: float) -> None:
    for place in (0, 777, 999):
        x = vector(1000, dtype=torch.float64)
        x[place] = poison
        coded = Coded.of(x, case.form)
        group = case.form.group_size or 1000
        lost = torch.arange(1000) // group == place // group
        assert torch.equal(coded.values(torch.float32).isnan(), lost)
        again = kernels.unpack_bits(coded.packed(), 1000, case.form.bits, coded.codes.dtype)
        assert torch.equal(again, coded.codes)


@formats
def test_zeros_stay_zeros(case: FormatCase) -> None:
    for zeros in (torch.zeros(500), torch.full((500,), -0.0)):
        assert not bool(_decoded(case.form, zeros).any())
    mixed = vector(500).index_fill(0, torch.arange(100, 300), 0.0)
    zeros = _decoded(case.form, mixed)[100:300]
    scale = _scales(Coded.of(mixed, case.form))[100:300].float() * _plus(case.form)
    assert torch.equal(zeros, scale)


def _plus(form: Format) -> Tensor:
    """What a zero among others becomes, at scale 1."""
    return form.decode(form.encode(torch.tensor([0.0, 1.0]), seed=0)[0][:1], torch.ones(1))


@pytest.mark.grid
@formats
@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100, 2.0**-140, 2.0**124])
def test_no_magnitude_overflows(case: FormatCase, factor: float) -> None:
    x = torch.linspace(-2.0, 2.0, 64) * factor
    coded = Coded.of(x, case.form)
    values, scale = coded.values(torch.float64), _scales(coded)
    assert bool(values.isfinite().all())
    fits = case.form != FORMATS["offset float unscaled"].form
    if fits and factor > 2.0**-126:
        error = (values - x.double()).abs()
        assert bool((error <= case.bound(x.double().abs(), scale) * (1 + 1e-6)).all())


@pytest.mark.grid
@pytest.mark.parametrize("rounding", ["truncate", "nearest", "stochastic"])
@pytest.mark.parametrize("max", [1.0, 1.875, 2.0])
@pytest.mark.parametrize("x", [3.4028234e38, 2.0**-149])
def test_the_ends_of_float32_saturate(rounding: Any, max: float, x: float) -> None:
    form = OffsetFloat.balanced(max=max, rounding=rounding)
    decoded = _decoded(form, torch.tensor([x, -x]))
    assert bool(decoded.isfinite().all())
    assert 0 <= float(decoded[0]) <= x
    assert float(decoded[0]) == -float(decoded[1]) or rounding == "stochastic"


def _plain_offset_float(form: OffsetFloat, x: float) -> float:
    """Round by arithmetic on float64, without bit patterns."""
    step = 2.0 ** (math.floor(math.log2(abs(x))) - form.mantissa)
    half = {"truncate": 0.0, "nearest": 0.5}[form.rounding]
    rounded = math.floor(abs(x) / step + half) * step
    small = form.eps * (form.rounding == "nearest" and abs(x) >= form.eps / 2)
    return math.copysign(min(small if abs(x) < form.eps else rounded, form.max), x)


@pytest.mark.grid
@pytest.mark.parametrize("mantissa", [2, 3, 5, 8])
@pytest.mark.parametrize("rounding", ["truncate", "nearest"])
def test_offset_float_against_plain_arithmetic(mantissa: int, rounding: Any) -> None:
    form = OffsetFloat.balanced(mantissa=mantissa, rounding=rounding, scaled=False)
    ties = 1 - (torch.arange(64) + 0.5) * 2.0 ** -(mantissa + 1)
    x = torch.cat([vector(2000), vector(500) * form.eps, ties, torch.tensor([form.eps, form.eps / 2])])
    x = x[x != 0]
    expected = torch.tensor([_plain_offset_float(form, value) for value in x.tolist()])
    assert torch.equal(_decoded(form, x), expected)


def test_figure_8() -> None:
    form = OffsetFloat(bits=8, mantissa=3, eps=0.125, max=2.0, min=-2.0, scaled=False)
    codes, scales = form.encode(torch.tensor([0.256, -0.256, 2.0, -2.0, 0.0, 0.124, 5.0, -5.0]), seed=0)
    assert codes.tolist() == [9, 42, 33, 66, 0, 0, 33, 66]
    assert form.decode(codes, scales).tolist() == [0.25, -0.25, 2.0, -2.0, 0.0, 0.0, 2.0, -2.0]
    assert (form.grid.base, form.grid.positives, form.grid.negatives) == (0x3E0, 33, 33)
    assert int((~form.table().isnan()).sum()) == 67


def test_a_range_of_its_own_on_either_side() -> None:
    form = OffsetFloat(bits=8, mantissa=3, eps=0.125, max=2.0, min=-0.5, scaled=False)
    assert _decoded(form, torch.tensor([3.0, -3.0, -0.3])).tolist() == [2.0, -0.5, -0.28125]
    assert (form.grid.positives, form.grid.negatives) == (33, 17)


@pytest.mark.parametrize(
    ("bits", "mantissa", "max", "eps"),
    [(8, 3, 2.0, 3.814697265625e-5), (10, 5, 1.0, 1.621246337890625e-5), (10, 6, 1.0, 0.0040283203125)],
)
def test_balanced_eps(bits: int, mantissa: int, max: float, eps: float) -> None:
    form = OffsetFloat.balanced(bits=bits, mantissa=mantissa, max=max)
    assert form.eps == eps
    assert form.grid.positives == form.grid.negatives == 2 ** (bits - 1) - 1


def test_pbase_of_the_balanced_example() -> None:
    assert OffsetFloat.balanced(bits=8, mantissa=3, max=2.0).grid.base == 0x382


@pytest.mark.parametrize("mantissa", [1, 2])
def test_no_balanced_eps(mantissa: int) -> None:
    with pytest.raises(ValueError, match="no balanced format exists for 10 bits"):
        balanced_eps(bits=10, mantissa=mantissa, max=1.0)
    with pytest.raises(ValueError, match="no balanced format exists for 10 bits"):
        tuned_eps(bits=10, mantissa=mantissa, max=1.0)


@pytest.mark.grid
@pytest.mark.parametrize("start", [0.002, 0.9, 1e-9])
@pytest.mark.parametrize(("bits", "mantissa"), [(8, 3), (8, 5), (10, 5), (10, 6), (4, 0), (12, 8)])
def test_the_papers_tuning_ends_at_the_closed_form(bits: int, mantissa: int, start: float) -> None:
    for top in (0.5, 1.0, 2.0):
        expected = balanced_eps(bits=bits, mantissa=mantissa, max=top)
        assert tuned_eps(bits=bits, mantissa=mantissa, max=top, start=start) == expected


def test_the_papers_tuning_of_an_uneven_range_fills_the_codes() -> None:
    form = OffsetFloat(bits=8, mantissa=3, eps=tuned_eps(bits=8, mantissa=3, max=2.0, min=-0.5), max=2.0, min=-0.5)
    assert 1 + form.grid.positives + form.grid.negatives in (255, 256)


@pytest.mark.parametrize("max", [1.0, 1.5, 2.0, 0.3])
def test_the_scale_brings_the_largest_magnitude_to_the_top(max: float) -> None:
    form = OffsetFloat.balanced(bits=10, mantissa=5, max=max)
    top = float(form.table()[form.grid.positives])
    for peak in (top, top / 2, math.nextafter(top, 0), 1.2 * top, 1e-30, 1e30, 0.7):
        scale = float(form.encode(torch.tensor([0.0, -peak]), seed=0)[1])
        assert math.frexp(scale)[0] == 0.5
        assert top / 2 < float(torch.tensor(peak)) / scale <= top


def test_levels_of_a_group_are_shares_of_its_norm() -> None:
    x = torch.tensor([3.0, -4.0, 0.0, 5.0, 12.0, 0.0])
    codes, scales = Levels(bits=4, group_size=3).encode(x, seed=0)
    assert scales.tolist() == [5.0, 13.0]
    assert Levels(bits=4, group_size=3, norm="max").encode(x, seed=0)[1].tolist() == [4.0, 12.0]
    assert codes[[2, 5]].tolist() == [7, 7]
    assert float(Levels(bits=4, group_size=None).encode(x, seed=0)[1]) == pytest.approx(194**0.5)


def test_ternary_clips_at_so_many_deviations() -> None:
    x = torch.cat([torch.ones(9999), torch.tensor([-100.0])])
    deviation = (1.9999) ** 0.5
    assert float(Ternary(clip=2.5).encode(x, seed=0)[1]) == pytest.approx(2.5 * deviation)
    assert float(Ternary().encode(x, seed=0)[1]) == 100.0
    assert torch.equal(_decoded(Ternary(clip=2.5), torch.ones(10)), torch.ones(10))


def test_sign_is_scaled_by_the_mean_magnitude() -> None:
    assert _decoded(Sign(), torch.tensor([1.0, -2.0, 6.0, -0.0])).tolist() == [2.25, -2.25, 2.25, 2.25]


def test_magnitudes_have_the_scale_of_least_error() -> None:
    """Of what Laplace has above a threshold, two levels then leave half the error of the sign alone."""
    x, form = 4.16 - torch.linspace(0.01, 0.99, 64).log(), Magnitudes(group_size=None)
    codes, scales = form.encode(x, seed=0)
    errors = [float((form.decode(codes, scales * factor) - x).square().sum()) for factor in (0.99, 1.0, 1.01)]
    assert min(errors) == errors[1]
    assert errors[1] < 0.5 * float((_decoded(Sign(), x) - x).square().sum())
    assert (form.bits, Magnitudes(levels=(1.0, 2.0, 3.0, 4.0)).bits) == (2, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Magnitudes(levels=(1.0,)), "expected 2, 4, 8, … numbers in ascending order"),
        (lambda: Magnitudes(levels=(1.0, 2.0, 3.0)), "expected 2, 4, 8, … numbers in ascending order"),
        (lambda: Magnitudes(levels=(2.0, 1.0)), "in ascending order"),
        (lambda: OffsetFloat(bits=6, eps=0.01, max=1.0), r"has \d+ numbers; expected at most 2\^6 = 64"),
        (lambda: OffsetFloat(eps=2.0, max=1.0), "use a smaller eps"),
        (lambda: OffsetFloat(eps=0.5, max=1.0, min=-0.1), "use a smaller eps"),
        (lambda: OffsetFloat(eps=0.0), "eps is 0.0; expected a positive"),
        (lambda: OffsetFloat(eps=1e-40), "eps is 1e-40; expected a positive"),
        (lambda: OffsetFloat(eps=math.nan), "eps is nan; expected a positive"),
        (lambda: OffsetFloat(eps=0.1, max=math.inf), "max is inf; expected a positive"),
        (lambda: OffsetFloat(eps=0.1, max=1.0, min=1.0), "min is 1.0; expected a negative"),
        (lambda: OffsetFloat(eps=0.1, mantissa=24), "mantissa is 24; expected 0 to 23"),
        (lambda: OffsetFloat(eps=0.1, mantissa=-1), "mantissa is -1; expected 0 to 23"),
        (lambda: OffsetFloat(eps=0.1, bits=16), "bits is 16; expected 2 to 15"),
        (lambda: OffsetFloat(eps=0.1, bits=1), "bits is 1; expected 2 to 15"),
        (lambda: OffsetFloat(eps=0.1, rounding="up"), "rounding is 'up'; expected one of truncate"),  # type: ignore[arg-type]
        (lambda: Levels(bits=1), "bits is 1; expected 2 to 15"),
        (lambda: Levels(norm="l1"), "norm is 'l1'; expected one of l2, max"),  # type: ignore[arg-type]
        (lambda: Levels(group_size=0), "group_size is 0; expected at least 1"),
        (lambda: Ternary(clip=0.0), "clip is 0.0; expected a finite number above 0"),
    ],
)
def test_arguments_are_checked(make: Callable[[], Format], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_does_not_fit_together_is_refused() -> None:
    coded = Coded.of(vector(11), Ternary())
    with pytest.raises(PayloadError, match="expected 2 of float32"):
        Coded(codes=coded.codes, scales=coded.scales, runs=(5, 6), format=Ternary())
    with pytest.raises(PayloadError, match=r"expected 10 of torch\.uint8"):
        Coded(codes=coded.codes, scales=coded.scales, runs=(10,), format=Ternary())
    with pytest.raises(ValueError, match="11 codes, 11 scales and room for 11 numbers; expected 1 scales"):
        Ternary().decode(coded.codes, coded.scales.expand(11))
    with pytest.raises(ValueError, match="room for 10 numbers; expected 1 scales and room for 11"):
        Ternary().decode_into(torch.empty(10), coded.codes, coded.scales)
    with pytest.raises(ValueError, match="expected the same for all parts"):
        Coded.cat([coded, Coded.of(vector(3), Sign())])


def test_a_code_that_is_never_sent_reads_as_nan() -> None:
    for form, code in ((Ternary(), 3), (Levels(bits=4), 15), (OffsetFloat.balanced(bits=8), 255)):
        assert bool(form.decode(torch.tensor([code], dtype=torch.uint8), torch.ones(1)).isnan())
