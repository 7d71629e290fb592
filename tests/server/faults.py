"""Does a parameter server keep its word when processes are killed?

    python tests/server/faults.py --seconds 600 --seed 0

A server and three trainers with 0, 1 and 2 updates in flight, each a process, train a small network. Every few seconds
one of them gets SIGKILL, and is started again a little later. Then the same runs undisturbed, to as many updates.

Each trainer adds 1 to an element of its own of a parameter that counts. At the end, that element is the number of its
updates that were applied; the server says which was the latest, and every trainer that ended by itself how many it
sent. All three must be equal. Of a trainer that was killed, all that the server had reported as saved must be there.
"""

import json
import multiprocessing
import random
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import thinwire

SLOTS, TRAINERS, WIDTH = 4096, 3, 64
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["thinwire"])  # imported once, not by every process
SERVERS = 0.6
"""How likely it is at least that a kill is the server's."""
PAUSE = (1.0, 4.0)
"""Seconds between two kills, at least and at most."""


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))
        self.counter = nn.Parameter(torch.zeros(SLOTS))


def recipe() -> Any:
    return thinwire.recipes.dct_dp(density=0.05, life=100, minimum_size=SLOTS + 1)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    counter, *net = parameters
    return torch.optim.SGD([{"params": net, "lr": 0.02}, {"params": [counter], "lr": 1.0}])


def batch(generator: torch.Generator, count: int = 64) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, WIDTH, generator=generator)
    return x, (x[:, :8].sum(1) * x[:, 8:16].sum(1) / 8).tanh()


def loss_of(model: Counting, generator: torch.Generator, count: int = 64) -> Tensor:
    x, y = batch(generator, count)
    return (model.net(x)[:, 0] - y).square().mean()


def serve(port: int, path: Path) -> None:
    torch.set_num_threads(1)
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    model = Counting()
    options: dict[str, Any] = {"checkpoint": path, "every": 1.0, "timeout": 10.0}
    with thinwire.serve(model, recipe(), make_optimizer=optimizer, address=f"127.0.0.1:{port}", **options):
        while not ended:
            time.sleep(0.1)


def train(port: int, path: Path, slot: int) -> None:
    torch.set_num_threads(1)
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    model, generator = Counting(), torch.Generator().manual_seed(slot)
    options: dict[str, Any] = {"reconnect": 60.0, "timeout": 10.0, "in_flight": slot % 3}
    with thinwire.connect(model, recipe(), address=f"127.0.0.1:{port}", **options) as trainer:
        while not ended:
            loss = loss_of(model, generator)
            model.zero_grad()
            loss.backward()
            model.counter.grad = torch.zeros(SLOTS)
            model.counter.grad[slot] = -1
            trainer.step()
            _note(path, trainer, ended=False)
        assert trainer.settle(30.0)
        _note(path, trainer, ended=True)


def _note(path: Path, trainer: thinwire.server.Trainer, *, ended: bool) -> None:
    traffic = trainer.traffic()
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"sent": traffic.updates, "saved": traffic.saved, "ended": ended}))
    beside.replace(path)


@dataclass
class Run:
    """Processes of one run, by role: "server", or a trainer's slot."""

    folder: Path
    port: int = field(init=False)
    running: dict[str, Any] = field(default_factory=dict)
    slots: Iterator[int] = field(default_factory=lambda: iter(range(SLOTS)))
    kills: dict[str, int] = field(default_factory=lambda: {"server": 0, "trainer": 0})

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def start_server(self) -> None:
        self._start("server", serve, self.port, self.folder / "server.pt")

    def start_trainer(self) -> None:
        slot = next(self.slots)
        self._start(str(slot), train, self.port, self.folder / f"{slot}.json", slot)

    def _start(self, name: str, *call: Any) -> None:
        function, *arguments = call
        self.running[name] = process = CONTEXT.Process(target=function, args=arguments)
        process.start()

    def kill(self, name: str) -> None:
        self.kills["server" if name == "server" else "trainer"] += 1
        process = self.running.pop(name)
        process.kill()
        process.join()

    def stop(self) -> None:
        for name in sorted(self.running, key="server".__eq__):  # the server last
            process = self.running[name]
            process.terminate()
            process.join(120)
            assert process.exitcode == 0, f"{name} ended with {process.exitcode}"

    def settle(self) -> None:
        """Wait until every trainer has sent something, and the server has saved something new."""
        before = self.version()
        trainers = [self.folder / f"{name}.json" for name in self.running.keys() - {"server"}]
        while self.check() <= before or not all(path.exists() for path in trainers):
            time.sleep(0.2)

    def check(self) -> int:
        for name, process in self.running.items():
            assert process.exitcode is None, f"{name} ended with {process.exitcode}"
        return self.version()

    def version(self) -> int:
        path = self.folder / "server.pt"
        return int(torch.load(path)["version"]) if path.exists() else 0


def disturbed(run: Run, seconds: float, chance: random.Random) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(chance.uniform(*PAUSE))
        run.check()
        name = "server" if chance.random() < SERVERS else chance.choice(list(run.running))
        run.kill(name)
        time.sleep(chance.uniform(0.0, 2.0))
        run.start_server() if name == "server" else run.start_trainer()
        run.settle()
        print(f"killed {'the server' if name == 'server' else 'a trainer'} at update {run.version()}", flush=True)
    run.settle()


def result(run: Run) -> Mapping[str, Any]:
    """Check the counters, and return what the run came to."""
    saved = torch.load(run.folder / "server.pt")
    counter, applied = saved["parameters"]["counter"], sorted(saved["applied"].values())
    notes = [json.loads(path.read_text()) for path in run.folder.glob("*.json")]
    assert sorted(counter[counter > 0].int().tolist()) == applied, "an update was applied twice, or counted and lost"
    for path in run.folder.glob("*.json"):
        note, count = json.loads(path.read_text()), int(counter[int(path.stem)])
        assert count == note["sent"] if note["ended"] else note["saved"] <= count <= note["sent"] + 1, (note, count)
    model = Counting()
    model.load_state_dict(saved["parameters"])
    loss = loss_of(model, torch.Generator().manual_seed(10**6), 20_000)
    return {"updates": saved["version"], "trainers": len(notes), "kills": run.kills, "loss": round(loss.item(), 4)}


app = typer.Typer()


@app.command()
def main(
    seconds: Annotated[float, typer.Option(help="How long to go on killing")] = 120.0,
    seed: Annotated[int, typer.Option(help="What draws who is killed, and when")] = 0,
) -> None:
    """Kill and restart; then run undisturbed."""
    with begun() as run:
        disturbed(run, seconds, random.Random(seed))
        run.stop()
        found = result(run)
    print("disturbed", json.dumps(found), flush=True)
    with begun() as run:
        while run.check() < found["updates"]:
            time.sleep(0.5)
        run.stop()
        print("undisturbed", json.dumps(result(run)))


@contextmanager
def begun() -> Iterator[Run]:
    """A run that has begun; whatever of it is left at the end is killed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        try:
            run.start_server()
            for _ in range(TRAINERS):
                run.start_trainer()
            run.settle()
            yield run
        finally:
            for process in run.running.values():
                process.kill()


if __name__ == "__main__":
    app()
