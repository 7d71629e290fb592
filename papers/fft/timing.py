"""The FFT paper's claims about collectives."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from papers.fft import FFT_PAPER
from papers.lab.benches import CNN_1G, FC_1G, FC_100M, LM_1G, TEXT_1G, TEXT_100M, TEXT_OF_2, TEXT_OF_8, Steps
from papers.lab.judging import by_setting, every, verdict
from papers.lab.ledger import Outcome
from papers.lab.links import KEPT_SAID, SWEEP, Found, kept, links, seconds, straight, worlds
from papers.lab.shelf import Document


@FFT_PAPER.judge("F13", SWEEP)
def gathers_linearly(found: Found) -> Outcome:
    """The time of an all-gather of a fixed payload is a straight line over the number of workers."""
    parts, said, counts = dict[str, str](), [], worlds(found)
    for link in links(found):
        times = [seconds(found, "all-gather", link, p, 2**20) for p in counts]
        slope, _, r2 = straight([p - 1 for p in counts], times)
        parts |= {link: verdict(r2 >= 0.98)} if link in kept(found) else {}
        said.append(f"{link}: R² {r2:.3f}, {1e3 * slope:.1f} ms a worker more")
    word, note = by_setting(parts)
    how = (
        f"1 MiB a worker, P = {', '.join(map(str, counts))}; Gloo, workers in namespaces of one "
        f"machine; holds if R² is at least 0.98, {KEPT_SAID}"
    )
    return Outcome(verdict=word, note=note, measured="; ".join(said), how=how)


LAYERS = Document(name="layers", words="python -m papers.fft.layers")
_STEPS = "`thinwire bench`, workers share 2 cores, median steps of three rounds"
_FOUR = ("fft 0.15", "topk 0.15", "qsgd", "terngrad")


def _gains(steps: Steps) -> str:
    return ", ".join(f"{label} {steps.faster(label):.2f}" for label in _FOUR)


@FFT_PAPER.judge("F1", CNN_1G, FC_1G, LM_1G)
def heavy_models_wait(cnn: Steps, fc: Steps, lm: Steps) -> Outcome:
    """A model with more parameters for its computing spends a larger share of its step communicating."""
    models = {"ResNet-20": cnn, "small VGG": fc, "LSTM": lm}
    shares = {name: 1 - steps.free / steps.seconds("dense") for name, steps in models.items()}
    weight = {name: steps.bytes("dense") / steps.free for name, steps in models.items()}
    order = sorted(models, key=weight.__getitem__)
    measured = ", ".join(f"{name} {shares[name]:.0%}" for name in models)
    how = (
        f"dense, 4 workers, 1 Gbit/s: what the link adds to a step; {_STEPS}; holds if the share "
        "rises with bytes per second of "
        f"computing: {', '.join(order)}"
    )
    return Outcome(verdict=verdict(sorted(models, key=shares.__getitem__) == order), measured=measured, how=how)


@FFT_PAPER.judge("F20", FC_1G, CNN_1G, SWEEP)
def faster_than_sgd(fc: Steps, cnn: Steps, found: Found) -> Outcome:
    """All four are faster than SGD, FFT most; also where dense gradients are reduced and not gathered."""
    models = {"small VGG": fc, "ResNet-20": cnn}
    gathered = {name: _gathered(steps, found) for name, steps in models.items()}
    parts = {}
    for name, steps in models.items():
        gains = [steps.faster(label) for label in _FOUR]
        parts[f"{name}, all-reduce"] = verdict(min(gains) > 1 and gains[0] == max(gains))
        parts[f"{name}, all-gather"] = verdict(min(gains) * gathered[name] > 1 and gains[0] == max(gains))
    word, note = by_setting(parts)
    measured = "; ".join(
        f"{name}: {_gains(steps)} over all-reduce, {gathered[name]:.2f} times that over all-gather"
        for name, steps in models.items()
    )
    how = (
        f"4 workers, 1 Gbit/s; {_STEPS}; a dense all-gather's longer time from the sweep; holds "
        "if all are above 1 and FFT is first"
    )
    return Outcome(verdict=word, note=note, measured=measured, how=how)


def _gathered(steps: Steps, found: Found) -> float:
    """Return how many times longer a dense step is whose gradients are gathered."""
    nbytes = steps.rows["dense"].wire_bytes_per_step.dense / 1.5  # of 4 ranks: an all-reduce sends 2 · 3/4 of them
    link = "1gbit" if "1gbit" in links(found) else links(found)[-1]
    more = seconds(found, "all-gather", link, 4, nbytes) - seconds(found, "all-reduce", link, 4, nbytes)
    return 1 + more / steps.seconds("dense")


@FFT_PAPER.judge("F24", TEXT_OF_2, TEXT_100M, TEXT_OF_8)
def scales(two: Steps, four: Steps, eight: Steps) -> Outcome:
    """From four workers on FFT has the highest rate of the four."""
    worlds = {"2": two, "4": four, "8": eight}
    parts = {
        f"P = {p}": verdict(steps.faster("fft 0.15") >= 0.97 * max(map(steps.faster, _FOUR)))
        for p, steps in worlds.items()
        if p != "2"
    }
    word, note = every(parts)
    measured = "; ".join(f"P = {p}: {_gains(steps)}" for p, steps in worlds.items())
    how = f"gain over dense, transformer, 100 Mbit/s; {_STEPS}; holds if FFT is at most 3 % behind at 4 and 8"
    return Outcome(verdict=word, note=note, measured=measured, how=how)


@FFT_PAPER.judge("F25", TEXT_100M, TEXT_1G, FC_100M, FC_1G)
def slower_is_better(text_slow: Steps, text: Steps, fc_slow: Steps, fc: Steps) -> Outcome:
    """Gains are larger on the slower link."""
    pairs = {"transformer": (text_slow, text), "small VGG": (fc_slow, fc)}
    parts = {
        f"{label} on {name}": verdict(slow.faster(label) > fast.faster(label))
        for name, (slow, fast) in pairs.items()
        for label in _FOUR
    }
    word, note = every(parts)
    measured = "; ".join(
        f"{name}: 100 Mbit/s {_gains(slow)}; 1 Gbit/s {_gains(fast)}" for name, (slow, fast) in pairs.items()
    )
    return Outcome(verdict=word, note=note, measured=measured, how=f"gain over dense, 4 workers; {_STEPS}")


@FFT_PAPER.judge("F2", LAYERS)
def convolutions_compute(found: Mapping[str, Any]) -> Outcome:
    """At one rate, a VGG's convolutions compute ten times longer than they communicate, and a ResNet's do not."""
    ratios = {
        name: [row["seconds"] * 1e9 / (8 * row["weights"]) for row in layers]
        for name, layers in found["layers"].items()
    }
    middle = {name: median(values) for name, values in ratios.items()}
    holds = middle["small VGG"] >= 10 * middle["ResNet-20"]
    measured = "; ".join(
        f"{name}: median {middle[name]:.0f} times, {min(values):.1f} to {max(values):.0f}"
        for name, values in ratios.items()
    )
    how = (
        "computing of each convolution alone, forward and backward of 32 images on one core, "
        "over its weights' time at 1 Gbit/s; one rate at which the VGG's is 10 or more and the ResNet's 1 or less "
        "exists "
        "where the medians are ten times apart: holds if they are"
    )
    return Outcome(verdict=verdict(holds), measured=measured, how=how)
