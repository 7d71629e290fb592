"""Which trainings of clicks the study takes from its file, and which it runs again."""

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.version import __version__
from thinwire_lab.studies import server_clicks


def test_what_another_version_wrote_runs_again_and_the_newest_of_a_seed_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, ran = tmp_path / "runs.jsonl", list[int]()

    def run(_: server_clicks.Setting, *, seed: int, **__: Any) -> dict[str, Any]:
        ran.append(seed)
        looks = [[8, 2.0 + seed, 1.0, 0.1, 5]] * server_clicks.PARTS
        return {"looks": looks, "staleness": 0.0, "bytes": 5, "down_bytes": 5}

    monkeypatch.setattr(server_clicks, "run", run)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    for seeds in ("0", "0,1"):
        server_clicks.main(path, updates=8, densities="0.05", threads="1", seeds=seeds)
    assert ran == [0, 1]
    old = [json.loads(line) | {"thinwire": "0.0.1"} for line in path.read_text().splitlines()]
    assert {json.loads(line)["thinwire"] for line in path.read_text().splitlines()} == {__version__}
    path.write_text("".join(json.dumps(each | {"looks": [[8, 99.0, 1.0, 0.1, 5]] * 8}) + "\n" for each in old))
    capsys.readouterr()
    server_clicks.main(path, updates=8, densities="0.05", threads="1", seeds="0,1")
    assert ran == [0, 1, 0, 1]
    assert "2.5000 \N{PLUS-MINUS SIGN} 0.7071" in capsys.readouterr().out
