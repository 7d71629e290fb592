"""What the papers state and can be recomputed: lemmas, worked examples, tables, schedules."""

from typing import Any

import pytest
import torch

from thinwire import kernels, schedules
from thinwire.codecs import (
    FFT,
    BlockTopK,
    CountSketch,
    KeptThreshold,
    LaplaceThreshold,
    MSTopK,
    SteeredThreshold,
    TopK,
    kept_threshold,
    steered_threshold,
)
from thinwire.exchanges import AllGather, AllReduce, GlobalTopKTree, Link
from thinwire.formats import OffsetFloat
from thinwire.kernels.hashing.reference import _sketch_hash
from thinwire.memories import ErrorFeedback, Noted
from thinwire.payloads import Sparse, Spectral, spectral
from thinwire_lab.studies.exchange_bytes import sent_bytes


def _counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[None]:
    """Have each call of a function leave an entry in the list returned."""
    calls: list[None] = []
    function = getattr(owner, name)

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, counting)
    return calls


# --- DRAGONN ---


@pytest.mark.parametrize(("slots", "mean", "deviation"), [(1024, 0.36770, 0.00974), (512, 0.13507, 0.01253)])
def test_share_of_empty_slots(slots: int, mean: float, deviation: float) -> None:
    """Lemma A.10 with n = 1024 writers; its own probabilities, 0.95 and 0.8, do not hold: 0.69 and 0.30."""
    writers = torch.arange(1024, dtype=torch.int32)
    draws = 400
    empty = torch.tensor(
        [
            float((kernels.hashed_slots(writers, writers * 0, slots, 126_720_000, seed) < 0).double().mean())
            for seed in range(draws)
        ]
    )
    assert abs(float(empty.mean()) - mean) < 4 * deviation / draws**0.5
    assert abs(float(empty.std()) - deviation) < 0.15 * deviation
    inside, stated = (
        ((empty >= 0.36) & (empty <= 0.38), 0.69) if slots == 1024 else ((empty >= 0.13) & (empty <= 0.14), 0.3)
    )
    assert abs(float(inside.double().mean()) - stated) < 4 * (stated * (1 - stated) / draws) ** 0.5


@pytest.mark.slow
def test_survival_of_the_ith_writer() -> None:
    """Lemma A.5: ((m − 1)/m)^(n − i), where the last writer wins; m = n = 4."""
    writers, draws = torch.arange(4, dtype=torch.int32), 20_000
    survivors = torch.stack([kernels.hashed_slots(writers, writers * 0, 4, 126_720_000, seed) for seed in range(draws)])
    for i in range(4):
        expected = (3 / 4) ** (3 - i)
        found = float((survivors == i).any(dim=1).double().mean())
        assert abs(found - expected) < 5 * (0.25 / draws) ** 0.5 + 1e-12, f"writer {i + 1}: {found} against {expected}"


# --- FFT sparsification ---


def test_offset_float_example_through_a_payload() -> None:
    """Fig. 8: m = 3, eps = 0.125, 8 bits: 0.256 → 0.25; what travels is one byte a value, and what is lost stays."""
    form = OffsetFloat(bits=8, mantissa=3, eps=0.125, max=2.0, scaled=False)
    payload = TopK(density=1.0, values=form).encode(torch.tensor([0.256, -0.256, 2.0, -2.0]))
    assert payload.dense().tolist() == [0.25, -0.25, 2.0, -2.0]
    assert payload.nbytes == 16 + 8 + 8 + 8, "header, scale, codes, indices as Elias-Fano"


def test_spectra_are_summed_and_transformed_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    payloads = [FFT(density=0.3, block=100).encode(x) for x in xs]
    calls = _counted(monkeypatch, spectral, "inverse")
    total = payloads[0].from_buffers(torch.stack([payload.to_buffer() for payload in payloads]))
    assert isinstance(total, Spectral)
    together = total.dense()
    assert len(calls) == 1
    torch.testing.assert_close(together, torch.stack([payload.dense() for payload in payloads]).sum(dim=0))


def test_a_wave_is_one_coefficient() -> None:
    wave = torch.cos(2 * torch.pi * 5 * torch.arange(256) / 256)
    payload = FFT(density=1 / 129, block=256).encode(wave)
    assert payload.values.numel() == 2
    torch.testing.assert_close(payload.dense(), wave, atol=1e-5, rtol=0)


def test_bytes_of_fft_at_the_papers_setting() -> None:
    """θ = 0.85 and 10 bits: 21.3× in the paper, which counts values only; with a bit per coefficient it is 16×.

    Elias-Fano names 0.15 of them in l = ⌊log₂ 6.67⌋ = 2 low bits each and 0.15 + 2⁻² high bits per coefficient.
    """
    form = OffsetFloat.balanced(bits=10, mantissa=5, max=1.0)
    payload = FFT(density=0.15, values=form).encode(torch.randn(1 << 20))
    assert (1 << 22) / payload.nbytes == pytest.approx(32 / (0.15 * 10 + (0.15 * 3 + 0.25) / 2), rel=0.01)
    assert 32 / (0.15 * 10 + 1 / 2) == 16


def test_density_follows_the_learning_rate() -> None:
    follow = schedules.FollowLearningRate(learning_rate=lambda step: 0.1 / (1 + step), smoothness=4.0)
    assert [round((1 - follow(step)) ** 2, 6) for step in (0, 1, 3)] == [0.4, 0.2, 0.1]
    assert schedules.FollowLearningRate(learning_rate=lambda step: 1.0, smoothness=4.0)(0) == pytest.approx(0.15)
    assert [schedules.recovery(0.1, at_step=130)(step) for step in (0, 129, 130, 10**6)] == [0.1, 0.1, 1.0, 1.0]


# --- S2 Reducer ---


def test_the_sum_of_sketches_is_the_sketch_of_the_sum() -> None:
    xs = torch.randn(5, 400, dtype=torch.float64)
    sketches = [CountSketch(rows=3).encode(x, seed=7) for x in xs]
    whole = CountSketch(rows=3).encode(xs.sum(dim=0), seed=7)
    torch.testing.assert_close(type(whole).concat(sketches).values, whole.values)
    other = CountSketch(rows=3).encode(xs[0], seed=8)
    assert not torch.allclose(
        type(whole).concat([sketches[1], other]).values, (sketches[1].values + sketches[0].values)
    )


def test_zeros_do_not_change_a_sketch() -> None:
    x = torch.randn(400)
    x[100:300] = 0
    dense = kernels.sketch_insert.reference(x, 3, 70, 5)
    table = torch.zeros(3, 70)
    for j in range(3):
        bucket, sign = _sketch_hash(x, 70, 5, j)
        live = x != 0
        table[j].index_add_(0, bucket[live], (sign * x)[live])
    assert torch.equal(dense, table)


def test_the_sketchs_error_is_as_computed() -> None:
    """One row: E‖x̂ − x‖² = (n − 1)/c · ‖x‖²; at λ = 0.5 that is twice the vector, which is why it is not kept."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    errors = [
        float((CountSketch(rows=1, ratio=0.5).encode(x, seed=s).dense() - x).square().sum() / x.square().sum())
        for s in range(60)
    ]
    mean = sum(errors) / 60
    deviation = torch.tensor(errors).std().item() / 60**0.5
    assert abs(mean - 999 / 500) < 5 * deviation


def test_a_sketch_with_the_same_hashes_every_time_is_biased_for_that_run() -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(2))
    fixed = CountSketch(rows=1).encode(x, seed=3).dense()
    drawn = torch.stack([CountSketch(rows=1).encode(x, seed=s).dense() for s in range(3000)]).mean(dim=0)
    assert float((drawn - x).norm() / x.norm()) < 0.1
    assert float((fixed - x).norm() / x.norm()) > 0.5


def test_blocks_are_chosen_by_norm() -> None:
    x = torch.zeros(96)
    x[32:64] = 0.5
    x[70] = 2.0
    payload = BlockTopK(density=1 / 3, block=32).encode(x)
    assert payload.keys.tolist() == [1], "½·√32 is more than 2"  # type: ignore[attr-defined]


# --- dynamic communication thresholding ---


def _steps(codec: KeptThreshold | SteeredThreshold, sizes: list[float]) -> list[int]:
    """Return how many elements are sent at each step of Laplace vectors of such sizes."""
    memory, sent = Noted(memory=ErrorFeedback()), []
    for step, size in enumerate(sizes):
        x = torch.distributions.Laplace(0.0, 1.0)
        torch.manual_seed(step)
        signal = memory.compensate("w", size * x.sample((20_000,)), 1.0)
        payload = codec.at(step).encode_signal(signal)
        sent.append(int((payload.values != 0).sum()))
        memory.retain(["w"], payload)
        memory.commit()
    return sent


def test_a_threshold_lives_for_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _counted(monkeypatch, kept_threshold, "kth_largest")
    sent = _steps(KeptThreshold(density=0.01, refresh=schedules.Every(steps=4), bound=2.0), [1.0] * 9)
    assert len(measured) == 3
    assert sent[0] == sent[4] == sent[8] == 200
    assert all(count <= 400 for count in sent)
    assert any(count != 200 for count in sent)


def test_a_called_off_step_forgets_its_threshold() -> None:
    memory, codec = Noted(memory=ErrorFeedback()), KeptThreshold(density=0.1, refresh=0.0)
    codec.encode_signal(memory.compensate("w", torch.full((100,), torch.nan), 1.0))
    memory.rollback()
    payload = codec.encode_signal(memory.compensate("w", torch.arange(100.0), 1.0))
    assert int((payload.values != 0).sum()) == 10


def test_steering_finds_the_density_again() -> None:
    sent = _steps(SteeredThreshold(density=0.01, bound=1.5), [1.0] * 80 + [3.0] * 100 + [0.2] * 150)
    for part in (sent[50:80], sent[150:180], sent[-30:]):
        assert 175 <= sum(part) / 30 <= 225, sent
        assert 130 <= min(part) <= max(part) <= 280, sent
    assert max(sent) <= 300


def test_steering_does_not_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _counted(monkeypatch, steered_threshold, "kth_largest")
    _steps(SteeredThreshold(density=0.01), [1.0] * 20)
    assert len(calls) == 1


def test_laplace_quantile_is_right_for_laplace_and_off_for_others() -> None:
    torch.manual_seed(0)
    for law, low, high in (
        (torch.distributions.Laplace(0.0, 1.0), 0.9, 1.1),
        (torch.distributions.Normal(0.0, 1.0), 0, 0.5),
    ):
        payload = LaplaceThreshold(density=0.01, bound=3.0).encode(law.sample((100_000,)))
        assert low <= int((payload.values != 0).sum()) / 1000 <= high


def test_mstopk_is_nearly_topk() -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(3))
    exact, near = (codec.encode(x).dense().square().sum() for codec in (TopK(density=0.01), MSTopK(density=0.01)))
    assert float(near) > 0.999 * float(exact)
    ties = MSTopK(density=0.1).encode(torch.ones(1000))
    assert int((ties.dense() == 1).sum()) == 100


# --- gTop-k ---


def test_table_one_and_figure_nine() -> None:
    """Times in ms at m = 25·10⁶, density 0.001, on the paper's 1 GbE. It counts log₂ P latencies for an all-gather."""
    link, k = Link(latency=0.436e-3, bandwidth=4 / 3.6e-8), 25_000
    expected = {
        4: (6.27, 8.94),
        8: (13.91, 13.42),
        16: (28.74, 17.89),
        32: (57.98, 22.36),
        64: (116.02, 26.83),
        128: (231.65, 31.3),
    }
    for ranks, (gather, tree) in expected.items():
        rounds = ranks.bit_length() - 1
        ours = AllGather().seconds(8 * k, ranks, link) - (ranks - 1 - rounds) * link.latency
        assert 1e3 * ours == pytest.approx(gather, abs=0.01)
        assert 1e3 * GlobalTopKTree().seconds(8 * k, ranks, link) == pytest.approx(tree, abs=0.01)
    assert AllReduce().seconds(4 * 25e6, 32, link) == pytest.approx(2 * 31 * 0.436e-3 + 2 * 31 / 32 * 25e6 * 3.6e-8)


def test_the_tree_counts_its_messages() -> None:
    payload = Sparse(indices=torch.arange(8, dtype=torch.int32), values=torch.ones(8), numel=99)
    assert sent_bytes(GlobalTopKTree(), payload, 4) == 2 * 3 / 4 * (16 + 32 + 8 + 8)
    assert sent_bytes(GlobalTopKTree(exact_values=True), payload, 4) == 2 * 3 / 4 * (16 + 32 + 8 + 8 + 32)


def test_warm_up_of_four_epochs() -> None:
    warm = schedules.gtopk_warmup(0.005, steps_per_epoch=100)
    assert [warm(step) for step in (0, 99, 100, 200, 300, 399, 400)] == [0.25, 0.25, 0.0725, 0.015, 0.004, 0.004, 0.005]
