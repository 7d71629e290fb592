"""DRAGONN's Figs. 3 to 6 beside ours."""

from matplotlib.figure import Figure

from thinwire_lab.papers.dragonn import DRAGONN
from thinwire_lab.papers.dragonn.learning import XL, Ways
from thinwire_lab.papers.dragonn.timing import gains_of_parts
from thinwire_lab.papers.shared.benches import CNN_1G, LM_1G, TEXT_1G, XL_1G, Steps
from thinwire_lab.papers.shared.figures import Bars, Lines, Words, beside, curve
from thinwire_lab.papers.shared.links import ROUTES, SYNCHRONISING, Found, links, routes

_GAIN = "times as fast as dense"


@DRAGONN.redraws("figure_3", CNN_1G, TEXT_1G, LM_1G, XL_1G)
def figure_3(cnn: Steps, text: Steps, lm: Steps, xl: Steps) -> Figure:
    """Throughput over dense, by model."""
    published = {
        "ResNet-50": {"DGC": 1.68, "DRAGONN": 2.40},
        "ViT": {"DGC": 2.14, "DRAGONN": 2.61},
        "MLP-Mixer": {"DGC": 2.06, "DRAGONN": 2.57},
        "XML": {"DGC": 10.2, "DRAGONN": 22.4},
    }
    models = {"ResNet-20": cnn, "transformer": text, "LSTM": lm, "XL": xl}
    ours = {
        name: {"DGC": steps.faster("dgc 0.001"), "DRAGONN": steps.faster("dragonn 0.001")}
        for name, steps in models.items()
    }
    return beside(
        Bars(title="Fig. 3: 16 V100, 25 Gbit/s", up=_GAIN, groups=published),
        Bars(title="Ours: 4 workers on 2 cores, 1 Gbit/s", up=_GAIN, groups=ours),
        "Throughput over dense synchronisation, density 0.001",
    )


@DRAGONN.redraws("figure_4", XL)
def figure_4(xl: Ways) -> Figure:
    """Loss over steps."""
    names = ("dense", "topk", "dgc", "hashed", "signsgd", "randomk")
    return beside(
        Words(
            title="Figs. 4 and 7 (a): XML, 16 GPUs",
            text="No numbers in the text but:\nDGC takes 1.6 times, Random-k 15.1 times DRAGONN's iterations.",
        ),
        Lines(
            title="Ours: XL, 8 virtual workers",
            along="steps",
            up="held-out loss, mean of 3 seeds",
            lines={name: curve(xl[name]) for name in names},
            log="y",
        ),
        "Loss over steps, density 0.001",
    )


@DRAGONN.redraws("figure_5", ROUTES)
def figure_5(found: Found) -> Figure:
    """Time to encode, by size."""
    names = {"mask and nonzero": "mask", "hashed slots": "hashed", "sampled threshold, ours": "sampled"}
    lines = {
        name: ([row["bytes"] / 2**20 for row in rows], [1e3 * row["encode"] for row in rows])
        for name, rows in ((name, routes(found, route, 4, 0.001)) for name, route in names.items())
    }
    return beside(
        Bars(
            title="Fig. 5 (a): 512 MB on a V100", up="ms", groups={"512 MB": {"DGC": 35.4, "DRAGONN": 13.2}}, line=None
        ),
        Lines(title="Ours: one core", along="MiB", up="ms", lines=lines, log="xy"),
        "Time to encode, density 0.001",
    )


@DRAGONN.redraws("figure_6", SYNCHRONISING)
def figure_6(found: Found) -> Figure:
    """What each part brings over DGC."""
    published = {
        "ResNet-50": {"hashing": 1.33, "all": 1.92},
        "ViT": {"hashing": 1.21, "all": 1.35},
        "MLP-Mixer": {"hashing": 1.25, "all": 1.39},
        "XML": {"hashing": 1.91, "all": 4.33},
    }
    ours = {
        link: dict(zip(("hashing", "decoding together", "all"), gains_of_parts(found, link), strict=True))
        for link in links(found)
    }
    up = "times as fast as DGC"
    return beside(
        Bars(title="Fig. 6: 16 V100, 25 Gbit/s", up=up, groups=published),
        Bars(title="Ours: 128 MiB, 4 workers", up=up, groups=ours),
        "Time to synchronise over DGC's, whose payloads are decoded one by one",
    )
