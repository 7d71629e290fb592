"""The figure of the front page: what is kept of its runs draws it, and a run that is too short is named."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from thinwire.planner import Profile
from thinwire_lab.studies import thin_links
from thinwire_lab.studies.convergence import results

KEPT = Path(__file__).parents[3] / "docs/measurements/thin_links"
PROFILES = {name: Profile.from_json((KEPT / f"{name}.json").read_text()) for name in thin_links.OPTIMIZERS}


def test_kept_runs_give_a_cell_for_each_link_and_number_of_workers(tmp_path: Path) -> None:
    found = list(thin_links.cells(results.read(KEPT / "runs.jsonl"), PROFILES))
    assert len(found) == 3 * 3 * 6
    assert all(cell.best < cell.bf16 for cell in found if cell.rate == "10mbit")
    for slow, fast in pairwise(found):
        assert (slow.workers, slow.optimizer) != (fast.workers, fast.optimizer) or slow.bf16 >= fast.bf16
    thin_links.drawn(found).savefig(tmp_path / "links.png")


def test_a_run_that_does_not_reach_denses_loss_is_named() -> None:
    runs = [
        replace(run, looks=run.looks[:5]) if "dgc" in run.settings.recipe else run
        for run in results.read(KEPT / "runs.jsonl")
    ]
    with pytest.raises(ValueError, match=r"dgc.*2 workers ends at .*train for more steps"):
        list(thin_links.cells(runs, PROFILES))
