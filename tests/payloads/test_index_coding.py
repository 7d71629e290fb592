"""How the indices of sparse payloads travel: by number, by Elias-Fano or in slots, whichever is shortest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.formats import Coded, OffsetFloat
from thinwire.payloads import Blocks, Sparse
from thinwire.payloads.wire import DTYPE_CODES, ELIAS_FANO, NUMBERS, SLOTS

DTYPES = sorted(DTYPE_CODES, key=str)


@st.composite
def sparse_payloads(draw: st.DrawFn) -> Sparse:
    """Indices that ascend and may repeat, or that are in any order, of up to 300 elements or of very many."""
    numel = draw(st.integers(1, 300) | st.integers(300, 2**31 - 1))
    indices = draw(st.lists(st.integers(0, numel - 1), max_size=min(40, numel)))
    values = draw(st.lists(st.floats(-100, 100, width=16), min_size=len(indices), max_size=len(indices)))
    dtype, ascending = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    where = torch.tensor(sorted(indices) if ascending else indices, dtype=torch.int32)
    return Sparse(indices=where, values=torch.tensor(values, dtype=dtype), numel=numel, ascending=ascending)


@given(sparse_payloads())
def test_sparse_round_trip(payload: Sparse) -> None:
    buffer = payload.to_buffer()
    for again in (Sparse.from_buffer(buffer), payload.from_buffers(buffer[None])):
        assert buffer.numel() == payload.nbytes
        assert torch.equal(again.indices, payload.indices)
        assert torch.equal(again.values, payload.values)
        assert torch.equal(again.to_buffer(), buffer)


def in_slots(numel: int, slots: int, seed: int) -> Tensor:
    """Return indices in slot order, with some slots empty."""
    picks = torch.arange(0, numel, 1 + 2 * (seed % 8), dtype=torch.int32)
    if not slots:
        return picks[:0]
    table = kernels.hashed_slots(picks, picks, slots, numel, seed)
    return table.masked_fill(table < 0, numel - 1)


@given(st.integers(1, 500), st.integers(0, 2**63), st.sampled_from(DTYPES), st.data())
def test_slots_round_trip(numel: int, seed: int, dtype: torch.dtype, data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, numel))
    indices = in_slots(numel, slots, seed)
    payload = Sparse(indices=indices, values=torch.ones(slots, dtype=dtype), numel=numel, seeds=(seed,))
    buffer = payload.to_buffer()
    assert buffer.numel() == payload.nbytes
    assert torch.equal(payload.from_buffers(torch.stack([buffer, buffer])).indices, indices.repeat(2))
    again = Sparse.from_buffer(buffer)
    assert torch.equal(again.indices, indices)
    assert torch.equal(again.to_buffer(), buffer)
    assert again.seeds == ((seed,) if buffer[15] == SLOTS else ())


def test_slots_of_several_spans_are_read_by_who_knows_the_spans() -> None:
    parts = [
        Sparse(indices=in_slots(n, m, seed), values=torch.randn(m).half(), numel=n, seeds=(seed,))
        for n, m, seed in ((900, 60, 5), (0, 0, 3), (70, 9, 2**63), (1, 1, 7))
    ]
    whole = Sparse.assemble(parts, [100, 1000, 1000, 1500], 2000)
    buffer = whole.to_buffer()
    assert buffer[15] == SLOTS
    assert whole.seeds == (5, 3, 2**63, 7)
    assert torch.equal(whole.from_buffers(buffer[None]).indices, whole.indices)
    taken = [torch.zeros(part.numel) for part in parts]
    whole.subtract_from(taken)
    for part, less in zip(parts, taken, strict=True):
        alone = torch.zeros(part.numel)
        part.subtract_from([alone])
        assert torch.equal(less, alone)
    with pytest.raises(PayloadError):
        Sparse.from_buffer(buffer)
    assert not whole.from_buffers(buffer[None]).seeds
    assert not whole.filled(100).seeds
    assert not whole.rekeyed(whole.indices[:0], whole.rows[:0]).seeds
    assert not Sparse.concat([whole, whole]).seeds


def test_an_order_that_is_claimed_but_not_kept_is_refused() -> None:
    falling, ones = torch.tensor([5, 4, 300], dtype=torch.int32), torch.ones(3)
    with pytest.raises(PayloadError, match="do not ascend"):
        Sparse(indices=falling, values=ones, numel=400).to_buffer()
    slotted = in_slots(400, 40, 1)
    with pytest.raises(PayloadError, match="order of 40 slots by seed 2"):
        Sparse(indices=slotted, values=torch.ones(40), numel=400, seeds=(2,)).to_buffer()
    for keys in (falling, torch.tensor([4, 4, 5], dtype=torch.int32)):
        with pytest.raises(PayloadError, match="do not ascend"):
            Blocks(keys=keys, values=ones, numel=400, width=1).to_buffer()
    for agreed in (False, True):
        payload = Sparse(indices=falling, values=ones, numel=400, ascending=False, agreed=agreed)
        assert Sparse.from_buffer(payload.to_buffer()).indices.tolist() == [5, 4, 300]
    with pytest.raises(PayloadError, match="reach from 4 to 300; expected 0 to 299"):
        Sparse(indices=falling.sort().values, values=ones, numel=300).to_buffer()


def test_a_sum_is_in_no_order_and_travels_by_number() -> None:
    picks = torch.arange(0, 900, 9, dtype=torch.int32)
    one = Sparse(indices=picks, values=torch.ones(100), numel=900)
    rows = torch.stack([one.to_buffer(), one.to_buffer()])
    for both in (Sparse.concat([one, one]), one.from_buffers(rows)):
        assert torch.equal(Sparse.from_buffer(both.to_buffer()).indices, picks.repeat(2))
        assert both.to_buffer()[15] == NUMBERS
    assert Sparse.concat([one]).to_buffer()[15] == ELIAS_FANO


def test_which_coding_travels_follows_from_sizes_and_order_alone() -> None:
    def coding(count: int, numel: int) -> int:
        indices = torch.arange(count, dtype=torch.int32) * (numel // max(1, count))
        payload = Sparse(indices=indices, values=torch.zeros(count), numel=numel)
        last = torch.full((count,), max(0, numel - 1), dtype=torch.int32)
        same = Sparse(indices=last, values=torch.zeros(count), numel=numel)
        assert payload.nbytes == same.nbytes == payload.to_buffer().numel() == same.to_buffer().numel()
        return int(payload.to_buffer()[15])

    assert [coding(*sizes) for sizes in ((0, 0), (0, 9), (1, 2**31 - 1), (2, 5))] == [NUMBERS] * 4
    assert [coding(*sizes) for sizes in ((9, 9), (10, 10**6), (300, 2**31 - 1))] == [ELIAS_FANO] * 3


def test_bits_per_kept_element() -> None:
    """At density 0.001 of 126.72 M elements: 11.4 bits would name an element without any loss."""
    numel, count = 126_720_000, 126_720
    indices = torch.randint(numel, (count,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    half = Sparse(indices=indices.sort().values, values=torch.ones(count).half(), numel=numel)
    assert half.to_buffer().numel() * 8 / count < 27.96
    form = OffsetFloat.balanced(bits=8, mantissa=3, max=2.0, rounding="nearest")
    coded = Coded.of(torch.ones(count), form)
    few = Sparse(indices=half.indices, values=coded.values(torch.float32), numel=numel, coded=coded)
    assert few.to_buffer().numel() * 8 / count < 19.96
    slots = kernels.hashed_slots(indices, indices, count, numel, 7)
    slots.masked_fill_(slots < 0, numel - 1)
    hashed = Sparse(indices=slots, values=torch.ones(count).half(), numel=numel, seeds=(7,))
    assert hashed.to_buffer().numel() * 8 / count < 26.01


@pytest.mark.parametrize("ascending", [True, False])
def test_indices_outside_the_spans_are_refused(ascending: bool) -> None:
    """A total that is written to other tensors of the bucket would change what it does not speak for."""
    count, regions = 20, ((0, 100), (150, 100))
    near = torch.arange(count, dtype=torch.int32) * 12

    def payload(indices: Tensor) -> Sparse:
        values = torch.ones(count)
        return Sparse(indices=indices, values=values, numel=300, regions=regions, runs=(10, 10), ascending=ascending)

    good = torch.where(near < 100, near, near + 10)
    good = good.where(good >= 150, good.clamp(max=99))
    assert torch.equal(payload(good).from_buffers(payload(good).to_buffer()[None]).indices, good)
    with pytest.raises(PayloadError, match="4 of 20 indices lie outside the payload's regions"):
        payload(good).from_buffers(payload(near + 1).to_buffer()[None])
