"""How much step time do sparsified boundaries and gradients save? Two stages x two replicas over slow links.

    python -m thinwire_lab.studies.pipeline --json steps.json

For their effect on training see papers/dct.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from thinwire_lab.bench.results import Setting
from thinwire_lab.cluster.link import parse_rate
from thinwire_lab.cluster.local import Cluster
from thinwire_lab.inputs import prepare_file, write_document
from thinwire_lab.show.table import plain
from thinwire_lab.show.terminal import print_titled, report_console

SCHEMA = "thinwire.pipeline_steps/1"
STAGES, REPLICAS, MICRO_BATCHES = 2, 2, 4
LINES = {
    "plain": Setting("dense", 1.0),
    "DCT-MP 75 %": Setting("dense", 1.0, 0.25),
    "DCT-MP 90 %": Setting("dense", 1.0, 0.1),
    "DCT-MP 95 %": Setting("dense", 1.0, 0.05),
    "DCT-DP": Setting("dct_dp", 0.01),
    "both": Setting("dct_dp", 0.01, 0.1),
    "plain again": Setting("dense", 1.0),
}
PUBLISHED = {"DCT-MP 75 %": -0.0704, "DCT-MP 90 %": -0.1395, "DCT-MP 95 %": -0.1443, "DCT-DP": -0.23, "both": -0.371}
"""Change in time: Table 5, and Section 3.3, of a production model on 12.5 Gbit/s."""

Runs = dict[str, dict[str, dict[str, list[dict[str, float]]]]]
"""Problem → link → line → the result of each round."""


def steps(
    json: Annotated[Path, typer.Option(help="Write what was found here, after every round.")],
    problem: Annotated[list[str] | None, typer.Option(help="Of transformer, dlrm; may be repeated.")] = None,
    link: Annotated[list[str] | None, typer.Option(help="Rates of each worker's link; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each all lines run, one after the other.")] = 5,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each line in a round; the first third warms up.")] = 30,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch and of the kernels.")] = 1,
) -> None:
    """Time plain pipelining, sparsified boundaries, sparsified gradients and both, round by round."""
    prepare_file(json)
    torch.set_num_threads(threads)
    console = report_console()
    problems, links = problem or ["transformer", "dlrm"], link or ["100mbit", "1gbit"]
    runs: Runs = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with (
        Cluster(STAGES * REPLICAS, parse_rate(links[0]), "thinwire_lab.bench.worker:handle") as cluster,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("", total=rounds * len(problems) * len(links) * len(LINES))
        for _ in range(rounds):
            for each in problems:
                for rate in links:
                    cluster.limit(parse_rate(rate))
                    for label, line in LINES.items():
                        progress.update(task, advance=1, description=f"{each}, {rate}, {label}")
                        runs[each][rate][label].append(_round(cluster, each, line, steps))
            write_document(json, SCHEMA, link=cluster.label, runs=runs)
    print_titled(console, plain(rows(runs), title=f"{STAGES} stages x {REPLICAS} replicas, the first stage"))


def _round(cluster: Cluster, problem: str, line: Setting, steps: int) -> dict[str, float]:
    """Train a line for some steps, and return the medians on the first worker. Raises where replicas differ."""
    row = vars(line) | {"steps": steps, "most_steps": steps, "every": steps + 1, "skip": steps // 3}
    row |= {"stages": STAGES, "micro_batches": MICRO_BATCHES}
    job = {"row": row, "problem": {"name": problem, "seed": 0, "data": None, "scale": 1.0}}
    events = list(cluster.run(job))
    if apart := [event["different"] for _, event in events if event["kind"] == "done" and event["different"]]:
        raise RuntimeError(f"replicas of {problem} with {line} differ in {apart}")
    counted = [e for rank, e in events if rank == 0 and e["kind"] == "step" and e["step"] >= steps // 3]
    return {key: median(e[key] for e in counted) for key in ("total", "encode", "decode", "sent_bytes", "dense_bytes")}


def rows(runs: Runs) -> list[dict[str, Any]]:
    """Return medians over rounds, the change from the plain step, and beside it the paper's."""
    return [
        _row({"line": label, "model": problem, "link": rate}, found, rounds["plain"])
        for problem, links in runs.items()
        for rate, rounds in links.items()
        for label, found in rounds.items()
    ]


def _row(
    where: dict[str, str], found: Sequence[Mapping[str, float]], plain: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    changes = [one["total"] / other["total"] - 1 for one, other in zip(found, plain, strict=True)]
    figures = {"step_ms": 1e3 * median(one["total"] for one in found), "change": median(changes)}
    figures |= {"least": min(changes), "most": max(changes)}
    codec = 1e3 * median(one["encode"] + one["decode"] for one in found)
    sent = median(one["sent_bytes"] for one in found)
    return where | figures | {"published": PUBLISHED.get(where["line"]), "bytes": sent, "codec_ms": codec}


if __name__ == "__main__":
    typer.run(steps)
