"""Replicas without DDP: the same training as DDP's, under everything that a step may bring."""

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ddp_models import SCENARIOS, WIDTH, Scenario, Training, digest, mlp, same, sgd, values
from ranks import Ranks, told
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.formats.base import _table as tables
from thinwire.recipes import METHODS, Method

Default = Callable[[], AbstractContextManager[Any]]
STEPS = 4
STATEFUL = [name for name, case in RECIPES.items() if any(memory.stateful for memory in case.make().memories())]
# What DDP has to be told about, replicas take as it comes.
USES = {name: use for name, use in SCENARIOS.items() if use.make is not mlp and "static_graph" not in use.options}


class Copies(Training):
    """A model in training that is replicated, unlike on each rank before."""

    def __init__(
        self,
        scenario: Scenario | str,
        recipe: tw.reducer.Reducer | str,
        *,
        dtype: torch.dtype = torch.float32,
        scaler: torch.amp.GradScaler | None = None,
        late: bool = False,
        **options: Any,
    ) -> None:
        self.scenario = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
        self.dtype, self.scaler = dtype, scaler
        torch.manual_seed(dist.get_rank())
        self.module = self.scenario.make(dtype)
        self.optimizer = sgd(self.module, **({"momentum": 0.9} | options))
        if late:
            _give_momentum(self.optimizer)
        recipe = RECIPES[recipe].make() if isinstance(recipe, str) else recipe
        self.replicas = tw.replicate(self.module, recipe, optimizer=self.optimizer, scaler=scaler)
        self.attachment = self.replicas.attachment

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def backward(self, step: int) -> None:
        for loss in self.losses(self.module, step):
            self._scaled(loss()).backward()
        self.replicas.reduce()

    def local_gradients(self, step: int) -> dict[str, Tensor]:
        total = sum(loss() for loss in self.losses(self.module, step))
        assert isinstance(total, Tensor)
        found = torch.autograd.grad(total, list(self.parameters().values()), allow_unused=True)
        return {name: g for name, g in zip(self.parameters(), found, strict=True) if g is not None}


def _give_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer one that has been at work; no two elements of a parameter's momentum are alike."""
    for p in optimizer.param_groups[0]["params"]:
        momentum = torch.arange(p.numel(), dtype=p.dtype).view(p.shape) / (p.numel() + 1)
        optimizer.state[p]["momentum_buffer"] = torch.empty_like(p).copy_(momentum).detach()


# --- as DDP ---


def _both(scenario: str, recipe: str) -> tuple[str, str, bool, int]:
    """Return what replicas and DDP make of the same model, whether the replicas are alike, and the steps counted."""
    copies = Copies(scenario, recipe).run(range(STEPS))
    attached = Training(scenario, recipe).run(range(STEPS))
    attachment = copies.attachment
    return digest(copies.module), digest(attached.model), attachment.verify_replicas(), attachment.step


@pytest.mark.grid
# To the bit, as a sum of two has no order. Three backwards to a step in "no_sync".
@pytest.mark.parametrize("scenario", ["one bucket", "no_sync"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_that_of_ddp_to_the_bit(ranks: Ranks, recipe: str, scenario: str) -> None:
    (one, *_), _ = results = ranks.run(2, _both, scenario, recipe)
    assert results == [(one, one, True, STEPS)] * 2


def _late(scenario: str) -> tuple[str, str, float]:
    copies, attached = Copies(scenario, "dgc", late=True), Training(scenario)
    _give_momentum(attached.optimizer)
    attached.attach("dgc")
    left = copies.optimizer.param_groups[0]["momentum"]
    return digest(copies.run(range(STEPS)).module), digest(attached.run(range(STEPS)).model), left


@pytest.mark.parametrize("scenario", ["several buckets", "channels last"])
def test_momentum_moves_as_under_ddp(ranks: Ranks, scenario: str) -> None:
    for copies, attached, left in ranks.run(2, _late, scenario):
        assert copies == attached
        assert left == 0.9


@pytest.mark.parametrize("recipe", ["dense", "topk", "dgc"])
def test_one_replica_is_one_rank_of_ddp(ranks: Ranks, recipe: str) -> None:
    ((one, other, alike, steps),) = ranks.run(1, _both, "several buckets", recipe)
    assert (one, alike, steps) == (other, True, STEPS)


@pytest.mark.grid
@pytest.mark.parametrize("recipe", ["dense", "topk", "dgc", "gtopk"])
@pytest.mark.parametrize("scenario", USES)
def test_models_out_of_the_ordinary_train_as_under_ddp(ranks: Ranks, scenario: str, recipe: str) -> None:
    (one, *_), _ = results = ranks.run(2, _both, scenario, recipe)
    assert results == [(one, one, True, STEPS)] * 2


def _alike(recipe: str) -> dict[str, tuple[bool, int]]:
    copies = {use: Copies(use, recipe).run(range(STEPS)) for use in ("several buckets", "unused", "sparse embedding")}
    return {use: (c.attachment.verify_replicas(), c.attachment.step) for use, c in copies.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_three_replicas_stay_bit_identical(ranks: Ranks, recipe: str) -> None:
    for found in ranks.run(3, _alike, recipe):
        assert set(found.values()) == {(True, STEPS)}


def _means(scenario: str) -> float:
    """Return how far the dense recipe's gradients are from the mean of what each rank finds alone."""
    copies, far = Copies(scenario, "dense"), 0.0
    for step in range(2):
        mine = copies.local_gradients(step)
        copies.optimizer.zero_grad()
        copies.backward(step)
        for name, p in copies.parameters().items():
            total = mine[name].to_dense().float().clone() if name in mine else torch.zeros(p.shape)
            dist.all_reduce(total)
            found = torch.zeros(()) if p.grad is None else p.grad.to_dense()
            far = max(far, float((found - total / dist.get_world_size()).abs().sum()))
    return far


@pytest.mark.parametrize("scenario", [name for name in USES if name != "mixed dtypes"])
def test_the_dense_recipe_gives_the_mean(ranks: Ranks, scenario: str) -> None:
    assert max(ranks.run(3, _means, scenario)) < 1e-5


def _small_buckets(recipe: str) -> tuple[int, str, str]:
    """Return how many buckets there were, and what comes of training with and without them."""
    whole = Copies("mixed dtypes", recipe).run(range(STEPS))
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(importlib.import_module("thinwire.integrations.training.gradients"), "BYTES", 600)
        parted = Copies("mixed dtypes", recipe).run(range(STEPS))
    assert parted.attachment.verify_replicas()
    return len(parted.replicas._buckets), digest(parted.module), digest(whole.module)


@pytest.mark.parametrize("recipe", ["dense", "topk", "dgc"])
def test_how_many_buckets_there_are_changes_no_bit(ranks: Ranks, recipe: str) -> None:
    for count, parted, whole in ranks.run(2, _small_buckets, recipe):
        assert count == 3
        assert parted == whole


# --- what is broadcast, and to whom ---


def _stage(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    stage = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Linear(5, 6), nn.Embedding(7, 3, sparse=True))
    stage.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for p in stage[2].parameters():
        p.requires_grad_(False)
    stage.register_buffer("noise", torch.randn(3, 2).t())
    stage.register_buffer("flags", torch.rand(9) > 0.5)
    stage.register_buffer("hidden", torch.randn(2, dtype=torch.complex64), persistent=False)
    return stage


def _on_a_mesh() -> tuple[list[Tensor], list[Tensor], list[str], list[Tensor]]:
    """Return all there is of two stages after replicating over columns of a mesh, the first rank's, and gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    rank, first = dist.get_rank(), mesh.get_local_rank("stage")
    stages = [_stage(10 * rank + i) for i in range(2)]
    replicas = tw.replicate(stages, tw.recipes.dense(), group=mesh.get_group("replica"))
    for stage in stages:
        for p in stage.parameters():
            there = p.requires_grad and (p.dim() > 2 or (p.dim() == 1 and first == 0))
            p.grad = torch.full_like(p, float(rank)) if there else None
    replicas.reduce()
    everything = [t.detach() for stage in stages for t in (*stage.parameters(), *stage.buffers())]
    expected = [
        t.detach() for i in range(2) for s in (_stage(10 * first + i),) for t in (*s.parameters(), *s.buffers())
    ]
    gradients = [p.grad for stage in stages for p in stage.parameters() if p.grad is not None]
    return everything, expected, list(replicas.attachment.parameters), gradients


def test_all_there_is_of_several_stages_comes_from_the_first_of_its_replicas(ranks: Ranks) -> None:
    for rank, (found, expected, names, gradients) in enumerate(ranks.run(4, _on_a_mesh)):
        assert len(found) == len(expected) == 2 * 13
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))
        assert names == [
            f"{i}.{name}" for i in range(2) for name in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight")
        ]
        assert len(gradients) == (2 if rank % 2 else 8)  # the other column's do not count
        assert all(bool((gradient == rank % 2 + 1).all()) for gradient in gradients)


KINDS = (torch.bool, torch.int16, torch.uint16, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)


def _sent_in_any_dtype() -> list[float]:
    net = nn.Linear(4, 4)
    for i, dtype in enumerate(KINDS):
        net.register_buffer(f"of_kind_{i}", torch.tensor(float(dist.get_rank() == 0)).to(dtype))
    tw.replicate(net, tw.recipes.dense())
    return [float(x.to(torch.complex64).real) for x in net.buffers()]


def test_parameters_and_buffers_of_any_dtype_come_from_the_first_rank(ranks: Ranks) -> None:
    assert ranks.run(2, _sent_in_any_dtype) == [[1.0] * len(KINDS)] * 2


# --- gradients that are not there ---


class Pair(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(WIDTH, 30, dtype=dtype), nn.Linear(WIDTH, 30, dtype=dtype)
        self.words = nn.EmbeddingBag(8, 30, sparse=True, dtype=dtype)

    def forward(self, x: Tensor, other: float | None, words: bool) -> Tensor:
        y = self.used(x)
        y = y if other is None else y + self.other(x) * other
        return y + self.words(torch.arange(len(x))[:, None] % 5) if words else y


def _dead_on_rank_0(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x, 0.0 if dist.get_rank() == 0 else None, False)


def _words_on_rank_1(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x, None, dist.get_rank() == 1)


def _absent(call: Callable[..., Tensor], recipe: str) -> tuple[dict[str, str], bool]:
    """Return what gradients there are after some steps with momentum and weight decay, and whether replicas agree."""
    copies = Copies(Scenario(make=Pair, call=call), RECIPES[recipe].make())
    for p in copies.parameters().values():
        p.detach().fill_(0.25)
    copies.optimizer.param_groups[0]["weight_decay"] = 0.0 if RECIPES[recipe].momentum else 0.1
    copies.run(range(STEPS))
    kinds = {name: str(g.layout).removeprefix("torch.") for name, g in copies.gradients().items()}
    return kinds, copies.attachment.verify_replicas()


DENSE = {"used.weight": "strided", "used.bias": "strided"}
OTHER = {"other.weight": "strided", "other.bias": "strided"}


@pytest.mark.grid
@pytest.mark.parametrize("recipe", ["dense", "topk", "dgc", "gtopk"])
@pytest.mark.parametrize(
    ("call", "gradients"),
    [(_dead_on_rank_0, DENSE | OTHER), (_words_on_rank_1, DENSE | {"words.weight": "sparse_coo"})],
)
def test_replicas_agree_on_which_gradients_there_are(
    ranks: Ranks, call: Callable[..., Tensor], gradients: dict[str, str], recipe: str
) -> None:
    assert ranks.run(3, _absent, call, recipe) == [(gradients, True)] * 3


def _idle() -> tuple[int, float]:
    """Reduce twice a step, without a gradient for the second layer; then keep a step by hand."""
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = tw.replicate(model, tw.recipes.topk(density=0.01), optimizer=optimizer)

    def reduce(*layers: nn.Module) -> None:
        sum((layer(torch.randn(3, 64)).square().sum() for layer in layers), torch.zeros(())).backward()
        replicas.reduce()

    def waits() -> Tensor:
        memories = replicas.state_dict()["memories"]
        return next(m[name]["residual"].clone() for m in memories for name in m if name.endswith("1.weight"))

    reduce(*model)
    optimizer.step()
    optimizer.zero_grad()
    before = waits()
    for _ in range(2):
        reduce(model[0])
        reduce(model[0])
        optimizer.step()
        optimizer.zero_grad()
    reduce(model[0])
    replicas.keep_step()
    return replicas.attachment.step, float((waits() - before).abs().max())


def test_what_no_replica_used_neither_counts_steps_nor_loses_what_waits(ranks: Ranks) -> None:
    assert ranks.run(2, _idle) == [(4, 0.0)] * 2


def _nothing() -> list[str]:
    frozen = mlp(torch.float32).requires_grad_(False)
    still, some = tw.replicate(frozen, tw.recipes.topk()), tw.replicate(mlp(torch.float32), tw.recipes.topk())
    still.reduce()
    some.reduce()
    return [name for name, p in some.attachment.parameters.items() if p.grad is not None]


def test_models_without_any_gradient_are_left_alone(ranks: Ranks) -> None:
    assert ranks.run(2, _nothing) == [[]] * 2


def _zeroed() -> list[str]:
    """Skip a step and zero its gradients in place. One rank has a gradient for the last layer, in the first step."""
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    replicas = tw.replicate(model, tw.recipes.topk(density=0.1, minimum_size=0))
    optimizer, said = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(2):
        idle = step == 1 or dist.get_rank() == 0
        sum((layer(torch.ones(2, 8)).sum() for layer in model[: 1 if idle else 2]), torch.zeros(())).backward()
        said.append(told(replicas.reduce))
        optimizer.zero_grad(set_to_none=False)
    return said


def test_gradients_zeroed_in_place_after_a_skipped_step_are_new_ones(ranks: Ranks) -> None:
    assert ranks.run(2, _zeroed) == [["nothing"] * 2] * 2


def _refused_on_one() -> list[str]:
    """Let one rank alone have a gradient of what was frozen, and then load a state into its model alone."""
    net, said = nn.ModuleList([nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)]), []
    replicas = tw.replicate(net, tw.recipes.topk(density=0.1, minimum_size=0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.requires_grad_(True)
    for step in range(4):
        optimizer.zero_grad()
        alone = step == 1 and dist.get_rank() == 0
        sum((layer(torch.ones(2, 8)).sum() for layer in (net if alone else net[1:])), torch.zeros(())).backward()
        if step == 3 and dist.get_rank() == 0:
            net.load_state_dict({name: x + 1 for name, x in net.state_dict().items()})
        said.append(told(replicas.reduce))
        if said[-1] == "nothing":
            optimizer.step()
    return said


def test_what_one_rank_refuses_is_an_error_on_every_rank(ranks: Ranks) -> None:
    mine, other = ranks.run(2, _refused_on_one)
    assert [mine[0], mine[2]] == [other[0], other[2]] == ["nothing"] * 2
    assert "0.weight was frozen" in mine[1]
    assert "residuals were not loaded" in mine[3]
    assert "another rank has refused" in other[1]
    assert "another rank has refused" in other[3]


# --- bad steps and checkpoints ---


def _poisoned(recipe: str, value: float) -> list[str]:
    """Return what went wrong around a step in which one rank has one bad element."""
    wrong = []
    copies = Copies("several buckets", recipe).run(range(2))
    before, weights = copy.deepcopy(copies.attachment.state_dict()), digest(copies.module)
    weight = copies.parameters()["2.weight"]
    spoil = partial(_spoiled, value if dist.get_rank() == 1 else 1.0)
    handle = weight.register_hook(spoil)
    if copies.step(2) or bool(values(copies.gradients()["2.weight"]).isfinite().all()):
        wrong.append("not seen")
    handle.remove()
    if not same(copies.attachment.state_dict(), before | {"draw": 3}):
        wrong.append("memory changed")
    assert digest(copies.module) == weights
    if not copies.step(3) or digest(copies.module) == weights:
        wrong.append("does not go on")
    return wrong if copies.attachment.verify_replicas() else [*wrong, "replicas differ"]


def _spoiled(factor: float, gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient.view(-1)[7] *= factor
    return gradient


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bad_gradient_is_seen_by_all_and_kept_by_none(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(2, _poisoned, recipe, float("nan")) == [[]] * 2


def _scaled(recipe: str, scaled: bool) -> list[str]:
    """Return the digests of a training in which one rank's gradient is infinite in step 3."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if scaled else None
    copies, found = Copies("several buckets", recipe, scaler=scaler), []
    for step in range(6):
        bad = step == 3 and dist.get_rank() == 1
        handle = copies.parameters()["2.weight"].register_hook(partial(_spoiled, float("inf") if bad else 1.0))
        copies.step(step)
        handle.remove()
        found.append(digest(copies.module))
    assert copies.attachment.verify_replicas()
    return found


@pytest.mark.parametrize("recipe", ["dense", "topk", "dgc", "gtopk"])
def test_a_grad_scaler_skips_the_bad_step_and_changes_no_bit(ranks: Ranks, recipe: str) -> None:
    first, second = ranks.run(2, _scaled, recipe, True)
    assert first == second == ranks.run(2, _scaled, recipe, False)[0]
    assert first[3] == first[2]
    assert len(set(first)) == 5


def _resumed(recipe: str) -> tuple[str, str]:
    old = Copies("several buckets", recipe).run(range(3))
    saved = copy.deepcopy([x.state_dict() for x in (old.module, old.optimizer, old.attachment)])
    old.run(range(3, 5))
    new = Copies("several buckets", recipe)
    new.module.load_state_dict(saved[0])
    new.optimizer.load_state_dict(saved[1])
    new.attachment.load_state_dict(saved[2])
    new.run(range(3, 5))
    assert same(new.attachment.state_dict(), old.attachment.state_dict())
    return digest(old.module), digest(new.module)


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_resumed_run_makes_the_same_next_steps(ranks: Ranks, recipe: str) -> None:
    for uninterrupted, resumed in ranks.run(2, _resumed, recipe):
        assert uninterrupted == resumed


# --- what is refused ---


def _refusals() -> dict[str, str]:
    rank, used, net = dist.get_rank(), tw.recipes.topk(), partial(mlp, torch.float32)
    held = tw.replicate(net(), used)
    unlike = tw.recipes.topk(density=0.01 if rank else 0.02)
    own = Copies("several buckets", "dgc")
    own.backward(0)
    adam = torch.optim.Adam(own.module.parameters())
    frozen = nn.Linear(2, 2, dtype=torch.complex64).requires_grad_(False)
    tw.replicate(frozen, tw.recipes.dense())
    attempts: dict[str, Callable[[], object]] = {
        "factory": lambda: tw.replicate(net(), tw.recipes.topk),  # type: ignore[arg-type]
        "used": lambda: tw.replicate(net(), used),
        "complex": lambda: tw.replicate(nn.Linear(2, 2, dtype=torch.complex64), tw.recipes.dense()),
        "meta": lambda: tw.replicate(_without_values() if rank else net(), tw.recipes.dense()),
        "wrapped": lambda: tw.replicate(DistributedDataParallel(net()), tw.recipes.dense()),
        "thawed": _thawed,
        "tied": _tied,
        "unlike recipes": lambda: tw.replicate(net(), unlike),
        "unlike models": lambda: tw.replicate(nn.Linear(2, 2 + rank), tw.recipes.topk()),
        "unlike optimizers": lambda: _optimized(tw.recipes.dense(), momentum=0.5 * rank),
        "no momentum": lambda: tw.replicate(net(), tw.recipes.dgc()),
        "dampened": lambda: _optimized(tw.recipes.dgc(), momentum=0.9, dampening=0.1),
        "twice": adam.step,
    }
    assert own.optimizer.param_groups[0]["momentum"] == 0.9
    messages = {name: _message(attempt) for name, attempt in attempts.items()}
    assert held.attachment.step == 0  # it was at work all along
    return messages


def _without_values() -> nn.Module:
    """A model with a frozen layer that has no values yet."""
    net = mlp(torch.float32)
    net.get_submodule("0").to("meta").requires_grad_(False)
    return net


def _thawed() -> None:
    net = mlp(torch.float32)
    weight = net.get_parameter("0.weight").requires_grad_(False)
    replicas = tw.replicate(net, tw.recipes.dense())
    weight.requires_grad_(True)
    net(torch.ones(2, WIDTH)).sum().backward()
    replicas.reduce()


def _tied() -> None:
    words, head = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 8, bias=False)
    head.weight = words.weight
    replicas = tw.replicate([words, head], tw.recipes.dense())
    head(words(torch.arange(3))).sum().backward()
    replicas.reduce()


def _optimized(recipe: tw.reducer.Reducer, **options: Any) -> object:
    net = mlp(torch.float32)
    return tw.replicate(net, recipe, optimizer=torch.optim.SGD(net.parameters(), **options))


def _message(attempt: Callable[[], object]) -> str:
    with pytest.raises((TypeError, RuntimeError, tw.errors.MomentumError)) as error:
        attempt()
    return f"{error.type.__name__}: {error.value}"


def _refused_anew() -> tuple[str, bool]:
    """Replicate a model anew whose buffer has another shape on each rank; return what is said, and what still waits."""
    net = mlp(torch.float32)
    earlier = tw.replicate(net, tw.recipes.topk(minimum_size=0))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(2, WIDTH)).sum().backward()
    earlier.reduce()
    sgd.step()
    net.register_buffer("mask", torch.zeros(1 + dist.get_rank()))
    said = _message(lambda: tw.replicate(net, tw.recipes.topk(minimum_size=0)))
    net(torch.ones(2, WIDTH)).sum().backward()
    earlier.reduce()
    return said, earlier.attachment.waits


def test_what_is_refused_takes_no_residual_of_an_earlier_handle(ranks: Ranks) -> None:
    for said, waits in ranks.run(2, _refused_anew):
        assert "parameter or buffer mask differs" in said
        assert waits


def test_replicate_refuses_with_the_fix_on_every_rank(ranks: Ranks) -> None:
    expected = {
        "factory": ("TypeError", "recipes.topk"),
        "used": ("RuntimeError", "make a new recipe"),
        "complex": ("TypeError", "view_as_real"),
        "meta": ("TypeError", "0.weight is on the meta device: call to_empty()"),
        "wrapped": ("TypeError", "replicate its .module"),
        "thawed": ("RuntimeError", "0.weight was frozen"),
        "tied": ("RuntimeError", "the gradient of '0.weight' is dense", "sparse=True"),
        "unlike recipes": ("FingerprintError", "recipe differs"),
        "unlike models": ("FingerprintError", "weight differs"),
        "unlike optimizers": ("FingerprintError", "optimizer is set to differs"),
        "no momentum": ("MomentumError", "optimizer="),
        "dampened": ("MomentumError", "dampening=0"),
        "twice": ("MomentumError", "a second time"),
    }
    for messages in ranks.run(2, _refusals):
        assert messages.keys() == expected.keys()
        for name, parts in expected.items():
            assert all(part in messages[name] for part in parts), messages[name]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _whatever_is_set(default: Default) -> list[str]:
    """Train with every method, with and without this; return those that end elsewhere."""
    torch.manual_seed(0)
    module, batch = mlp(torch.float32), torch.randn(8, WIDTH)

    def trained(method: Method) -> list[Tensor]:
        model = copy.deepcopy(module)
        optimizer = sgd(model, momentum=0.9)
        replicas = tw.replicate(model, method.make(), optimizer=optimizer if method.momentum else None)
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            replicas.reduce()
            optimizer.step()
        replicas.load_state_dict(replicas.state_dict())
        return [p.detach() for p in model.parameters()]

    plain = {name: trained(method) for name, method in METHODS.items()}
    tables.cache_clear()
    with default():
        ours = {name: trained(method) for name, method in METHODS.items()}
    return [name for name in METHODS if not all(map(torch.equal, plain[name], ours[name]))]


DEFAULTS = {"device": partial(torch.device, "meta"), "dtype": partial(_default_dtype, torch.bfloat16)}


@pytest.mark.parametrize("default", DEFAULTS.values(), ids=DEFAULTS)
def test_models_on_the_host_train_whatever_the_defaults(ranks: Ranks, default: Default) -> None:
    assert ranks.run(2, _whatever_is_set, default) == [[], []]
