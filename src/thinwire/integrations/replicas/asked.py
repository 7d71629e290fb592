"""What was `attach` asked for? A recipe, a plan, or a budget within which it decides while you train."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from thinwire.collectives import Group
from thinwire.planner.candidates import Budget
from thinwire.planner.live import Adaptive
from thinwire.planner.losses import OptimizerName
from thinwire.planner.plan import Plan, Why
from thinwire.reducer import Reducer

_log = logging.getLogger("thinwire")

Asked = Reducer | Plan | Budget


def asked_for(how: object, optimizer: OptimizerName | None) -> Asked:
    """Return the recipe, plan or budget asked for: "auto" is the budget for this optimizer. Raises TypeError."""
    if isinstance(how, Budget):
        return replace(how, optimizer=how.optimizer or optimizer)
    if isinstance(how, str) and how == "auto":  # arrays compare element by element
        return Budget.under(optimizer)
    if not isinstance(how, Reducer | Plan):
        raise TypeError(
            "attach takes a recipe such as recipes.topk(density=0.01), a plan from thinwire.plan, a Budget, or "
            f'"auto"; got {how!r:.60}'
        )
    return how


def online_budget(budget: Budget, group: Group, *, has_momentum: bool) -> Budget:
    """Return the budget of what can be switched on and off in training, and log what is left out, and why."""
    if budget == Budget() and group.rank() == 0:
        _say_that_none_is_known()
    budget = _leaving_out(budget, budget.switchable(), _NOT_IN_TRAINING, group)
    return budget if has_momentum else _leaving_out(budget, budget.without_momentum(), _NONE_TO_TAKE_FROM, group)


def chosen(
    asked: Asked, parameters: Mapping[str, nn.Parameter], sparse: set[torch.Tensor], caps: list[int] | None
) -> tuple[Reducer, Callable[[], Why] | None]:
    """Return the reducer, and what says why, unless you chose it; ValueError for the plan of another model."""
    if isinstance(asked, Reducer):
        return asked, None
    if isinstance(asked, Budget):
        adaptive = Adaptive(asked, sizes=[p.numel() for p in parameters.values() if p not in sparse], caps=caps)
        return adaptive, adaptive.why
    if strangers := sorted(asked.choice.keys() - parameters.keys()):
        raise ValueError(f"the plan has a tensor {strangers[0]!r}, which this model lacks: make a plan for this model")
    return asked.reducer(), asked.why


_NONE_TO_TAKE_FROM = (
    "it takes momentum out of the optimizer: pass attach(..., optimizer=) one with momentum, such as AdamW, that holds "
    "the whole model"
)
_NOT_IN_TRAINING = (
    "its updates are much larger than gradients, and an optimizer cannot switch between the two during training: "
    "attach its recipe, or a plan made beforehand by thinwire.plan"
)


@cache  # once in a process
def _say_that_none_is_known() -> None:
    _log.warning(
        'attach(model, "auto") does not know the optimizer, on which the loss of each method depends, and may choose '
        "sparsification: pass attach(..., optimizer=optimizer), or a Budget"
    )


def _leaving_out(budget: Budget, less: Budget, why: str, group: Group) -> Budget:
    """Say what the smaller budget leaves out, and why, and return it."""
    level = logging.DEBUG if group.rank() else logging.INFO
    for name in budget.names if less != budget else ():
        if name not in less.names:
            _log.log(level, "%s is left out, as %s", name, why)
    return less
