"""`thinwire_lab.studies.exchanges` from end to end, small; and the path that it finds in what ranks noted."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from thinwire_lab.studies.exchange_path import Hop, path

PROGRAM = [sys.executable, "-m", "thinwire_lab.studies.exchanges"]


@pytest.mark.slow
def test_bytes_are_those_of_the_formulas_and_sums_are_right(tmp_path: Path) -> None:
    small = ["--worlds", "3", "--links", "100mbit", "--numel", "200000", "--density", "0.02", "--repeats", "2"]
    written = ["--json", str(tmp_path / "x.json")]
    done = subprocess.run([*PROGRAM, *small, *written], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["schema"] == "thinwire.exchanges/2"
    assert {row["exchange"] for row in document["rows"]} >= {"dense", "all-gather", "tree", "doubling", "owner-sharded"}
    for row in document["rows"]:
        assert row["identical"]
        assert row["right"] is not False
        assert row["declared_bytes"] == pytest.approx(row["formula_bytes"], rel=0.03)
        if row["measured_bytes"] is not None:
            expected = row["formula_bytes"] + row["header_bytes"]
            # Gloo adds a fixed few hundred bytes to each ring all-reduce, which small payloads show
            assert row["measured_bytes"] == pytest.approx(expected, rel=0.03, abs=3000)
        assert (row["path"] is not None) == (row["exchange"] == "tree")
        assert (row["message_seconds"] is not None) == (row["exchange"] == "tree")
        for one, then in pairwise(row["path"] or ()):
            assert one["receiver"] in (then["sender"], then["receiver"])


Spans = list[tuple[str, float, float]]
NOTED: dict[int, Spans] = {
    0: [("receive from 1", 0, 3), ("receive from 2", 4, 9), ("send to 2", 10, 11), ("send to 1", 11, 12)],
    1: [("send to 0", 1, 2), ("receive from 0", 2, 14)],
    2: [("receive from 3", 0, 2), ("send to 0", 3, 4), ("receive from 0", 6, 13), ("send to 3", 14, 15)],
    3: [("encode", 0, 0.5), ("send to 2", 0.5, 1), ("receive from 2", 1, 17)],
}
"""What the ranks of a tree did, by name, start and end."""


def _hops(noted: dict[int, Spans]) -> list[Hop]:
    return list(path({"rank": rank, "start": 0, "end": 20, "spans": spans} for rank, spans in noted.items()))


def test_the_path_goes_back_from_the_last_message_to_what_each_waited_for() -> None:
    assert _hops(NOTED) == [
        Hop(sender=1, receiver=0, seconds=2, waited=1),
        Hop(sender=2, receiver=0, seconds=5, waited=1),  # sent at 3, when its receiver was not there yet
        Hop(sender=0, receiver=2, seconds=3, waited=1),
        Hop(sender=2, receiver=3, seconds=3, waited=1),
    ]
    last = [*NOTED[1][:1], ("receive from 0", 2, 20)]
    assert _hops(NOTED | {1: last})[-1] == Hop(sender=0, receiver=1, seconds=10, waited=1), "with the one to rank 2"
    assert _hops({0: [("encode", 0, 1)], 1: []}) == []
