"""thinwire_lab.studies.changed_bits: what counts as a change, and what it takes on the wire."""

import pytest
import torch
from torch import nn

from thinwire_lab.studies.changed_bits import changes, entropy, ordinals


def test_neighbours_in_bfloat16_are_one_apart() -> None:
    model = nn.Linear(4, 1, bias=False)
    up = torch.nextafter(torch.tensor([1.0, -1.0, 0.0, 0.5]).bfloat16(), torch.tensor(9.0).bfloat16())
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0, 0.0, 0.5]]))
        before = ordinals(model)
        model.weight.copy_(up)
    assert (ordinals(model) - before).tolist() == [1, 1, 1, 1]


def test_changes_by_hand() -> None:
    """In each of two steps a quarter of the weights moves to the next number: another quarter each time."""
    model = nn.Linear(64, 1, bias=False)
    nn.init.ones_(model.weight)

    def step(number: int) -> None:
        with torch.no_grad():
            model.weight[:, 16 * number : 16 * number + 16] += 2.0**-7
            model.weight[:, 48:] += 2.0**-20  # too little for bfloat16

    found = changes(model, step, 2)
    assert found == pytest.approx((0.25, 0.5, 1 + 16 / 2, 1.0))
    assert entropy(torch.tensor([0, 0, 1, 2])) == 1.5
