"""Steps over limited links, by `thinwire bench`: three rounds of every row, medians."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, Self

from thinwire_lab.bench.results import Results, Row
from thinwire_lab.papers.shared.judging import Range, sooner
from thinwire_lab.papers.shared.ledger import NOTHING
from thinwire_lab.papers.shared.shelf import DATA, Document, Evidence, Shelf

_DATA = {"resnet20": "cifar10/cifar10_jpeg.npz", "vgg": "cifar10/cifar10_jpeg.npz", "lstm": "wikitext2"}
_SPARSE = "topk:0.001,dgc:0.001,dragonn:0.001,gtopk:0.001"
_FFTS = "fft:0.15,topk:0.15,qsgd,terngrad"
_BLOCKS = "s2_reducer:0.03125,s2_union:0.03125,topk:0.03125"
MORE = "more cores"
WORKERS, LINKS = (2, 4, 8), ("100mbit", "1gbit")
_LIVES = "dct_dp:0.25,dct_dp:0.1,dct_dp:0.05,dct_dp:0.02,dct_dp:0.005"


@dataclass(frozen=True, kw_only=True)
class Bench(Evidence):
    """A run of `thinwire bench`. link: such as 100mbit. recipes: besides dense. part: of what runs at this place."""

    model: str
    link: str
    recipes: str
    workers: int = 4
    steps: int = 12
    scale: float = 1.0
    part: str = ""
    seeds: tuple[int, ...] = (0, 1, 2)
    more: str = MORE  # more rounds would not do: single steps lie as far apart in those

    @property
    def document(self) -> Document:
        data = f" --data {DATA}/{_DATA[self.model]}" if self.model in _DATA else ""
        scale = f" --scale {self.scale:g}" if self.scale != 1 else ""
        words = (
            f"thinwire bench --model {self.model}{data}{scale} --workers {self.workers} --link {self.link} "
            f"--recipes dense,{self.recipes} --steps {self.steps} --seeds {len(self.seeds)} --extend 1"
        )
        name = f"bench-{self.model}-{self.workers}-{self.link}{self.part}"
        return Document(name=name, words=words, complete=lambda found: found["environment"]["complete"])

    @property
    def parts(self) -> tuple[Document]:
        return (self.document,)

    def read(self, shelf: Shelf) -> "Steps":
        found = Results.from_json(self.document.read(shelf))
        return Steps(environment=found.environment, rows={row.label: row for row in found.rows})

    def spread(self, found: "Steps") -> str:
        return f"{self.model} \N{PLUS-MINUS SIGN} {found.apart:.0%}"

    def shrunk(self) -> Self:
        return replace(self, steps=2, seeds=(0,), workers=2)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Rows by label, such as `dgc 0.001`."""

    environment: Mapping[str, Any]
    rows: Mapping[str, Row]

    def seconds(self, label: str) -> float:
        """Return the median step."""
        return self.rows[label].step_seconds.p50

    def faster(self, label: str, than: str = "dense") -> float:
        """Return how many times shorter its step is."""
        return self.seconds(than) / self.seconds(label)

    def gain(self, label: str, than: str = "dense") -> Range:
        """Return the same at least and at most, by the 20th and the 80th percentile of both."""
        (soonest, latest), (others_soonest, others_latest) = self.range(label), self.range(than)
        return others_soonest / latest, others_latest / soonest

    def ahead(self, label: str, than: str = "dense") -> str:
        """Judge whether its steps are shorter: undecided where the 20th to 80th percentiles of both overlap."""
        return sooner(self.range(label), self.range(than))

    def range(self, label: str) -> Range:
        """Return the 20th and the 80th percentile of the seconds of its steps."""
        found = self.rows[label].step_seconds
        return found.p20, found.p80

    @property
    def apart(self) -> float:
        """How far the 20th and 80th percentile of a recipe's steps lie from their median, at most; over all recipes."""
        times = [row.step_seconds for row in self.rows.values()]
        return max(max(each.p80 / each.p50 - 1, 1 - each.p20 / each.p50) for each in times)

    @property
    def free(self) -> float:
        """The seconds of a dense step with the link lifted."""
        return self.environment["free_network_step_seconds"]["p50"]

    @property
    def waits(self) -> Range:
        """The share of a dense step that the link adds, at least and at most."""
        free, (soonest, latest) = self.environment["free_network_step_seconds"], self.range("dense")
        return 1 - free["p80"] / soonest, 1 - free["p20"] / latest

    def gradient(self, workers: int) -> float:
        """Return the bytes of a model's gradients, from what a ring of so many sends of them."""
        return self.rows["dense"].wire_bytes_per_step.dense * workers / (2 * (workers - 1))

    def bytes(self, label: str) -> float:
        """Return the bytes of a step, as the link counted them."""
        found = self.rows[label].wire_bytes_per_step
        return found.measured or found.declared or found.dense


class Place(NamedTuple):
    workers: int
    link: str

    def __str__(self) -> str:
        return f"P = {self.workers} at {self.link}"


Grid = Mapping[Place, Steps]
"""The steps of one model, by place."""


@dataclass(frozen=True, kw_only=True)
class Benches(Evidence):
    """Runs of one model at every place."""

    places: Mapping[Place, Bench]
    seeds: tuple[int, ...] = (0, 1, 2)
    more: str = MORE

    @classmethod
    def of(
        cls, model: str, recipes: str, *, at_four: str = "", workers: Sequence[int] = WORKERS, **options: Any
    ) -> Self:
        """Make them. at_four: recipes that four workers run besides."""
        all_of = dict.fromkeys(WORKERS, recipes) | {4: ",".join(filter(None, (recipes, at_four)))}
        return cls(
            places={
                place: Bench(model=model, recipes=all_of[place.workers], **place._asdict(), **options)
                for place in map(Place._make, product(workers, LINKS))
            }
        )

    def __getitem__(self, place: tuple[int, str]) -> Bench:
        return self.places[Place(*place)]

    @property
    def parts(self) -> list[Bench]:
        return list(self.places.values())

    def read(self, shelf: Shelf) -> Grid:
        return {place: bench.read(shelf) for place, bench in self.places.items()}

    def spread(self, found: Grid) -> str:
        apart = [steps.apart for steps in found.values()]
        model = next(iter(self.places.values())).model
        return f"{model} \N{PLUS-MINUS SIGN} {span(apart, '.0%')}"

    def shrunk(self) -> Self:
        """See `shelf.Evidence`: both links of one number of workers, four where they are among them."""
        one = min((place.workers for place in self.places), key=lambda workers: abs(workers - 4))
        return replace(
            self, places={place: each.shrunk() for place, each in self.places.items() if place.workers == one}
        )


def at_every(
    found: Grid, rule: Callable[[Steps], str], workers: Sequence[int] = WORKERS, links: Sequence[str] = LINKS
) -> dict[str, str]:
    """Return a verdict for each place with so many workers behind such links."""
    return {
        str(place): rule(steps) for place, steps in found.items() if place.workers in workers and place.link in links
    }


def by_workers(found: Grid) -> dict[int, tuple[Steps, Steps]]:
    """Return the steps of each number of workers on the slower link and on the faster, where there are both."""
    pairs = {workers: [found.get(Place(workers, link)) for link in LINKS] for workers in WORKERS}
    return {workers: (slow, fast) for workers, (slow, fast) in pairs.items() if slow and fast}


def told(found: Grid, say: Callable[[Steps], str]) -> str:
    """Return what is said of each place, as `1gbit (P = 2, 4) 1.5, 1.2`."""
    links = dict.fromkeys(place.link for place in found)
    said = {link: [(place.workers, say(found[place])) for place in found if place.link == link] for link in links}
    return ", ".join(
        f"{link} (P = {', '.join(str(workers) for workers, _ in each)}) {', '.join(words for _, words in each)}"
        for link, each in said.items()
    )


def span(values: Sequence[float], form: str = ".2f") -> str:
    """Return the least and the most, as `0.83–1.06`."""
    least, most = (f"{each:{form}}" for each in (min(values), max(values)))
    if least == most:
        return least
    return f"{least} to {most}" if min(values) < 0 else f"{least.removesuffix('%')}{NOTHING}{most}"


def spans(found: Grid, say: Callable[[Steps], Iterable[float]], form: str = ".2f") -> str:
    """Return the least and the most of each link, whatever the number of workers, as `100mbit 1.5–3.2`."""
    links = dict.fromkeys(place.link for place in found)
    values = {link: [each for place in found if place.link == link for each in say(found[place])] for link in links}
    return ", ".join(f"{link} {span(each, form)}" for link, each in values.items())


def faster(found: Grid, label: str, than: str = "dense") -> str:
    """Return how many times as fast as the other it is, by link."""
    return spans(found, lambda steps: [steps.faster(label, than)])


def gains(found: Grid, label: str, than: str = "dense") -> str:
    """Return how many times as fast as the other it is, by place."""
    return told(found, lambda steps: f"{steps.faster(label, than):.2f}")


CNN_STEPS = Benches.of("resnet20", f"{_SPARSE},{_FFTS},{_BLOCKS}")
FC_STEPS = Benches.of("vgg", f"{_SPARSE},{_FFTS}", at_four=_LIVES)
TEXT_STEPS = Benches.of(
    "transformer", f"{_SPARSE},{_FFTS}", at_four=f"{_BLOCKS},dgc:0.01,dragonn:0.01,dgc:0.1,dragonn:0.1"
)
LM_STEPS = Benches.of("lstm", f"{_SPARSE},{_BLOCKS}", steps=6)
XL_STEPS = Benches.of("xml", f"{_SPARSE},randomk:0.001,signsgd", steps=6, scale=0.1)
CNN_1G, FC_1G, TEXT_1G, XL_1G = (each[4, "1gbit"] for each in (CNN_STEPS, FC_STEPS, TEXT_STEPS, XL_STEPS))
FC_LIVES = Benches.of("vgg", _LIVES, workers=(2, 8), part="-lives")
"""What four workers run among the others."""
TEXT_SPARSER = Benches.of("transformer", "dgc:0.0001,dragonn:0.0001", workers=(4,), part="-sparser")
FC_100M, TEXT_100M = FC_STEPS[4, "100mbit"], TEXT_STEPS[4, "100mbit"]
