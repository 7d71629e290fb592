"""The problems that `thinwire bench` trains on, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from thinwire_lab.inputs import BadInput
from thinwire_lab.problems import dlrm, images, lstm, mlp, transformer, xml
from thinwire_lab.problems.base import Batch, Options, Parts, Problem

__all__ = ["PROBLEMS", "Batch", "Entry", "Parts", "Problem", "build"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A problem that can be built; `summary` says in a line its model, its data and what --data must name.

    largest: the largest --scale, with which it has about a trillion parameters; 1 if it has one size.
    """

    summary: str
    make: Callable[[Options], Problem]
    takes_data: bool = True
    sparse_embeddings: bool = False
    largest: float = 1.0


PROBLEMS: Mapping[str, Entry] = MappingProxyType(
    {
        "transformer": Entry(
            summary="byte-level GPT, 0.83 M parameters, on Python's own standard library; "
            "--data FILE for another text, --scale multiplies its size",
            make=transformer.make,
            largest=1e6,
        ),
        "lstm": Entry(
            summary="word-level LSTM, 4.4 M parameters; needs --data DIR with WikiText-2's train.txt and valid.txt",
            make=lstm.make,
        ),
        "lstm_sparse": Entry(
            summary="the same with a sparse embedding and a head of its own, 8.7 M parameters; --data as for lstm",
            make=lstm.make_sparse,
            sparse_embeddings=True,
        ),
        "mlp": Entry(
            summary="784-1024-1024-10 network, 1.9 M parameters; needs --data DIR with MNIST's idx files", make=mlp.make
        ),
        "resnet20": Entry(
            summary="ResNet-20, 0.27 M parameters; needs --data FILE.npz with CIFAR-10", make=images.make_resnet20
        ),
        "vgg": Entry(
            summary="small VGG with large dense layers, 1.6 M parameters; needs --data FILE.npz with CIFAR-10",
            make=images.make_vgg,
        ),
        "dlrm": Entry(
            summary="DLRM, 1.0 M parameters, on generated clicks; --data FILE for Criteo's train.txt, 4.7 M parameters",
            make=dlrm.make,
        ),
        "xml": Entry(
            summary="linear layer 4,096 -> 30,938, 126.7 M parameters, on generated sparse features; "
            "takes no data, --scale multiplies the number of labels",
            make=xml.make,
            takes_data=False,
            largest=1e4,
        ),
    }
)


def build(name: str, *, seed: int, data: Path | str | None = None, scale: float = 1.0) -> Problem:
    """Build a problem in its initial state; takes seconds. Leaves torch's and numpy's global generators alone.

    Raises BadInput for an unknown name, a seed out of range, a scale that is out of range or for a problem that has
    one size, and data that is missing, unusable or not wanted.
    """
    entry = PROBLEMS.get(name)
    if entry is None:
        raise BadInput(f"no model is called {name!r}; choose one of {', '.join(PROBLEMS)}")
    if not 0 <= seed < 2**63:
        raise BadInput(f"the seed is {seed}; expected 0 or more, and less than 2^63")
    _check_scale(name, entry, scale)
    if data is not None and not entry.takes_data:
        raise BadInput(f"{name} generates its data; leave --data out")
    return entry.make(Options(seed=seed, data=None if data is None else Path(data), scale=scale))


def _check_scale(name: str, entry: Entry, scale: float) -> None:
    if scale != 1 and entry.largest == 1:
        scaling = ", ".join(known for known, entry in PROBLEMS.items() if entry.largest > 1)
        raise BadInput(f"{name} has one size; leave --scale out, or choose a model that scales: {scaling}")
    if not 0 < scale <= entry.largest:
        raise BadInput(
            f"--scale is {scale:g}; expected above 0 and at most {entry.largest:,.0f}, about a trillion parameters"
        )
