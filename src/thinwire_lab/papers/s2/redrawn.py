"""The S2 Reducer's Figs. 3 and 5 beside ours."""

from matplotlib.figure import Figure

from thinwire_lab.papers.s2 import S2
from thinwire_lab.papers.s2.timing import GATHER, SKETCH, UNION, gather_over_reduce
from thinwire_lab.papers.shared.benches import CNN_1G, LM_1G, Steps
from thinwire_lab.papers.shared.figures import Bars, Lines, Words, beside
from thinwire_lab.papers.shared.links import SWEEP, Found, links, worlds


@S2.redraws("figure_3", LM_1G, CNN_1G)
def figure_3(lm: Steps, cnn: Steps) -> Figure:
    """How much faster the sketch is than the others."""
    published = {
        "LSTM": {"SparCML": 1.6},
        "GNMT-8": {"all-gather": 1.25},
        "GNMT-16": {"OmniReduce": 1.4},
        "ResNet-50,\nblocks": {"SparCML": 4.1, "all-gather": 2.3},
        "GNMT-8,\nblocks": {"OmniReduce": 1.8},
    }
    ours = {
        name: {
            "all-gather": steps.faster(SKETCH, GATHER),
            "exact union, packed": steps.faster(SKETCH, UNION),
            "dense": steps.faster(SKETCH),
        }
        for name, steps in (("LSTM", lm), ("ResNet-20,\nblocks", cnn))
    }
    up = "the sketch: times as fast"
    return beside(
        Bars(title="Fig. 3: 16 GPUs, 1 and 10 Gbit/s", up=up, groups=published),
        Bars(title="Ours: 4 workers on 2 cores, 1 Gbit/s", up=up, groups=ours),
        "Steps of the S2 Reducer against other exchanges; blocks of 32, 1/32 of them, ratio 0.5",
    )


@S2.redraws("figure_5", SWEEP)
def figure_5(found: Found) -> Figure:
    """All-gather over all-reduce, by number of workers."""
    lines = {
        link: (worlds(found), [gather_over_reduce(found, link, p) for p in worlds(found)]) for link in links(found)
    } | {"P/2": (worlds(found), [p / 2 for p in worlds(found)])}
    return beside(
        Words(
            title="Figs. 5 and 6: 16 GPUs, InfiniBand",
            text="All-reduce is over 11 times faster beyond 8 MB;\nalpha and beta alone say 8.",
        ),
        Lines(
            title="Ours: Gloo, the largest message of both", along="workers", up="times as long", lines=lines, log="y"
        ),
        "Time of a dense all-gather over that of an all-reduce of equal messages",
    )
