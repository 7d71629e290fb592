"""Runs the rows of a section in processes of their own, ends those that hang, and starts others for what is left."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from signal import Signals
from threading import Event
from typing import IO, Any

import torch

from thinwire_lab.check.findings import Finding, Found, merged
from thinwire_lab.check.launch import Launch
from thinwire_lab.check.sections import Section
from thinwire_lab.check.worker import Spec
from thinwire_lab.cluster.worker import LOOPBACK, Channel, HungUp, environment

WORKER = "thinwire_lab.check.worker"
"""The module that processes run."""
_STARTING = 180.0  # seconds to import everything and to join
_AGREEING = 45.0  # seconds for the other ranks to end a row that hangs there
_TRIES = 2  # to join, as a process that dies while joining leaves the others without a group
_LOOKING = 0.5  # seconds until we look whether it is over


@dataclass
class _Member:
    """A process, and what it has said."""

    spec: Spec
    process: subprocess.Popen[bytes]
    pipe: Channel
    errors: IO[bytes]
    deadline: float
    row: int = 0
    next: int | None = None
    unjoined: str = ""
    found: dict[int, Finding] = field(default_factory=dict)

    @classmethod
    def start(cls, section: Section, launch: Launch, device: str, rank: int, row: int) -> _Member:
        """Start a process that works through the rows of a section from `row` on."""
        ours, theirs = socket.socketpair()
        there: dict[str, Any] = {"store": launch.address, "prefix": launch.prefix, "threads": launch.threads(section)}
        spec = Spec(section=section, start=row, device=device, rank=rank, pipe=theirs.fileno(), **there)
        interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), LOOPBACK) if launch.alone else {}
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        process = subprocess.Popen(
            [sys.executable, "-Pu", "-X", "faulthandler", "-m", WORKER, json.dumps(asdict(spec))],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=[spec.pipe],
            process_group=0,  # ^C is for us: a row that it ended would look like one that failed
            env=os.environ | environment(spec.threads) | interfaces,
        )
        theirs.close()
        return cls(spec, process, Channel(ours), errors, time.monotonic() + _STARTING, row)

    def hear(self, limit: float) -> bool:
        """Take in what it said; return whether more may come."""
        try:
            messages = self.pipe.receive()
        except HungUp:
            return False
        for message in messages:
            if "begin" in message:
                self.deadline = time.monotonic() + limit + (_STARTING if not self.found else 0)
                self.row = message["begin"]
            elif "found" in message:
                self.found[self.row] = Finding(**message["found"])
                self.deadline = time.monotonic() + limit + _AGREEING
            self.next = message.get("next", self.next)
            self.unjoined = message.get("unjoined", self.unjoined)
        return True

    def end(self) -> None:
        """End it, if it has not ended, and note why the row it was at has no finding."""
        hung = time.monotonic() >= self.deadline
        if hung or self.process.poll() is None:
            try:
                self.process.wait(0 if hung else 10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        self.pipe.close()
        if self.next is None and self.row not in self.found:
            reason = f"no group: {self.unjoined}" if self.unjoined else self._cause(hung, code)
            section = self.spec.section
            self.found[self.row] = Finding(section=section.title, name=section.rows[self.row], ok=False, said=reason)
        self.errors.close()

    def _cause(self, hung: bool, code: int) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        last = next((line.strip() for line in reversed(lines) if "rror" in line), "")
        if hung:
            return f"no answer within {self.spec.section.limit:g} s"
        how = f"killed by {Signals(-code).name}" if code < 0 else f"its process ended with status {code}"
        return f"{how}: {last[:200]}" if last else how


def work(section: Section, launch: Launch, device: str, tell: Callable[[Finding], None]) -> list[Finding]:
    """Do a section together with the other processes. Return, on rank 0, what came of each row."""
    mine: Found = {}
    devices = 1 if device == "cpu" else torch.cuda.device_count()
    if section.backend or launch.local_rank < devices:  # each has one of its own, or they meet in a group
        mine = run(section, launch, device if device == "cpu" else f"cuda:{launch.local_rank % devices}", tell)
    every = launch.gathered(section, mine)
    none = Finding(section=section.title, name="", ok=None, said="not run, as there was no group")
    return [merged(every[i]) if every.get(i) else replace(none, name=row) for i, row in enumerate(section.rows)]


def run(section: Section, launch: Launch, device: str, tell: Callable[[Finding], None]) -> Found:
    """Do all rows of a section; `tell` hears of each as this process's ranks have found it."""
    lanes = [replace(section, rows=section.rows[lane :: section.lanes], lanes=1) for lane in range(section.lanes)]
    over = Event()
    with ThreadPoolExecutor(len(lanes)) as threads:
        try:
            dealt = list(threads.map(lambda lane: _run(lane, launch, device, tell, over), lanes))
        finally:
            over.set()  # ^C is heard in this thread alone
    return {row * section.lanes + lane: by for lane, found in enumerate(dealt) for row, by in found.items()}


def _run(section: Section, launch: Launch, device: str, tell: Callable[[Finding], None], over: Event) -> Found:
    found: Found = {}
    row = without_group = 0
    while row < len(section.rows) and without_group < _TRIES and not over.is_set():
        ranks = range(section.world) if launch.alone else [launch.rank]
        members = [_Member.start(section, launch, device, rank, row) for rank in ranks]
        try:
            _attend(members, section, launch, found, tell, over)
        finally:
            for member in members:
                if member.process.poll() is None:
                    member.process.kill()
        without_group = without_group + 1 if any(member.unjoined for member in members) else 0
        row = max(member.row for member in members) + 1
    return found


def _attend(
    members: Sequence[_Member],
    section: Section,
    launch: Launch,
    found: Found,
    tell: Callable[[Finding], None],
    over: Event,
) -> None:
    """Listen until all have ended, or until it is over. Note, and tell of, each row that all of them have done."""
    with selectors.DefaultSelector() as selector:
        for member in members:
            selector.register(member.pipe, selectors.EVENT_READ, member)
        while (open_ := [key.data for key in selector.get_map().values()]) and not over.is_set():
            soonest = min(member.deadline for member in open_) - time.monotonic()
            ready = [key.data for key, _ in selector.select(min(_LOOKING, max(0.0, soonest)))]
            ended = [member for member in ready if not member.hear(section.limit)]
            ended += [member for member in open_ if member not in ready and time.monotonic() >= member.deadline]
            for member in ended:
                selector.unregister(member.pipe)
                member.end()
                if member.next is None and section.backend:
                    launch.store.set(member.spec.status(member.row, member.spec.rank), "failed")
            common = set.intersection(*(set(member.found) for member in members))
            for row in sorted(common - found.keys()):
                found[row] = {member.spec.rank: member.found[row] for member in members}
                tell(merged(found[row]))
