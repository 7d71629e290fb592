"""The spectra of what arrives: of the right matrices, and of the right numbers."""

import pytest
import torch
from test_convergence import _tiny, _with

from thinwire_lab.studies.convergence.training import train
from thinwire_lab.studies.spectrum import Spectra, cosine, effective_rank


def test_effective_rank_counts_directions_of_equal_length() -> None:
    basis = torch.linalg.qr(torch.randn(20, 7, generator=torch.Generator().manual_seed(0))).Q
    assert effective_rank(basis) == pytest.approx(7)
    assert effective_rank(basis[:, :1] @ torch.ones(1, 9)) == pytest.approx(1)
    assert cosine(basis, -2 * basis) == pytest.approx(-1)


def _rows(recipe: str) -> Spectra:
    settings, problem = _with(recipe, "adamw(betas=(0.95, 0.9))"), _tiny()
    spectra = Spectra(problem, settings)
    train(settings, problem, settings.steps, spectra)
    return spectra


def test_where_all_is_sent_the_mean_gradient_arrived_and_nothing_waits() -> None:
    rows = _rows("fading(density=1, transform=None, values=None, minimum_size=100)").rows("")
    assert [row.name for row in rows] == ["0.weight", "2.weight", "4.weight"]
    for row in rows:
        torch.testing.assert_close(row.arrived, row.gradient)
        assert float(row.waits.norm()) < 1e-5 * float(row.gradient.norm())
        assert 0.1 < cosine(row.momentum, row.gradient) < 0.999, "0.95 of it is of earlier steps"


def test_what_was_orthogonalised_has_the_higher_rank() -> None:
    (row,) = _rows("orthogonal(density=0.1, minimum_size=100)").rows("2")
    assert row.name == "2.weight"
    assert effective_rank(row.waits) > 1.5 * effective_rank(row.momentum)
