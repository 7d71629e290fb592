"""How far does a gradient walk? Files, functions, calls and moves from file to file in one settled step.

    python tests/walk.py topk --files

From backward to the optimizer's step, with one rank of Gloo and one bucket. Exchanges end in threads of Gloo's own,
which count too, but not where they end after the step: the step with the most calls of seven counts.
"""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

ROOT = str(Path(tw.__file__).parent) + os.sep
FOR_SGD = ("topk", "dgc", "dragonn")
_SETTLED, _COUNTED = 8, 7  # steps


class Walk(NamedTuple):
    """What a step went through: calls, how many functions and files, moves between files, and calls by file."""

    calls: int
    functions: int
    files: int
    moves: int
    by_file: dict[str, int]


class _Steps:
    """Counts the library's calls while `counts` is set."""

    def __init__(self) -> None:
        self.counts, self.moves = False, 0
        self.calls: Counter[tuple[str, str]] = Counter()
        self._last = threading.local()

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if not self.counts or event not in ("call", "return") or not code.co_filename.startswith(ROOT):
            return
        here = code.co_filename
        if event == "call":
            self.calls[here, code.co_qualname] += 1
        else:
            here = frame.f_back.f_code.co_filename if frame.f_back else ""
        if here.startswith(ROOT):
            self.moves += getattr(self._last, "file", here) != here
            self._last.file = here

    def taken(self) -> Walk:
        """Return what has been counted, and begin anew."""
        by_file: Counter[str] = Counter()
        for (file, _), count in self.calls.items():
            by_file[str(Path(file).relative_to(ROOT))] += count
        found = Walk(self.calls.total(), len(self.calls), len(by_file), self.moves, dict(by_file))
        self.calls.clear()
        self.moves = 0
        return found


def walked(recipe: str) -> Walk:
    """Train a small model with a recipe of `thinwire.recipes`, and return the walk of a settled step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64)))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.9))
    if recipe in FOR_SGD:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tw.attach(model, getattr(tw.recipes, recipe)(), optimizer=optimizer)
    steps, found, x = _Steps(), list[Walk](), torch.randn(32, 128)
    threading.setprofile(steps)
    sys.setprofile(steps)
    base: Any = Future.__bases__[0]  # whose methods the futures of collectives have
    plain = base.then, base.add_done_callback

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(future: "Future[Any]", callback: Callable[[Any], Any]) -> Any:
            def counted(done: Any) -> Any:
                sys.setprofile(steps)  # in whatever thread this is
                return callback(done)

            return method(future, counted)

        return call

    base.then, base.add_done_callback = map(counting, plain)
    for step in range(_SETTLED + _COUNTED):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        steps.counts = step >= _SETTLED
        loss.backward()
        optimizer.step()
        steps.counts = False
        found.append(steps.taken())
    base.then, base.add_done_callback = plain
    sys.setprofile(None)
    threading.setprofile(None)
    return max(found[_SETTLED:], key=lambda walk: walk.calls)


def main(
    recipe: Annotated[str, typer.Argument(help="A recipe of thinwire.recipes.")] = "topk",
    files: Annotated[bool, typer.Option("--files", help="Name the files, with how often each is called.")] = False,
) -> None:
    """Count."""
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
        walk = walked(recipe)
        dist.destroy_process_group()
    print(f"{recipe}: files {walk.files}, functions {walk.functions}, calls {walk.calls}, moves {walk.moves}")
    if files:
        print(*(f"  {count:4} {name}" for name, count in sorted(walk.by_file.items())), sep="\n")


if __name__ == "__main__":
    typer.run(main)
