"""Do outer steps go on when a worker is killed within an exchange, and when another comes? Real processes, real kills.

    python -m thinwire_lab.studies.outer_faults --method "sparseloco(every=10)" --steps 120

Four workers train a small network. One of them sends itself SIGKILL just after it has begun an exchange. The others
form a group of three and repeat that outer step. Later a new process joins them, and they are four again. Beside it,
the same training undisturbed. Printed: who was there, the loss of the global parameters, and what each event took.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn

from thinwire import OuterSteps, outer, outer_steps, recipes
from thinwire.collectives import Group

_stores: Any = dist  # which does not export them, as mypy has it
WORKERS, PATIENCE = 4, timedelta(seconds=180)
_ALARM = timedelta(seconds=10)  # after which a worker without news gives an exchange up; only neighbours hear at once
_PARTS: dict[str, Any] = {name: getattr(outer_steps, name) for name in outer_steps.__all__}
_PARTS |= {name: getattr(recipes, name) for name in recipes.__all__} | {"partial": partial, "torch": torch}


def _problem() -> tuple[nn.Module, Callable[[nn.Module, int, int], torch.Tensor]]:
    """Return a network and its loss on the batch of a seed, of so many samples."""
    torch.manual_seed(0)
    truth, model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32)), nn.Sequential()
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 32))

    def loss(module: nn.Module, seed: int, samples: int) -> torch.Tensor:
        x = torch.randn(samples, 64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            wanted = truth(3 * x)
        return (module(x) - wanted).square().mean()

    return model, loss


class Worker:
    """One process. `identity` says which data it takes."""

    def __init__(self, store: Any, identity: int, steps: OuterSteps, group: Group) -> None:
        self.store, self.identity = store, identity
        self.model, self.loss = _problem()
        optimizer = self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.handle = outer(self.model, optimizer, steps, group=group, elastic=True)

    def train(self, until: int, killed_at: int) -> None:
        """Take inner steps. A worker that dies is told of by torch; then the others go on without it."""
        while self.handle.inner_steps < until:
            if self.handle.inner_steps + 1 == killed_at:
                self._die_within_the_exchange()
            self.optimizer.zero_grad()
            self.loss(self.model, 1 + self.handle.inner_steps * 64 + self.identity, 16).backward()
            try:
                self.optimizer.step()
            except RuntimeError as error:
                self._regroup(1, f"lost a worker: {str(error).splitlines()[0]:.60}")

    def held_out(self) -> float:
        """Return the loss of the global parameters."""
        self.handle.go_back()
        with torch.no_grad():
            return float(self.loss(self.model, 0, 4096))

    def regroup(self, generation: int, *, joining: bool = False) -> None:
        """Enter the group of that generation, and go on in it."""
        began = time.monotonic()
        dist.destroy_process_group()
        group = enter(self.store, self.identity, generation, WORKERS if generation != 1 else WORKERS - 1)
        self.handle.regroup(group, joining=joining)
        say(f"worker {self.identity}: {dist.get_world_size()} workers after {time.monotonic() - began:.2f} s")

    def _regroup(self, generation: int, why: str) -> None:
        say(f"worker {self.identity}, inner step {self.handle.inner_steps}: {why}")
        self.regroup(generation)

    def _die_within_the_exchange(self) -> None:
        fragment = self.handle.fragments[0]
        start = fragment.start

        def start_and_die(*, nothing: bool = False) -> None:
            start(nothing=nothing)
            os.kill(os.getpid(), signal.SIGKILL)

        fragment.start = start_and_die  # type: ignore[method-assign]


def enter(store: Any, rank: int, generation: int, size: int) -> Group:
    """Join the processes of a generation, and return a group that gives up soon."""
    prefixed = _stores.PrefixStore(f"generation {generation}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=PATIENCE)
    group: Group = dist.new_group(timeout=_ALARM)
    return group


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def work(port: int, identity: int, method: str, steps: int, disturbed: bool, comes_late: bool) -> None:
    """Be a worker: from the start, or one that comes after two thirds of the steps."""
    torch.set_num_threads(1)
    store = _stores.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    if comes_late:
        alone = enter(_stores.PrefixStore("alone", store), 0, 0, 1)
        worker = Worker(store, identity, eval(method, dict(_PARTS)), alone)
        store.wait(["late"], PATIENCE)
        worker.regroup(2, joining=True)
    else:
        group = enter(store, identity, 0, WORKERS)
        worker = Worker(store, identity, eval(method, dict(_PARTS)), group)
        worker.train(2 * steps // 3, steps // 3 if disturbed and identity == WORKERS - 1 else -1)
        if disturbed:
            store.set("late", "now")
            worker.regroup(2)
    # inner steps are each worker's own; ticks are common
    worker.train(worker.handle.inner_steps + steps - worker.handle.ticks, -1)
    same = worker.handle.verify_replicas()
    if worker.identity == 0:
        say(f"{'disturbed' if disturbed else 'undisturbed'}: loss {worker.held_out():.5f}, replicas identical: {same}")
    dist.barrier()


def main(
    method: Annotated[str, typer.Option(help="Outer steps, as an expression.")] = "sparseloco(every=10)",
    steps: Annotated[int, typer.Option(help="Inner steps, a multiple of three times H.")] = 120,
    job: Annotated[str, typer.Option(help="For the script's own workers.", hidden=True)] = "",
) -> None:
    """Train undisturbed, and with a kill and a newcomer."""
    if job:
        port, identity, disturbed, late = map(int, job.split(","))
        work(port, identity, method, steps, bool(disturbed), bool(late))
        return
    for disturbed in (0, 1):
        store = _stores.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        who = [(identity, 0) for identity in range(WORKERS)] + [(WORKERS - 1, 1)] * disturbed
        command = [
            sys.executable,
            "-m",
            "thinwire_lab.studies.outer_faults",
            "--method",
            method,
            "--steps",
            str(steps),
            "--job",
        ]
        workers = [subprocess.Popen([*command, f"{store.port},{i},{disturbed},{late}"]) for i, late in who]
        say(f"exit codes: {[each.wait(timeout=600) for each in workers]}")


if __name__ == "__main__":
    typer.run(main)
