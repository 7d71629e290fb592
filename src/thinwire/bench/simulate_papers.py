"""What papers predict and measured beside what thinwire predicts from their own figures."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from thinwire.bench.problems.base import BadInput
from thinwire.bench.simulate_dragonn import dragonn
from thinwire.bench.simulate_gtopk import gtopk
from thinwire.bench.simulate_outputs import Outcome

PAPERS: Mapping[str, Callable[[], Outcome]] = MappingProxyType({"gtopk": gtopk, "dragonn": dragonn})


def outcome(name: str, *, beside: Sequence[object]) -> Outcome:
    """Return ours beside theirs. Raises BadInput for another paper, or options given `beside` it."""
    if name not in PAPERS:
        raise BadInput(f"--paper {name!r}: expected {' or '.join(PAPERS)}")
    if any(option is not None for option in beside):
        raise BadInput(f"--paper {name} brings its own models and network: leave --link, --topology and the like out")
    return PAPERS[name]()
