"""gTop-k's predictions and measurements beside ours."""

from dataclasses import asdict
from typing import Any

from thinwire.planner import papers
from thinwire.tools.show.table import Table
from thinwire.tools.simulate.outputs import Outcome, starred
from thinwire.tools.simulate.paper_plots import gtopk_figure

_WORLDS = (4, 8, 16, 32)


def gtopk() -> Outcome:
    """Return Table I, Table IV and Fig. 10."""
    return Outcome(
        title=f"gTop-k (Shi et al. 2019) from its own figures: {1e3 * papers.ALPHA:g} ms, "
        f"{1e9 * papers.BETA:g} ns an element",
        tables=[_table_1(), _table_4(), _figure_10()],
        notes=[],
        document={"schema": "thinwire.paper/1", "paper": "gtopk", **_document()},
        figure=gtopk_figure,
    )


def _table_1() -> Table:
    theirs, ours = papers.crossings()
    rows = [
        [f"{t.workers}"]
        + [f"{x:.2f}" for x in (t.gather_theirs, t.gather_formula, t.gather_ours, t.tree_theirs, t.tree_ours)]
        for t in papers.times()
    ]
    return starred(
        title="Table I and Fig. 9 (left): ms to exchange 0.1 % of 25 M elements",
        headings=["P ", "all-gather\ntheirs ", "their\nformula ", "ours,\na ring ", "tree\ntheirs ", "ours "],
        rows=rows,
        notes=(
            "Their all-gather counts the latency of log2 P messages, a ring has P - 1.",
            f"The tree is faster from P = {theirs:.1f} on by their formula, from {ours:.1f} on against a ring.",
        ),
    )


def _table_4() -> Table:
    rows = []
    for system in papers.SYSTEMS:
        (scale,) = system.predicted()
        ours = [papers.WORKERS * system.batch / scale.seconds[name] for name in papers.NAMES]
        pairs = (f"{a:.0f} / {b:.0f}" for a, b in zip(system.throughput[:2], ours[:2], strict=True))
        dense, gather = (f"{8e-6 * bandwidth:.0f}" for bandwidth in system.implied)
        rows.append([system.name, f"{system.rest:.3f}", *pairs, f"{system.throughput[2]}", dense, gather])
    return starred(
        title="Table IV: samples/s on 32 GPUs, theirs / ours, and the Mbit/s that theirs imply",
        headings=["model", " rest, s*", " dense", " Top-k", " gTop-k", " dense\n Mbit/s", " Top-k\n Mbit/s"],
        rows=rows,
        notes=(
            "* a gTop-k step of theirs without the messages of its tree: computing and selecting, in one. Times of "
            "computing are not given, nor sizes of models but ResNet-50's; they are what these models usually have.",
            "The order of the three is theirs for every model, the distances are not: their dense and Top-k steps took "
            f"as long as over a link of so many Mbit/s, where alpha and beta say {8e-6 * papers.LINK.bandwidth:.0f}.",
        ),
    )


def _figure_10() -> Table:
    rows = []
    for system in papers.SYSTEMS:
        scales = system.predicted(_WORLDS)
        for name in papers.NAMES:
            shares = (f"{100 * scale.efficiency(name):.1f}" for scale in scales)
            rows.append([f"{system.name} ", name, *shares])
    return starred(
        title="Fig. 10: scaling efficiency in %, from alpha and beta",
        headings=["model ", "recipe", *(f"  {world}" for world in _WORLDS)],
        rows=rows,
        notes=('Over the rest above. Their figure\'s values are not in the text, but "up to 80 %" for ResNets on 32.',),
    )


def _document() -> dict[str, Any]:
    models = [
        asdict(s)
        | {"rest": s.rest, "implied_bandwidth": s.implied, "predicted": [asdict(x) for x in s.predicted(_WORLDS)]}
        for s in papers.SYSTEMS
    ]
    return {"times": [asdict(row) for row in papers.times()], "crossings": papers.crossings(), "models": models}
