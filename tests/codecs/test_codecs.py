"""Codec laws, over every row of the list."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import CODECS, MEMORIES, SIZES, CodecCase, vector
from torch import Tensor

from thinwire import codecs, formats, schedules
from thinwire.codecs.base import kept
from thinwire.kernels import Transform
from thinwire.kernels.parts import Cut, Parts
from thinwire.memories import Memory
from thinwire.payloads import Payload, Sparse
from thinwire.payloads.spectral import spectrum_size
from thinwire.signals import Plain

codec_cases = pytest.mark.parametrize("case", CODECS.values(), ids=CODECS)
sizes = pytest.mark.parametrize("numel", SIZES)
UNBIASED = {name: case for name, case in CODECS.items() if case.unbiased}


def _of_row_topk(codec: codecs.RowTopK, numel: int) -> float:
    rest = numel % codec.width
    widths = [width for width, some in ((codec.width, numel >= codec.width), (rest, rest > 0)) if some]
    return min((kept(codec.density, width) / width for width in widths), default=1.0)


def _of_chunk_topk(codec: codecs.ChunkTopK, numel: int) -> float:
    sizes = range(1, max(codec.chunk**2, 4 * codec.chunk) + 1)
    return min(kept(codec.density, size) / size for size in sizes)


def _of_blocks(codec: codecs.BlockTopK, numel: int) -> float:
    blocks = -(-numel // codec.block)
    return kept(codec.density, blocks) / max(1, blocks)


def _of_spectra(codec: codecs.FFT, numel: int) -> float:
    count = spectrum_size(numel, codec.block)
    return kept(codec.density, count) / (2 * count) if numel else 0.0


# δ with E‖x − decode(encode(x))‖² ≤ (1 − δ)·‖x‖² for so many elements, where values travel as they are
CONTRACTIONS: dict[type, Callable[[Any, int], float]] = {
    codecs.Identity: lambda codec, numel: 1.0,
    codecs.TopK: lambda codec, numel: kept(codec.density, numel) / max(1, numel),  # equal magnitudes attain it
    codecs.RowTopK: _of_row_topk,  # k / width, or the last row's share if that is less
    codecs.BlockTopK: _of_blocks,  # blocks of equal norm attain it
    codecs.RandomK: lambda codec, numel: 1 / -(-numel // kept(codec.density, numel)) if numel else 0.0,
    codecs.FFT: _of_spectra,  # every coefficient of a block but the first and the last stands for two
    codecs.ChunkTopK: _of_chunk_topk,  # the least share of all sizes that a chunk may have
}


def _contracts(codec: Any) -> bool:
    plain = not any(getattr(codec, setting, None) for setting in ("values", "unbiased", "half"))
    return plain and type(codec) in CONTRACTIONS


CONTRACTIVE = {name: case for name, case in CODECS.items() if _contracts(case.codec)}


def _decoded(case: CodecCase, x: Tensor, seed: int = 0) -> Tensor:
    return case.codec.encode(x, seed=seed).dense().to(x.dtype)


def _sparse(codec: codecs.Codec, x: Tensor, seed: int) -> Sparse:
    payload = codec.encode(x, seed=seed)
    assert isinstance(payload, Sparse)
    return payload


@codec_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_size_dtype_and_values_are_kept(case: CodecCase, dtype: torch.dtype) -> None:
    for x in (vector(numel, dtype=dtype) for numel in SIZES):
        before = x.clone()
        payload = case.codec.encode(x)
        assert payload.numel == x.numel()
        narrow = getattr(case.codec, "values", None)
        if isinstance(narrow, formats.Format) or isinstance(case.codec, codecs.CountSketch):
            assert payload.values.dtype == torch.promote_types(dtype, torch.float32)
        else:
            assert payload.values.dtype == (narrow or dtype)
        decoded = payload.dense().to(dtype)
        assert torch.equal(x, before), "the input was changed"
        if case.exact:
            assert bool(((decoded == x) | (decoded == 0)).all())


@codec_cases
def test_an_empty_vector_is_encoded(case: CodecCase) -> None:
    assert case.codec.encode(torch.empty(0)).dense().numel() == 0


@codec_cases
def test_any_shape_is_taken_flat(case: CodecCase) -> None:
    x = vector(600).view(20, 30)
    flat = x.t().contiguous() if case.shaped else x.t().reshape(-1)
    assert torch.equal(_decoded(case, x.t()), _decoded(case, flat))


@codec_cases
def test_same_seed_same_payload(case: CodecCase) -> None:
    x = vector(3000)
    assert torch.equal(case.codec.encode(x, seed=5).to_buffer(), case.codec.encode(x, seed=5).to_buffer())


@codec_cases
def test_global_random_state_is_left_alone(case: CodecCase) -> None:
    before = torch.random.get_rng_state()
    case.codec.encode(vector(3000), seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)


@codec_cases
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_hidden(case: CodecCase, poison: float) -> None:
    for place in (0, 777, 2999):
        x = vector(3000)
        x[place] = poison
        for seed in range(3):
            payload = case.codec.encode(x, seed=seed)
            out = payload.dense()
            assert not payload.is_finite(out)
            assert not bool(out.isfinite().all())


@codec_cases
def test_zeros_decode_to_zeros(case: CodecCase) -> None:
    assert not bool(_decoded(case, torch.zeros(500)).any())


@pytest.mark.grid
@pytest.mark.parametrize("case", CONTRACTIVE.values(), ids=CONTRACTIVE)
@sizes
def test_contraction(case: CodecCase, numel: int) -> None:
    """E‖x − C(x)‖² ≤ (1 − δ)‖x‖², within four standard errors over seeds."""
    delta = CONTRACTIONS[type(case.codec)](case.codec, numel)
    for x in (vector(numel), torch.ones(numel)):
        errors = torch.stack([(x - _decoded(case, x, seed)).double().square().sum() for seed in range(80)])
        slack = 4 * float(errors.std()) / len(errors) ** 0.5
        assert float(errors.mean()) <= (1 - delta) * float(x.double().square().sum()) * (1 + 1e-6) + slack


@pytest.mark.parametrize("case", UNBIASED.values(), ids=UNBIASED)
def test_unbiased(case: CodecCase) -> None:
    """The mean over seeds is within five standard errors of the vector, element by element."""
    x = torch.linspace(-1.5, 2.0, 97)  # no element outweighs the rest, so that a small bias shows
    decoded = torch.stack([_decoded(case, x, seed) for seed in range(1500)]).double()
    along = decoded @ x.double() / x.double().square().sum()
    assert abs(float(along.mean()) - 1) <= 5 * float(along.std()) / 1500**0.5, "biased along the vector"
    error = (decoded.mean(dim=0) - x).abs()
    assert bool((error <= 5 * decoded.std(dim=0) / 1500**0.5 + 1e-9).all())


@codec_cases
def test_schedules_resolve_to_the_step(case: CodecCase) -> None:
    assert case.codec.at(3) is case.codec
    if hasattr(case.codec, "density"):
        stages = schedules.Stages(values=(0.5, 0.25), steps_each=10, final=0.125)
        warm: Any = replace(case.codec, density=stages)  # type: ignore[type-var]  # every codec is a dataclass
        assert [warm.at(step).density for step in (0, 9, 10, 20, 10**6)] == [0.5, 0.5, 0.25, 0.125, 0.125]
        with pytest.raises(TypeError, match=r"codec\.at\(step\)"):
            warm.encode(vector(10))


@pytest.mark.parametrize("density", [0.001, 0.05, 0.5, 1.0])
def test_topk_keeps_the_largest(density: float) -> None:
    x = vector(5000)
    decoded = codecs.TopK(density=density).encode(x).dense()
    k = round(density * 5000)
    expected = x.double().abs().sort(descending=True).values[:k].square().sum()
    torch.testing.assert_close(decoded.double().square().sum(), expected)
    assert int((decoded != 0).sum()) == k


@pytest.mark.parametrize(("density", "numel", "k"), [(0.3, 9, 3), (0.3, 11, 3), (0.01, 5, 1), (1.0, 7, 7), (0.5, 0, 0)])
def test_topk_keeps_the_nearest_whole_number_but_at_least_one(density: float, numel: int, k: int) -> None:
    payload = codecs.TopK(density=density).encode(vector(numel))
    assert isinstance(payload, Sparse)
    assert payload.indices.numel() == k


SHAPES = [(1, 1), (17, 33), (16, 16), (5, 3, 3, 3), (256, 65), (257, 7), (13, 29)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transform", ["dct", "hadamard", None])
def test_chunk_topk_of_matrices(shape: tuple[int, ...], transform: Transform) -> None:
    """What is left is as little as a contraction by δ leaves, and all coefficients are the matrix."""
    codec = codecs.ChunkTopK(density=0.1, transform=transform)
    delta = _of_chunk_topk(codec, math.prod(shape))
    for x in (vector(math.prod(shape)).view(shape), torch.ones(shape)):
        rest = (x.view(-1) - codec.encode(x).dense()).double()
        assert float(rest.square().sum()) <= (1 - delta) * float(x.double().square().sum()) * (1 + 1e-6)
        torch.testing.assert_close(replace(codec, density=1.0).encode(x).dense(), x.view(-1))


def test_chunk_topk_sees_the_matrix_that_the_reducer_names() -> None:
    x = vector(32 * 64)
    signal = Plain(x)
    signal.shape = (32, 64)
    codec = codecs.ChunkTopK(density=0.1)
    assert torch.equal(codec.encode_signal(signal).to_buffer(), codec.encode(x.view(32, 64)).to_buffer())
    assert codec.encode(x).nbytes != codec.encode(x.view(32, 64)).nbytes


def test_sampled_threshold_is_topk_whenever_enough_reach_it() -> None:
    exact = fewer = 0
    for seed in range(100):
        x = vector(20_000, seed)
        decoded = codecs.SampledThreshold(density=0.02).encode(x, seed=seed).dense()
        kept = int((decoded != 0).sum())
        fewer += kept < 400
        exact += torch.equal(decoded, codecs.TopK(density=0.02).encode(x).dense())
        assert kept >= 200, "the sample misled by more than a factor of two"
    assert exact + fewer == 100
    assert exact >= 85


def test_sampled_threshold_survives_ties() -> None:
    decoded = codecs.SampledThreshold(density=0.01).encode(torch.ones(10_000)).dense()
    assert int((decoded != 0).sum()) == 100


def test_hashed_slots_fill_as_computed() -> None:
    """Of n picks in m slots m·(1 − (1 − 1/m)ⁿ) survive; with twice as many picks as slots 86 % fill."""
    filled = []
    for seed in range(60):
        payload = codecs.HashedSlots(density=0.02).encode(vector(20_000, seed), seed=seed)
        filled.append(float((payload.values != 0).double().mean()))
    assert abs(sum(filled) / 60 - 0.865) < 0.02


def test_hashed_slots_send_only_true_values_once() -> None:
    x = vector(20_000)
    payload = _sparse(codecs.HashedSlots(density=0.02), x, seed=1)
    sent = payload.indices[payload.values != 0]
    assert sent.unique().numel() == sent.numel()
    assert torch.equal(payload.values[payload.values != 0], x[sent])


def test_random_k_draws_alike_on_all_ranks_and_anew_each_seed() -> None:
    codec = codecs.RandomK(density=0.1)
    a, b = _sparse(codec, vector(1000, 1), seed=4), _sparse(codec, vector(1000, 2), seed=4)
    assert a.summable
    assert torch.equal(a.indices, b.indices)
    assert not torch.equal(a.indices, _sparse(codec, vector(1000, 1), seed=5).indices)
    fixed = _sparse(codecs.RandomK(density=0.05), torch.ones(100), seed=7).indices  # on whatever computes it
    assert fixed.tolist() == [4, 30, 45, 61, 89]


def test_random_k_draws_every_element_equally_often() -> None:
    codec = codecs.RandomK(density=0.1)
    drawn = torch.zeros(100)
    for seed in range(5000):
        drawn[_sparse(codec, torch.ones(100), seed=seed).indices] += 1
    deviation = (5000 * 0.1 * 0.9) ** 0.5
    assert bool(((drawn - 500).abs() < 5 * deviation).all())


def test_a_large_value_overflows_visibly_in_fp16() -> None:
    assert bool(codecs.Cast().encode(torch.tensor([1e6])).dense().isinf().all())


@pytest.mark.parametrize(
    "kind",
    [
        getattr(codecs, name)
        for name in codecs.__all__
        if hasattr(getattr(codecs, name), "density")
        or "density" in getattr(getattr(codecs, name), "__dataclass_fields__", ())
    ],
)
@pytest.mark.parametrize("density", [0.0, -1.0, 1.5, math.nan])
def test_impossible_densities_are_refused(kind: type[codecs.TopK], density: float) -> None:
    others: dict[str, Any] = {"width": 8} if kind.__name__ == "RowTopK" else {}
    with pytest.raises(ValueError, match="density is"):
        kind(density=density, **others)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float16, torch\.bfloat16 or"):
        codecs.Cast(values=torch.int8)
    with pytest.raises(ValueError, match="width is 0"):
        codecs.RowTopK(density=0.1, width=0)
    with pytest.raises(ValueError, match="surplus"):
        codecs.SampledThreshold(density=0.1, surplus=0.5)
    with pytest.raises(ValueError, match="surplus"):
        codecs.HashedSlots(density=0.1, surplus=0.0)
    for kind in (codecs.KeptThreshold, codecs.SteeredThreshold, codecs.LaplaceThreshold):
        with pytest.raises(ValueError, match="bound is"):
            kind(density=0.1, bound=0.5)
    with pytest.raises(ValueError, match="block is"):
        codecs.BlockTopK(density=0.1, block=0)
    with pytest.raises(ValueError, match="block is"):
        codecs.FFT(density=0.1, block=1)
    with pytest.raises(ValueError, match="chunk is 1; expected 2 to 64"):
        codecs.ChunkTopK(density=0.1, chunk=1)
    with pytest.raises(ValueError, match="rows is 0"):
        codecs.CountSketch(rows=0)
    with pytest.raises(ValueError, match="steps is 0"):
        schedules.Every(steps=0)
    with pytest.raises(ValueError, match="at least 1 step"):
        schedules.Stages(values=(), steps_each=0, final=1.0)


def test_exponential_warmup_is_deep_gradient_compressions() -> None:
    schedule = schedules.exponential_warmup(0.001, stages=4, steps_each=10)
    assert [schedule(step) for step in (0, 10, 20, 30, 40)] == [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    assert schedules.exponential_warmup(0.1, steps_each=1)(3) == 0.1


@pytest.mark.parametrize("numel", [20_000, 20_001, 20_063])
def test_a_spectrum_in_parts_is_the_spectrum(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    codec, uneven = codecs.FFT(density=0.15, block=64), vector(numel)
    uneven[: numel // 3] *= 100  # then the sample's threshold is far off
    for x in (vector(numel), uneven, vector(numel).index_fill(0, torch.tensor([numel - 1]), torch.nan)):
        with monkeypatch.context() as patch:
            whole = codec.encode(x)
            patch.setattr("thinwire.codecs.fft._PART", 1 << 10)
            parts = codec.encode(x)
        assert torch.equal(parts.values.nan_to_num(), whole.values.nan_to_num())
        torch.testing.assert_close(parts.dense(), whole.dense(), equal_nan=True)


def _of_a_bucket(codec: codecs.Codec, memory: Memory, *, together: bool, continued: bool) -> Payload:
    """Encode parameters of several sizes together, or one by one; the second may come in two parts."""
    lengths = [2000, 63, 300, 1, 700]
    cut, names, flat = Cut([3000 - 700 * i for i in range(5)], lengths), list("01234"), torch.zeros(5000)
    for name, length in zip(names, lengths, strict=True):  # a step before, so that something waits and moves
        memory.compensate(name, vector(length, int(name) + 20), 0.5, seed=int(name)).tensor()
    memory.commit()
    if continued:
        memory.compensate("1", vector(63, 8), 0.5).tensor()
    for i, gradient in enumerate(Parts(flat, cut)):
        gradient.copy_(vector(lengths[i], i))[lengths[i] // 2] = torch.inf if lengths[i] == 700 else 0
    seeds, share, shapes = range(5, 10), 0.5 if memory.stateful else None, [(length,) for length in lengths]
    if together:
        signals = memory.compensate_each(names, Parts(flat, cut), 0.5, range(5))
        signals.share, signals.shapes = share, shapes
        payload = codec.encode_signals(signals, seeds=seeds, cut=cut, numel=5000)
        assert signals.computed
        return payload
    parts = []
    for i, gradient in enumerate(Parts(flat, cut)):
        signal = memory.compensate(names[i], gradient, 0.5, seed=i)
        signal.share, signal.shape = share, shapes[i]
        parts.append(codec.encode_signal(signal, seed=seeds[i]))
    return type(parts[0]).assemble(parts, cut.offsets, 5000)


@pytest.mark.grid
@codec_cases
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("continued", [False, True])
def test_a_bucket_holds_what_each_of_its_tensors_would_send(
    case: CodecCase, memory: str, continued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, in what travels and in what stays, whether small tensors are taken in one call or not."""
    bucket, kept = MEMORIES[memory](), MEMORIES[memory]()
    sent = _of_a_bucket(case.codec, bucket, together=True, continued=continued)
    monkeypatch.setattr("thinwire.kernels.parts.is_single_threaded", lambda numel: False)
    expected = _of_a_bucket(case.codec, kept, together=False, continued=continued)
    assert torch.equal(sent.to_buffer(), expected.to_buffer())
    assert (sent.regions, sent.counts()) == (expected.regions, expected.counts())
    for each in (bucket, kept):
        each.commit()
    for name, fields in kept.state().items():
        assert all(torch.equal(bucket.state()[name][field].nan_to_num(), x.nan_to_num()) for field, x in fields.items())
