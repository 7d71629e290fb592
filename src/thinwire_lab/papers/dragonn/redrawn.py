"""Ours of DRAGONN's Figs. 3 to 6."""

from thinwire_lab.papers.dragonn import DRAGONN
from thinwire_lab.papers.dragonn.learning import XL, Ways
from thinwire_lab.papers.dragonn.timing import gains_of_parts
from thinwire_lab.papers.shared.benches import CNN_1G, LM_1G, TEXT_1G, XL_1G, Steps
from thinwire_lab.papers.shared.figures import Bars, Lines, curve
from thinwire_lab.papers.shared.links import ROUTES, SYNCHRONISING, Found, links, routes


@DRAGONN.redraws("figure_3", CNN_1G, TEXT_1G, LM_1G, XL_1G)
def figure_3(*found: Steps) -> Bars:
    """Throughput over dense, by model."""
    ours = {
        name: {"DGC": steps.faster("dgc 0.001"), "DRAGONN": steps.faster("dragonn 0.001")}
        for name, steps in zip(("ResNet-20", "transformer", "LSTM", "XL"), found, strict=True)
    }
    return Bars(title="Ours: 4 workers on 2 cores, 1 Gbit/s", up="times as fast as dense", groups=ours)


@DRAGONN.redraws("figure_4", XL)
def figure_4(xl: Ways) -> Lines:
    """Loss over steps."""
    lines = {name: curve(xl[name]) for name in ("dense", "topk", "dgc", "hashed", "signsgd", "randomk")}
    up = "held-out loss, mean of 3 seeds"
    return Lines(title="Ours: XL, 8 virtual workers", along="steps", up=up, lines=lines, log="y")


@DRAGONN.redraws("figure_5", ROUTES)
def figure_5(found: Found) -> Lines:
    """Time to encode, by size."""
    names = {"mask and nonzero": "mask", "hashed slots": "hashed", "sampled threshold, ours": "sampled"}
    lines = {
        name: ([row["bytes"] / 2**20 for row in rows], [1e3 * row["encode"] for row in rows])
        for name, rows in ((name, routes(found, route, 4, 0.001)) for name, route in names.items())
    }
    return Lines(title="Ours: one core", along="MiB", up="ms", lines=lines, log="xy")


@DRAGONN.redraws("figure_6", SYNCHRONISING)
def figure_6(found: Found) -> Bars:
    """What each part brings over DGC."""
    parts = ("hashing", "decoding together", "all")
    ours = {link: dict(zip(parts, gains_of_parts(found, link), strict=True)) for link in links(found)}
    return Bars(title="Ours: 128 MiB, 4 workers", up="times as fast as DGC", groups=ours)
