"""Standard output that may end early: a pipe to `head`, or a device that is full."""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from errno import EDQUOT, ENOSPC
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, cast

_FULL = frozenset((ENOSPC, EDQUOT))


class Printed:
    """Stands in for `sys.stdout`. From the first text on that cannot be written, the rest is dropped.

    The program then ends, unless it `goes_on` to write files. `failure`: why that text could not be written.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.goes_on = stream, False
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write it, or end the program."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Hand on what was written, or end the program."""
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self.failure = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # and what the stream still holds
        if self.failure is not None and not self.goes_on:
            raise SystemExit(1)


def expect_files(paths: Iterable[Path | None]) -> None:
    """Have the program go on to write these, if there are any, though what it prints cannot be written."""
    if isinstance(sys.stdout, Printed):
        sys.stdout.goes_on = any(path is not None for path in paths)


def printing(act: Callable[[], object]) -> int:
    """Run a program. Return its exit code, which is not 0 if it could not print or write all; say so in a line."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # such as ASCII lacks characters
    out, code, failure = Printed(sys.stdout), 0, None
    with redirect_stdout(cast(TextIO, out)):
        try:
            act()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            failure = error
        files, out.goes_on = out.goes_on and not code, True
        out.flush()
    if failure is not None:
        _complain(f"files could not be written: {failure.strerror}; make room for them, and run it again")
    elif out.failure is not None:
        fix = "the files are written as asked" if files else "print to what takes all of it, or write files"
        _complain(f"not all could be printed: {out.failure.strerror}; {fix}")
    return code or int(failure is not None or out.failure is not None)


def _complain(reason: str) -> None:
    with suppress(OSError):  # the same device may be full
        print(f"thinwire: {reason}", file=sys.stderr)
