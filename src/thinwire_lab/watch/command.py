"""`thinwire watch`, from addresses to tables that are drawn anew every few seconds."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from io import StringIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from thinwire.errors import ServerError
from thinwire.server.environment import split
from thinwire.server.joining import given_secret, secret_of
from thinwire_lab.inputs import BadInput
from thinwire_lab.show.table import Table
from thinwire_lab.show.terminal import complain, print_titled
from thinwire_lab.watch.connection import Watch
from thinwire_lab.watch.view import Look, view

_FAILED, _INTERRUPTED = 1, 130


def run(addresses: Sequence[str], *, every: float, once: bool) -> int:
    """Show the servers until one is gone or the user has seen enough, and return the exit code.

    Raises BadInput for what is no address, and for a time that is not above 0.
    """
    _check(addresses, every)
    try:
        with ExitStack() as stack:
            watches = {each: stack.enter_context(Watch(each)) for each in addresses}
            _once(watches, every) if once else _on_and_on(watches, every)
    except ServerError as error:
        complain("watch", str(error))
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _check(addresses: Sequence[str], every: float) -> None:
    if not every > 0:
        raise BadInput(f"--every is {every:g}; expected seconds, more than 0")
    try:
        for each in addresses:
            secret_of(given_secret(None), split(each)[0])
    except ValueError as error:
        raise BadInput(str(error)) from error


def _once(watches: dict[str, Watch], every: float) -> None:
    before = _looks(watches)
    time.sleep(every)
    for address, now in _looks(watches).items():
        print_titled(Console(), view(address, before[address], now))


def _on_and_on(watches: dict[str, Watch], every: float) -> None:
    """Draw in place on a terminal; elsewhere, print one below the other."""
    console, before = Console(), _looks(watches)
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            time.sleep(every)
            now = _looks(watches)
            drawn = Group(*(_drawn(console, view(each, before[each], look)) for each, look in now.items()))
            console.print(drawn) if live is None else live.update(drawn, refresh=True)
            before = now


def _drawn(console: Console, table: Table) -> Text:
    paper = StringIO()
    print_titled(Console(file=paper, width=console.width, force_terminal=console.is_terminal), table)
    return Text.from_ansi(paper.getvalue())


def _looks(watches: dict[str, Watch]) -> dict[str, Look]:
    return {address: Look(at=time.monotonic(), status=each.status()) for address, each in watches.items()}
