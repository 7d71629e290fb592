"""What does a round cost with hivemind, and an outer step with `thinwire.outer`, on the same links?

    pip install hivemind==1.1.12
    python -m thinwire_lab.studies.hivemind_rounds --way hivemind --link 10mbit/50ms

Peers, each in a namespace of its own, average a vector every few seconds. In one round out of three the last peer is
late by eight seconds; before the last three rounds it is killed. Prints for each round the longest time that another
peer took for it, and the most bytes that one sent.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from torch import nn

import thinwire as tw
from thinwire_lab.check.worker import connect
from thinwire_lab.cluster.link import parse_rate
from thinwire_lab.cluster.star import INTERFACE, Star, address
from thinwire_lab.cluster.worker import fork
from thinwire_lab.inputs import append_line, read_lines

_PORT, _LATE, _PATIENCE = 29400, 8.0, 20.0  # seconds
_ROUNDS, _AFTER = 9, 6  # the latter: before the kill


def _hivemind(place: int, numel: int, folder: Path) -> Callable[[], object]:
    import hivemind  # type: ignore[import-not-found]

    known = folder / "known"
    if place > 1:
        _wait_for(known)
    peers = known.read_text().split() if place > 1 else []
    table = hivemind.DHT(host_maddrs=[f"/ip4/{address(place)}/tcp/0"], initial_peers=peers, start=True)
    if place == 1:
        known.write_text("\n".join(map(str, table.get_visible_maddrs())))
    averager = hivemind.averaging.DecentralizedAverager(
        averaged_tensors=[torch.randn(numel)],
        dht=table,
        prefix="run",
        target_group_size=4,
        compression=hivemind.compression.Uniform8BitQuantization(),
        start=True,
    )

    def step() -> int:
        control = averager.step(timeout=_PATIENCE, wait=False)
        try:
            return len(control.result(_PATIENCE) or ())
        except Exception:  # it does not say which
            control.cancel()
            return 0

    return step


def _thinwire(place: int, numel: int, folder: Path) -> Callable[[], object]:
    if place == 1:
        kept = connect("0.0.0.0", _PORT, serve=True)
    model = nn.Linear(numel // 1024, 1024, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = tw.outer_steps.sparseloco(every=1)
    handle = tw.outer(model, optimizer, steps, store=f"tcp://{address(1)}:{_PORT}", workers=4)

    def step() -> int:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        return len(handle.workers)

    step.kept = kept if place == 1 else None  # type: ignore[attr-defined]
    return step


_WAYS = {"hivemind": _hivemind, "thinwire": _thinwire}


def _sent() -> int:
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return int(next(line for line in lines if INTERFACE in line).split(":")[1].split()[8])


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.1)
    time.sleep(0.5)


def _peer(star: Star, way: str, place: int, workers: int, numel: int, every: float, folder: Path) -> None:
    os.setsid()
    star.enter(place)
    step = _WAYS[way](place, numel, folder)
    step() if way == "thinwire" else None  # kernels are compiled in the first
    (folder / f"ready {place}").touch()
    for each in range(1, workers + 1):
        _wait_for(folder / f"ready {each}")
    begins = max((folder / f"ready {each}").stat().st_mtime for each in range(1, workers + 1)) + 5.0
    for number in range(_ROUNDS):
        late = _LATE if place == workers and number % 3 == 2 else 0.0
        time.sleep(max(0.0, begins + number * every + late - time.time()))
        before, sent = time.time(), _sent()
        count = step()
        note = {"round": number, "place": place, "seconds": time.time() - before, "peers": count}
        append_line(folder / f"{place}.log", note | {"sent": _sent() - sent})
        if place == workers and number == _AFTER - 1:
            os.killpg(0, signal.SIGKILL)
    time.sleep(5.0)
    os.killpg(0, signal.SIGKILL)


def main(
    way: Annotated[str, typer.Option(help="hivemind or thinwire.")] = "thinwire",
    link: Annotated[str, typer.Option()] = "10mbit/50ms",
    workers: Annotated[int, typer.Option()] = 4,
    numel: Annotated[int, typer.Option()] = 1024 * 816,
    every: Annotated[float, typer.Option(help="Seconds from one round to the next.")] = 25.0,
) -> None:
    """Run the rounds."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        star = Star(workers + 1, parse_rate(link))
        peers = [
            fork(lambda place=place: _peer(star, way, place, workers, numel, every, folder))  # type: ignore[misc]
            for place in range(1, workers + 1)
        ]
        for process in peers:
            os.waitpid(process, 0)
        notes = [note for log in folder.glob("*.log") for note in read_lines(log)]
    for number in range(_ROUNDS):
        here = [note for note in notes if note["round"] == number and note["place"] < workers]
        print(
            f"round {number}{', one is late' if number % 3 == 2 else ''}{', one is dead' if number >= _AFTER else ''}: "
            f"{max(note['seconds'] for note in here):.2f} s, {max(note['sent'] for note in here) / 1e3:.0f} kB, "
            f"peers {sorted(note['peers'] for note in here)}"
        )


if __name__ == "__main__":
    typer.run(main)
