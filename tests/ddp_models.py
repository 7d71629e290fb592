"""Small models, the ways to use DDP with them, and the loop in which every rank trains them."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from cases import RECIPES
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

WIDTH = 20
NARROWER = {torch.float64: torch.float32, torch.float32: torch.bfloat16}
SEVERAL = {"bucket_cap_mb": 0.0001}


def mlp(dtype: torch.dtype) -> nn.Module:
    layers = [nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 4)]
    return nn.Sequential(*layers).to(dtype)


class Mixed(nn.Module):
    """The middle layer is in the next narrower dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 40, dtype=dtype)
        self.middle = nn.Linear(40, 40, dtype=NARROWER[dtype])
        self.last = nn.Linear(40, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.middle(self.first(x).tanh().to(self.middle.weight.dtype))
        return self.last(middle.tanh().to(x.dtype))


class Branching(nn.Module):
    """`left` and `right` are used when asked for, `never` never."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, 30, dtype=dtype)
        self.left = nn.Linear(30, 30, dtype=dtype)
        self.right = nn.Linear(30, 30, dtype=dtype)
        self.never = nn.Linear(30, 4, dtype=dtype)

    def forward(self, x: Tensor, left: bool = False, right: bool = False) -> Tensor:
        x = self.trunk(x).tanh()
        if left:
            x = x + self.left(x)
        return x + self.right(x) if right else x


class Tied(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Words(nn.Module):
    """The embedding's gradient is sparse."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(64, 30, sparse=True, dtype=dtype)
        self.last = nn.Linear(30, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words((x.abs() * 16).long().clamp(max=63)))


class RareWords(nn.Module):
    """The first thousand elements of the embedding's gradient are zero; `never` is not used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(80, 30, dtype=dtype)
        self.never = nn.Linear(30, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.words((x.abs() * 16).long().clamp(max=30) + 49)


class Picture(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.filter = nn.Conv2d(5, 16, 2, dtype=dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.last = nn.Linear(16, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 5, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.last(self.filter(x).flatten(1).tanh())


class Gaps(nn.Module):
    """The middle factor does not fill its memory, and does not lie there row by row."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 30, dtype=dtype)
        self.factor = nn.Parameter((0.2 * torch.randn(30, 50, dtype=dtype)).t()[:40])
        self.last = nn.Linear(40, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x).tanh() @ self.factor.t()).tanh())


class Odd(nn.Module):
    """Has a parameter without dimensions and one without elements."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=dtype))
        self.empty = nn.Parameter(torch.zeros(0, 5, dtype=dtype))
        self.last = nn.Linear(WIDTH, 30, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) * self.scale + self.empty.sum()


def _call(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x)


def _left_on_rank_0_right_on_odd_steps(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x, left=dist.get_rank() == 0, right=step % 2 == 1)


def _left_on_all_but_rank_0(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x, left=dist.get_rank() != 0, right=step % 2 == 1)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A way to use DDP. With `uneven`, rank r has r batches less than rank 0, under Join."""

    make: Callable[[torch.dtype], nn.Module] = mlp
    options: Mapping[str, Any] = field(default_factory=lambda: SEVERAL)
    call: Callable[[nn.Module, Tensor, int], Tensor] = _call
    microbatches: int = 1
    uneven: bool = False


SCENARIOS = {
    "one bucket": Scenario(options={}),
    "several buckets": Scenario(),
    "bucket views": Scenario(options=SEVERAL | {"gradient_as_bucket_view": True}),
    "no_sync": Scenario(microbatches=3),
    "static graph": Scenario(options=SEVERAL | {"static_graph": True}),
    "static graph, unused": Scenario(make=Branching, options=SEVERAL | {"static_graph": True}),
    "unused": Scenario(
        make=Branching,
        options=SEVERAL | {"find_unused_parameters": True},
        call=_left_on_rank_0_right_on_odd_steps,
    ),
    "unused, bucket views": Scenario(
        make=Branching,
        options=SEVERAL | {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        call=_left_on_rank_0_right_on_odd_steps,
    ),
    "unused on rank 0": Scenario(
        make=Branching, options=SEVERAL | {"find_unused_parameters": True}, call=_left_on_all_but_rank_0
    ),
    "unused, zeros in front": Scenario(make=RareWords, options=SEVERAL | {"find_unused_parameters": True}),
    "mixed dtypes": Scenario(make=Mixed),
    "channels last": Scenario(make=Picture),
    "tied weights": Scenario(make=Tied),
    "gaps in memory": Scenario(make=Gaps),
    "odd shapes": Scenario(make=Odd),
    "sparse embedding": Scenario(make=Words),
    "uneven inputs": Scenario(uneven=True),
}


def batch(step: int, microbatch: int, dtype: torch.dtype) -> Tensor:
    """Return this rank's inputs."""
    generator = torch.Generator().manual_seed(10_000 * dist.get_rank() + 100 * microbatch + step)
    return torch.randn(8, WIDTH, generator=generator).to(dtype)


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """Return an SGD with `options`, but neither momentum nor weight decay for sparse embeddings."""
    sparse = {m.weight for m in model.modules() if isinstance(m, nn.EmbeddingBag) and m.sparse}
    groups = [{"params": [p for p in model.parameters() if p not in sparse]} | options]
    if sparse:
        groups.append({"params": list(sparse)})
    return torch.optim.SGD(groups, lr=0.05)


class Training:
    """A model in training; with a recipe (or a reducer), that is attached."""

    def __init__(
        self,
        scenario: Scenario | str,
        recipe: tw.reducer.Reducer | str | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        self.scenario = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
        self.dtype, self.scaler = dtype, scaler
        torch.manual_seed(0)
        self.model = DistributedDataParallel(self.scenario.make(dtype), **self.scenario.options)
        self.optimizer = sgd(self.model, **({"momentum": 0.9} | options))
        if recipe is not None:
            self.attach(recipe)

    def attach(self, recipe: tw.reducer.Reducer | str) -> tw.integrations.Attachment:
        recipe = RECIPES[recipe].make() if isinstance(recipe, str) else recipe
        self.attachment = tw.attach(self.model, recipe, optimizer=self.optimizer, scaler=self.scaler)
        return self.attachment

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.module.named_parameters())

    def losses(self, model: nn.Module, step: int) -> list[Callable[[], Tensor]]:
        """Return one function per microbatch that computes its loss."""
        inputs = [batch(step, micro, self.dtype) for micro in range(self.scenario.microbatches)]
        return [lambda x=x: self.scenario.call(model, x, step).square().mean() for x in inputs]  # type: ignore[misc]

    def backward(self, step: int) -> None:
        *early, last = self.losses(self.model, step)
        for loss in early:
            with self.model.no_sync():
                self._scaled(loss()).backward()
        self._scaled(last()).backward()

    def step(self, step: int) -> bool:
        """Do one step, and return whether its gradients were finite; the optimizer steps only then."""
        self.optimizer.zero_grad()
        self.backward(step)
        finite = all(bool(values(g).isfinite().all()) for g in self.gradients().values())
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif finite:
            self.optimizer.step()
        return finite

    def run(self, steps: range) -> Self:
        with self.joined():
            for step in steps[: len(steps) - dist.get_rank()] if self.scenario.uneven else steps:
                self.step(step)
        return self

    def joined(self) -> AbstractContextManager[object]:
        return Join([self.model]) if self.scenario.uneven else nullcontext()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters().items() if p.grad is not None}

    def local_gradients(self, step: int) -> dict[str, Tensor]:
        """Return this rank's own gradients, in no way touched by DDP."""
        total = sum(loss() for loss in self.losses(self.model.module, step))
        assert isinstance(total, Tensor)
        found = torch.autograd.grad(total, list(self.parameters().values()), allow_unused=True)
        return {name: g for name, g in zip(self.parameters(), found, strict=True) if g is not None}

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)


def values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def flat(x: Tensor, p: nn.Parameter) -> Tensor:
    """Return `x` in float64, in the order in which the gradient of `p` lies in memory."""
    x = (x.to_dense() if x.is_sparse else x).detach()
    like = p if torch.ops.aten.is_non_overlapping_and_dense(p) else torch.empty(p.shape, dtype=p.dtype)
    return torch.empty_like(like, dtype=torch.float64).copy_(x).as_strided((p.numel(),), (1,))


def digest(model: nn.Module) -> str:
    """Return a hash over the bits of all parameters."""
    sha = hashlib.sha256()
    for p in model.parameters():
        sha.update(p.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def same(a: Any, b: Any) -> bool:
    """Whether two states are alike to the last bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and _bytes(a) == _bytes(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _bytes(x: Tensor) -> bytes:
    return x.detach().reshape(-1).view(torch.uint8).numpy().tobytes()  # NumPy has no bfloat16
