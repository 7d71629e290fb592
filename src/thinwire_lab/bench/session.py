"""A whole bench run: every row in turn on the same workers, over the same link."""

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any

from thinwire.version import __version__
from thinwire_lab.bench.options import Options
from thinwire_lab.bench.results import Results, Row, Setting
from thinwire_lab.bench.rows import Record, merged, percentiles
from thinwire_lab.cluster.workers import Workers, free_ports
from thinwire_lab.machine import processor
from thinwire_lab.problems.base import RATES
from thinwire_lab.show.progress import BenchProgress
from thinwire_lab.show.table import loss_text, milliseconds

_PACKAGES = ("torch", "numba")
_WARMUP = 20  # steps left out of all figures but the loss, in runs at least four times as long


@dataclass
class Session:
    """One run of the bench. Whatever ends it, `results()` keeps the rows finished so far."""

    options: Options
    description: str
    _link: str = "not started"
    _throttled: bool = False
    _rows: list[Row] = field(default_factory=list)
    _dense_of: dict[int, Row] = field(default_factory=dict)  # by seed
    _overhead: dict[str, float] = field(default_factory=dict)
    _free: list[float] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """Whether it has come to its rows."""
        return self._link != "not started"

    def run(self, workers: Workers, shown: BenchProgress, on_row: Callable[[], None]) -> None:
        """Train every row, and call `on_row` after each."""
        self._link, self._throttled = workers.label, workers.throttled
        for setting in self.options.rows():
            if workers.throttled:
                self._sample_free_network(workers)
            self._train(workers, shown, setting)
            on_row()

    def results(self, reason: str | None = None) -> Results:
        """Return what has been measured; `reason` says why rows are missing, if any are."""
        dense = self._dense()
        environment = _environment(self.options) | {
            "model_description": self.description,
            "link": self._link,
            "throttled": self._throttled,
            "target_loss": dense.final_loss if self.options.target is None and dense else self.options.target,
            "free_network_step_seconds": asdict(percentiles(self._free)) if self._free else None,
            "protocol_overhead": self._overhead,
            "complete": len(self._rows) == len(self.options.rows()),
            "reason": None if len(self._rows) == len(self.options.rows()) else reason,
        }
        return Results(environment=environment, rows=tuple(self._rows))

    def _train(self, workers: Workers, shown: BenchProgress, setting: Setting) -> None:
        seeds = self.options.every_seed
        runs, overheads = zip(*(self._run_of(workers, shown, setting, seed) for seed in seeds), strict=True)
        row = runs[0] if len(seeds) == 1 else merged(runs, seeds, dense=self._dense())
        self._rows.append(row)
        if row.is_dense:
            self._dense_of = dict(zip(seeds, runs, strict=True))
        if None not in overheads:
            self._overhead[row.label] = median(overheads)

    def _run_of(self, workers: Workers, shown: BenchProgress, setting: Setting, seed: int) -> tuple[Row, float | None]:
        """Train a row with one seed. Return what it did and its protocol overhead, if that is known."""
        steps, dense = self.options.steps, self._dense_of.get(seed)
        target = dense.final_loss if self.options.target is None and dense else self.options.target
        record = Record(setting, steps, _skip(steps))
        shown.start_row(setting.label + (f", seed {seed}" if self.options.seeds > 1 else ""), steps)
        loss = None
        for event in self._events(workers, setting, steps, seed, target=target):
            record.add(event)
            loss = event.get("loss", loss)
            if event["kind"] == "step":
                shown.advance(event["step"] + 1, loss, event["total"])
        row = record.row(dense=dense, target=target)
        shown.finish_row(f"{milliseconds(row.step_seconds.p50)} ms per step, loss {loss_text(row.final_loss)}")
        return row, record.protocol_overhead()

    def _sample_free_network(self, workers: Workers) -> None:
        """What does a step cost when the network is free? Take a few uncompressed steps without a limit on the link."""
        workers.throttle(False)
        steps = max(3, min(16, self.options.steps // 5))
        record = Record(Setting("dense", 1.0), steps, _skip(steps))
        for event in self._events(workers, record.setting, steps, self.options.seed, target=None, quick=True):
            record.add(event)
        self._free += record.step_seconds()
        workers.throttle(True)

    def _events(
        self, workers: Workers, setting: Setting, steps: int, seed: int, *, target: float | None, quick: bool = False
    ) -> Iterator[dict[str, Any]]:
        most = steps if target is None else max(steps, round(self.options.extend * steps))
        options, apart = self.options, setting.served or setting.outer
        row = vars(setting) | {"steps": steps, "most_steps": most, "target": target, "skip": _skip(steps)}
        row |= {name: getattr(options, name) for name in ("micro_batches", "optimizer", "servers", "slow", "kill")}
        row |= {"stages": options.pipeline, "shards": options.shard or 1, "trainers": options.workers}
        row |= {"ports": free_ports(1 + options.servers) if apart else ()}
        row["warmup"] = _WARMUP if steps >= 4 * _WARMUP else 0
        row["every"] = most + 1 if quick else options.every
        data = None if options.data is None else str(options.data)
        problem = {"name": options.model, "data": data, "seed": seed, "scale": options.scale}
        for rank, event in workers.run({"row": row, "problem": problem}):
            if rank == 0:
                yield event

    def _dense(self) -> Row | None:
        return next((row for row in self._rows if row.is_dense), None)


def _skip(steps: int) -> int:
    return min(_WARMUP, steps // 4)


def _environment(options: Options) -> dict[str, Any]:
    """Return the machine and versions of the run: a reader needs them to judge the figures."""
    named = ("model", "workers", "pipeline", "steps", "optimizer", "scale")
    return {name: getattr(options, name) for name in named} | {
        "micro_batches": options.micro_batches if options.pipeline > 1 else None,
        "learning_rate": getattr(RATES[options.model], options.optimizer),
        "seed": options.seed,
        **({"seeds": list(options.every_seed)} if options.seeds > 1 else {}),
        **({"shard": options.shard} if options.shard else {}),
        **({"outer": list(options.outer)} if options.outer else {}),
        **({"servers": options.servers} if options.servers else {}),
        **({"slow": options.slow, "kill": options.kill} if options.servers or options.outer else {}),
        **({"left_out": list(options.left_out)} if options.left_out else {}),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "thinwire": __version__}
        | {name: version(name) for name in _PACKAGES},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
