"""Whoever listens to optimizers is told of their steps, whatever other threads do meanwhile."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.integrations.training import optimizers


class _Listener:
    """Counts steps, and closures that have been evaluated. It also takes part, and notes what it is told."""

    def __init__(self) -> None:
        self.steps = self.evaluated = 0
        self.told: list[str] = []

    def about_to_take(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Observer`."""

    def taken(self, optimizer: torch.optim.Optimizer, *, evaluated: bool = False) -> None:
        self.steps += not evaluated
        self.evaluated += evaluated

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.told.append("before")

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        self.told.append("apply")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.told.append("after")

    def give_back(self) -> None:
        self.told.append("give back")


class _Clipping(torch.optim.AdamW):
    """Clips within its step, as some do."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise OverflowError
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


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


def _clipping() -> _Clipping:
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # torch wraps the step of classes that have been made
    optimizer = _Clipping([torch.nn.Parameter(torch.zeros(1))])
    _backward(optimizer)
    return optimizer


def _backward(optimizer: torch.optim.Optimizer) -> Tensor:
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = torch.ones(1)
    return p.sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, as it compiles
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_within_a_step_of_the_same_optimizer_is_a_part_of_it(compiled: bool) -> None:
    listener, optimizer = _Listener(), _clipping()
    optimizers.observe(listener)
    optimizers.take_part(listener)
    step = torch.compile(lambda: optimizer.step(), backend="eager") if compiled else optimizer.step
    step()
    assert (listener.steps, listener.evaluated) == (1, 0)
    assert listener.told == ["before", "apply", "after"]
    optimizer.step(lambda: _backward(optimizer))
    assert (listener.steps, listener.evaluated) == (2, 1)
    assert listener.told[3:] == ["before", "apply", "after"]


def test_a_step_after_one_that_raised_is_told() -> None:
    listener, optimizer = _Listener(), _clipping()
    optimizers.observe(listener)
    optimizer.fails = True
    with pytest.raises(OverflowError):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    assert listener.steps == 1


def test_a_step_within_a_step_of_another_optimizer_is_told() -> None:
    listener, inner = _Listener(), _clipping()
    outer = torch.optim.SGD(inner.param_groups[0]["params"])
    outer.register_step_pre_hook(lambda *_: inner.step())
    optimizers.observe(listener)
    outer.step()
    assert listener.steps == 2
