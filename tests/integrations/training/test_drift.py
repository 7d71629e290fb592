"""Digests of tensors: what tells that somebody has written, or that replicas differ."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.integrations.training.drift import digest

COLUMNS = 4096
SWAPS = {
    "neighbours": [(0, 1)],
    "a, b, b, a": [(0, 1), (2, 3)],
    "a, b, b, a of rows": [(0, COLUMNS), (2 * COLUMNS, 3 * COLUMNS)],
    "corners": [(0, 1), (COLUMNS, COLUMNS + 1)],
    "corners of columns": [(0, COLUMNS), (1, COLUMNS + 1)],
    "the last row": [(5 * COLUMNS, 5 * COLUMNS + 1), (5 * COLUMNS + 2, 5 * COLUMNS + 3)],
}
PAIRS = {
    "numbers": (1.0, 2.0),
    "signs": (1.5, -1.5),
    "zeros": (0.0, -0.0),
    "NaN": (torch.nan, 1.0),
    "infinities": (torch.inf, -torch.inf),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2]


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", PAIRS)
@pytest.mark.parametrize("swap", SWAPS)
def test_values_that_trade_places_are_seen(swap: str, values: str, dtype: torch.dtype) -> None:
    x, (a, b) = torch.zeros(5 * COLUMNS + 7).to(dtype), torch.tensor(PAIRS[values]).to(dtype)
    y = x.clone()
    for i, (one, other) in enumerate(SWAPS[swap]):
        x[one], x[other] = (a, b) if i % 2 == 0 else (b, a)
        y[one], y[other] = (b, a) if i % 2 == 0 else (a, b)
    assert digest(x) != digest(y)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, torch.inf]), min_size=2, max_size=40), st.randoms())
def test_a_permutation_has_the_same_digest_only_if_it_changes_nothing(values: list[float], random: object) -> None:
    x = torch.tensor(values)
    random.shuffle(values)  # type: ignore[attr-defined]
    y = torch.tensor(values)
    assert (digest(x) == digest(y)) == torch.equal(_bits(x), _bits(y))


def test_a_digest_depends_on_bits_alone() -> None:
    x = torch.randn(3 * COLUMNS + 5, generator=torch.Generator().manual_seed(0))
    assert digest(x) == digest(x.clone()) == digest(torch.stack([x, x], dim=1)[:, 0])
    assert digest(torch.arange(5000.0)) == 2933252304683154556  # that of any device and version
    assert digest(torch.empty(0)) == 0
