"""Plain values and states between ranks: they arrive as they were, and nothing else can."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor

from thinwire.collectives import all_gather_plain, broadcast_state, messages, receive_state, send_state

WORLD = 3


def _group() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def _told() -> list[object]:
    rank = dist.get_rank()
    return all_gather_plain({"rank": rank, "name": "ü" * 100 * rank, "none": None, "pair": (1, 0.1)}, _group())


def test_every_rank_has_every_value(ranks: Ranks) -> None:
    expected = [{"rank": r, "name": "ü" * 100 * r, "none": None, "pair": [1, 0.1]} for r in range(WORLD)]
    assert ranks.run(WORLD, _told) == [expected] * WORLD


def _state() -> dict[str, Any]:
    tensors = [torch.arange(6.0).view(2, 3).T, torch.tensor(True), torch.empty(0, 4), torch.tensor([1.5, torch.nan])]
    return {"memories": [{"a.b": {"x": x}} for x in tensors], "half": torch.ones(3).bfloat16(), "step": 3, "own": [1]}


def _same(a: object, b: object) -> bool:
    match a, b:
        case Tensor(), Tensor():
            return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, equal_nan=True)
        case dict(), dict():
            return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
        case list(), list():
            return len(a) == len(b) and all(map(_same, a, b))
        case _:
            return a == b


def _carried() -> bool:
    group, rank = _group(), dist.get_rank()
    found = [broadcast_state(_state() if rank == 1 else None, group, 1)]
    if rank == 2:
        send_state(_state(), group, 0)
    elif rank == 0:
        found.append(receive_state(group, 2))
    return all(_same(each, _state()) for each in found)


def test_a_state_arrives_as_it_was(ranks: Ranks) -> None:
    assert all(ranks.run(WORLD, _carried))


def _cannot() -> str:
    try:
        broadcast_state({"setting": object()} if dist.get_rank() == 0 else None, _group(), 0)
    except (TypeError, RuntimeError) as error:
        return str(error)
    return ""


def test_nobody_waits_for_a_state_that_cannot_be_sent(ranks: Ranks) -> None:
    source, *others = ranks.run(WORLD, _cannot)
    assert "expected tensors, and plain values" in source
    assert all("could not send" in each for each in others)


def test_no_tensor_of_what_is_no_dtype() -> None:
    with pytest.raises(ValueError, match="expected one of torch's dtypes"):
        messages._dtype("load")
