"""FSDP's backward passes: when one begins, which gradients it brings in which buckets, and when it is over.

FSDP reduces gradients within the island as always. Then each rank holds its shard of the island's gradient, and the
ranks that hold the same shard in other islands put it through the recipe, while backward goes on or after it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo as untraced
from torch.autograd import Variable
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from thinwire.collectives import Group, broadcast_state
from thinwire.integrations.attachments.attachment import Attachment
from thinwire.integrations.sharding.contributions import Contributions
from thinwire.integrations.sharding.copies import Copies
from thinwire.integrations.sharding.fsdp import exchanges_now, held_parameters
from thinwire.integrations.sharding.lane import Coded
from thinwire.integrations.training.gradients import buckets, own_length, used_anywhere
from thinwire.integrations.training.optimizers import Hook
from thinwire.waits import refuse_unfit


@final
class Arrivals:
    """The gradients of one backward after another, in buckets, exchanged while backward goes on if they `may_overlap`.

    `island`: the groups of ranks that hold the parameters together. `length`: how many elements an exchange takes for a
    parameter, alike on all ranks of the attachment. `arrived`: how often each has come in this backward. Collectives
    are those of the mesh.
    """

    def __init__(
        self,
        attachment: Attachment,
        island: Sequence[Group],
        *,
        may_overlap: bool,
        length: Callable[[nn.Parameter], int] = own_length,
    ) -> None:
        self._attachment, self._island, self._may_overlap = attachment, list(island), may_overlap
        self._length = length
        self._arranged = self.overlaps = False
        self._arrange(list(attachment.parameters))
        self.arrived: Counter[nn.Parameter] = Counter()
        self.started: list[Future[Tensor]] = []
        self._reduced: list[Any] = []  # on a GPU, when FSDP had reduced

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets."""
        return sum(bucket.flat.nbytes for bucket in self.buckets)

    def clear(self) -> None:
        """Get ready for a backward. There may be some left of one that raised."""
        self.started.clear()
        self.arrived.clear()

    def note(self, name: str, p: nn.Parameter, *, now: bool) -> None:
        """Note that FSDP has added to the gradient of this shard. `now`: start the buckets that are complete."""
        if self._bucket_of[p] < len(self.started):
            raise RuntimeError(
                f"FSDP reduced the gradient of {name!r} again after its exchange had started, unlike in the first "
                "backward: pass overlap=False"
            )
        self._attachment.steps.gradients.added.add(name)
        self.arrived[p] += 1
        if p.is_cuda:
            self._reduced.append(torch.cuda.current_stream(p.device).record_event())
        if self.overlaps and now:
            for bucket in self.buckets[len(self.started) :]:
                if not all(each in self.arrived for each in bucket.parameters):
                    break
                self._start_next()

    @torch.no_grad()
    def exchange(self) -> None:
        """Replace every shard of the gradient by its mean over the replicas."""
        while self._reduced:
            self._reduced.pop().wait()
        if not self._arranged:
            self._arrange_as_arrived()
        error, used = None, set[Tensor]()
        try:
            while len(self.started) < len(self.buckets):
                self._start_next()
            used |= used_anywhere(list(self._attachment.parameters.values()), self._attachment.group)
            for future in self.started:
                future.wait()
            self.started.clear()
        except Exception as raised:
            error = raised
        self._all_reduce_failures(error)
        for bucket in self.buckets:
            bucket.hand_back(used)
        self._attachment.steps.drop_idle(used)

    def _start_next(self) -> None:
        bucket = self.buckets[len(self.started)]
        bucket.fill()
        self.started.append(self._attachment.reduce(bucket.flat, bucket.parameters))

    def _arrange(self, names: Sequence[str]) -> None:
        parameters = [self._attachment.parameters[name] for name in reversed(names)]
        self.buckets = list(buckets(parameters, length=self._length))
        self._bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket.parameters}

    def _arrange_as_arrived(self) -> None:
        """After the first backward, agree on overlap, if each came once, and on the order in the first replica."""
        self._arranged = True
        names, group = self._attachment.names, self._attachment.group
        order = [*dict.fromkeys([names[p] for p in self.arrived] + list(names.values()))]
        self._arrange(broadcast_state(order, group, 0))
        several = torch.tensor([int(max(self.arrived.values()) > 1)], device=self.buckets[0].flat.device)
        dist.all_reduce(several, dist.ReduceOp.MAX, group)
        self.overlaps = self._may_overlap and not several

    def _all_reduce_failures(self, error: Exception | None) -> None:
        """Make every mean NaN if any shard's is not finite, and raise on every rank what an exchange raised on one."""
        steps = self._attachment.steps
        error = error or steps.failure()
        watched = any(memory.stateful for memory in self._attachment.recipe.memories())
        news = [int(error is not None), int(watched and steps.spoilt), steps.step]
        told = torch.tensor(news, device=self.buckets[0].flat.device)
        for group in self._island:
            dist.all_reduce(told, dist.ReduceOp.MAX, group)
        failed, bad, step = told.tolist()
        if failed:
            self.started.clear()
            raise error or RuntimeError("an exchange has failed between other ranks of this mesh: see their errors")
        steps.step = max(steps.step, step)  # a shard without rows cannot tell when its gradients are zeroed
        if bad:
            steps.spoil()
            for bucket in self.buckets:
                bucket.flat.fill_(torch.nan)


@final
class Backwards:
    """Follows the backward passes of the sharded `modules`, and has what they bring exchanged.

    `contributions`: what is kept from FSDP's reduce-scatter where there are no replicas. There every backward pass is
    exchanged, and FSDP gathers over all ranks of the mesh, so that none evaluates without the others. After each
    exchange, islands compare what their `gathers` have sent.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        attachment: Attachment,
        arrivals: Arrivals,
        gathers: Copies | Coded | None,
        contributions: Contributions | None = None,
    ) -> None:
        self._modules, self._attachment, self._arrivals = modules, attachment, arrivals
        self._gathers, self._contributions = gathers, contributions
        self._queued = self._now = False
        self._evaluated = contributions is None
        self._hooks = [module.register_forward_hook(self._after_forward) for module in modules]
        for module in modules:  # before FSDP's own, which gathers parameters
            self._hooks.append(module.register_forward_pre_hook(self._before_forward, prepend=True))
        arrived = Hook(self._note_arrived)  # modules keep this object alive, and would never go if their parameters did
        for name, p in attachment.parameters.items():
            self._hooks.append(p.register_post_accumulate_grad_hook(partial(arrived, name)))

    @untraced  # nor does Dynamo trace FSDP's own hooks
    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        """Before FSDP's first collective in training, agree on where to go on from: another rank may be loading."""
        membership = self._attachment.membership
        if membership.agreed:
            return
        if module.training and torch.is_grad_enabled():
            membership.agree()
        elif not self._evaluated:  # ranks may load after it
            self._evaluated = True
            membership.agree()
            membership.agreed = False

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

    @untraced  # in a compiled step, Dynamo would look into what autograd calls
    def _before_backward(self, gradient: object) -> None:
        if self._queued:
            return
        if self._attachment.ended:
            while self._hooks:
                self._hooks.pop().remove()
            return
        refuse_unfit("gradients are reduced")
        steps = self._attachment.steps
        steps.close_if_done()
        for name in list(steps.gradients.reduced):
            if steps.gradients.gone(name):
                steps.thrown_away(name)
        self._queue()

    def _queue(self) -> None:
        """Have this backward followed. Raises RuntimeError if FSDP reduces others than those that are exchanged."""
        held, served = held_parameters(self._modules), self._attachment.names.keys()
        if not served <= held or any(p.requires_grad for p in held - served):
            raise RuntimeError(
                "parameters have been replaced or unfrozen since shard() or scatter(), as load_state_dict(assign=True) "
                "does: call it again, with an optimizer of the current parameters"
            )
        self._queued, self._now = True, self._contributions is not None or exchanges_now(self._modules)
        self._attachment.steps.adding = None
        self._arrivals.clear()
        if self._contributions is not None:
            self._contributions.clear()
        at_the_end = Variable._execution_engine.queue_callback
        at_the_end(partial(at_the_end, self._after_backward))  # behind what FSDP has queued since

    @untraced
    def _note_arrived(self, name: str, p: nn.Parameter) -> None:
        steps = self._attachment.steps
        own, steps.adding = steps.adding == name, None  # by autograd, as a penalty on parameters does, and not by FSDP
        if own and self._contributions is not None:
            self._contributions.keep(name)
        if own and not self._queued:
            return
        if not self._queued:
            raise RuntimeError(
                f"thinwire cannot follow the gradient of {name!r}: return tensors, or containers of them that "
                "torch.utils._pytree knows, from the modules that fully_shard was called with"
            )
        if self._contributions is not None and not own:
            self._contributions.take(name, p)
        self._arrivals.note(name, p, now=self._now)

    @untraced
    def _after_backward(self) -> None:
        self._queued = False
        if self._arrivals.arrived and self._now:
            self._attachment.membership.agree()
            self._arrivals.exchange()
            if self._gathers:
                self._gathers.compare()
