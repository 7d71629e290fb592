"""The model of what a step costs elsewhere says what the page says, and what it predicts agrees with itself."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from thinwire_lab.check.gpu import cost
from thinwire_lab.check.gpu.buckets import RECIPES, Case, counted

PAGE = Path(__file__).parents[3] / "docs/measurements/gpu.md"
ROW: dict[str, Any] = {"elements": cost.BUCKET // 4, "launches": {"encode": 3, "decode": 2}, "bytes": 4 * cost.BUCKET}
ROWS = [
    ROW | {"recipe": "bf16", "sent_bytes": cost.BUCKET / 2},
    ROW | {"recipe": "sparse", "sent_bytes": cost.BUCKET / 50, "bytes": 12 * cost.BUCKET},
    ROW | {"recipe": "free", "sent_bytes": 0, "launches": {}, "bytes": 0},
]


@pytest.mark.parametrize("model", cost.MODELS)
def test_below_the_break_even_a_step_is_shorter_than_with_bf16_and_above_it_is_not(model: str) -> None:
    bf16, sparse, _ = ROWS
    found = {row["recipe"]: row[cost.EVEN] for row in cost.predicted(ROWS) if row["model"] == model}
    assert found["bf16"] == 0
    assert found["free"] == 3600  # faster everywhere
    assert 25 < found["sparse"] < 3600
    assert all(row[cost.EVEN] is None for row in cost.predicted(ROWS[1:]))  # nothing to compare with
    for share, shorter in ((0.9, True), (1.1, False)):
        rate = share * found["sparse"] * 1e9
        assert (cost.step(sparse, *cost.MODELS[model], rate) < cost.step(bf16, *cost.MODELS[model], rate)) == shorter


@pytest.mark.parametrize("seconds", ["CAPTURED", "OWN"])
def test_another_time_of_the_host_gives_another_figure(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures() -> set[str]:
        return {f"{row['400 Gbit/s']:,.0f}" for row in cost.predicted(ROWS) if row["recipe"] == "sparse"}

    before = figures()
    monkeypatch.setattr(cost, seconds, 1.1 * getattr(cost, seconds))
    assert figures() != before


def test_what_was_measured_takes_the_place_of_what_was_reckoned() -> None:
    busy = ROW | {"recipe": "busy", "sent_bytes": 0, "busy_ms": {"encode": 40.0, "decode": 60.0}}
    waits = busy | {"captured": {"host_us": {"all": 9000.0}}}
    buckets = -(-4 * 1.3e9 // cost.BUCKET)
    reckoned = cost.step(busy, 1.3e9, 16384, 1e9)
    assert reckoned < 1 < buckets * 0.1 < cost.step(waits, 1.3e9, 16384, 1e9)


@pytest.mark.parametrize("tokens", [4096, 16384])
def test_the_page_has_what_is_predicted_of_the_version_measured(tokens: int) -> None:
    buckets = json.loads(PAGE.with_suffix(".json").read_text())["parts"]["buckets"]
    rows = [buckets[f"{recipe}, 6 of 1092224 float32"] | {"sent_bytes": 0} for recipe in ("topk", "dgc", "fading")]
    first, *others = (f"{1e3 * cost.step(row, 126e6, tokens, 1e9):.0f}" for row in rows)
    assert re.search(rf"{first}, {others[0]} and {others[1]}[^0-9]* {tokens:,}", " ".join(PAGE.read_text().split()))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_page_has_what_is_predicted_today() -> None:
    pytest.importorskip("triton")
    page = PAGE.read_text()
    table = page[page.index("| recipe | BERT-base |") :].split("\n\n")[0].splitlines()[2:]
    lines = [line.strip("|").split("|") for line in table]
    said = {recipe: cells for names, *cells in lines for recipe in re.findall(r"`(\w+)`", names)}
    assert set(said) == set(RECIPES)
    tensors, each = 6, cost.BUCKET // 4 // 6 // 64 * 64
    cases = [Case(recipe=recipe, tensors=tensors, dtype="float32", numel=tensors * each) for recipe in RECIPES]
    rows = cost.predicted([{"recipe": case.recipe, "elements": case.numel} | counted(case) for case in cases])
    evens = dict[str, set[int]]()
    for recipe, cells in said.items():
        its = [row for row in rows if row["recipe"] == recipe]
        evens[recipe] = {round(row[cost.EVEN]) for row in its}
        for found, cell in zip(its, cells, strict=True):
            figures = [f"{found[link]:,.0f}" for link in cost.LINKS]
            assert [*map(str.strip, re.split("/", cell))] == figures[: cell.count("/") + 1], (recipe, found)
            assert set(figures[cell.count("/") :]) == {figures[-1]}  # the last one holds for all that follow
    assert evens.pop("dense") == evens.pop("bf16") == {0}
    slower, others = evens.pop("orthogonal"), set().union(*evens.values())
    said_of = f"up to {min(others)} to {max(others)} Gbit/s, `orthogonal` up to {min(slower)} to {max(slower)}."
    assert f"beat bf16 {said_of}" in page
