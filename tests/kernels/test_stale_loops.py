"""Are compiled loops that lie on disk made of the sources that are there?"""

import dis
import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
from cases import CODECS, vector
from numba.core import event
from ranks import Ranks

from thinwire.kernels import compiled
from thinwire.kernels.compiled import HOSTS, KERNELS, made_of

LOOP = """
from thinwire.kernels.compiled import compiled
from thinwire.kernels.{0} import {0}

@compiled
def twice(x):
    return {0}(x)
"""


def _imported(file: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


def test_a_loop_is_compiled_anew_when_one_that_it_calls_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, called = tmp_path / "loop.py", tmp_path / "called.py"
    loop.write_text(LOOP.format("called"))
    monkeypatch.setattr(compiled, "KERNELS", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python's own is found stale by seconds and lengths alone

    def run(by: str, x: Any = 2) -> tuple[float, bool, int]:
        """Run it where it calls this. Return what it returns, whether it was on disk, and how many files then are."""
        called.write_text(f"from thinwire.kernels.compiled import compiled\n@compiled\ndef called(x): return {by}\n")
        compiled._mark.cache_clear()
        monkeypatch.setitem(sys.modules, "thinwire.kernels.called", _imported(called, "called"))
        twice = _imported(loop, "loop").twice
        return twice(x), bool(twice.stats.cache_hits), len([*tmp_path.rglob("loop.*.nb?")])

    assert run("x + x") == (4, False, 1)
    assert run("x + x") == (4, True, 1)
    assert run("x + x", np.float32(2)) == (4, False, 2)
    assert run("3 * x") == (6, False, 1)  # what was made of the other is gone
    compiled._mark.cache_clear()


def _begun_together(file: str) -> tuple[int, int]:
    """Return how often this rank compiled a loop that all begin to call at once, and took it from the disk."""
    module = _imported(Path(file), "together")
    loop = module.loop
    dist.barrier()
    with patch.dict(sys.modules, together=module):
        loop(np.zeros(8))
    return sum(loop.stats.cache_misses.values()), sum(loop.stats.cache_hits.values())


def test_ranks_of_one_machine_compile_a_loop_once(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "together.py"
    lines = "\n".join(f"    x[{i}] = x[{i - 1}] / (x[0] + {i})" for i in range(1, 8))  # which take a while to compile
    file.write_text(f"from thinwire.kernels.compiled import compiled\n@compiled\ndef loop(x):\n{lines}\n")
    assert sorted(ranks.run(3, _begun_together, str(file))) == [(0, 1), (0, 1), (1, 0)]


def _compiling() -> list[str]:
    """Exchange a payload of every codec. Return which loops were compiled for that."""
    group = dist.group.WORLD
    assert group is not None
    with event.install_recorder("numba:compile") as recorder:
        for case in CODECS.values():
            case.exchange.start(case.codec.encode(vector(1000), seed=1), group).wait().total.dense()
    return [each.data["dispatcher"].py_func.__qualname__ for _, each in recorder.buffer if each.data]


def test_no_loop_is_compiled_again_by_another_process(ranks: Ranks) -> None:
    ranks.run(1, _compiling)
    others = Ranks()
    found = others.run(1, _compiling)
    others.stop()
    assert found == [[]]


def _modules() -> list[ModuleType]:
    files = [file for file in KERNELS.rglob("*.py") if file.stem not in ("triton", "__init__")]
    return [import_module(".".join(("thinwire.kernels", *f.relative_to(KERNELS).with_suffix("").parts))) for f in files]


def test_what_a_loop_is_made_of_is_found() -> None:
    modules = {module.__name__: module for module in _modules()}
    for module in modules.values():
        found = made_of(Path(str(module.__file__)))
        loops = [x.py_func for x in vars(module).values() if hasattr(x, "py_func")]
        compiles = {i.argval for loop in loops for i in dis.get_instructions(loop) if i.opname == "LOAD_GLOBAL"}
        for name, used in vars(module).items():
            whence = used.__name__ if isinstance(used, ModuleType) else getattr(used, "__module__", None)
            if isinstance(whence, str) and whence in modules:
                file = Path(str(modules[whence].__file__))
                assert file in found or (file in HOSTS and name not in compiles), (module.__name__, name)
