"""Do workers that find each other by a store keep their word when they are killed, stopped, cut off, or come and go?

    python fuzz/outer.py --seconds 600 --link 10mbit/50ms

Workers train a small network, each in a namespace of its own. Every few seconds something befalls one of them: SIGKILL
and a new one in its place, SIGSTOP for up to a minute, no link for ten seconds. Of every outer step each worker notes a
hash of the global parameters. Prints how many outer steps there were, the longest pause between two, ticks at which
hashes differ (none may), and the loss over the last 100 of them, with its standard deviation.

With `--store` the store is killed, too, and started anew after ten seconds. At the end it is killed for good, and after
20 s a worker: it prints how many outer steps there were in between, and how soon all others raised; `patience` is 20 s.
"""

import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import nn

import thinwire as tw
from thinwire_lab.check.worker import connect
from thinwire_lab.cluster.link import parse_rate
from thinwire_lab.cluster.star import Star, address
from thinwire_lab.cluster.worker import exit_code, fork
from thinwire_lab.inputs import read_lines

_PORT, _EVERY = 29400, 5
_FAULTS = ("kill", "stop", "cut")
_PATIENCE = 20.0  # seconds for which workers wait for a store that is gone for good


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - (x[:, :8] * x[:, 8:16]).tanh()).square().mean()


def train(store: str, log: Path, seed: int, pace: float, certificate: Path | None) -> None:
    """Train as a worker until SIGTERM, and note each outer step."""
    ends = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: ends.append(number))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = tw.outer_steps.sparseloco(every=_EVERY, density=0.1, minimum_size=256)
    waits: dict[str, Any] = {"grace": 2.0, "quorum": 0.5, "patience": _PATIENCE}
    handle = tw.outer(model, optimizer, steps, store=store, certificate=certificate, **waits)
    shown, held = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 8)), torch.Generator().manual_seed(0)
    batch, last = torch.randn(256, 24, generator=held), handle.ticks
    with log.open("a") as file:
        while not ends:
            optimizer.zero_grad()
            _loss(model, torch.randn(32, 24)).backward()
            time.sleep(pace)
            optimizer.step()
            if handle.ticks // _EVERY != last // _EVERY:
                last = handle.ticks
                shown.load_state_dict(handle.parameters)
                bits = hash(tuple(tuple(p.detach().view(-1).tolist()) for p in handle.parameters.values()))
                note = {"tick": last, "hash": bits, "time": time.time(), "loss": float(_loss(shown, batch).detach())}
                print(json.dumps(note | {"waited": handle.waited}), file=file, flush=True)
    handle.remove()
    os._exit(0)


@dataclass
class Course:
    """Places for workers, each in a namespace, and what befalls them. `busy`: until when, by place.

    `store`: the process that serves it. Place 0 is its.
    """

    star: Star
    logs: Path
    pace: float
    certificate: Path | None
    processes: dict[int, int] = field(default_factory=dict)
    started: int = 0
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    busy: dict[int, float] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    store: int = 0

    def serve(self) -> None:
        """Start the store."""
        self.store = fork(partial(_serve, self.star))

    def start(self, place: int) -> None:
        """Start a worker."""
        self.started += 1
        store, log = f"tcp://{address(0)}:{_PORT}", self.logs / f"{self.started}"
        work = partial(train, store, log, self.started, self.pace, self.certificate)

        def begin() -> None:
            os.dup2(os.open(self.logs / f"{self.started}.err", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
            self.star.enter(place)
            work()

        self.processes[place] = fork(begin)

    def befall(self, place: int, what: str, dice: random.Random) -> None:
        """Have something befall a worker, and pass again."""
        now, process = time.monotonic(), self.processes.get(place, self.store)
        lasts = {"kill": 5.0, "stop": dice.uniform(5.0, 60.0), "cut": 10.0, "store": 10.0}[what]
        self.said.append(f"{what} {place}")
        if what == "store":
            _end(process)
            self.later.append((now + lasts, self.serve))
        elif what == "kill":
            _end(process)
            self.later.append((now + lasts, partial(self.start, place)))
        elif what == "stop":
            os.kill(process, signal.SIGSTOP)
            self.later.append((now + lasts, partial(os.kill, process, signal.SIGCONT)))
        else:
            self.star.unplug(place)
            self.later.append((now + lasts, partial(self.star.plug, place)))
        self.busy[place] = now + lasts + 15.0

    def run(self, seconds: float, pause: float, dice: random.Random, most: int, faults: Sequence[str]) -> None:
        """Have faults come for so long, at most so many workers in trouble at once; then 45 seconds of peace."""
        ends, due = time.monotonic() + seconds, time.monotonic() + 30.0
        while (now := time.monotonic()) < ends + 45.0:
            time.sleep(0.2)
            for each in [each for each in self.later if each[0] <= now]:
                self.later.remove(each)
                each[1]()
            free = [place for place in self.processes if self.busy.get(place, 0.0) < now]
            if due < now < ends and len(self.processes) - len(free) < most and free:
                what = dice.choice(faults)
                self.befall(0 if what == "store" else dice.choice(free), what, dice)
                due = now + pause

    def stop(self) -> None:
        """End all workers."""
        for process in self.processes.values():
            os.kill(process, signal.SIGTERM)
        time.sleep(5.0)
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def end_store(self) -> dict[str, Any]:
        """End the store for good, then a worker. Return what the others do."""
        _end(self.store)
        before = found(self.logs)["outer steps"]
        time.sleep(20.0)
        steps, began = found(self.logs)["outer steps"] - before, time.monotonic()
        _end(self.processes.popitem()[1])
        codes = [exit_code(process) for process in self.processes.values()]
        self.processes.clear()
        return {"outer steps without a store": steps, "seconds to raise": time.monotonic() - began, "codes": codes}


def _end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def found(logs: Path) -> dict[str, Any]:
    """Return what the workers have noted."""
    notes = [note for log in logs.iterdir() if not log.suffix for note in read_lines(log)]
    hashes, first = defaultdict[int, set[int]](set), dict[int, float]()
    for note in notes:
        hashes[note["tick"]].add(note["hash"])
        first[note["tick"]] = min(note["time"], first.get(note["tick"], note["time"]))
    times, said = sorted(first.values()), [log.read_text() for log in logs.glob("*.err")]
    end = max(note["tick"] for note in notes)
    late = [note["loss"] for note in notes if note["tick"] > end - 100 * _EVERY]
    return {
        "outer steps": len(hashes),
        "ticks that differ": [tick for tick, each in hashes.items() if len(each) > 1],
        "longest pause": max(after - before for before, after in pairwise(times)),
        "loss": [mean(late), stdev(late)],
        "errors": [text[-1500:] for text in said if "Traceback" in text or "terminate" in text],
        "most lines that a worker logs": max(text.count("\n") for text in said),
    }


def main(
    seconds: Annotated[float, typer.Option()] = 600.0,
    workers: Annotated[int, typer.Option()] = 4,
    link: Annotated[str, typer.Option()] = "10mbit/50ms",
    pause: Annotated[float, typer.Option()] = 20.0,
    pace: Annotated[float, typer.Option()] = 0.2,
    seed: Annotated[int, typer.Option()] = 0,
    most: Annotated[int, typer.Option(help="Workers in trouble at once; 0 for none at all.")] = 2,
    certificate: Annotated[Path | None, typer.Option(help="See `thinwire.outer`.")] = None,
    store: Annotated[bool, typer.Option("--store", help="Kill the store as well.")] = False,
) -> None:
    """Run a course of faults."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        course = Course(Star(workers + 1, parse_rate(link)), Path(folder), pace, certificate)
        course.serve()
        for place in range(1, workers + 1):
            course.start(place)
        course.run(seconds, pause, random.Random(seed), most, (*_FAULTS, *(["store"] if store else [])))
        report = {"end": course.end_store() if store else None}
        course.stop()
        report |= found(Path(folder)) | {"faults": len(course.said), "what": course.said}
        print(json.dumps(report, indent=1))


def _serve(star: Star) -> None:
    star.enter(0)
    kept = connect("0.0.0.0", _PORT, serve=True)
    while kept:
        signal.pause()


if __name__ == "__main__":
    typer.run(main)
