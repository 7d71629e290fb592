"""Fixtures for every test, and which cells of a grid run by default."""

import fcntl
import gc
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from cases import CODECS, OTHERS, VARIANTS, vector
from hypothesis import settings
from interpreting import hasten, refuse_integer_masks
from ranks import RankError, Ranks, prepare

from thinwire.kernels import dispatch

settings.register_profile("no seconds", deadline=None)  # a busy machine is no fault
settings.load_profile("no seconds")

if not torch.cuda.is_available():
    # Read when triton is imported, which torch.distributed.pipelining does, in whatever test comes first.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests run side by side, and torch's threads wait for each other by spinning.
torch.set_num_threads(1)

SILENCE = 5.0  # seconds of compiling without a word
TURNS = 12  # a test of any recipe trains with every so many-th of most
LONG = (  # whose tests train whole models, start commands, or interpret what is for a GPU
    "tests/collectives/test_exit.py",
    "tests/frameworks/",
    "tests/kernels/test_triton.py",
    "tests/lab/",
    "tests/planner/test_live.py",
    "tests/repository/test_example.py",
    "tests/repository/test_walk.py",
)
COSTLY = tuple(f"tests/{name}/" for name in ("collectives", "frameworks", "kernels", "lab", "planner", "reducer"))


_RANKS = Ranks()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes with a Gloo group between them."""
    yield _RANKS
    _RANKS.stop()


@pytest.fixture(scope="session", autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers leave tickets in the user's folder; those of tests in one of their own."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Compile nothing for what tests compute where they are imported: each process would, at the same time."""
    with patch.object(dispatch, "_ONLY_REFERENCE", True):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Have each test begin with one thread: programs that tests run in this process may set another number."""
    torch.set_num_threads(1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Have torch use two threads, as kernels divide large tensors among threads."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have Numba compile what most tests use and keep it on disk, or every rank would, all at the same time.

    That takes a minute where nothing is kept yet, so no test's time limit may include it. It fails nothing either: what
    cannot be compiled fails in the tests that use it. Each of pytest's processes compiles what none has begun, codecs
    of a class together, as they share loops, and waits for the others before it begins.
    """
    if "triton.runtime.interpreter" in sys.modules:
        hasten(sys.modules["triton.runtime.interpreter"])
        refuse_integer_masks(sys.modules["triton.runtime.interpreter"])
    gc.freeze()  # of a million objects none is garbage, and tests that collect garbage would look through all
    functions = [item for item in session.items if isinstance(item, pytest.Function)]
    used = {item.module.__name__ for item in functions if "ranks" in item.fixturenames}
    if session.config.option.collectonly or not used:
        return
    prepare(sorted(used))
    capture = session.config.pluginmanager.getplugin("capturemanager")
    folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # before there are fixtures
    common = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        _RANKS.run(1, os.getpid)
        last = time.monotonic()
        for kind, names in _by_class().items():
            with suppress(FileExistsError, RankError):
                (common / kind).mkdir()
                _RANKS.run(1, _compile, names)
            if time.monotonic() - last > SILENCE:
                last = time.monotonic()
                with capture.global_and_fixture_disabled():
                    print(f"compiling for the tests: {kind} is there", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)  # once the others have let go


def _by_class() -> dict[str, list[str]]:
    """Return the names of codecs by class, first those of which there are most."""
    found = defaultdict[str, list[str]](list)
    for name, case in CODECS.items():
        found[type(case.codec).__name__].append(name)
    return dict(sorted(found.items(), key=lambda each: -len(each[1])))


def _compile(names: list[str]) -> None:
    group = dist.group.WORLD
    assert group is not None
    for case, dtype in product(map(CODECS.__getitem__, names), (torch.float32, torch.float64)):
        case.exchange.start(case.codec.encode(vector(1000, dtype=dtype)), group).wait().total.dense()


def pytest_xdist_auto_num_workers() -> int:
    """Have one process more than there are cores: many tests wait, for other processes or for time-outs to pass."""
    return (os.cpu_count() or 1) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take `--share K/N`, for CI."""
    parser.addoption("--share", metavar="K/N", default="0/1", help="run every N-th selected test from the K-th")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Say what is slow, further and quick before `-m` selects, and keep the share that was asked for afterwards."""
    _mark_slow(config, items)
    _mark_further(items)
    _mark_quick(items)
    yield
    first, step = map(int, config.getoption("share").split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % step != first])
    items[:] = items[first::step]


def _mark_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark training with variants of recipes as slow, and what no value of a parameter needs to occur in its grid.

    Of variants, nothing else of a grid is run. With most other recipes tests train in turns, chosen by their names.
    """
    # The longest first, or one process would work on them alone at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    grids = defaultdict(list)
    seen = Counter[str]()
    for item in items:
        if (first := item.get_closest_marker("first")) and not item.get_closest_marker("slow"):
            seen[name := item.nodeid.partition("[")[0]] += 1
            if seen[name] > first.args[0]:
                item.add_marker("slow")
        if isinstance(item, pytest.Function) and item.get_closest_marker("grid"):
            grids[item.path, item.originalname].append(item)
        if isinstance(item, pytest.Function) and "ranks" in item.fixturenames and _recipe(item) in VARIANTS:
            item.add_marker("slow")
            item.add_marker("grid")
        elif isinstance(item, pytest.Function) and "ranks" in item.fixturenames and not _has_its_turn(item):
            item.add_marker("slow")
    needless: set[pytest.Item] = set()
    for cells in grids.values():
        needless.update(cell for cell in set(cells) - set(_covering(cells)) if _recipe(cell) in VARIANTS)
        for cell in set(cells) - set(_covering([cell for cell in cells if not cell.get_closest_marker("slow")])):
            cell.add_marker("slow")
    config.hook.pytest_deselected(items=list(needless))
    items[:] = [item for item in items if item not in needless]


def _mark_further(items: list[pytest.Item]) -> None:
    """Of each test that starts ranks or is otherwise costly, mark all cells but the first and the last."""
    cells = defaultdict(list)
    for item in items:
        costly = "ranks" in getattr(item, "fixturenames", ()) or item.nodeid.startswith(COSTLY)
        if costly and not item.get_closest_marker("slow"):
            cells[item.nodeid.partition("[")[0]].append(item)
    for each in cells.values():
        for item in each[1:-1]:
            item.add_marker("further")


def _mark_quick(items: list[pytest.Item]) -> None:
    """Mark one cell of each test as quick, where the test is not slow and trains no more than a few steps."""
    cells: dict[str, pytest.Item] = {}
    for item in items:
        if not item.get_closest_marker("slow") and not item.nodeid.startswith(LONG):
            cells.setdefault(item.nodeid.partition("[")[0], item)
    for item in cells.values():
        item.add_marker("quick")


def _has_its_turn(item: pytest.Function) -> bool:
    """Whether the test trains with a recipe whose turn it is, or with one that takes none."""
    recipe = _recipe(item)
    return recipe not in OTHERS or (OTHERS.index(recipe) + crc32(item.originalname.encode())) % TURNS == 0


def _recipe(item: pytest.Function) -> object:
    """Return the recipe that a test trains with, if it is for any recipe."""
    return item.callspec.params.get("recipe") if hasattr(item, "callspec") else None


def _covering(cells: list[pytest.Function]) -> Iterator[pytest.Function]:
    """Yield cells that hold every value of every parameter, and each with many of others: of a grid, a diagonal."""
    values = {cell: {(name, id(value)) for name, value in cell.callspec.params.items()} for cell in cells}
    missing, uses = set[tuple[str, int]]().union(*values.values()), Counter[tuple[str, int]]()
    while missing:
        cell = max(cells, key=lambda cell: (len(values[cell] & missing), -sum(uses[value] for value in values[cell])))
        missing -= values[cell]
        uses.update(values[cell])
        cells = [each for each in cells if values[each] & missing]
        yield cell
