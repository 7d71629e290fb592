"""Clicks: generated ones, whose best loss is known, and Criteo's format."""

import gzip
import math
import re
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire_lab.inputs import BadInput
from thinwire_lab.problems import Batch, build, clicks, dlrm
from thinwire_lab.problems.clicks import Impressions

TEACHER = clicks.teacher(np.random.default_rng(0))


@cache  # not at import: every process of a run imports this, and one needs it
def _many() -> Impressions:
    return TEACHER.show(np.random.default_rng(1), 200_000)


@cache
def _chances() -> clicks.Floats:
    return TEACHER.chances(_many())


def _few(count: int) -> Impressions:
    return Impressions(dense=_many().dense[:count], ids=_many().ids[:count].copy(), labels=_many().labels[:count])


def test_the_best_loss_is_what_the_teacher_reaches_on_its_labels() -> None:
    losses = -np.log(np.where(_many().labels, _chances(), 1 - _chances()))
    # Given p, a loss is -log p or -log(1 - p): its variance is p (1 - p) (log odds)^2.
    variance = (_chances() * (1 - _chances()) * np.log(_chances() / (1 - _chances())) ** 2).mean()
    bound = 4 * math.sqrt(variance / len(losses))
    assert bound < 0.01
    assert abs(losses.mean() - clicks.entropy(_chances())) < bound


def test_about_a_quarter_is_clicked_and_knowing_more_than_that_helps() -> None:
    rate = float(_chances().mean())
    assert _many().labels.mean() == pytest.approx(rate, abs=4 * 0.5 / math.sqrt(len(_chances())))
    assert 0.22 < rate < 0.28
    assert clicks.entropy(_chances()) < clicks.entropy(np.array([rate])) - 0.15


def test_the_description_tells_the_best_loss_on_the_held_out_clicks() -> None:
    problem = build("dlrm", seed=5)
    dense, ids, labels = (torch.cat(tensors).numpy() for tensors in zip(*problem.held_out(0, 1), strict=True))
    assert len(labels) >= 10_000
    best = clicks.entropy(TEACHER.chances(Impressions(dense=dense, ids=ids, labels=labels)))
    assert f"generated clicks, best possible loss {best:.3f}" in problem.description


def test_chances_are_those_of_the_formula() -> None:
    for row, chance in enumerate(TEACHER.chances(_few(20))):
        rows = _many().ids[row] + TEACHER.starts
        met = [float(TEACHER.vectors[a] @ TEACHER.vectors[b]) for a, b in combinations(rows[clicks._MEETING], 2)]
        alone = TEACHER.effects[rows[clicks._TELLING]].sum() + (_many().dense[row] - 1) @ TEACHER.slopes
        assert chance == pytest.approx(1 / (1 + math.exp(-clicks._BIAS - alone - sum(met))), rel=1e-6)


def test_some_features_say_nothing_and_the_others_something() -> None:
    few = _few(200)
    telling = []
    for feature, rows in enumerate(clicks.ROWS):
        other = _few(200)
        other.ids[:, feature] = (other.ids[:, feature] + 1) % rows
        telling.append(bool((TEACHER.chances(other) != TEACHER.chances(few)).any()))
    assert [feature for feature in range(26) if telling[feature]] == sorted({*clicks._TELLING, *clicks._MEETING})
    assert telling.count(False) >= 8
    assert 0 < np.count_nonzero(TEACHER.slopes) < 13


def test_ids_follow_zipfs_law() -> None:
    for feature, rows in enumerate(clicks.ROWS.tolist()):
        ids = _many().ids[:, feature]
        weights = np.arange(1, rows + 1) ** -clicks._STEEPNESS
        shares = weights / weights.sum()
        assert 0 <= ids.min() <= ids.max() < rows
        for number in (0, 2, 3):
            bound = 4.5 * math.sqrt(shares[number] * (1 - shares[number]) / len(ids))
            assert abs((ids == number).mean() - shares[number]) < bound


@pytest.mark.slow
def test_training_learns_more_than_the_rate_of_clicks() -> None:
    problem = build("dlrm", seed=0)
    optimizer = torch.optim.SGD(problem.model.parameters(), problem.learning_rate, problem.momentum)
    for step in range(250):
        optimizer.zero_grad()
        problem.loss(problem.model, problem.batch(step, 0, 1)).backward()
        optimizer.step()
    with torch.no_grad():
        losses = [problem.loss(problem.model, batch).item() for batch in problem.held_out(0, 1)[:20]]
    rate = clicks.entropy(np.array([_chances().mean()]))
    assert clicks.entropy(_chances()) - 0.02 < np.mean(losses) < rate - 0.02


def test_features_have_embeddings_of_their_own_and_meet_as_dot_products() -> None:
    interaction, vector = dlrm.Interaction([2, 3]), torch.randn(4, 16)
    first, second = interaction.embedding.weight.detach().split([2, 3])
    ids = torch.tensor([[0, 0], [1, 2], [0, 1], [1, 0]])
    one, other = first[ids[:, 0]], second[ids[:, 1]]
    products = torch.stack([(a * b).sum(1) for a, b in ((one, vector), (other, vector), (other, one))], 1)
    torch.testing.assert_close(interaction(vector, ids).detach(), torch.cat([vector, products], 1))


def _line(label: str = "1", counts: dict[int, str] | None = None, hashes: dict[int, str] | None = None) -> str:
    """A line with these fields, and 7 and 0000000a in all others."""
    numbers = [(counts or {}).get(k, "7") for k in range(13)]
    return "\t".join([label, *numbers, *((hashes or {}).get(k, "0000000a") for k in range(26))])


def _write(folder: Path, *lines: str) -> Path:
    (folder / "train.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder / "train.txt"


def test_what_a_line_says_is_what_is_read(tmp_path: Path) -> None:
    odd = _line(
        "0", {0: "", 1: "-3", 2: "0", 3: "1", 12: "65535"}, {0: "", 1: "00000000", 2: "FFffFFff", 25: "0000270e"}
    )
    found = clicks.load(_write(tmp_path, odd, *[_line()] * 6))
    assert found.labels.tolist() == [0] + [1] * 6
    assert found.dense.dtype == np.float32
    np.testing.assert_array_equal(found.dense[0, [0, 1, 2]], 0)
    np.testing.assert_allclose(found.dense[0, [3, 4, 12]], [math.log(2), math.log(8), math.log(65536)], rtol=1e-6)
    # Nothing is row 0 and no hash is: 0 -> 1, 9,998 -> 9,999.
    assert found.ids[0, [0, 1, 2, 3, 25]].tolist() == [0, 1, 0xFFFFFFFF % 9999 + 1, 11, 9999]
    assert found.ids[1].tolist() == [11] * 26


def test_packed_and_plain_files_and_line_ends_are_alike(tmp_path: Path) -> None:
    lines = [_line(str(k % 2), {3: str(k)}, {4: f"{k:08x}"}) for k in range(9)]
    plain = clicks.load(_write(tmp_path, *lines))
    (tmp_path / "a.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (tmp_path / "b.txt").write_bytes("\r\n".join(lines).encode())
    for name in ("a.gz", "b.txt"):
        other = clicks.load(tmp_path / name)
        for key in ("dense", "ids", "labels"):
            np.testing.assert_array_equal(getattr(other, key), getattr(plain, key))


def _numbers(batches: list[Batch]) -> list[float]:
    """What the first dense feature was in the file."""
    return torch.cat([dense for dense, *_ in batches])[:, 0].expm1().round().unique().tolist()


def test_the_last_seventh_is_held_out_and_never_trained_on(tmp_path: Path) -> None:
    problem = build("dlrm", seed=0, data=_write(tmp_path, *[_line(counts={0: str(k)}) for k in range(23)]))
    assert _numbers(problem.held_out(0, 1)) == [20, 21, 22]
    assert _numbers([problem.batch(step, 0, 1) for step in range(4)]) == list(range(20))
    assert "first 23 lines" in problem.description


def test_no_more_lines_than_the_bound_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clicks, "LINES", 8)
    assert len(clicks.load(_write(tmp_path, *[_line()] * 8, "no such line")).labels) == 8


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("", "1 columns, not 40"),
        (_line() + "\t", "41 columns, not 40"),
        (_line().removesuffix("\t0000000a"), "39 columns, not 40"),
        (_line("2"), "column 1 is '2', not 0 or 1"),
        (_line(""), "column 1 is '', not 0 or 1"),
        (_line(counts={0: "1.5"}), "column 2 is '1.5', not an integer"),
        (_line(counts={12: "-"}), "column 14 is '-', not an integer"),
        (_line(counts={1: "9" * 19}), "column 3 is '9999999999999999999', not an integer"),
        (_line(hashes={0: "0000000g"}), "column 15 is '0000000g', not 8 hexadecimal digits"),
        (_line(hashes={25: "123"}), "column 40 is '123', not 8 hexadecimal digits"),
        (_line(hashes={3: " 123456 "}), "column 18 is ' 123456 ', not 8 hexadecimal digits"),
        (_line(hashes={3: "\xe9"}), r"column 18 is '\\xc3\\xa9', not 8 hexadecimal digits"),
        ("x" * 5000, "1 columns, not 40"),
    ],
)
def test_malformed_lines_are_named(line: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        build("dlrm", seed=0, data=_write(tmp_path, *[_line()] * 4, line, *[_line()] * 4))
    assert re.search(r"train\.txt line 5: ", str(caught.value))
    assert fault in str(caught.value)
    assert "expected a text file" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", (_line() + "\n").encode() * 6])
def test_files_of_too_few_lines_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(content)
    with pytest.raises(BadInput, match="expected"):
        clicks.load(tmp_path / "train.txt")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.gz").write_bytes(gzip.compress(b"1")[:-4])
    (tmp_path / "not.gz").write_bytes(b"1")
    for name in ("", "nothing", "short.gz", "not.gz"):
        with pytest.raises(BadInput, match="expected a text file"):
            clicks.load(tmp_path / name)
