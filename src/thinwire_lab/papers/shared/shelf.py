"""Where the documents of runs lie, and how a missing one is made."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from thinwire.files import write_atomically
from thinwire_lab.inputs import read_lines
from thinwire_lab.machine import FIRST, TODAY, code, made
from thinwire_lab.papers.shared.ledger import FOLDER
from thinwire_lab.papers.shared.material import Absent

RUNS = FOLDER / "runs"
DATA = "DATA"
TRAIN, SERVE = "thinwire_lab.studies.convergence", "thinwire_lab.studies.server_clicks"
GOING_ON = (TRAIN, SERVE)
_OURS = {"python": [sys.executable], "thinwire": [sys.executable, "-m", "thinwire"]}
"""Programs of this very environment, whether or not it is on the path."""


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """A folder of documents; `data` is that of data sets, which commands call DATA.

    made.json there says of each command when, by which version and code and on what it ran, and for how long; lines of
    trainings say it themselves. anew: what another code of this version has written is missing, too.
    """

    folder: Path = RUNS
    data: Path | None = None
    anew: bool = False

    def document(self, name: str) -> Any:
        """Return a JSON document. Raises Absent if it has not been made, ValueError if it is damaged."""
        path = self.folder / name
        if not path.exists():
            raise Absent(f"{name} has not been run")
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} is not JSON ({error}); restore it, or delete it and run again") from error

    def lines(self, name: str) -> Sequence[Mapping[str, Any]]:
        """Return a file of JSON lines; nothing if there is none."""
        path = self.folder / name
        return _lines(path, path.stat().st_mtime_ns) if path.exists() else ()

    def made(self) -> dict[str, dict[str, Any]]:
        path = self.folder / "made.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def is_current(self, note: Mapping[str, Any]) -> bool:
        """Whether what is noted of a run says that it need not run again."""
        return note.get("thinwire", FIRST) == TODAY and (not self.anew or note.get("code") == code())

    def run(self, command: str) -> None:
        """Run a command from the checkout's root, and note it. Raises CalledProcessError, and Absent without data."""
        self.folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        subprocess.run(list(self._words(command)), check=True, cwd=FOLDER.parent)
        note = made() | {"seconds": round(time.perf_counter() - began, 1)}
        write_atomically(self.folder / "made.json", json.dumps(self.made() | {command: note}, indent=1) + "\n")

    def try_to_run(self, command: str) -> str | None:
        """Run a command. Return what went wrong, if anything did."""
        try:
            self.run(command)
        except (subprocess.CalledProcessError, Absent) as problem:
            return str(problem)
        return None

    def _words(self, command: str) -> Iterator[str]:
        words = shlex.split(command)
        if self.anew:  # these programs go on where a file of theirs ends
            words = [word for word in words if word != "--resume"] + ["--anew"] * bool({*GOING_ON} & {*words})
        for word in words:
            if word.startswith(DATA) and self.data is None:
                raise Absent(f"needs data: {command}")
            yield from _OURS.get(word, [self._placed(word)])

    def _placed(self, word: str) -> str:
        if word.startswith("papers/runs/"):
            return str(self.folder / word.removeprefix("papers/runs/"))
        return word.replace(DATA, str(self.data), 1) if word.startswith(DATA) else word


@lru_cache(maxsize=4)  # some sixty claims read one file
def _lines(path: Path, _changed: int) -> Sequence[Mapping[str, Any]]:
    return read_lines(path)


class Evidence:
    """Runs that verdicts rest on; some are made of others, their `parts`.

    seeds: those that they were run with. more: more of what would decide a claim that they leave undecided.
    """

    seeds: tuple[int, ...]
    more = "more seeds"

    @property
    def parts(self) -> Sequence["Evidence"]:
        return ()

    @property
    def commands(self) -> tuple[str, ...]:
        """What makes them, as one would type it in the checkout, with DATA for the folder of data sets."""
        return tuple(command for each in self.parts for command in each.commands)

    def missing(self, shelf: Shelf) -> tuple[str, ...]:
        """Return the commands that have not been run to their end.

        What another version has made is missing, and is read until there is something by today's.
        """
        if self.parts:
            return tuple(command for each in self.parts for command in each.missing(shelf))
        made = shelf.made()
        if not all(shelf.is_current(made.get(command, {})) for command in self.commands):
            return self.commands
        try:
            self.read(shelf)
        except Absent:
            return self.commands
        return ()

    def read(self, shelf: Shelf) -> Any:
        """Return what they found. Raises Absent."""
        raise NotImplementedError

    def spread(self, found: Any) -> str:
        """Return how far repeats of what was `read` lie apart, in words; nothing if each ran once."""
        return f"{len(self.seeds)} seeds"

    def shrunk(self) -> Self:
        """Return the same runs, short."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Document(Evidence):
    """A program that writes a JSON file.

    words: its command, without --json. quick: what makes it short. apart: says how far its repeats lie apart.
    complete: whether it is all there, where the program writes it bit by bit.
    """

    name: str
    words: str
    quick: str = ""
    seeds: tuple[int, ...] = (0,)
    apart: Callable[[Any], str] = lambda _: ""
    complete: Callable[[Any], bool] = lambda _: True
    more: str = "more repeats"

    @property
    def commands(self) -> tuple[str, ...]:
        return (f"{self.words} --json papers/runs/{self.name}.json",)

    def read(self, shelf: Shelf) -> Any:
        """See `Evidence`. Raises Absent where the run was cut off, too."""
        found = shelf.document(f"{self.name}.json")
        if not self.complete(found):
            raise Absent(f"{self.name} was cut off")
        return found

    def spread(self, found: Any) -> str:
        return self.apart(found)

    def shrunk(self) -> Self:
        return replace(self, words=f"{self.words} {self.quick}".strip())


@dataclass(frozen=True, kw_only=True)
class Combined(Evidence):
    """Documents that are read as one; `combine` takes what each of them found. enough: so many for a short run."""

    documents: Sequence[Document]
    combine: Callable[[Sequence[Any]], Any]
    more: str = "more repeats"
    enough: int | None = None

    @property
    def seeds(self) -> tuple[int, ...]:  # type: ignore[override]  # it never sets them
        return tuple(dict.fromkeys(seed for each in self.documents for seed in each.seeds))

    @property
    def parts(self) -> Sequence[Evidence]:
        return self.documents

    def read(self, shelf: Shelf) -> Any:
        return self.combine([each.read(shelf) for each in self.documents])

    def spread(self, found: Any) -> str:
        return "; ".join(filter(None, (each.spread(found) for each in self.documents)))

    def shrunk(self) -> Self:
        return replace(self, documents=[each.shrunk() for each in self.documents[: self.enough]])
