"""Every rank's part in a checkpoint: in a folder that all write to, or gathered on rank 0."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, told
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.frameworks.attaching import gathered, load, save


def _trained(steps: int) -> thinwire.integrations.Attachment:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = thinwire.attach(model, thinwire.recipes.topk(density=0.01, minimum_size=0))
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 64)).square().mean().backward()
        optimizer.step()
    return handle


def _waiting(state: Any) -> torch.Tensor:
    held = {name: fields["residual"] for memory in state["memories"] for name, fields in memory.items()}
    return torch.cat([held.get("weight", torch.zeros(64 * 64)), held.get("bias", torch.zeros(64))])


def _saved(folder: Path) -> torch.Tensor:
    handle = _trained(2)
    save(handle, folder)
    return _waiting(handle.state_dict())


def _loaded(folder: Path) -> tuple[int, torch.Tensor]:
    handle = _trained(0)
    load(handle, folder, missing_ok=False)
    return handle.step, _waiting(handle.state_dict())


@pytest.mark.parametrize("then", [2, 3, 1])
def test_what_is_saved_is_loaded_for_any_number_of_ranks(ranks: Ranks, tmp_path: Path, then: int) -> None:
    saved = ranks.run(2, _saved, tmp_path / "thinwire")
    steps, loaded = zip(*ranks.run(then, _loaded, tmp_path / "thinwire"), strict=True)
    assert set(steps) == {2}
    assert not torch.equal(saved[0], saved[1])
    expected = [torch.stack(saved).sum(0)] if then == 1 else [*saved, torch.zeros_like(saved[0])][:then]
    torch.testing.assert_close(list(loaded), expected, rtol=0, atol=1e-7 if then == 1 else 0)


def _missing(folder: Path) -> tuple[str, bool, bool]:
    handle = _trained(1)
    said = told(lambda: load(handle, folder, missing_ok=False))
    waited = handle.waits
    load(handle, folder, missing_ok=True)
    return said, waited, handle.waits


def test_a_checkpoint_without_it_is_refused_unless_that_is_fine(ranks: Ranks, tmp_path: Path) -> None:
    for said, waited, waits in ranks.run(2, _missing, tmp_path / "thinwire"):
        assert said.startswith(f"StateError: nothing was loaded, as there is nothing of thinwire's in {tmp_path}")
        assert "missing_ok=True" in said
        assert waited
        assert not waits


def _apart(folder: Path) -> tuple[list[str], str]:
    handle, heard = _trained(1), list[str]()
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]  # to hear it
    logging.getLogger("thinwire").addHandler(listener)
    mine = folder / str(dist.get_rank())  # as on hosts that share no disk
    save(handle, mine)
    logging.getLogger("thinwire").removeHandler(listener)
    return heard, told(lambda: load(handle, mine, missing_ok=True))


def test_hosts_that_share_no_folder_are_told_when_they_save(ranks: Ranks, tmp_path: Path) -> None:
    (first, one), (second, two) = ranks.run(2, _apart, tmp_path)
    assert len(first) == 1
    assert "rank 1 does not see what rank 0 wrote" in first[0]
    assert not second
    assert all(said.startswith("StateError: nothing was loaded") for said in (one, two))


def _gathered() -> tuple[list[Any], Any]:
    handle = _trained(2)
    return list(gathered(handle)), handle.state_dict()


def test_rank_0_gathers_what_every_rank_has(ranks: Ranks) -> None:
    found = ranks.run(3, _gathered)
    states, nothing, neither = (states for states, _ in found)
    assert [state["rank"] for state in states] == [0, 1, 2]
    for state, (_, own) in zip(states, found, strict=True):
        assert torch.equal(_waiting(state), _waiting(own))
    assert nothing == neither == []
