"""What papers predict and measured beside what thinwire predicts from their own figures."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from thinwire.tools.inputs import BadInput
from thinwire.tools.simulate.dragonn import dragonn
from thinwire.tools.simulate.gtopk import gtopk
from thinwire.tools.simulate.outputs import Outcome

PAPERS: Mapping[str, Callable[[], Outcome]] = MappingProxyType({"gtopk": gtopk, "dragonn": dragonn})


def outcome(name: str, *, beside: Sequence[object]) -> Outcome:
    """Return ours beside theirs. Raises BadInput for another paper, or options given `beside` it."""
    if name not in PAPERS:
        raise BadInput(f"--paper {name!r}: expected {' or '.join(PAPERS)}")
    if any(option is not None for option in beside):
        raise BadInput(f"--paper {name} brings its own models and network: leave --link, --topology and the like out")
    return PAPERS[name]()
