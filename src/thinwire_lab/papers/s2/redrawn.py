"""Ours of the S2 Reducer's Figs. 3 and 5."""

from thinwire_lab.papers.s2 import S2
from thinwire_lab.papers.s2.timing import GATHER, SKETCH, UNION, gather_over_reduce
from thinwire_lab.papers.shared.benches import CNN_1G, LM_1G, Steps
from thinwire_lab.papers.shared.figures import Bars, Lines
from thinwire_lab.papers.shared.links import SWEEP, Found, links, worlds


@S2.redraws("figure_3", LM_1G, CNN_1G)
def figure_3(lm: Steps, cnn: Steps) -> Bars:
    """How much faster the sketch is than the others."""
    others = {"all-gather": GATHER, "exact union, packed": UNION, "dense": "dense"}
    ours = {
        name: {other: steps.faster(SKETCH, label) for other, label in others.items()}
        for name, steps in (("LSTM", lm), ("ResNet-20,\nblocks", cnn))
    }
    return Bars(title="Ours: 4 workers on 2 cores, 1 Gbit/s", up="the sketch: times as fast", groups=ours)


@S2.redraws("figure_5", SWEEP)
def figure_5(found: Found) -> Lines:
    """All-gather over all-reduce, by number of workers."""
    counts = worlds(found)
    lines = {link: (counts, [gather_over_reduce(found, link, p) for p in counts]) for link in links(found)}
    lines["P/2"] = (counts, [p / 2 for p in counts])
    title = "Ours: Gloo, the largest message of both"
    return Lines(title=title, along="workers", up="times as long", lines=lines, log="y")
