"""FSDP's backward passes: when one begins, which gradients it brings, and when it is over."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as untraced
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from thinwire.collectives import Group
from thinwire.errors import StateError
from thinwire.integrations.attachments.attachment import Attachment
from thinwire.integrations.membership import state
from thinwire.integrations.membership.together import together
from thinwire.integrations.sharding.arrivals import Arrivals
from thinwire.integrations.sharding.fsdp import exchanges_now, held_parameters
from thinwire.waits import refuse_captured


@final
class Backwards:
    """Follows the backward passes of the sharded `modules`, and has what they bring exchanged if it `exchanges`.

    `evaluate_together`: whether FSDP gathers over all ranks of the mesh, so that none evaluates without the others.
    `on_start` is called when one begins, `on_arrival` when FSDP has added to a gradient, and `on_exchanged` after the
    exchange.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        attachment: Attachment,
        groups: Sequence[Group],
        arrivals: Arrivals,
        *,
        exchanges: Callable[[Iterable[nn.Module]], bool] = exchanges_now,
        evaluate_together: bool = False,
        on_start: Callable[[], None] = lambda: None,
        on_arrival: Callable[[str, nn.Parameter], None] = lambda name, p: None,
        on_exchanged: Callable[[], None] = lambda: None,
    ) -> None:
        self._modules, self._attachment, self._groups, self._arrivals = modules, attachment, groups, arrivals
        self._exchanges, self._on_start, self._on_arrival = exchanges, on_start, on_arrival
        self._on_exchanged = on_exchanged
        self._queued = self._agreed = self._now = False
        self._evaluated = not evaluate_together
        self._hooks = [module.register_forward_hook(self._after_forward) for module in modules]
        for module in modules:  # before FSDP's own, which gathers parameters
            self._hooks.append(module.register_forward_pre_hook(self._before_forward, prepend=True))
        me = weakref.ref(self)  # modules keep this object alive, and would never go if their parameters did
        for name, p in attachment.parameters.items():
            self._hooks.append(p.register_post_accumulate_grad_hook(partial(_arrived, me, name)))

    def compare(self, mine: Callable[[], state.Standing]) -> None:
        """Compare where the ranks of the mesh stand. Raises on every rank of it or on none."""
        together(self._groups, lambda group: state.agree(group, mine), ValueError, StateError)
        self._agreed = True

    @untraced  # nor does Dynamo trace FSDP's own hooks
    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        """Before FSDP's first collective in training, agree on where to go on from: another rank may be loading."""
        if self._agreed:
            return
        if module.training and torch.is_grad_enabled():
            self._agree()
        elif not self._evaluated:  # ranks may load after it
            self._evaluated = True
            self._agree()
            self._agreed = False

    @untraced  # nor does Dynamo trace FSDP's own hooks
    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        """Learn of the backward that starts at this output, before FSDP adds to any gradient."""
        if not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() < 0:  # else a checkpoint recomputes
            self._queued = False  # a backward may have raised
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(self._before_backward)

    def _before_backward(self, gradient: object) -> None:
        if self._queued:
            return
        if self._attachment.ended:
            while self._hooks:
                self._hooks.pop().remove()
            return
        refuse_captured("gradients are reduced")
        steps = self._attachment.steps
        steps.close_if_done()
        for name in list(steps.gradients.reduced):
            if steps.gradients.gone(name):
                steps.thrown_away(name)
        self._queue()

    def _queue(self) -> None:
        self._check_served()
        self._queued, self._now = True, self._exchanges(self._modules)
        self._arrivals.clear()
        self._on_start()
        # Once more at the end, behind what FSDP has queued since.
        _at_the_end(lambda: _at_the_end(self._after_backward))

    def _check_served(self) -> None:
        """Raise RuntimeError if FSDP reduces other parameters than those whose gradients are exchanged."""
        held, served = held_parameters(self._modules), self._attachment.names.keys()
        if not served <= held or any(p.requires_grad for p in held - served):
            raise RuntimeError(
                "parameters have been replaced or unfrozen since shard() or scatter(), as load_state_dict(assign=True) "
                "does: call it again, with an optimizer of the current parameters"
            )

    def _note_arrived(self, name: str, p: nn.Parameter) -> None:
        """Note that FSDP has added to the gradient of this shard."""
        if not self._queued:
            raise RuntimeError(
                f"thinwire cannot follow the gradient of {name!r}: return tensors, or containers of them that "
                "torch.utils._pytree knows, from the modules that fully_shard was called with"
            )
        self._on_arrival(name, p)
        self._arrivals.note(name, p, now=self._now)

    def _after_backward(self) -> None:
        self._queued = False
        if self._arrivals.some and self._now:
            if not self._agreed:
                self._agree()
            self._arrivals.exchange()
            self._on_exchanged()

    def _agree(self) -> None:
        """Agree on where to go on from, in the collectives that `load_state_dict` has on ranks that call it."""
        steps = self._attachment.steps
        self.compare(lambda: state.Standing(step=steps.step, draw=steps.draw))


def _arrived(followed: "weakref.ref[Backwards]", name: str, p: nn.Parameter) -> None:
    backwards = followed()
    if backwards is not None:
        backwards._note_arrived(name, p)


def _at_the_end(call: Callable[[], None]) -> None:
    """Call this when the backward pass that is under way is over."""
    Variable._execution_engine.queue_callback(call)
