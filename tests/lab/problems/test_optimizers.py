"""The optimizers of the bench: every parameter has one, and matrices are Muon's."""

import pytest
import torch
from torch import nn

from thinwire.integrations.momentum.first_moments import family
from thinwire_lab import problems
from thinwire_lab.inputs import BadInput
from thinwire_lab.problems import PROBLEMS, Problem
from thinwire_lab.problems.base import RATES
from thinwire_lab.problems.lstm import WordLSTM
from thinwire_lab.problems.optimizers import OPTIMIZERS, check_optimizer, optimizers, step_all, zero_all

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
EVERY = [pytest.param(name, marks=needs_muon if name == "muon" else ()) for name in OPTIMIZERS]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problems.build("transformer", seed=0)


def test_every_problem_has_a_rate_for_every_optimizer() -> None:
    assert RATES.keys() == PROBLEMS.keys()
    assert set(next(iter(RATES.values()))._fields) == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_is_trained_once_and_the_loss_falls(problem: Problem, name: str) -> None:
    model = problem.model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    several = optimizers(name, model, problem)
    held = [p for each in several for group in each.param_groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == set(model.parameters())
    assert family(several) == name
    batch, losses = problem.batch(0, 0, 1), []
    for _ in range(4):
        zero_all(several)
        loss = problem.loss(model, batch)
        losses.append(float(loss.detach()))
        loss.backward()
        step_all(several)
    model.load_state_dict(before)
    assert losses[-1] < losses[0] - 0.1


@needs_muon
def test_muon_has_the_matrices_but_no_embedding(problem: Problem) -> None:
    muon, rest = optimizers("muon", problem.model, problem)
    names = {p: name for name, p in problem.model.named_parameters()}
    mine, others = ({names[p] for p in each.param_groups[0]["params"]} for each in (muon, rest))
    assert mine == {name for name in names.values() if "qkv" in name or "out" in name or "up" in name} | {
        *(name for name in names.values() if "down" in name),
        "head.weight",
    }
    assert "bytes.weight" in others
    assert (type(rest), rest.defaults["lr"]) == (torch.optim.AdamW, RATES["transformer"].adamw)
    assert muon.defaults["lr"] == RATES["transformer"].muon


@needs_muon
def test_a_stage_without_matrices_is_trained_too(problem: Problem) -> None:
    (only,) = optimizers("muon", nn.LayerNorm(4), problem)
    assert isinstance(only, torch.optim.AdamW)


@pytest.mark.parametrize("name", EVERY)
def test_sparse_embeddings_can_be_trained(problem: Problem, name: str) -> None:
    model = WordLSTM(50, sparse=True)
    several = optimizers(name, model, problem)
    words = torch.arange(20).reshape(2, 10)
    before = model.embedding.weight.detach().clone()
    model(words).square().mean().backward()
    step_all(several)
    moved = (model.embedding.weight != before).any(1)
    assert moved[:20].all()
    assert not moved[20:].any()


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(BadInput, match="'adam'; choose one of sgd, adamw, muon"):
        check_optimizer("adam")


def test_where_torch_has_no_muon_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(BadInput, match=r"has no torch\.optim\.Muon"):
        check_optimizer("muon")
    check_optimizer("adamw")
