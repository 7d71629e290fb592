"""Memory laws: nothing is lost, a step can be skipped, and the state survives a round trip."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import CODECS, MEMORIES, CodecCase, vector
from torch import Tensor

from thinwire import codecs, formats, memories, waits
from thinwire.memories import OrthogonalMomentum
from thinwire.memories.base import State
from thinwire.memories.orthogonal_momentum import orthogonal
from thinwire.payloads import Chunks, Keyed, Payload
from thinwire.signals import Signal

STATEFUL = {name: make for name, make in MEMORIES.items() if make().stateful}
FEEDBACK = {name: case for name, case in CODECS.items() if not case.unbiased}
stateful = pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
feedback = pytest.mark.parametrize("case", FEEDBACK.values(), ids=FEEDBACK)
NUMEL = 700


def _step(memory: memories.Memory, case: CodecCase, gradient: Tensor, seed: int, scale: float = 0.5) -> Tensor:
    """Send one gradient through the memory, and return what was delivered."""
    payload = case.codec.encode_signal(memory.compensate("w", gradient, scale), seed=seed)
    delivered = payload.dense().double()
    memory.retain(["w"], payload)
    return delivered


def _copy(state: State) -> State:
    return {name: {field: x.clone() for field, x in fields.items()} for name, fields in state.items()}


def _equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        a[n].keys() == b[n].keys() and all(torch.equal(a[n][f], b[n][f]) for f in a[n]) for n in a
    )


@pytest.mark.grid
@feedback
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_error_feedback_loses_nothing(case: CodecCase, dtype: torch.dtype) -> None:
    """Σ delivered + retained = Σ scale · gradient, over many steps."""
    memory = memories.ErrorFeedback()
    total, delivered = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(40):
        gradient = vector(NUMEL, seed=step, dtype=dtype)
        total += 0.5 * gradient.double()
        delivered += _step(memory, case, gradient, step)
        memory.commit()
    residual = memory.state()["w"]["residual"].double()
    torch.testing.assert_close(delivered + residual, total, rtol=1e-5, atol=1e-5)


def _picks_elements(payload: Payload) -> bool:
    """Whether single elements were sent: keyed ones, or those of chunks that were not transformed."""
    return isinstance(payload, Keyed) or (isinstance(payload, Chunks) and payload.chunkings[0].transform is None)


@pytest.mark.grid
@feedback
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_momentum_correction_follows_its_equations(case: CodecCase, nesterov: bool, masking: bool) -> None:
    """u ← m·u + g, v ← v + u, delivered leaves v, and with masking stops u where elements, but not all, were sent."""
    memory = memories.MomentumCorrection(momentum=0.9, nesterov=nesterov, masking=masking)
    u, v = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(25):
        gradient = vector(NUMEL, seed=step)
        u = 0.9 * u + 0.5 * gradient.double()
        v = v + (0.5 * gradient.double() + 0.9 * u if nesterov else u)
        delivered = _step(memory, case, gradient, step)
        memory.commit()
        v = v - delivered
        payload = case.codec.encode(gradient)
        if masking and _picks_elements(payload) and payload.values.numel() < NUMEL:
            u[delivered != 0] = 0
    torch.testing.assert_close(memory.state()["w"]["residual"].double(), v, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(memory.state()["w"]["velocity"].double(), u, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [None, torch.bfloat16, torch.float16, formats.OffsetFloat.balanced()])
@pytest.mark.parametrize("make", [codecs.TopK, codecs.SampledThreshold, codecs.BlockTopK])
def test_what_is_chosen_whole_keeps_its_momentum_however_it_is_rounded(
    make: Callable[..., codecs.Codec], values: Any, dtype: torch.dtype
) -> None:
    gradient = vector(4000, dtype=dtype)
    gradient[::7] = 1e-7  # 0 in coarser numbers
    for density in (1.0, 0.5):
        memory = memories.MomentumCorrection(momentum=0.9)
        codec = make(density=density, **({} if values is None else {"values": values}))
        memory.retain(["w"], codec.encode_signal(memory.compensate("w", gradient.clone(), 1.0), seed=0))
        memory.commit()
        moving = memory.state()["w"]["velocity"] == gradient.float()
        assert bool(moving.all()) == (density == 1.0)


@pytest.mark.grid
@feedback
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_fading_momentum_follows_its_equation(case: CodecCase, decay: float) -> None:
    """M ← β·M + g − delivered in float64, where some steps are skipped and others have several parts."""
    memory, expected = memories.FadingMomentum(decay=decay), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(12):
        gradients = [vector(NUMEL, seed=10 * step + part, dtype=torch.float64) for part in range(1 + step % 3)]
        arrived = sum(_step(memory, case, gradient, step) for gradient in gradients)
        if step % 4 == 3:
            memory.rollback()
            continue
        memory.commit()
        expected = decay * expected + 0.5 * torch.stack(gradients).sum(dim=0) - arrived
        torch.testing.assert_close(memory.state()["w"]["momentum"], expected, rtol=1e-13, atol=1e-13)
    (waiting,) = memory.waiting()
    assert torch.equal(waiting, memory.state()["w"]["momentum"])


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_error_feedback_may_fade(decay: float) -> None:
    """r ← decay · r + g − delivered in float64: once a step, also where it has several parts or is skipped."""
    case, memory = CODECS["chunk topk, two bits"], memories.ErrorFeedback(decay=decay)
    expected = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(12):
        gradients = [vector(NUMEL, seed=10 * step + part, dtype=torch.float64) for part in range(1 + step % 3)]
        arrived = sum(_step(memory, case, gradient, step) for gradient in gradients)
        if step % 4 == 3:
            memory.rollback()
            continue
        memory.commit()
        expected = decay * expected + 0.5 * torch.stack(gradients).sum(dim=0) - arrived
        torch.testing.assert_close(memory.state()["w"]["residual"], expected, rtol=1e-13, atol=1e-13)


def test_each_parameter_fades_as_the_optimizer_has_it() -> None:
    memory = memories.FadingMomentum()
    for step in range(2):
        memory.adopt({"slow": 0.9, "fast": 0.5 - 0.25 * step})
        for name in ("slow", "fast"):
            memory.compensate(name, torch.ones(4), 1.0).tensor()
        memory.commit()
    found = {name: float(fields["momentum"][0]) for name, fields in memory.state().items()}
    assert found == {"slow": pytest.approx(1.9), "fast": 1.25}
    own = memories.FadingMomentum(decay=0.5)
    own.adopt({"w": 0.9})
    assert own.compensate("w", torch.ones(4), 1.0).tensor().tolist() == [1.0] * 4
    own.commit()
    assert own.compensate("w", torch.zeros(4), 1.0).tensor().tolist() == [0.5] * 4


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_memory_receives_momentum(dtype: torch.dtype | None) -> None:
    """It is there whether the step is kept or not, and has faded in a step that has begun."""
    memory = memories.FadingMomentum(decay=0.5, dtype=dtype)
    memory.receive("w", torch.full((4,), 2.0))
    assert memory.state()["w"]["momentum"].tolist() == [2.0] * 4
    memory.compensate("w", torch.ones(4), 1.0).tensor()
    memory.receive("w", torch.full((4,), 4.0))
    memory.rollback()
    assert memory.state()["w"]["momentum"].tolist() == [6.0] * 4
    memory.compensate("w", torch.ones(4), 1.0).tensor()
    memory.receive("w", torch.full((4,), 4.0))
    memory.commit()
    assert memory.state()["w"]["momentum"].tolist() == [0.5 * 10 + 1] * 4


def test_fading_momentum_in_bf16_keeps_the_mean() -> None:
    """Gradients and fading too small to change a large momentum by themselves add up nevertheless."""
    memory, small, mean = memories.FadingMomentum(decay=0.999, dtype=torch.bfloat16), torch.full((4000,), 1e-4), 1.0
    memory.receive("w", torch.ones(4000))
    for step in range(100):
        memory.compensate("w", small, 1.0, seed=step).tensor()
        memory.commit()
        mean = 0.999 * mean + 1e-4
    found = float(memory.state()["w"]["momentum"].double().mean())
    assert found == pytest.approx(mean, abs=4 * (100 * 1e-3 * 2**-7 / 4000) ** 0.5)


@pytest.mark.grid
@stateful
@feedback
def test_a_step_called_off_leaves_no_trace(make: Callable[[], memories.Memory], case: CodecCase) -> None:
    memory, twin = make(), make()
    for step in range(3):
        for m in (memory, twin):
            _step(m, case, vector(NUMEL, seed=step), step)
            m.commit()
    before = _copy(memory.state())
    for poison in (torch.nan, torch.inf):
        gradient = vector(NUMEL, seed=99)
        gradient[5] = poison
        _step(memory, case, gradient, 99)
        memory.rollback()
        assert _equal(memory.state(), before)
    for m in (memory, twin):
        last = _step(m, case, vector(NUMEL, seed=4), 4)
        m.commit()
    assert _equal(memory.state(), twin.state())
    assert bool(last.isfinite().all())


@stateful
def test_state_round_trip(make: Callable[[], memories.Memory]) -> None:
    case = CODECS["topk"]
    memory, resumed = make(), make()
    for step in range(3):
        _step(memory, case, vector(NUMEL, seed=step), step)
        memory.commit()
    saved = _copy(memory.state())
    resumed.restore(saved)
    for x in saved["w"].values():
        x.fill_(torch.nan)  # what was restored is a copy
    for m in (memory, resumed):
        _step(m, case, vector(NUMEL, seed=3), 3)
        m.commit()
    assert _equal(memory.state(), resumed.state())


@stateful
def test_rescaling_follows_the_loss_scale(make: Callable[[], memories.Memory]) -> None:
    """A memory fed with gradients doubled from some step on, and rescaled by 2 there, is twice the plain one."""
    case = CODECS["topk"]
    plain, scaled = make(), make()
    for step in range(6):
        factor = 1.0 if step < 3 else 2.0
        if step == 3:
            scaled.rescale(2.0)
        gradient = vector(NUMEL, seed=step)
        _step(plain, case, gradient, step)
        _step(scaled, case, gradient * factor, step)
        plain.commit()
        scaled.commit()
    for field, x in plain.state()["w"].items():
        assert torch.equal(scaled.state()["w"][field], 2 * x)


@stateful
def test_bytes_held(make: Callable[[], memories.Memory]) -> None:
    memory = make()
    _step(memory, CODECS["topk"], vector(NUMEL), 0)
    memory.commit()
    width = memory.held(torch.float32).itemsize
    assert memory.nbytes == 2 * len(memory.fields - memory.free) * width * NUMEL


def test_a_residual_in_bf16_loses_nothing_on_average() -> None:
    """Gradients too small to change a large residual by themselves arrive nevertheless."""
    memory, small = memories.ErrorFeedback(dtype=torch.bfloat16), torch.full((4000,), 1e-4)
    memory.compensate("w", torch.ones(4000), 1.0).tensor()
    for step in range(100):
        memory.commit()
        memory.compensate("w", small, 1.0, seed=step).tensor()
    memory.commit()
    mean = float(memory.state()["w"]["residual"].double().mean())
    assert mean == pytest.approx(1.01, abs=4 * (100 * 1e-4 * 2**-7 / 4000) ** 0.5)
    assert bool((torch.ones(1, dtype=torch.bfloat16) + small.bfloat16() == 1).all()), "rounding to nearest loses them"


@pytest.mark.parametrize("make", [memories.ErrorFeedback, memories.FadingMomentum])
def test_what_waits_has_a_type_that_is_known(make: Callable[..., memories.Memory]) -> None:
    with pytest.raises(ValueError, match="expected torch"):
        make(dtype=torch.float16)


def test_sixteen_bit_gradients_wait_in_float32() -> None:
    memory = memories.ErrorFeedback()
    _step(memory, CODECS["topk"], vector(NUMEL, dtype=torch.bfloat16), 0)
    memory.commit()
    assert memory.state()["w"]["residual"].dtype == torch.float32


def test_without_memory_the_gradient_is_scaled_in_place() -> None:
    gradient = vector(10)
    expected = gradient * 0.25
    signal = memories.NoMemory().compensate("w", gradient, 0.25)
    assert signal.tensor().data_ptr() == gradient.data_ptr()
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("make", [memories.MomentumCorrection, memories.FadingMomentum])
def test_unknown_momentum_is_refused(make: Callable[[], memories.Memory]) -> None:
    with pytest.raises(RuntimeError, match="optimizer="):
        make().compensate("w", vector(10), 1.0)


clipping = pytest.mark.parametrize(
    "clipped",
    [
        partial(memories.MomentumCorrection, momentum=0.0, clip_norm=0.1),
        partial(memories.FadingMomentum, decay=0.0, clip_norm=0.1),
        partial(memories.FadingMomentum, decay=0.5, clip_norm=0.1),
    ],
    ids=["momentum correction", "fading", "fading by half"],
)


@clipping
@pytest.mark.parametrize("world_size", [1, 4])
def test_local_clipping_limits_the_norm(clipped: Callable[[], memories.Memory], world_size: int) -> None:
    """Each rank's gradient is limited to clip_norm/√K, then divided by K like any other."""
    gradient = vector(NUMEL)
    x = clipped().compensate("w", gradient, 1 / world_size).tensor()
    torch.testing.assert_close(x, gradient / gradient.norm() * 0.1 / world_size**0.5 / world_size)
    small = gradient * 1e-4
    assert torch.equal(clipped().compensate("w", small, 1.0).tensor(), small)


@clipping
def test_clipping_follows_the_loss_scale(clipped: Callable[[], memories.Memory]) -> None:
    memory, gradient = clipped(), vector(NUMEL)
    memory.rescale(64.0)
    x = memory.compensate("w", 64 * gradient, 1.0).tensor()
    torch.testing.assert_close(x, 64 * clipped().compensate("w", gradient, 1.0).tensor())


@clipping
def test_clipping_does_not_hide_what_is_not_finite(clipped: Callable[[], memories.Memory]) -> None:
    gradient = vector(NUMEL)
    gradient[3] = torch.inf
    x = clipped().compensate("w", gradient, 1.0).tensor()
    assert bool(x[3].isinf())


def test_a_huge_gradient_does_not_stay_in_clipped_momentum() -> None:
    """Clipping what arrives would come too late: the huge one would outweigh the next ones until it has faded."""
    found = []
    for clip_norm in (1.0, None):
        memory = memories.FadingMomentum(decay=0.9, clip_norm=clip_norm)
        for gradient in (torch.tensor([100.0, 0.0]), torch.tensor([0.0, 1.0])):
            x = memory.compensate("w", gradient, 1.0).tensor()
            memory.commit()
        found.append(int(x.argmax()))
    assert found == [1, 0]


@stateful
def test_a_sample_is_of_the_vector(make: Callable[[], memories.Memory]) -> None:
    memory = make()
    for step in range(3):
        signal = memory.compensate("w", vector(NUMEL, seed=step), 0.3, seed=step)
        sample = signal.sample(2, 5)
        torch.testing.assert_close(sample.float(), signal.tensor()[2::5].float(), rtol=1e-2, atol=1e-2)
        if signal.tensor().dtype != torch.bfloat16:
            torch.testing.assert_close(sample, signal.tensor()[2::5])
        memory.commit()


@stateful
def test_what_waits_is_named_and_a_wrapper_knows_it(make: Callable[[], memories.Memory]) -> None:
    for memory in (make(), memories.Noted(memory=make())):
        _step(memory, CODECS["topk"], vector(NUMEL), 0)
        memory.commit()
        (waiting,) = memory.waiting()
        assert waiting is not None
        assert torch.equal(waiting, memory.state()["w"][memory.residual])


def test_notes_of_a_step_called_off_and_of_before_a_restore_are_forgotten() -> None:
    memory = memories.Noted(memory=memories.ErrorFeedback())
    note = memory.note("w")
    note.write(torch.ones(1))
    memory.rollback()
    memory.commit()
    assert note.read() is None
    note.write(torch.ones(1))
    memory.restore({"w": {"note": torch.zeros(1)}})
    memory.commit()
    assert memory.note("w").read() == torch.zeros(1)


@pytest.mark.parametrize("values", [formats.Sign(), formats.Levels(bits=4)], ids=["sign", "levels"])
def test_coarse_values_leave_a_residual_in_bf16_rounded_stochastically(values: formats.Format) -> None:
    """Rounded to nearest, a small delivery would never leave a large residual, and be sent again and again."""
    memory, codec = memories.ErrorFeedback(dtype=torch.bfloat16), codecs.Cast(values=values)
    gradient, delivered = torch.zeros(400), torch.zeros(400, dtype=torch.float64)
    gradient[0] = 100
    for step in range(600):
        payload = codec.encode_signal(memory.compensate("w", gradient, 1.0, seed=step), seed=step)
        delivered += payload.dense().double()
        memory.retain(["w"], payload)
        memory.commit()
        gradient = torch.zeros(400)
    waiting = memory.state()["w"]["residual"].double()
    assert float(delivered[0] + waiting[0]) == pytest.approx(100, abs=5)
    assert float((delivered + waiting)[1:].abs().max()) < 5


@pytest.mark.parametrize("make", [memories.ErrorFeedback, lambda: memories.FadingMomentum(decay=0.5)])
def test_what_was_released_in_a_step_is_not_there_when_the_step_goes_on(make: Callable[[], memories.Memory]) -> None:
    memory = make()
    memory.compensate("w", torch.ones(8), 1.0).tensor()
    memory.commit()
    released = torch.zeros(8)
    memory.release("w", released, 1.0)
    assert torch.equal(memory.compensate("w", torch.full((8,), 2.0), 1.0).tensor(), torch.full((8,), 2.0))
    memory.commit()
    assert torch.equal(released, torch.ones(8))
    assert [torch.full((8,), 2.0).equal(x) for x in memory.waiting()] == [True]


def _orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Muon's iteration, singular value by singular value."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (24, 30), (1, 40)])
@pytest.mark.parametrize("least", [1.0, 1e-3, 1e-9])
def test_float32_keeps_three_digits_of_what_is_orthogonalised(shape: tuple[int, int], least: float) -> None:
    u, _, v = torch.linalg.svd(vector(shape[0] * shape[1], dtype=torch.float64).view(shape), full_matrices=False)
    x = (u * torch.logspace(0, math.log10(least), min(shape), dtype=torch.float64)) @ v
    found, exact = orthogonal(x.float()), _orthogonal(x)
    assert float((found - exact).norm() / exact.norm()) < 1e-3


def _shaped(memory: memories.Memory, gradient: torch.Tensor, scale: float, shape: tuple[int, ...]) -> Signal:
    signals = memory.compensate_each(["w"], [gradient], scale, [0])
    signals.shapes = [shape]
    signal: Signal = signals[0]
    return signal


@pytest.mark.parametrize("shape", [(40, 10), (10, 40), (20, 5, 4), (400,)])
@pytest.mark.parametrize("decay", [0.0, 0.95])
def test_orthogonal_momentum_follows_its_equations(shape: tuple[int, ...], decay: float) -> None:
    """m ← μ·m + g;  E ← β·E + O(μ·m + g)/K − delivered, in float64, where steps are skipped or have parts."""
    memory, momentum = memories.OrthogonalMomentum(momentum=0.9, decay=decay), 0.9
    rows = shape[0] if len(shape) > 1 else 1
    m, e = torch.zeros(rows, 400 // rows, dtype=torch.float64), torch.zeros(400, dtype=torch.float64)
    for step in range(12):
        gradients = [vector(400, seed=10 * step + part, dtype=torch.float64) for part in range(1 + step % 3)]
        arrived = torch.zeros(400, dtype=torch.float64)
        for gradient in gradients:
            signal = _shaped(memory, gradient, 0.5, shape)
            payload = CODECS["topk"].codec.encode_signal(signal, seed=step)
            memory.retain(["w"], payload)
            payload.write(part := torch.zeros_like(arrived))
            arrived += part
        if step % 4 == 3:
            memory.rollback()
            continue
        memory.commit()
        g = 0.5 * torch.stack(gradients).sum(dim=0).view_as(m)
        m = momentum * m + g
        e = decay * e + 0.5 * _orthogonal(momentum * m + g).reshape(-1) - arrived
        torch.testing.assert_close(memory.state()["w"]["momentum"], m.reshape(-1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(memory.state()["w"]["update"], e, rtol=1e-8, atol=1e-8)
    (waiting,) = memory.waiting()
    assert torch.equal(waiting, memory.state()["w"]["update"])


@pytest.mark.parametrize("parts", [[0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
def test_without_a_gradient_a_rank_adds_nothing_orthogonal(parts: list[float]) -> None:
    memory, update = memories.OrthogonalMomentum(momentum=0.9), []
    for step in ([1.0], parts):
        for factor in step:
            signal = _shaped(memory, factor * vector(400, dtype=torch.float64), 0.5, (20, 20))
            signal.tensor()
        memory.commit()
        update.append(memory.state()["w"]["update"].clone())
    added = update[1] - 0.95 * update[0]
    assert float(added.norm()) == pytest.approx(float(update[0].norm()) if any(parts) else 0, rel=1e-9, abs=1e-15)


def _step_of(memory: memories.OrthogonalMomentum, received: torch.Tensor, when: int) -> dict[str, torch.Tensor]:
    """Train two steps, the second in two parts; momentum is received before it, after its first part, or at its end."""
    for step, parts in enumerate((1, 2)):
        for part in range(parts):
            if (step, part) == (1, when):
                memory.receive("w", received)
            signal = _shaped(memory, vector(400, seed=2 * step + part, dtype=torch.float64), 0.5, (20, 20))
            signal.tensor()
            memory.retain(["w"], CODECS["identity"].codec.encode(0.1 * vector(400, seed=9, dtype=torch.float64)))
        if (step, when) == (1, 2):
            memory.receive("w", received)
        memory.commit()
    return memory.state()["w"]


@pytest.mark.parametrize("when", [1, 2])
def test_what_is_orthogonalised_counts_momentum_received_in_the_middle_of_a_step(when: int) -> None:
    received = vector(400, seed=7, dtype=torch.float64)
    early, late = (_step_of(memories.OrthogonalMomentum(momentum=0.9), received, each) for each in (0, when))
    for name, expected in early.items():
        torch.testing.assert_close(late[name], expected, rtol=1e-9, atol=1e-9)


def test_momentum_received_in_a_step_that_is_called_off_is_there_for_the_next() -> None:
    received, memory = vector(400, seed=7), memories.OrthogonalMomentum(momentum=0.9)
    signal = _shaped(memory, vector(400), 1.0, (20, 20))
    signal.tensor()
    memory.receive("w", received)
    memory.rollback()
    assert torch.equal(memory.state()["w"]["momentum"], received)
    assert not memory.state()["w"]["update"].any()


def test_a_huge_gradient_does_not_outweigh_others_when_orthogonalised() -> None:
    sizes = []
    for factor in (1.0, 1e6, 1e30, 1e-30, 1e-38):
        memory = memories.OrthogonalMomentum(momentum=0.0)
        signal = _shaped(memory, factor * vector(400), 1.0, (20, 20))
        sizes.append(signal.tensor().norm())
    assert max(sizes) < 1.01 * min(sizes), "squares overflow, or vanish"
    zero = memories.OrthogonalMomentum(momentum=0.0).compensate("w", torch.zeros(400), 1.0)
    assert not zero.tensor().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orthogonal_matrices_of_one_shape_go_together_as_they_go_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "HOST", frozenset())  # a GPU's path
    together, alone = OrthogonalMomentum(momentum=0.9), OrthogonalMomentum(momentum=0.9)
    shapes = [(40, 50), (50, 40), (40, 50), (500,), (1, 7)]
    for step in range(3):
        gradients = [vector(math.prod(shape), 10 * step + i).to(dtype) for i, shape in enumerate(shapes)]
        gradients[2] *= step != 1
        found = []
        for memory in (together, alone):
            signals = memory.compensate_each("abcde", gradients, 0.25, range(5))
            signals.shapes = shapes
            xs = signals.tensors() if memory is together else [signal.tensor() for signal in signals]
            found.append([x.clone() for x in xs])
            memory.commit()
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
