"""papers/dct/model_parallel.py on a model so small that every row trains at once; what its tables and figures say."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from thinwire.pipeline import TopKBoundary
from thinwire_lab.inputs import BadInput
from thinwire_lab.papers.dct import model_parallel
from thinwire_lab.papers.dct.crossing import HEAD, LEFT_OUT
from thinwire_lab.papers.dct.looking import criteria, look
from thinwire_lab.papers.dct.model_parallel import app
from thinwire_lab.papers.dct.rows import BASELINE, rows
from thinwire_lab.papers.dct.training import INSIDE, Document, Material, Network, Run, run
from thinwire_lab.problems import Batch, Parts, Problem
from thinwire_lab.problems.base import Chain, classes, cross_entropy, feed

PAGE = Path(__file__).parents[3] / "papers" / "dct" / "README.md"


def _batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def _split(model: nn.Module, stages: int) -> list[nn.Module]:
    assert isinstance(model, Chain)
    return [model[:2], model[2:]] if stages == 2 else [model[:2], model[2:4], model[4:]]


def tiny(name: str = "tiny", *, seed: int = 0, data: Path | None = None) -> Problem:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Chain(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    return Problem(
        name=name,
        description="a tiny model",
        model=model,
        batch=lambda step, rank, world: _batch(1000 * seed + step),
        loss=cross_entropy,
        held_out=lambda rank, world: [_batch(-1), _batch(-2)],
        learning_rate=0.1,
        parts=Parts(split=_split, feed=feed, criterion=classes),
    )


def _material(steps: int, problem: Problem | None = None) -> Material:
    found = problem or tiny()
    return Material(problem=found, batches=[found.batch(step, 0, 1) for step in range(steps)])


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("thinwire_lab.papers.dct.model_parallel.build", tiny)
    monkeypatch.setitem(INSIDE, "tiny", ("2", "4"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _run(path: Path, *more: str) -> str:
    result = CliRunner().invoke(app, ["accuracy", "--json", str(path), "--problem", "tiny", "--steps", "4", *more])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_row_runs_on_every_seed_and_is_written_and_read(tmp_path: Path) -> None:
    said = _run(tmp_path / "a.json", "--seeds", "2")
    document = Document.read(tmp_path / "a.json")
    assert set(document.runs) == {("tiny", row.name, seed) for row in rows("tiny") for seed in (0, 1)}
    assert all(run.diverged_at is None for run in document.runs.values())
    document.write(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert "Gaussian sketch" in said


def test_seeds_differ_and_rows_of_one_seed_see_the_same(tmp_path: Path) -> None:
    _run(tmp_path / "a.json", "--seeds", "2", "--only", "bfloat16")
    one, other = Document.read(tmp_path / "a.json").of("tiny", rows("tiny")[0].name)
    assert one.held_out_loss != other.held_out_loss
    everything = run(_material(4), "all of it", 0, 1.0, 2, 2, lambda: TopKBoundary(1.0))
    assert (everything.held_out_loss, everything.train_loss) == (one.held_out_loss, one.train_loss)
    assert everything.kept == everything.kept_late == everything.kept_held_out == 1


def test_what_takes_its_density_from_another_row_has_it(tmp_path: Path) -> None:
    _run(tmp_path / "a.json", "--seeds", "1", "--only", "as many")
    document = Document.read(tmp_path / "a.json")
    followers = [row for row in rows("tiny") if row.like is not None]
    assert len(followers) == 2
    for row in followers:
        assert row.like is not None
        assert document.of("tiny", row.name)[0].density == document.of("tiny", row.like)[0].kept


def test_resuming_runs_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ran = tmp_path / "a.json", list[str]()
    _run(path, "--seeds", "1", "--only", "Gaussian")
    document = Document.read(path)
    missing = document.runs.pop(("tiny", rows("tiny")[0].name, 0))
    document.write(path)

    def noted(material: Material, row: str, seed: int, *rest: Any) -> Run:
        ran.append(row)
        return run(material, row, seed, *rest)

    monkeypatch.setattr(model_parallel, "run", noted)
    _run(path, "--seeds", "1", "--only", "Gaussian", "--resume")
    assert ran == [missing.row]
    again = Document.read(path).of("tiny", missing.row)[0]
    assert replace(again, seconds=0, kept=0, nonzero=0, kept_late=0, kept_held_out=0) == replace(
        missing, seconds=0, kept=0, nonzero=0, kept_late=0, kept_held_out=0
    )


def test_only_may_be_repeated_and_a_seed_that_is_there_draws_no_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--seeds", "1", "--only", "Gaussian", "--only", "bfloat16")
    _run(tmp_path / "a.json", *asked)
    ran = {row for _, row, _ in Document.read(tmp_path / "a.json").runs}
    assert ran == {row.name for row in rows("tiny") if re.search("baseline|Gaussian|bfloat16", row.name)}
    sizes = dict.fromkeys([0], _batch(0))  # of which no other is asked for than the first, for its size
    monkeypatch.setattr(model_parallel, "build", lambda _, **__: replace(tiny(), batch=lambda step, *_: sizes[step]))
    _run(tmp_path / "a.json", *asked, "--resume")


@pytest.mark.slow
def test_runs_of_something_else_are_not_resumed(tmp_path: Path) -> None:
    _run(tmp_path / "a.json", "--seeds", "1", "--only", "bfloat16")
    arguments = ["accuracy", "--json", str(tmp_path / "a.json"), "--problem", "tiny", "--steps", "5", "--resume"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "the document has runs of" in re.sub(r"[\s│]+", " ", result.output)
    document = Document.read(tmp_path / "a.json")
    document.runs.clear()
    document.write(tmp_path / "a.json")
    assert CliRunner().invoke(app, arguments).exit_code == 0  # there is nothing to disagree with
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(BadInput, match="expected a document of"):
        Document.read(tmp_path / "a.json")


@pytest.mark.parametrize("command", ["accuracy", "figures"])
def test_a_model_without_stages_is_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_parallel, "build", lambda name, **_: replace(tiny(), parts=None))
    result = CliRunner().invoke(app, [command, "--json", str(tmp_path / "a.json"), "--problem", "tiny"])
    assert result.exit_code == 2
    assert "cannot be split into stages" in re.sub(r"[\s│]+", " ", result.output)


@pytest.mark.parametrize(("cuts", "inside"), [(0, 0), (1, 0), (2, 0), (0, 2), (2, 2)])
def test_a_network_computes_what_the_model_computes(cuts: int, inside: int) -> None:
    problem, batch = tiny(), _batch(5)
    network = Network(problem, cuts, inside, nn.Identity)
    assert torch.equal(network.loss(batch), problem.loss(problem.model, batch))
    assert (len(network.between), len(network.before)) == (cuts, inside)


def test_a_network_crosses_every_cut_once() -> None:
    seen = list[int]()

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.shape[-1])
            return x

    Network(tiny(), 2, 2, Spy).loss(_batch(0))
    assert seen == [16, 16, 16, 16]


def test_boundaries_know_training_from_evaluation() -> None:
    modes = list[bool]()

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(self.training)
            return x

    run(_material(3), "", 0, 1.0, 1, 0, Spy)
    assert modes == [True] * 3 + [False] * (3 + 2)  # batches trained on, those of them looked at again, held-out ones


def test_a_training_that_diverges_says_so() -> None:
    problem = replace(tiny(), learning_rate=1e30)
    found = run(_material(6, problem), "exact | 75% | 2 workers", 0, 0.25, 1, 0, lambda: TopKBoundary(0.25))
    assert found.diverged_at is not None
    assert math.isnan(found.held_out_loss)


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    numbers = {f.name: 0.5 for f in fields(Run)} | {"problem": "tiny", "row": "exact", "kept": math.nan}
    made = [Run(**numbers | {"seed": seed, "diverged_at": at}) for seed, at in ((1, None), (0, 3))]  # type: ignore[arg-type]
    document = Document(environment={}, settings={"tiny": {"steps": 4}})
    for each in made:
        document.add(each)
    document.write(tmp_path / "a.json")
    read = Document.read(tmp_path / "a.json").of("tiny", "exact")
    assert [(run.seed, run.diverged_at) for run in read] == [(0, 3), (1, None)]
    assert all(math.isnan(run.kept) and run.train_loss == 0.5 for run in read)


def test_a_look_by_hand() -> None:
    x = torch.tensor([[0.0, 0, 0, 4, 0, 0, 0, 0], [0, 0, -3, 1, 0, 2, 0, 0]])
    found = look(x, 7)
    assert (found.step, found.zeros) == (7, 0.75)
    assert found.rms == pytest.approx(math.sqrt(30 / 16))
    assert found.thresholds == [(0.0 + 2.0) / 2, 3.5, 3.5]  # 2, 1 and 1 of 8
    mean, scale = 0.25, math.sqrt((30 / 16 - 0.0625) / 2)
    assert found.one_sided[1] == float((x >= mean + scale * math.log(5)).double().mean())


def test_criteria_prefer_the_law_that_was_drawn_from() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(20_000, generator=generator, dtype=torch.float64)
    sign = torch.randint(0, 2, (20_000,), generator=generator) * 2 - 1
    laplace = sign * torch.empty(20_000, dtype=torch.float64).exponential_(generator=generator)
    for x, best, worst in ((normal, "normal", "Laplace"), (laplace, "Laplace", "normal")):
        assert criteria(x)[best] < criteria(x)[worst]
    ours, theirs = "zeros and exponential", "zeros and half-normal"
    assert criteria(laplace.clamp(min=0))[ours] < criteria(laplace.clamp(min=0))[theirs]
    assert criteria(normal.clamp(min=0))[ours] > criteria(normal.clamp(min=0))[theirs]
    assert criteria(laplace)["Laplace"] == pytest.approx(2 + 2 * math.log(2), abs=0.05)
    assert criteria(normal)["normal"] == pytest.approx(1 + math.log(2 * math.pi), abs=0.05)


def test_figures_are_noted(tmp_path: Path) -> None:
    arguments = ["figures", "--json", str(tmp_path / "f.json"), "--problem", "tiny", "--steps", "12", "--seed", "1"]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    document = json.loads((tmp_path / "f.json").read_text())
    assert len(document["runs"]) == 10
    assert [look["step"] for look in document["runs"]["dense"]] == list(range(12))
    assert set(document["shapes"]) == {"before the ReLU", "at the cut"}
    assert {"Laplace", "normal"} <= document["shapes"]["before the ReLU"]["aic"].keys()


def test_the_page_has_every_row_of_both_problems() -> None:
    printed = PAGE.read_text().split(HEAD)[1].split("\n\n")[0]
    _, dlrm, transformer = re.split(r"\| \*\*\w+\*\* [| ]+\n", printed)
    for problem, table_of in (("dlrm", dlrm), ("transformer", transformer)):
        shown = set()
        for line in table_of.splitlines():
            method, place, *found = (cell.strip() for cell in line.strip("|").split("|"))
            shown |= {(method, place, share) for share, cell in zip(LEFT_OUT, found, strict=True) if cell}
        assert shown == {(row.method, row.place, row.sparsity) for row in rows(problem) if row.method != BASELINE}
