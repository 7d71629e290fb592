"""Steps over limited links, by `thinwire bench`: three rounds of every row, medians."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from papers.lab.judging import Range, sooner
from papers.lab.material import Absent
from papers.lab.shelf import DATA, Document, Shelf
from thinwire.tools.bench.results import SCHEMA, Row

_DATA = {"resnet20": "cifar10/cifar10_jpeg.npz", "vgg": "cifar10/cifar10_jpeg.npz", "lstm": "wikitext2"}
_SPARSE = "topk:0.001,dgc:0.001,dragonn:0.001,gtopk:0.001"
_FFTS = "fft:0.15,topk:0.15,qsgd,terngrad"
_BLOCKS = "s2_reducer:0.03125,s2_union:0.03125,topk:0.03125"
_LIVES = "dct_dp:0.25,dct_dp:0.1,dct_dp:0.05,dct_dp:0.02,dct_dp:0.005"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A run of `thinwire bench`. link: such as 100mbit. recipes: besides dense."""

    model: str
    link: str
    recipes: str
    workers: int = 4
    steps: int = 12
    scale: float = 1.0
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def more(self) -> str:
        """See `shelf.Evidence`."""
        return "more rounds"

    @property
    def document(self) -> Document:
        """Return the document that it writes."""
        data = f" --data {DATA}/{_DATA[self.model]}" if self.model in _DATA else ""
        scale = f" --scale {self.scale:g}" if self.scale != 1 else ""
        words = (
            f"thinwire bench --model {self.model}{data}{scale} --workers {self.workers} --link {self.link} "
            f"--recipes dense,{self.recipes} --steps {self.steps} --seeds {len(self.seeds)} --extend 1"
        )
        return Document(name=f"bench-{self.model}-{self.workers}-{self.link}", words=words)

    @property
    def commands(self) -> tuple[str, ...]:
        """See `shelf.Evidence`."""
        return self.document.commands

    def missing(self, shelf: Shelf) -> tuple[str, ...]:
        """See `shelf.Evidence`. A run that was cut off is missing."""
        if self.document.missing(shelf) or not self.document.read(shelf)["environment"]["complete"]:
            return self.commands
        return ()

    def read(self, shelf: Shelf) -> "Steps":
        """See `shelf.Evidence`."""
        found = self.document.read(shelf)
        if not found["environment"]["complete"]:
            raise Absent(f"{self.document.name} was cut off")
        if found["schema"] != SCHEMA:
            raise ValueError(f"{self.document.name} is of schema {found['schema']!r}; expected {SCHEMA!r}")
        return Steps(
            environment=found["environment"], rows={row.label: row for row in map(Row.from_json, found["rows"])}
        )

    def spread(self, found: "Steps") -> str:
        """See `shelf.Evidence`."""
        return f"{self.model}, {self.workers} at {self.link} \N{PLUS-MINUS SIGN} {found.apart:.0%}"

    def shrunk(self) -> Self:
        """See `shelf.Evidence`."""
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

    def ahead(self, label: str, than: str = "dense") -> str:
        """Whether its steps are shorter: decided where the 80th percentile of one is below the 20th of the other."""
        return sooner(self.range(label), self.range(than))

    def range(self, label: str) -> Range:
        """Return the 20th and the 80th percentile of the seconds of its steps."""
        found = self.rows[label].step_seconds
        return found.p20, found.p80

    def spread(self, label: str) -> str:
        """Return the 20th and 80th percentile over dense's median step, as gains."""
        row = self.rows[label].step_seconds
        return f"{self.seconds('dense') / row.p80:.2f} to {self.seconds('dense') / row.p20:.2f}"

    @property
    def apart(self) -> float:
        """How far the 20th and 80th percentile of a recipe's steps lie from their median, at most; over all recipes."""
        times = [row.step_seconds for row in self.rows.values()]
        return max(max(each.p80 / each.p50 - 1, 1 - each.p20 / each.p50) for each in times)

    @property
    def free(self) -> float:
        """The seconds of a dense step with the link lifted."""
        return self.environment["free_network_step_seconds"]["p50"]

    def bytes(self, label: str) -> float:
        """Return the bytes of a step, as the link counted them."""
        found = self.rows[label].wire_bytes_per_step
        return found.measured or found.declared or found.dense


def _pair(model: str, recipes: str, **options: Any) -> tuple[Bench, Bench]:
    return tuple(Bench(model=model, link=link, recipes=recipes, **options) for link in ("100mbit", "1gbit"))  # type: ignore[return-value]


TEXT_100M, TEXT_1G = _pair("transformer", f"{_SPARSE},{_FFTS},{_BLOCKS},dgc:0.01,dragonn:0.01,dgc:0.1,dragonn:0.1")
CNN_100M, CNN_1G = _pair("resnet20", f"{_SPARSE},{_FFTS},{_BLOCKS}")
FC_100M, FC_1G = _pair("vgg", f"{_SPARSE},{_FFTS},{_LIVES}")
LM_100M, LM_1G = _pair("lstm", f"{_SPARSE},{_BLOCKS}", steps=6)
XL_100M, XL_1G = _pair("xml", f"{_SPARSE},randomk:0.001,signsgd", steps=6, scale=0.1)
XL_OF_2, XL_OF_8 = (
    Bench(model="xml", link="1gbit", recipes="topk:0.001,dgc:0.001,dragonn:0.001", workers=workers, steps=6, scale=0.1)
    for workers in (2, 8)
)
TEXT_OF_2, TEXT_OF_8 = (
    Bench(model="transformer", link="100mbit", recipes=f"{_SPARSE},{_FFTS}", workers=workers) for workers in (2, 8)
)
