"""The processes of a cluster as the process that wants them sees them."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict

from thinwire.tools.cluster.channel import Channel, HungUp
from thinwire.tools.cluster.supervisor import Setup

_PATIENCE = 1.0  # seconds that a supervisor has to end its workers


class Processes:
    """A supervisor and, once it has sent ``ready``, its workers. They end with this process, however that ends."""

    def __init__(self, world: int, rate: int | None, handler: str, *, namespaces: bool) -> None:
        pairs = [socket.socketpair() for _ in range(world + 1)]
        self.control, *self.workers = (Channel(ours) for ours, _ in pairs)
        control, *workers = (theirs.fileno() for _, theirs in pairs)
        setup = Setup(handler=handler, bits_per_second=rate, namespaces=namespaces, control=control, workers=workers)
        command = [sys.executable, "-Pu", "-X", "faulthandler", "-m", "thinwire.tools.cluster.supervisor"]
        self._supervisor = subprocess.Popen(
            [*command, json.dumps(asdict(setup))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[control, *workers],
            env=os.environ | _environment(world),
            start_new_session=True,  # so that ^C reaches this process only, and all others can be killed together
        )
        for _, theirs in pairs:
            theirs.close()

    def end(self) -> str:
        """End them all, whatever they are doing, and return what the supervisor printed."""
        with suppress(HungUp):
            self.control.finish()
            while self.control.is_ready(_PATIENCE):
                self.control.receive()
        with suppress(ProcessLookupError, PermissionError):  # all may be gone, which macOS calls not permitted
            os.killpg(self._supervisor.pid, signal.SIGKILL)  # not waited for before, so the number is still theirs
        _, printed = self._supervisor.communicate()
        for channel in (self.control, *self.workers):
            channel.close()
        return printed.decode(errors="replace")


def _environment(world: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // world)
    return {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), "OMP_NUM_THREADS": str(threads)}
