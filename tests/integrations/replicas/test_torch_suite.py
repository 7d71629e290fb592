"""PyTorch's own DDP tests, which ship with it, on the CPU over Gloo and with a recipe attached to every DDP model."""

import inspect
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.reducer import Reducer

RECIPES: Mapping[str, Callable[[], Reducer]] = {
    "dense": tw.recipes.dense,
    "topk": partial(tw.recipes.topk, density=1.0),
}
TOO_LONG = {"test_ddp_uneven_inputs"}  # a large convolutional model
OWN_HOOK = "registers a hook of its own, and DDP has one"
REFUSED = {
    **dict.fromkeys(
        (
            "test_ddp_comm_hook_logging",
            "test_ddp_hook_parity_allreduce",
            "test_ddp_hook_parity_allreduce_process_group",
            "test_ddp_hook_parity_post_localSGD",
            "test_ddp_hook_parity_powerSGD",
        ),
        OWN_HOOK,
    ),
    "test_ddp_native_mixed_precision_ignored_params": "mixed_precision uses the hook",
    "test_ddp_static_graph_nested_types": "trains one module in two DDP models, and the second attachment takes over",
}
"""Tests that plain DDP passes and attached models do not, and why."""


def _on_cpu(x: object) -> object:
    """Return the CPU for any device of CUDA, which tests also name by number."""
    named = isinstance(x, str | torch.device) and str(x).startswith("cuda")
    return torch.device("cpu") if named or (isinstance(x, int) and not isinstance(x, bool)) else x


class _Devices(torch.overrides.TorchFunctionMode):
    """Rewrites devices, so that tests for GPUs run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


class _Stream:
    """Stands in for streams and for choosing a device."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


def _without_gpus() -> None:
    """Let models and streams work where there is no GPU."""
    patched: Any = nn.Module
    move = patched.to

    def to(self: nn.Module, *args: object, **kwargs: object) -> Any:
        return move(self, *map(_on_cpu, args), **{k: _on_cpu(x) if k == "device" else x for k, x in kwargs.items()})

    patched.to, patched.cuda = to, lambda self, *args, **kwargs: self
    for name in ("device", "Stream", "stream", "current_stream"):
        setattr(torch.cuda, name, _Stream)
    for name in ("set_device", "synchronize", "current_device"):
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)


def _attach_everywhere(recipe: str) -> None:
    """Attach to every DDP model from now on; `plain` attaches nothing."""
    init: Any = DistributedDataParallel.__init__

    @wraps(init)
    def attached(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, module, **{key: x for key, x in kwargs.items() if key not in ("device_ids", "output_device")})
        if recipe in RECIPES:
            tw.attach(self, RECIPES[recipe]())

    DistributedDataParallel.__init__ = attached  # type: ignore[method-assign]


def _suite() -> tuple[type[unittest.TestCase], list[str]]:
    """Return PyTorch's tests, and the names of those about DDP."""
    theirs: Any = import_module("torch.testing._internal.distributed.distributed_test")
    base = theirs.DistributedTest._DistTestBase
    theirs.init_multigpu_helper = lambda world_size, backend: {i: [i] for i in range(int(world_size))}

    class Suite(theirs.TestDistBackend, base):  # type: ignore[misc, valid-type]
        def setUp(self) -> None:
            theirs.MultiProcessTestCase.setUp(self)
            theirs.initialize_temp_directories()
            theirs.Barrier.init()
            self.skip_return_code_checks: list[object] = []
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def run_test(self, name: str, pipe: Any) -> None:
            with _Devices():
                theirs.MultiProcessTestCase.run_test(self, name, pipe)

    bare = {name: inspect.unwrap(test) for name, test in vars(base).items() if name.startswith("test_")}
    about = {n: t for n, t in bare.items() if "ddp" in n.lower() or "DistributedDataParallel" in inspect.getsource(t)}
    for name, test in about.items():
        setattr(Suite, name, test)  # without what skips it where there is no GPU
    return Suite, [name for name in about if name not in TOO_LONG]


def _main(recipe: str, names: Sequence[str]) -> None:
    """Run these tests, by default all, and print which pass."""
    torch.set_num_threads(1)
    _without_gpus()
    _attach_everywhere(recipe)
    suite, about = _suite()
    passed = []
    for name in names or about:
        result = unittest.TestResult()
        suite(name).run(result)
        passed += [name] if result.wasSuccessful() and not result.skipped else []
    print(json.dumps(passed))


def _passed(recipe: str, names: Sequence[str] = ()) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": folder, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60"}
        run = subprocess.run(
            [sys.executable, "-W", "ignore", str(Path(__file__)), recipe, *names],
            env=os.environ | settings | {"GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    found: list[str] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_plain_ddp_passes_attached_models_pass_too() -> None:
    pytest.importorskip("expecttest")
    with ThreadPoolExecutor() as pool:
        plain, *attached = pool.map(_passed, ("plain", *RECIPES))
    assert len(plain) > 40
    for recipe, passed in zip(RECIPES, attached, strict=True):
        assert set(plain) - set(passed) <= REFUSED.keys(), recipe


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
