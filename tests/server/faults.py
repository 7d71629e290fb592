"""Does a parameter server keep its word when processes are killed?

    python tests/server/faults.py --seconds 600 --seed 0 --servers 2 --staleness 1

Servers and three trainers with 0, 1 and 2 updates in flight, each a process, train a small network. Every few seconds
one of them gets SIGKILL, and is started again a little later. Then the same runs undisturbed, to as many updates.

Each trainer adds 1 to an element of its own of each parameter that counts; every server has some. At the end, that
element is the number of its updates that were applied; the server says which was the latest, and every trainer that
ended by itself how many it sent. All three must be equal. Of a trainer that was killed, all that the servers had
reported as saved must be there, on each.
"""

import json
import multiprocessing
import random
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import ge, lt
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import thinwire

SLOTS, COUNTERS, TRAINERS, WIDTH = 1024, 24, 3, 64  # as many, so that two servers or three have some each
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["thinwire"])  # imported once, not by every process
SERVERS = 0.6
"""How likely it is at least that a kill is a server's."""
PAUSE = (1.0, 4.0)
"""Seconds between two kills, at least and at most."""


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))
        self.counters = nn.ParameterList(torch.zeros(SLOTS) for _ in range(COUNTERS))


def recipe() -> Any:
    return thinwire.recipes.dct_dp(density=0.05, life=100, minimum_size=SLOTS + 1)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    net, counters = ([p for p in parameters if (p.shape == (SLOTS,)) is counts] for counts in (False, True))
    groups = [{"params": net, "lr": 0.02}, {"params": counters, "lr": 1.0}]
    found = torch.optim.SGD([group for group in groups if group["params"]])

    def count(*_: Any) -> None:
        """Have an element that counts go up by 1, also where a mean of several trainers' updates is applied."""
        for counter in counters:
            counter.grad.sign_()

    found.register_step_pre_hook(count)
    return found


def batch(generator: torch.Generator, count: int = 64) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, WIDTH, generator=generator)
    return x, (x[:, :8].sum(1) * x[:, 8:16].sum(1) / 8).tanh()


def loss_of(model: Counting, generator: torch.Generator, count: int = 64) -> Tensor:
    x, y = batch(generator, count)
    return (model.net(x)[:, 0] - y).square().mean()


def serve(ports: list[int], index: int, staleness: int | None, path: Path) -> None:
    torch.set_num_threads(1)
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    model = Counting()
    options: dict[str, Any] = {"checkpoint": path, "every": 1.0, "timeout": 10.0, "staleness": staleness}
    options |= {"address": f"127.0.0.1:{ports[index]}", "servers": len(ports), "index": index}
    with thinwire.serve(model, recipe(), make_optimizer=optimizer, **options):
        while not ended:
            time.sleep(0.1)


def train(ports: list[int], path: Path, slot: int) -> None:
    torch.set_num_threads(1)
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    model, generator = Counting(), torch.Generator().manual_seed(slot)
    options: dict[str, Any] = {"reconnect": 60.0, "timeout": 10.0, "in_flight": slot % 3}
    options |= {"address": [f"127.0.0.1:{port}" for port in ports], "servers": len(ports)}
    with thinwire.connect(model, recipe(), **options) as trainer:
        while not ended:
            loss = loss_of(model, generator)
            model.zero_grad()
            loss.backward()
            for counter in model.counters:
                counter.grad = torch.zeros(SLOTS)
                counter.grad[slot] = -1
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
    """Processes of one run, by role: "server 0", or a trainer's slot."""

    folder: Path
    servers: int
    staleness: int | None
    running: dict[str, Any] = field(default_factory=dict)
    slots: Iterator[int] = field(default_factory=lambda: iter(range(SLOTS)))
    kills: dict[str, int] = field(default_factory=lambda: {"server": 0, "trainer": 0})

    def __post_init__(self) -> None:
        with ExitStack() as free:
            doors = [free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(self.servers)]
            self.ports = [each.getsockname()[1] for each in doors]

    def start(self, name: str) -> None:
        """Start a server, or a new trainer."""
        if name.startswith("server"):
            call: tuple[Any, ...] = serve, self.ports, int(name.split()[1]), self.staleness, self.folder / f"{name}.pt"
        else:
            name = str(next(self.slots))
            call = train, self.ports, self.folder / f"{name}.json", int(name)
        self.running[name] = process = CONTEXT.Process(target=call[0], args=call[1:])
        process.start()

    def kill(self, name: str) -> None:
        self.kills[name.split()[0] if name.startswith("server") else "trainer"] += 1
        process = self.running.pop(name)
        process.kill()
        process.join()

    def stop(self) -> None:
        for name in sorted(self.running):  # servers last
            process = self.running[name]
            process.terminate()
            process.join(120)
            assert process.exitcode == 0, f"{name} ended with {process.exitcode}"

    def settle(self) -> None:
        """Wait until every trainer has sent something, and each server has saved something new."""
        before = self.check()
        trainers = [self.folder / f"{name}.json" for name in self.running if not name.startswith("server")]
        while any(map(ge, before, self.check())) or not all(path.exists() for path in trainers):
            time.sleep(0.2)

    def check(self) -> list[int]:
        """See that all are there, and return how many steps each server has saved."""
        for name, process in self.running.items():
            assert process.exitcode is None, f"{name} ended with {process.exitcode}"
        paths = [self.folder / f"server {index}.pt" for index in range(self.servers)]
        return [int(torch.load(path)["version"]) if path.exists() else 0 for path in paths]


def disturbed(run: Run, seconds: float, chance: random.Random) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(chance.uniform(*PAUSE))
        run.check()
        servers = [name for name in run.running if name.startswith("server")]
        name = chance.choice(servers if chance.random() < SERVERS else list(run.running))
        run.kill(name)
        time.sleep(chance.uniform(0.0, 2.0))
        run.start(name)
        run.settle()
        print(f"killed {name if name in servers else 'a trainer'} at update {run.check()}", flush=True)
    run.settle()


def result(run: Run) -> Mapping[str, Any]:
    """Check the counters, and return what the run came to."""
    model, saved = Counting(), [torch.load(run.folder / f"server {index}.pt") for index in range(run.servers)]
    model.load_state_dict({name: value for each in saved for name, value in each["parameters"].items()})
    notes = {int(path.stem): json.loads(path.read_text()) for path in run.folder.glob("*.json")}
    for each in saved:
        counters = [value for name, value in each["parameters"].items() if name.startswith("counters")]
        assert counters, "a server has none"
        for counter in counters:
            applied = sorted(counter[counter > 0].int().tolist())
            assert applied == sorted(each["applied"].values()), "an update was applied twice, or counted and lost"
            for slot, note in notes.items():
                count, sent = int(counter[slot]), note["sent"]
                assert count == sent if note["ended"] else note["saved"] <= count <= sent + 1, (note, count)
    loss = loss_of(model, torch.Generator().manual_seed(10**6), 20_000)
    steps = [each["version"] for each in saved]
    return {"steps": steps, "trainers": len(notes), "kills": run.kills, "loss": round(loss.item(), 4)}


app = typer.Typer()


@app.command()
def main(
    seconds: Annotated[float, typer.Option(help="How long to go on killing")] = 120.0,
    seed: Annotated[int, typer.Option(help="What draws who is killed, and when")] = 0,
    servers: Annotated[int, typer.Option(min=1)] = 1,
    staleness: Annotated[int | None, typer.Option(min=0, help="See thinwire.serve; any, by default")] = None,
) -> None:
    """Kill and restart; then run undisturbed."""
    with begun(servers, staleness) as run:
        disturbed(run, seconds, random.Random(seed))
        run.stop()
        found = result(run)
    print("disturbed", json.dumps(found), flush=True)
    with begun(servers, staleness) as run:
        while any(map(lt, run.check(), found["steps"])):
            time.sleep(0.5)
        run.stop()
        print("undisturbed", json.dumps(result(run)))


@contextmanager
def begun(servers: int, staleness: int | None) -> Iterator[Run]:
    """A run that has begun; whatever of it is left at the end is killed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), servers, staleness)
        try:
            for name in [*(f"server {index}" for index in range(servers)), *["trainer"] * TRAINERS]:
                run.start(name)
            run.settle()
            yield run
        finally:
            for process in run.running.values():
                process.kill()


if __name__ == "__main__":
    app()
