"""Whoever listens to optimizers is told of their steps, whatever other threads do meanwhile."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from thinwire.integrations.training import optimizers


class _Listener:
    """Counts steps."""

    def __init__(self) -> None:
        self.steps = 0

    def about_to_take(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Observer`."""

    def taken(self, optimizer: torch.optim.Optimizer, *, evaluated: bool = False) -> None:
        self.steps += 1


@pytest.fixture
def restless() -> Iterator[None]:
    """Have threads take turns after a microsecond, and not after five thousand."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("restless")
def test_threads_may_step_while_others_begin_to_listen() -> None:
    """Hogwild's threads, and virtual workers, each attach what is theirs while another one is in its step."""
    listeners, done = [_Listener() for _ in range(300)], Event()
    for listener in listeners:
        optimizers.observe(listener)

    def come_and_go() -> None:
        while not done.is_set():
            late = [_Listener() for _ in range(50)]
            for each in late:
                optimizers.observe(each)

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(come_and_go)
        try:
            for _ in range(200):
                optimizer.step()
        finally:
            done.set()
        other.result()
    assert {listener.steps for listener in listeners} == {200}
