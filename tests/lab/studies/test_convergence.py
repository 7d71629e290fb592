"""Virtual workers end where real ones do, bit for bit, and a file of runs is read as it was written."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from thinwire import attach, outer, replicate
from thinwire.collectives import Group
from thinwire_lab.cluster.virtual import VirtualGroup, on_ranks, ring_sum
from thinwire_lab.inputs import append_line
from thinwire_lab.problems.base import Batch, Problem, cross_entropy
from thinwire_lab.studies.convergence import __main__ as convergence
from thinwire_lab.studies.convergence.optimizers import DelayedNesterov, Schedule, scheduler
from thinwire_lab.studies.convergence.results import read, several
from thinwire_lab.studies.convergence.training import TEXT, Look, Run, Settings, problem_of, text_of, train

STEPS = 14  # PowerSGD sends its first ten uncompressed
SETTINGS = Settings(
    model="tiny", recipe="dense()", optimizer="adamw()", rate=0.02, schedule="cosine", steps=STEPS, workers=4, seed=0
)


def _tiny() -> Problem:
    """A network small enough for a test; no tensor's length is a multiple of the number of workers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(19, 37), nn.ReLU(), nn.Linear(37, 45), nn.ReLU(), nn.Linear(45, 5))

    def batch(step: int, rank: int, world: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + world)
        x = torch.randn(6, 19, generator=generator)
        return x, x[:, :5].argmax(1)

    return Problem(
        name="tiny",
        description="",
        model=model,
        batch=batch,
        loss=cross_entropy,
        held_out=lambda rank, world: [batch(-1, rank, world)],
        learning_rate=0.1,
    )


def _replicas(group: Group, settings: Settings, problem: Problem) -> list[Tensor]:
    """Train a replica on any group, and return its parameters."""
    model = copy.deepcopy(problem.model)
    (optimizer,) = settings.make_optimizers(model)
    replicas = replicate(model, settings.make_recipe(), group=group, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        problem.loss(model, problem.batch(step, group.rank(), group.size())).backward()
        replicas.reduce()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _real_replicas(settings: Settings) -> list[Tensor]:
    assert dist.group.WORLD is not None
    return _replicas(dist.group.WORLD, settings, _tiny())


def _with(recipe: str, optimizer: str = "adamw()") -> Settings:
    return Settings(**{**vars(SETTINGS), "recipe": recipe, "optimizer": optimizer})


@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    [
        pytest.param("dense()", "adamw()", marks=pytest.mark.slow),
        ("topk(density=0.05, minimum_size=100)", "adamw()"),
        ("powersgd(rank=2)", "adamw()"),
        ("dgc(density=0.05, minimum_size=100)", "sgd()"),
        pytest.param("gtopk(density=0.05, minimum_size=100)", "sgd()", marks=pytest.mark.slow),
        pytest.param("fading(density=0.1, minimum_size=100)", "adamw(betas=(0.9, 0.9))", marks=pytest.mark.slow),
        pytest.param("orthogonal(minimum_size=100)", "adamw(betas=(0.9, 0.9))", marks=pytest.mark.slow),
        pytest.param("randomk(density=0.1, minimum_size=100)", "sgd()", marks=pytest.mark.slow),
        pytest.param("qsgd()", "adamw()", marks=pytest.mark.slow),
    ],
)
def test_virtual_workers_have_the_bits_of_real_ones(ranks: Ranks, recipe: str, optimizer: str) -> None:
    settings = _with(recipe, optimizer)
    problem = _tiny()
    virtual = on_ranks(4, lambda group: _replicas(group, settings, problem))
    real = ranks.run(4, _real_replicas, settings)
    for mine, theirs in zip(virtual, real, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


def _ddp(settings: Settings) -> list[float]:
    """Train with DDP and attach as a user would, and return the held-out loss after every step."""
    problem = _tiny()
    model = DistributedDataParallel(copy.deepcopy(problem.model))
    (optimizer,) = settings.make_optimizers(model.module)
    attach(model, settings.make_recipe(), optimizer=optimizer)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        problem.loss(model, problem.batch(step, dist.get_rank(), dist.get_world_size())).backward()
        optimizer.step()
        rates.step()
        with torch.no_grad():
            losses.append(float(problem.loss(model.module, problem.held_out(0, 1)[0])))
    return losses


def test_schedules_stay_fall_or_drop() -> None:
    def rates(schedule: Schedule) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        made, found = scheduler(optimizer, schedule, 10, 2), list[float]()
        for _ in range(10):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            made.step()
        return found

    assert rates("constant") == [0.5] + [1.0] * 9
    assert rates("drop") == pytest.approx([0.5] + [1.0] * 6 + [0.1] * 3)
    falling = rates("cosine")[1:]
    assert falling == sorted(falling, reverse=True)
    assert 0.1 < falling[-1] < 0.15


def test_an_unknown_schedule_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(convergence.app, ["run", str(tmp_path / "runs.jsonl"), "--schedule", "dorp"])
    assert done.exit_code == 2
    assert "dorp" in done.output


@pytest.mark.parametrize("recipe", ["dense()", "topk(density=0.05, minimum_size=100)"])
def test_a_run_has_the_losses_of_ddp(ranks: Ranks, recipe: str) -> None:
    settings = Settings(**{**vars(_with(recipe)), "workers": 2, "schedule": "constant"})
    run = train(settings, _tiny(), every=1)
    assert [look.loss for look in run.looks] == ranks.run(2, _ddp, settings)[0]


def test_bits_are_those_of_the_payloads() -> None:
    assert train(SETTINGS, _tiny()).bits == 32
    numel = sum(p.numel() for p in _tiny().model.parameters())
    topk = _with("Compressed(memory=ErrorFeedback(), codec=TopK(density=0.5), exchange=AllGather())")
    payload = train(topk, _tiny()).bits * numel / 8
    assert 4 * numel * 0.5 < payload < 4 * numel * 0.5 + numel  # values, and less than a byte per index


def test_a_rank_that_fails_ends_the_others() -> None:
    def work(group: VirtualGroup) -> None:
        if group.rank() == 1:
            raise ZeroDivisionError("on purpose")
        dist.all_reduce(torch.ones(3), group=group)

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        on_ranks(3, work)


def test_a_run_looks_at_other_data_too() -> None:
    constant = replace(_tiny(), held_out=lambda rank, world: [(torch.zeros(5, 19), torch.arange(5))])
    looks = train(SETTINGS, _tiny(), other=constant).looks
    assert [look.elsewhere for look in looks] == pytest.approx([0.2] * len(looks))
    assert train(SETTINGS, _tiny()).looks == [look._replace(elsewhere=None) for look in looks]


def test_a_run_that_diverges_stops() -> None:
    run = train(Settings(**{**vars(_with("dense()", "sgd()")), "rate": 1e30}), _tiny(), every=1)
    assert not math.isfinite(run.loss)
    assert len(run.looks) < STEPS
    assert train(Settings(**{**vars(SETTINGS), "batch": 15}), _tiny(), every=STEPS).looks[-1].step == STEPS


def test_the_ring_adds_every_element_once() -> None:
    for size, numel in ((1, 5), (2, 7), (3, 1), (4, 0), (5, 1 << 20)):
        parts = [torch.full((numel,), float(1 << rank)) for rank in range(size)]
        ring_sum(parts)
        assert all(bool((part == (1 << size) - 1).all()) for part in parts)


def _run(rate: float, seed: int, loss: float, recipe: str = "dense()") -> Run:
    settings = Settings(**{**vars(_with(recipe)), "rate": rate, "seed": seed})
    return Run(settings=settings, looks=[Look(7, 2 * loss, 7.0), Look(14, loss, 14.0)], seconds=0.1)


def test_seeds_are_put_together_the_lowest_loss_first(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    runs = [
        _run(0.1, 0, 3.0),
        _run(0.1, 1, 5.0),
        _run(0.2, 0, 1.0),
        _run(0.1, 0, 2.0, "topk()"),
        _run(0.2, 0, math.nan),
    ]
    for run in runs[:4]:
        append_line(file, run.document())
    assert read(file) == runs[:4]
    rows = [(row["recipe"], row["rate"], row["seeds"], row["loss"]) for row in several(runs)]
    assert rows[:-1] == [("topk()", 0.1, 1, 2.0), ("dense()", 0.1, 2, 4.0)]
    assert several(runs)[1]["deviation"] == pytest.approx(math.sqrt(2))
    assert rows[-1][:3] == ("dense()", 0.2, 2)


def test_what_the_file_has_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def pretend(settings: Settings, problem: Problem, other: Problem | None) -> Run:
        trained.append(settings)
        return Run(settings=settings, looks=[Look(2, 1.0, 3.0), Look(4, 0.5 + settings.rate, 6.0)], seconds=0.0)

    monkeypatch.setattr(convergence, "train", pretend)
    monkeypatch.setattr(convergence, "problem_of", lambda *_: _tiny())
    file = tmp_path / "runs.jsonl"
    options = ["run", str(file), "--steps", "4", "--rate", "0.1,0.2", "--recipe", "dense()", "--recipe", "topk()"]
    for seeds in ("0", "0,1"):
        done = CliRunner().invoke(convergence.app, [*options, "--seeds", seeds])
        assert done.exit_code == 0, done.output
    assert len(trained) == len(set(trained)) == 8 == len(file.read_text().splitlines())
    assert json.loads(file.read_text().splitlines()[0])["bits"] == 1.5
    said = CliRunner().invoke(convergence.app, ["table", str(file)], env={"COLUMNS": "200"})
    assert "0.6" in said.output.splitlines()[-4], said.output


def test_a_contest_is_of_best_rates_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dense()` is best at 4, `topk()` at 1/2, and a third diverges above 1; then dense AdamW is in the finals, too."""
    best, trained = {"dense()": 4.0, "topk()": 0.5, "signsgd()": 1.0}, list[Settings]()

    def pretend(settings: Settings, problem: Problem, other: Problem | None) -> Run:
        trained.append(settings)
        away = abs(math.log2(settings.rate / best[settings.recipe])) + len(settings.recipe) / 100
        loss = math.nan if settings.recipe == "signsgd()" and settings.rate > 1 else 5 - settings.steps / 100 + away
        return Run(settings=settings, looks=[Look(2, loss, 3.0)], seconds=0.0)

    monkeypatch.setattr(convergence, "train", pretend)
    monkeypatch.setattr(convergence, "problem_of", lambda *_: _tiny())
    file = tmp_path / "runs.jsonl"
    entries = ("topk(); adamw(); 1", "dense(); adamw(); 1", "dense(); muon(); 8", "signsgd(); adamw(); 1")
    options = [option for entry in entries for option in ("--entry", entry)]
    for seeds in ("3", "3,4"):
        command = ["contest", str(file), *options, "--search", "40", "--steps", "80", "--finals", "1", "--seeds", seeds]
        done = CliRunner().invoke(convergence.app, command)
        assert done.exit_code == 0, done.output
    tried = {(run.recipe, run.optimizer, run.rate) for run in trained if run.steps == 40}
    assert {rate for recipe, by, rate in tried if (recipe, by) == ("dense()", "adamw()")} == {0.5, 1, 2, 4, 8}
    assert {rate for recipe, by, rate in tried if (recipe, by) == ("dense()", "muon()")} == {2, 4, 8, 16}
    assert {rate for recipe, by, rate in tried if recipe == "signsgd()"} == {0.5, 1, 2}
    finals = [(run.recipe, run.optimizer, run.rate, run.seed) for run in trained if run.steps == 80]
    assert finals == [("topk()", "adamw()", 0.5, 3), ("dense()", "adamw()", 4, 3),
                      ("topk()", "adamw()", 0.5, 4), ("dense()", "adamw()", 4, 4)]  # fmt: skip
    assert len(trained) == len(set(trained)) == len(file.read_text().splitlines())


def test_a_forward_in_bfloat16_leaves_parameters_in_float32() -> None:
    problem = _tiny()
    precise, rough = (train(replace(SETTINGS, autocast=on), problem).loss for on in (False, True))
    assert precise != rough == pytest.approx(precise, rel=0.02)
    early = _run(0.1, 0, 3.0).document()
    del early["autocast"], early["data"]
    assert Run.of(early) == _run(0.1, 0, 3.0)


def test_the_transformer_trains_on_the_text_that_the_folder_has(tmp_path: Path) -> None:
    assert text_of("transformer", None) == text_of("transformer", tmp_path) == text_of("lstm", tmp_path) == ""
    (tmp_path / TEXT).parent.mkdir()
    (tmp_path / TEXT).write_text("to be or not to be, " * 400)
    assert text_of("transformer", tmp_path) == TEXT
    assert "7,600 bytes" in problem_of("transformer", 0, tmp_path).description


def test_what_is_no_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match="not an expression of"):
        _with("tpok()").make_recipe()
    with pytest.raises(ValueError, match="expected a Reducer"):
        _with("TopK(density=0.1)").make_recipe()


OUTER = "sparseloco(every=4, minimum_size=64)"


def _outer(group: Group, settings: Settings, problem: Problem) -> list[Tensor]:
    """Train a worker with outer steps on any group, and return the global parameters."""
    model = copy.deepcopy(problem.model)
    optimizers = settings.make_optimizers(model)
    steps = settings.make_outer_steps()
    assert steps is not None
    handle = outer(model, optimizers, steps, group=group)
    for step in range(STEPS):
        model.zero_grad()
        problem.loss(model, problem.batch(step, group.rank(), group.size())).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for p in handle.parameters.values()]


def _really_outer(settings: Settings) -> list[Tensor]:
    assert dist.group.WORLD is not None
    return _outer(dist.group.WORLD, settings, _tiny())


def test_outer_steps_of_virtual_workers_end_where_real_ones_do(ranks: Ranks) -> None:
    settings = replace(SETTINGS, recipe=OUTER)
    problem = _tiny()  # before there are threads, which would share its seed
    virtual = on_ranks(3, lambda group: _outer(group, settings, problem))
    for mine, theirs in zip(virtual, ranks.run(3, _really_outer, settings), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_run_with_outer_steps() -> None:
    run = train(replace(SETTINGS, recipe=OUTER, steps=40), _tiny(), every=20)
    assert run.looks[-1].loss < run.looks[0].loss
    dense = train(replace(SETTINGS, recipe="diloco(every=4)", steps=40), _tiny())
    assert 0 < run.bits < dense.bits == pytest.approx(32 / 4, rel=0.01)


@pytest.mark.parametrize("every", [1, 3])
def test_delayed_momentum_moves_every_nth_step(every: int) -> None:
    gradients = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    p, other = (nn.Parameter(torch.zeros(5)) for _ in range(2))
    delayed = DelayedNesterov(iter([p]), lr=0.5, momentum=0.9, every=every)
    nesterov = torch.optim.SGD([other], lr=0.5, momentum=0.9, nesterov=True)
    for g in gradients:
        p.grad, other.grad = g.clone(), g.clone()
        delayed.step()
        nesterov.step()
    expected, moving = -0.5 * gradients.sum(0), torch.zeros(5)
    for some in gradients.split(every):
        moving = 0.9 * moving + some.mean(0)
        expected -= 0.5 * 0.9 * moving
    assert torch.allclose(p, expected)
    assert torch.allclose(p, other) == (every == 1)
