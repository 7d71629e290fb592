"""On a GPU, does every stream wait for those whose results it reads? Every recipe takes steps on imitated streams."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch.distributed as dist

if find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install -e '.[triton]'", allow_module_level=True)
from imitated_streams import races

from thinwire.codecs import TopK
from thinwire.memories import ErrorFeedback
from thinwire.reducer import Reducer
from thinwire.reducer.owners import ToOwners
from thinwire_lab.check.gpu.buckets import RECIPES, WORLD, made
from thinwire_lab.check.gpu.counting import fake_group

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
RECIPE: dict[str, Callable[[], Reducer]] = {
    **{
        name: partial(made, name, [f"tensor {i}" for i in range(3)])
        for name in (*RECIPES, "demo", "powersgd", "randomk")
    },
    "topk to owners": lambda: ToOwners(memory=ErrorFeedback(), codec=TopK(density=0.01)),
}
FEW = {"topk", "fading", "bf16", "orthogonal", "topk to owners"}
APART = pytest.mark.parametrize("apart", [True, False], ids=["collectives apart", "collectives in the current stream"])


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    """Leave no group to the tests that follow."""
    fake_group(WORLD)
    yield
    dist.destroy_process_group()


@APART
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in RECIPE])
def test_no_stream_touches_what_it_has_not_waited_for(name: str, apart: bool) -> None:
    assert not races(RECIPE[name], apart=apart)


@APART
@pytest.mark.parametrize("module", ["thinwire.collectives.queued", "thinwire.kernels.replay"])
def test_a_stream_that_does_not_wait_is_noticed(module: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module(module), "follow", lambda stream, other: None)
    assert races(RECIPE["topk"], apart=apart)
