"""The first moment of Adam, Muon and SGD in fading memories: what arrives is stepped with β = 0, all else is theirs."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import SEVERAL, Scenario, Training, digest, flat
from ranks import Ranks, told
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.codecs import Codec, Identity, TopK
from thinwire.exchanges import AllGather, AllReduce
from thinwire.integrations.training.gradients import shaped_like
from thinwire.memories import FadingMomentum, NoMemory
from thinwire.reducer import Compressed, MinimumSize, Reducer

MINIMUM = 200
"""Elements: of the model's tensors, the weights of its first two layers have more."""


def _recipe(density: float = 1.0, *, minimum_size: int = 0, decay: float | None = None) -> Reducer:
    fading = Compressed(memory=FadingMomentum(decay=decay), codec=TopK(density=density), exchange=AllGather())
    small = Compressed(memory=NoMemory(), codec=Identity(), exchange=AllReduce())
    return MinimumSize(minimum_size=minimum_size, small=small, large=fading) if minimum_size else fading


Optimizers = list[torch.optim.Optimizer]


def _halves(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    *first, weight, bias = model.parameters()
    return [{"params": first}, {"params": [weight, bias]} | second]


def _muon(model: nn.Module) -> Optimizers:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.01, betas=(0.8, 0.9))]


ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95)}
TENSORS: dict[str, Any] = {
    "betas": (torch.tensor(0.9).double(), torch.tensor(0.95).double()),
    "lr": torch.tensor(0.01).double(),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizers]] = {
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), **ADAM, weight_decay=0.1)],
    "adamw, foreach": lambda m: [torch.optim.AdamW(m.parameters(), **ADAM, foreach=True)],
    "adamw, fused": lambda m: [torch.optim.AdamW(m.parameters(), **ADAM, fused=True)],
    "adamw, tensors": lambda m: [torch.optim.AdamW(m.parameters(), **TENSORS, foreach=False)],
    "amsgrad": lambda m: [torch.optim.AdamW(m.parameters(), **ADAM, amsgrad=True)],
    "maximize": lambda m: [torch.optim.AdamW(m.parameters(), **ADAM, maximize=True)],
    "two betas": lambda m: [torch.optim.AdamW(_halves(m, betas=(0.5, 0.8)), **ADAM)],
    "adam": lambda m: [torch.optim.Adam(m.parameters(), **ADAM, weight_decay=0.1)],
    "radam": lambda m: [torch.optim.RAdam(m.parameters(), lr=0.01, betas=(0.9, 0.5))],
    "adamax": lambda m: [torch.optim.Adamax(m.parameters(), **ADAM)],
    "muon": _muon,
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)],
    "adamw, subclass": lambda m: [ClippingAdamW(m.parameters(), **ADAM, weight_decay=0.1)],
    "sgd, maximize": lambda m: [torch.optim.SGD(_halves(m, momentum=0.5), lr=0.05, momentum=0.9, maximize=True)],
}
every = pytest.mark.parametrize("optimizer", OPTIMIZERS)
kinds = pytest.mark.parametrize("optimizer", ["adamw", "two betas", "muon", "sgd, maximize"])


class Run:
    """A model that trains with one or several optimizers."""

    def __init__(
        self, make: Callable[[nn.Module], Optimizers] | str, scenario: str | Scenario = "several buckets"
    ) -> None:
        self.training = Training(scenario, dtype=torch.float64)
        self.optimizers = (OPTIMIZERS[make] if isinstance(make, str) else make)(self.training.model)

    def attach(self, recipe: Reducer) -> tw.integrations.Attachment:
        self.attachment = tw.attach(self.training.model, recipe, optimizer=self.optimizers)
        return self.attachment

    def steps(self, steps: range) -> "Run":
        for step in steps:
            self.zero_grad()
            self.training.backward(step)
            for optimizer in self.optimizers:
                optimizer.step()
        return self

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, torch.optim.Optimizer, dict[str, Any]]]:
        names = {p: name for name, p in self.training.parameters().items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from ((names[p], p, optimizer, group) for p in group["params"])

    def state(self) -> Any:
        return copy.deepcopy((self.training.model.state_dict(), [each.state_dict() for each in self.optimizers]))

    def load(self, state: Any) -> None:
        self.training.model.load_state_dict(copy.deepcopy(state[0]))
        for optimizer, saved in zip(self.optimizers, copy.deepcopy(state[1]), strict=True):
            optimizer.load_state_dict(saved)


def _beta(group: dict[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group["momentum"])


def _momentum(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor) -> Tensor:
    """Return Σ βᵏ·g as the optimizer holds it, of the gradient's sign."""
    state, sign = optimizer.state.get(p, {}), -1 if group.get("maximize") else 1
    buffer = state.get("exp_avg", state.get("momentum_buffer"))
    if buffer is None:
        return torch.zeros_like(p)
    return sign * (buffer.clone() if isinstance(optimizer, torch.optim.SGD) else buffer / (1 - _beta(group)))


class Workers:
    """Simulates fading memories in float64: M ← β·M + g/K, q = its k largest, M ← M − q; the optimizer steps with Σ q.

    It takes over a run as it is. Tensors below `minimum_size` are averaged, and keep the optimizer's momentum.
    """

    def __init__(self, run: Run, codec: Codec, *, minimum_size: int = 0, decay: float | None = None) -> None:
        self.run, self.codec, self.decay = run, codec, decay
        self.ours = {name for name, p, _, _ in run.parameters() if p.numel() >= minimum_size}
        self.betas = {name: decay or _beta(group) for name, _, _, group in run.parameters()}
        size = dist.get_world_size()
        self.waits = {name: flat(_momentum(o, g, p), p) / size for name, p, o, g in run.parameters()}
        for optimizer in run.optimizers:
            optimizer.param_groups[:] = list(self._divided(optimizer))

    def _divided(self, optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
        names = {p: name for name, p in self.run.training.parameters().items()}
        for group in optimizer.param_groups:
            none = {"betas": (0.0, float(group["betas"][1]))} if "betas" in group else {"momentum": 0.0}
            yield group | {"params": [p for p in group["params"] if names[p] in self.ours]} | none
            yield group | {"params": [p for p in group["params"] if names[p] not in self.ours]}

    def steps(self, steps: range) -> Run:
        for step in steps:
            local = self.run.training.local_gradients(step)
            for name, p in self.run.training.parameters().items():
                p.grad = shaped_like(p, self._arrives(name, flat(local[name], p) / dist.get_world_size()))
            for optimizer in self.run.optimizers:
                optimizer.step()
        return self.run

    def _arrives(self, name: str, gradient: Tensor) -> Tensor:
        delivered = gradient
        if name in self.ours:
            moving = self.betas[name] * self.waits[name] + gradient
            delivered = self.codec.encode(moving).dense()
            self.waits[name] = moving - delivered
        delivered = delivered.clone()
        dist.all_reduce(delivered)
        return delivered


def _apart(a: Run, b: Run) -> float:
    pairs = zip(a.training.model.parameters(), b.training.model.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


def _normed(x: Tensor, *_: object) -> Tensor:
    return x / x.norm()


def _with_exact_muon(function: Callable[..., Any], *args: Any) -> Any:
    """Muon orthogonalises in bfloat16, where a last bit of the gradient may matter: norm it instead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.optim._muon._zeropower_via_newtonschulz", _normed)
        return function(*args)


# --- the law ---


def _law(optimizer: str, density: float, minimum_size: int, decay: float | None, dense_steps: int) -> float:
    ours, theirs = (Run(optimizer).steps(range(dense_steps)) for _ in range(2))
    ours.attach(_recipe(density, minimum_size=minimum_size, decay=decay))
    workers = Workers(theirs, TopK(density=density), minimum_size=minimum_size, decay=decay)
    return _apart(ours.steps(range(dense_steps, 9)), workers.steps(range(dense_steps, 9)))


@every
def test_where_everything_is_sent_the_optimizer_has_no_momentum_but_its_first(ranks: Ranks, optimizer: str) -> None:
    assert max(ranks.run(2, _with_exact_muon, _law, optimizer, 1.0, 0, None, 3)) < 1e-11


@kinds
@pytest.mark.parametrize("minimum_size", [0, MINIMUM])
def test_what_is_not_sent_fades_in_the_memory(ranks: Ranks, optimizer: str, minimum_size: int) -> None:
    assert max(ranks.run(2, _with_exact_muon, _law, optimizer, 0.05, minimum_size, None, 3)) < 1e-11


@pytest.mark.parametrize("dense_steps", [0, 3])
def test_a_decay_of_the_recipe_takes_the_place_of_the_optimizers(ranks: Ranks, dense_steps: int) -> None:
    assert max(ranks.run(2, _law, "adamw", 0.05, 0, 0.5, dense_steps)) < 1e-11


def _as_without(scenario: str) -> float:
    """Where everything is sent and nothing was there before, AdamW has β₁ = 0, however DDP is used."""
    plain, ours = (Training(scenario, dtype=torch.float64) for _ in range(2))
    plain.optimizer = torch.optim.AdamW(plain.model.parameters(), lr=0.01, betas=(0.0, 0.9))  # type: ignore[assignment]
    ours.optimizer = torch.optim.AdamW(ours.model.parameters(), lr=0.01, betas=(0.9, 0.9))  # type: ignore[assignment]
    ours.attach(_recipe())
    pairs = zip(plain.run(range(6)).model.parameters(), ours.run(range(6)).model.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs if x.numel())


@pytest.mark.parametrize("scenario", ["unused", "static graph, unused", "tied weights", "odd shapes", "uneven inputs"])
def test_however_ddp_is_used_momentum_is_only_in_the_memory(ranks: Ranks, scenario: str) -> None:
    assert max(ranks.run(2, _as_without, scenario)) < 1e-11


def _by_hand(amsgrad: bool, maximize: bool) -> float:
    """What the docstring says AdamW does: d = β·Σ M_i + ḡ in the first step, ḡ in later ones."""
    options: dict[str, Any] = {"amsgrad": amsgrad, "maximize": maximize, "weight_decay": 0.1}
    ours, theirs = (
        Run(lambda m: [torch.optim.AdamW(m.parameters(), **ADAM, **options)]).steps(range(3)) for _ in range(2)
    )
    ours.attach(_recipe())
    (adamw,), (beta, beta2), rate = theirs.optimizers, ADAM["betas"], ADAM["lr"]
    for step in range(3, 8):
        theirs.zero_grad()
        theirs.training.backward(step)
        for p in theirs.training.model.parameters():
            assert p.grad is not None
            state, d = adamw.state[p], -p.grad if maximize else p.grad
            d = d + beta * state["exp_avg"] / (1 - beta) if step == 3 else d
            v = state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * d**2
            v = state["largest"] = torch.maximum(v, state.get("largest", state["max_exp_avg_sq"])) if amsgrad else v
            with torch.no_grad():
                p.sub_(rate * 0.1 * p)
                p.sub_(rate * d / ((v / (1 - beta2 ** (step + 1))).sqrt() + 1e-8))
    return _apart(ours.steps(range(3, 8)), theirs)


@pytest.mark.parametrize(("amsgrad", "maximize"), [(False, False), (True, False), (False, True)])
def test_adamw_does_what_is_said_of_it(ranks: Ranks, amsgrad: bool, maximize: bool) -> None:
    assert max(ranks.run(2, _by_hand, amsgrad, maximize)) < 1e-11


def _accumulated(synchronised: bool) -> float:
    ours, theirs = (Run("adamw", Scenario(microbatches=4, options=SEVERAL)) for _ in range(2))
    ours.attach(_recipe())
    for step in range(5):
        ours.zero_grad()
        if synchronised:
            for loss in ours.training.losses(ours.training.model, step):
                loss().backward()
        else:
            ours.training.backward(step)
        ours.optimizers[0].step()
    return _apart(ours, Workers(theirs, TopK(density=1.0)).steps(range(5)))


@pytest.mark.parametrize("synchronised", [False, True])
def test_momentum_fades_once_a_step(ranks: Ranks, synchronised: bool) -> None:
    assert max(ranks.run(2, _accumulated, synchronised)) < 1e-11


def _scheduled() -> float:
    ours, theirs = (Run("two betas") for _ in range(2))
    ours.attach(_recipe(0.1))
    workers = Workers(theirs, TopK(density=0.1))
    cycle = torch.optim.lr_scheduler.OneCycleLR(ours.optimizers[0], max_lr=0.1, total_steps=20)
    for step in range(9):
        groups = {name: group for name, _, _, group in ours.parameters()}
        workers.betas = {name: _beta(group) for name, group in groups.items()}
        for name, _, _, group in theirs.parameters():
            group["lr"] = groups[name]["lr"]
        ours.steps(range(step, step + 1))
        workers.steps(range(step, step + 1))
        cycle.step()
    assert _beta(ours.optimizers[0].param_groups[0]) not in (0.0, 0.9)
    return _apart(ours, theirs)


def test_schedules_of_rate_and_betas_are_followed(ranks: Ranks) -> None:
    assert max(ranks.run(2, _scheduled)) < 1e-11


def _between_groups() -> float:
    ours, theirs = (Run(lambda m: [torch.optim.AdamW(_halves(m, betas=(0.5, 0.95)), **ADAM)]) for _ in range(2))
    ours.attach(_recipe(0.1))
    workers = Workers(theirs, TopK(density=0.1))
    ours.steps(range(3))
    workers.steps(range(3))
    first, second = ours.optimizers[0].param_groups
    first["params"].append(second["params"].pop())
    workers.betas = {name: _beta(group) for name, _, _, group in ours.parameters()}
    return _apart(ours.steps(range(3, 6)), workers.steps(range(3, 6)))


def test_a_parameter_that_changes_groups_fades_as_its_new_one(ranks: Ranks) -> None:
    assert max(ranks.run(2, _between_groups)) < 1e-11


def _closures() -> float:
    runs = [Run("adamw") for _ in range(2)]
    for run in runs:
        run.attach(_recipe(0.1, minimum_size=MINIMUM))
    for step in range(5):

        def closure(step: int = step) -> float:
            runs[0].zero_grad()
            runs[0].training.backward(step)
            return 0.0

        runs[0].optimizers[0].step(closure)
    return _apart(runs[0], runs[1].steps(range(5)))


def test_closures_are_steps_like_others(ranks: Ranks) -> None:
    assert max(ranks.run(2, _closures)) == 0


def _scaled(fused: bool) -> tuple[float, float]:
    """A loss scale that grows, and a step with an overflow, change nothing: powers of two, in float32."""
    runs = [Training("several buckets") for _ in range(2)]
    runs[1].scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    for run in runs:
        run.optimizer = torch.optim.AdamW(run.model.parameters(), **ADAM, fused=fused)  # type: ignore[assignment]
        run.run(range(2))
        run.attach(_recipe(0.05))
    runs[0].run(range(2, 10))
    runs[1].run(range(2, 6))
    scale = runs[1].scaler.get_scale()
    with torch.no_grad():
        kept = {p: p.clone() for p in runs[1].model.parameters()}
        for p in runs[1].model.parameters():
            p.fill_(torch.inf)
    runs[1].step(6)
    with torch.no_grad():
        for p, value in kept.items():
            p.copy_(value)
    assert runs[1].scaler.get_scale() < scale
    runs[1].run(range(6, 10))
    pairs = zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs), scale


@pytest.mark.parametrize("fused", [False, True])
def test_what_waits_follows_the_loss_scale(ranks: Ranks, fused: bool) -> None:
    for apart, scale in ranks.run(2, _scaled, fused):
        assert scale > 2**8
        assert apart < 1e-6


# --- giving back, and resuming ---


def _there_and_back(optimizer: str, scenario: str) -> tuple[float, float]:
    """Move momentum into the memory and back, without a step between; training then goes on as it would have."""
    ours, theirs = (Run(optimizer, scenario).steps(range(3)) for _ in range(2))
    ours.attach(MinimumSize(minimum_size=MINIMUM, small=_recipe(0.05), large=_recipe(0.05)))  # two memories
    ours.training.backward(3)
    emptied = max(float(_momentum(o, g, p).abs().max()) for _, p, o, g in ours.parameters())
    ours.zero_grad()
    ours.attachment.remove()
    return emptied, _apart(ours.steps(range(3, 7)), theirs.steps(range(3, 7)))


@pytest.mark.parametrize(
    ("optimizer", "scenario"),
    [
        *((name, "several buckets") for name in ("adamw", "two betas", "muon", "sgd, maximize")),
        ("adam", "channels last"),
    ],
)
def test_momentum_goes_there_and_back(ranks: Ranks, optimizer: str, scenario: str) -> None:
    for emptied, apart in ranks.run(2, _with_exact_muon, _there_and_back, optimizer, scenario):
        assert emptied == 0
        assert apart < 1e-11


def _removed(optimizer: str) -> tuple[float, float, bool]:
    """After some steps, the optimizer gets what waits on all ranks, and nothing is left for later gradients."""
    run = Run(optimizer).steps(range(2))
    run.attach(_recipe(0.05, minimum_size=MINIMUM))
    run.steps(range(2, 6))
    (_, memory) = run.attachment.recipe.memories()
    waits = {name: fields["momentum"].clone() for name, fields in memory.state().items()}
    run.attachment.remove()
    errors = []
    for name, p, optimizer_of, group in run.parameters():
        if name in waits:
            dist.all_reduce(waits[name])
            errors.append(float((flat(_momentum(optimizer_of, group, p), p) - waits[name]).abs().max()))
    marks = any("momentum_in_memory" in group for _, _, _, group in run.parameters())
    left = run.attachment.waits
    plain = Run(optimizer)
    plain.load(run.state())
    assert len(waits) == 2
    return max(errors), _apart(run.steps(range(6, 9)), plain.steps(range(6, 9))), marks or left


@kinds
def test_the_optimizer_gets_back_what_waits(ranks: Ranks, optimizer: str) -> None:
    for error, apart, left in ranks.run(2, _with_exact_muon, _removed, optimizer):
        assert error < 1e-14
        assert apart < 1e-11
        assert not left


def _removed_without_momentum() -> tuple[float, bool]:
    """Where the optimizer has no place for it, what waits goes out with the next gradients."""
    run = Run(lambda m: [torch.optim.RMSprop(m.parameters(), lr=0.01)])
    run.attach(_recipe(0.05, decay=0.9))
    run.steps(range(3))
    (memory,) = run.attachment.recipe.memories()
    waits = {name: fields["momentum"].clone() for name, fields in memory.state().items()}
    run.attachment.remove()
    run.zero_grad()
    local = run.training.local_gradients(3)
    run.training.backward(3)
    errors = []
    for name, p in run.training.parameters().items():
        expected = waits[name] + flat(local[name], p) / dist.get_world_size()
        dist.all_reduce(expected)
        assert p.grad is not None
        errors.append(float((flat(p.grad, p) - expected).abs().max()))
    run.optimizers[0].step()
    run.zero_grad()
    run.training.backward(4)
    return max(errors), run.attachment.waits


def test_what_no_optimizer_can_take_goes_out_with_the_next_gradients(ranks: Ranks) -> None:
    for error, left in ranks.run(2, _removed_without_momentum):
        assert error < 1e-12
        assert not left


def _removed_orthogonal(betas: tuple[float, float], given: bool) -> tuple[float, bool, list[str]]:
    """Return by how much the optimizer's momentum misses Σ m, what is left, and what was said."""
    run, listener = Run(lambda m: [torch.optim.AdamW(m.parameters(), betas=betas)]), logging.Handler()
    said: list[str] = []
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a listener
    recipe = tw.recipes.orthogonal(momentum=0.9, minimum_size=MINIMUM)
    run.attachment = tw.attach(run.training.model, recipe, optimizer=run.optimizers if given else None)
    run.steps(range(3))
    (_, memory) = run.attachment.recipe.memories()
    momenta = {name: fields["momentum"].clone() for name, fields in memory.state().items()}
    logging.getLogger("thinwire").addHandler(listener)
    run.attachment.remove()
    logging.getLogger("thinwire").removeHandler(listener)
    errors = [0.0]
    for name, p, optimizer, group in run.parameters() if betas[0] else ():
        if name in momenta:
            dist.all_reduce(momenta[name])
            errors.append(float((flat(_momentum(optimizer, group, p), p) - momenta[name]).abs().max()))
    run.steps(range(3, 5))
    return max(errors), run.attachment.waits, said


@pytest.mark.parametrize(("betas", "given"), [((0.9, 0.9), True), ((0.0, 0.9), True), ((0.0, 0.9), False)])
def test_what_orthogonal_cannot_give_back_is_dropped_and_named(
    ranks: Ranks, betas: tuple[float, float], given: bool
) -> None:
    error, left, said = ranks.run(2, _removed_orthogonal, betas, given)[0]
    assert error < 1e-14
    assert not left
    assert "the residual of orthogonalised updates is dropped" in said[0]
    assert any("the momentum of 2 parameters, such as " in text for text in said) == (betas[0] == 0)
    assert "removed: gradients are averaged" in said[-1]


def _loaded_late(optimizer: str) -> float:
    """A dense checkpoint, loaded after attaching, moves too: the same as attaching to it."""
    late, soon = Run(optimizer), Run(optimizer).steps(range(3))
    late.attach(_recipe(0.05))
    late.load(soon.state())
    soon.attach(_recipe(0.05))
    return _apart(late.steps(range(3, 7)), soon.steps(range(3, 7)))


@kinds
def test_a_dense_checkpoint_can_be_loaded_after_attaching(ranks: Ranks, optimizer: str) -> None:
    assert max(ranks.run(2, _with_exact_muon, _loaded_late, optimizer)) == 0


def _loaded_between() -> float:
    """A dense state that is loaded after a backward pass fades in the step that has begun: M = β·M₀ + g/K − q."""
    dense = Run("adamw").steps(range(3))
    ours = Run("adamw")
    ours.training.model.load_state_dict(dense.training.model.state_dict())
    ours.attach(_recipe(0.05))
    local, size = ours.training.local_gradients(3), dist.get_world_size()
    ours.training.backward(3)
    ours.optimizers[0].load_state_dict(copy.deepcopy(dense.optimizers[0].state_dict()))
    ours.optimizers[0].step()
    (memory,) = ours.attachment.recipe.memories()
    errors = []
    for name, p, optimizer, group in dense.parameters():
        gradient = flat(local[name], p) / size
        kept = gradient - TopK(density=0.05).encode(gradient).dense()
        expected = 0.9 * flat(_momentum(optimizer, group, p), p) / size + kept
        errors.append(float((memory.state()[name]["momentum"] - expected).abs().max()))
    return max(errors)


def test_a_dense_state_that_comes_in_the_middle_of_a_step_is_not_lost(ranks: Ranks) -> None:
    assert max(ranks.run(2, _loaded_between)) < 1e-14


def _resumed(optimizer: str, attachment_first: bool, earlier: bool) -> bool:
    old = Run(optimizer).steps(range(2))
    old.attach(_recipe(0.05, minimum_size=MINIMUM))
    old.steps(range(2, 5))
    state, waits = old.state(), old.attachment.state_dict()
    marked = [group for saved in state[1] for group in saved["param_groups"] if group["momentum_in_memory"]]
    for group in marked if earlier else ():  # earlier versions marked whole groups
        group["momentum_in_memory"] = "token"
    new = Run(optimizer)
    attachment = new.attach(_recipe(0.05, minimum_size=MINIMUM))
    if attachment_first:
        attachment.load_state_dict(waits)
    new.load(state)
    if not attachment_first:
        attachment.load_state_dict(waits)
    old.steps(range(5, 8))
    new.steps(range(5, 8))
    return digest(old.training.model) == digest(new.training.model)


@pytest.mark.grid
@kinds
@pytest.mark.parametrize(("attachment_first", "earlier"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_checkpoint_resumes_to_the_bit(ranks: Ranks, optimizer: str, attachment_first: bool, earlier: bool) -> None:
    assert all(ranks.run(2, _resumed, optimizer, attachment_first, earlier))


def _optimizer_alone(forget: bool) -> str:
    old = Run("adamw")
    old.attach(_recipe(0.05))
    old.steps(range(2))
    new = Run("adamw")
    attachment = new.attach(_recipe(0.05))
    new.load(old.state())
    if forget:
        attachment.forget()
    new.steps(range(2, 4))
    return "trained"


def test_an_optimizer_whose_momentum_was_elsewhere_asks_for_it(ranks: Ranks) -> None:
    assert "load the handle's state too" in ranks.run(1, told, _optimizer_alone, False)[0]
    assert ranks.run(2, _optimizer_alone, True) == ["trained"] * 2


def _wrapped(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=0.0001)


def _attached_again() -> tuple[float, bool]:
    runs = [Run("adamw").steps(range(2)) for _ in range(2)]
    for run in runs:
        run.attach(_recipe(0.05))
        run.steps(range(2, 4))
    held = runs[0].attachment
    runs[0].training.model = _wrapped(runs[0].training.model.module)
    runs[0].attach(_recipe(0.05))
    return _apart(*(run.steps(range(4, 7)) for run in runs)), held.ended


def test_an_attachment_takes_over_what_waits(ranks: Ranks) -> None:
    assert ranks.run(2, _attached_again) == [(0, True)] * 2


def _split(optimizer: torch.optim.Optimizer) -> None:
    (group,) = optimizer.param_groups
    settings = {key: group[key] for key in ("lr", "betas", "weight_decay")}
    first, *rest = group["params"]
    group["params"] = [first]
    optimizer.add_param_group({"params": rest} | settings)


def _made_anew(optimizer: torch.optim.Optimizer) -> None:
    (group,) = optimizer.param_groups
    optimizer.param_groups.clear()
    for part in (group["params"][:1], group["params"][1:]):
        optimizer.add_param_group({"params": part} | {key: group[key] for key in ("lr", "betas", "weight_decay")})


def _regrouped(regroup: Callable[[torch.optim.Optimizer], None], then: str) -> float:
    one, other = (Run("adamw") for _ in range(2))
    for run in (one, other):
        run.attach(_recipe(0.05, minimum_size=MINIMUM))
        run.steps(range(4))
    (optimizer,) = other.optimizers
    regroup(optimizer)
    if then == "load":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if then == "attach":
        for run in (one, other):
            run.training.model = _wrapped(run.training.model.module)
            run.attach(_recipe(0.05, minimum_size=MINIMUM))
    return _apart(one.steps(range(4, 8)), other.steps(range(4, 8)))


@pytest.mark.parametrize("then", ["step", "load", "attach"])
@pytest.mark.parametrize("regroup", [_split, _made_anew])
def test_however_parameters_are_grouped_momentum_has_moved(
    ranks: Ranks, regroup: Callable[[torch.optim.Optimizer], None], then: str
) -> None:
    assert ranks.run(2, _regrouped, regroup, then) == [0.0] * 2


def _two_models(groups: int, restart: bool) -> tuple[list[Tensor], bool, list[str]]:
    """Train two models, one upon the other, with an optimizer of one group or of two."""
    models = [_wrapped(nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20)).double()) for _ in range(2)]
    with torch.no_grad():
        for i, p in enumerate(p for model in models for p in model.parameters()):
            p.copy_(torch.linspace(-0.3, 0.3, p.numel(), dtype=p.dtype).roll(7 * i).view_as(p))
    parameters = [p for model in models for p in model.parameters()]
    cut = [parameters[:4], parameters[4:]] if groups == 2 else [parameters]
    optimizer = torch.optim.AdamW([{"params": each} for each in cut], **ADAM)
    handles = [tw.attach(model, _recipe(0.05, minimum_size=MINIMUM), optimizer=optimizer) for model in models]
    refused = []
    for step in range(6):
        if step == 3 and restart:
            states = copy.deepcopy((optimizer.state_dict(), *(handle.state_dict() for handle in handles)))
            for group in states[0]["param_groups"]:  # as another process would have saved it
                group["momentum_in_memory"] = [mark and mark + "'" for mark in group["momentum_in_memory"]]
            optimizer.load_state_dict(states[0])
            handles[0].load_state_dict(states[1])
            refused = [told(handles[1].membership.handover.prepare, 1.0)]
            handles[1].load_state_dict(states[2])
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 80, dtype=torch.float64).view(4, 20) + step + dist.get_rank()
        (models[1](models[0](x)) - x).square().mean().backward()
        optimizer.step()
    kept = [id(p) for group in optimizer.param_groups for p in group["params"]] == list(map(id, parameters))
    return [p.detach() for p in parameters], kept, refused


@pytest.mark.parametrize("restart", [False, True])
def test_two_models_may_share_a_group(ranks: Ranks, restart: bool) -> None:
    for one, two in zip(ranks.run(2, _two_models, 1, restart), ranks.run(2, _two_models, 2, False), strict=True):
        assert all(map(torch.equal, one[0], two[0]))
        assert one[1], "the order of parameters, by which a state is loaded"
        assert all("load the handle's state" in each for each in one[2])
        assert len(one[2]) == restart


def _another_recipe() -> tuple[float, bool]:
    """Where nothing waits, another recipe may follow: AdamW then has its momentum again, and it is zero."""
    run = Run("adamw")
    run.attach(_recipe())
    run.steps(range(3))
    run.training.model = _wrapped(run.training.model.module)
    run.attach(tw.recipes.dense())
    marks = any("momentum_in_memory" in group for _, _, _, group in run.parameters())
    return max(float(_momentum(o, g, p).abs().max()) for _, p, o, g in run.parameters()), marks


def test_another_recipe_may_follow_where_nothing_waits(ranks: Ranks) -> None:
    assert ranks.run(2, _another_recipe) == [(0, False)] * 2


# --- settings ---


def _settings(run: Run) -> list[tuple[int, float]]:
    return [(len(group["params"]), _beta(group)) for optimizer in run.optimizers for group in optimizer.param_groups]


def _raising(how: str) -> bool:
    run = Run("two betas")
    run.attach(_recipe(0.05, minimum_size=MINIMUM))
    before = _settings(run.steps(range(2)))
    (optimizer,) = run.optimizers
    run.training.backward(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "_init_group", _raise)
        assert "broken" in told(optimizer.step, _raise if how == "closure" else None)
    saved = optimizer.state_dict() if how != "load" else None
    if how == "load":
        optimizer.load_state_dict(copy.deepcopy(Run("two betas").steps(range(1)).optimizers[0].state_dict()))
        run.attachment.forget()
    shown = [(len(g["params"]), _beta(g)) for g in saved["param_groups"]] if saved else before
    run.steps(range(2, 4))
    return shown == before == _settings(run)


def _raise(*arguments: object) -> Any:
    raise ArithmeticError("broken")


@pytest.mark.parametrize("how", ["closure", "save", "load"])
def test_a_step_that_raises_leaves_the_settings_as_they_were(ranks: Ranks, how: str) -> None:
    assert all(ranks.run(1, _raising, how))


def _seen() -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """The settings while the optimizer steps, and what its state shows."""
    run = Run("two betas")
    found: list[tuple[int, float]] = []
    run.attach(_recipe(0.05, minimum_size=MINIMUM))
    own = run.optimizers[0]._init_group  # type: ignore[attr-defined]  # what torch's steps call for each group

    def seen(*arguments: Any) -> Any:
        found[:] = _settings(run)
        return own(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.optimizers[0], "_init_group", seen)
        run.steps(range(1))
    return found, [(len(group["params"]), _beta(group)) for group in run.optimizers[0].state_dict()["param_groups"]]


def test_only_what_fades_is_without_momentum_and_only_in_a_step(ranks: Ranks) -> None:
    assert ranks.run(1, _seen) == [([(2, 0.9), (2, 0.5), (2, 0.0)], [(4, 0.9), (2, 0.5)])]


def _hooked(by_hook: bool) -> list[Tensor]:
    """Schedule rate, betas and decay in hooks of the optimizer's step, or in the loop around it."""
    run = Run("two betas")
    run.attach(_recipe(0.05, minimum_size=MINIMUM))
    (optimizer,) = run.optimizers
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def before(*_: Any) -> None:
        for group in optimizer.param_groups:
            group.update(weight_decay=0.1 + group["weight_decay"], betas=(group["betas"][0] * 0.9, 0.9))

    def after(*_: Any) -> None:
        rates.step()

    if by_hook:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
    for step in range(6):
        run.zero_grad()
        run.training.backward(step)
        for call in (optimizer.step,) if by_hook else (before, optimizer.step, after):
            call()
    return [p.detach() for p in run.training.model.parameters()]


def test_hooks_of_your_own_see_and_set_the_optimizers_settings(ranks: Ranks) -> None:
    for one, other in zip(ranks.run(2, _hooked, False), ranks.run(2, _hooked, True), strict=True):
        assert all(map(torch.equal, one, other))


def _taken_over(decay: float | None) -> str:
    run = Run("adamw")
    run.attach(_recipe(0.05, decay=decay))
    given = run.steps(range(2)).optimizers
    run.optimizers = [torch.optim.RMSprop(run.training.model.parameters())]
    run.steps(range(2, 4))
    return f"trained without {given[0]}"


def test_another_optimizer_cannot_take_over_without_a_word(ranks: Ranks) -> None:
    assert "RMSprop steps parameters whose momentum" in ranks.run(1, told, _taken_over, None)[0]
    assert ranks.run(1, _taken_over, 0.9)[0].startswith("trained without AdamW")


def _with_sparse_embedding() -> bool:
    run = Run(lambda m: [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)], "sparse embedding")
    run.attach(_recipe(0.05))
    run.steps(range(3))
    buffers = {name: o.state[p].get("momentum_buffer") for name, p, o, _ in run.parameters()}
    return buffers["words.weight"] is not None and run.attachment.verify_replicas()


def test_sparse_embeddings_keep_their_momentum(ranks: Ranks) -> None:
    assert all(ranks.run(2, _with_sparse_embedding))


def _replicated() -> float:
    attached, replicated = (Run("adamw").steps(range(2)) for _ in range(2))
    attached.attach(_recipe(0.05)), attached.steps(range(2, 6))
    module = replicated.training.model.module
    replicas = tw.replicate(module, _recipe(0.05), optimizer=replicated.optimizers)
    for step in range(2, 6):
        replicated.zero_grad()
        for loss in replicated.training.losses(module, step):
            loss().backward()
        replicas.reduce()
        replicated.optimizers[0].step()
    return _apart(attached, replicated)


def test_replicas_hand_momentum_over_too(ranks: Ranks) -> None:
    assert max(ranks.run(2, _replicated)) < 1e-12


# --- what is refused, and what has no momentum ---


class Lion(torch.optim.Optimizer):
    """Sign of a momentum, as third parties write it."""

    def __init__(self, params: Any, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_(torch.sign(group["betas"][0] * m + (1 - group["betas"][0]) * p.grad), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - group["betas"][1])


class FirstBeta(torch.optim.Optimizer):
    """Gradient descent whose groups have a `beta1`, as the Adafactor of transformers has."""

    def __init__(self, params: Any, beta1: float | None) -> None:
        super().__init__(params, {"lr": 1e-3, "beta1": beta1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


class Signum(torch.optim.Optimizer):
    """Sign of a momentum whose decay has a name of its own, and may be one of three betas."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"lr": 1e-3} | settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("slow", torch.zeros_like(p))
                p.add_(torch.sign(m.lerp_(p.grad, 0.1)), alpha=-group["lr"])


class SignAdamW(torch.optim.AdamW):
    """An AdamW by name alone."""

    step = Signum.step  # type: ignore[assignment]  # torch overloads it


class ClippingAdamW(torch.optim.AdamW):
    """Clips within its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e9)
        return super().step(closure)


class NamedAdamW(torch.optim.AdamW):
    """AdamW with a name of its own."""


OTHERS: dict[str, tuple[Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], float | None, str]] = {
    "lion": (lambda ps: Lion(ps, (0.9, 0.99)), 0.9, "Lion has momentum that cannot be moved"),
    "beta1": (lambda ps: FirstBeta(ps, 0.9), 0.9, "FirstBeta has momentum that cannot be moved"),
    "beta1 without": (lambda ps: FirstBeta(ps, None), 0.9, ""),
    "nadam": (lambda ps: torch.optim.NAdam(ps), None, "NAdam has momentum that cannot be moved"),
    "rmsprop": (lambda ps: torch.optim.RMSprop(ps, momentum=0.9), 0.9, "RMSprop has momentum that cannot be moved"),
    "dampening": (lambda ps: torch.optim.SGD(ps, momentum=0.9, dampening=0.1), None, "set dampening=0"),
    "none to adopt": (lambda ps: torch.optim.RMSprop(ps), None, "whose momentum for 0.weight is 0"),
    "lion without": (lambda ps: Lion(ps, (0.0, 0.99)), 0.9, ""),
    "nadam without": (lambda ps: torch.optim.NAdam(ps, betas=(0.0, 0.9)), 0.9, ""),
    "rmsprop without": (lambda ps: torch.optim.RMSprop(ps), 0.9, ""),
    "adafactor": (lambda ps: torch.optim.Adafactor(ps), 0.9, ""),
    "beta": (lambda ps: Signum(ps, beta=0.9), 0.9, "Signum has momentum that cannot be moved"),
    "mu": (lambda ps: Signum(ps, mu=0.9), 0.9, "every beta but the second"),
    "third beta": (lambda ps: Signum(ps, betas=(0, 0.9, 0.99)), 0.9, "Signum has momentum that cannot be moved"),
    "adamw's subclass": (lambda ps: SignAdamW(ps), 0.9, "does not call AdamW's by super().step()"),
    "adamw's subclass that goes on": (lambda ps: ClippingAdamW(ps), None, ""),
    "adamw by another name": (lambda ps: NamedAdamW(ps), None, ""),
    "adamw without": (lambda ps: torch.optim.AdamW(ps, betas=(0.0, 0.9)), 0.9, ""),
}


def _others(name: str) -> str:
    make, decay, _ = OTHERS[name]
    run = Run(lambda m: [make(list(m.parameters()))])
    run.attach(_recipe(0.05, decay=decay))
    run.steps(range(3))
    (group,) = run.optimizers[0].param_groups
    assert run.attachment.verify_replicas()
    assert len(group["params"]) == 6
    return "trained"


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_are_refused_unless_they_have_no_momentum(ranks: Ranks, name: str) -> None:
    expected = OTHERS[name][2]
    if not expected:
        assert ranks.run(2, _others, name) == ["trained"] * 2
    for said in ranks.run(2, told, _others, name) if expected else ():
        assert said.startswith("MomentumError: ")
        assert expected in said


def _wanting(recipe: str, made: str) -> None:
    run = Run(lambda m: [OTHERS[made][0](list(m.parameters()))])
    run.attach(getattr(tw.recipes, recipe)(**{"decay": None} if recipe == "fading" else {}, minimum_size=0))


@pytest.mark.parametrize(("recipe", "own"), [("fading", "decay"), ("orthogonal", "momentum")])
def test_what_is_missing_has_the_name_that_the_memory_has_for_it(ranks: Ranks, recipe: str, own: str) -> None:
    assert f"give the recipe's memory a {own};" in ranks.run(1, told, _wanting, recipe, "nadam")[0]
    zero = ranks.run(1, told, _wanting, recipe, "adamw without")[0]
    assert f"takes its {own} from the optimizer" in zero
    assert zero.endswith(f"or give the memory a {own}")


def _said_of_unknown(betas: tuple[float, ...], given: bool) -> list[str]:
    run, listener = Run(lambda m: [Signum(m.parameters(), betas=betas)]), logging.Handler()
    said: list[str] = []
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a listener
    logging.getLogger("thinwire").addHandler(listener)
    run.attachment = tw.attach(run.training.model, _recipe(0.05, decay=0.9), optimizer=run.optimizers if given else [])
    run.steps(range(2))
    return [text for text in said if "Signum has a step that thinwire does not know" in text]


@pytest.mark.parametrize("given", [True, False])
def test_what_a_step_from_elsewhere_does_cannot_be_seen_and_that_is_said(ranks: Ranks, given: bool) -> None:
    assert len(ranks.run(1, _said_of_unknown, (0.0, 0.9), given)[0]) == 1
    refused = ranks.run(1, told, _said_of_unknown, (0.0, 0.9, 0.99), given)[0]
    assert "momentum a second time" in refused or "momentum that cannot be moved" in refused


def _forgetting() -> bool:
    """With β₁ = 0 AdamW's buffer is the last gradient, which it has applied in full."""
    run = Run(lambda m: [torch.optim.AdamW(m.parameters(), betas=(0.0, 0.9))]).steps(range(2))
    run.attach(_recipe(0.05, decay=0.9))
    run.training.backward(2)
    run.zero_grad()
    return run.attachment.waits


def test_what_the_optimizer_would_forget_does_not_move(ranks: Ranks) -> None:
    assert ranks.run(2, _forgetting) == [False] * 2


def _without_optimizer(decay: float | None, betas: tuple[float, float]) -> str:
    training = Training("several buckets")
    tw.attach(training.model, _recipe(0.05, decay=decay))
    training.optimizer = torch.optim.AdamW(training.model.parameters(), betas=betas)  # type: ignore[assignment]
    training.run(range(2))
    return "trained"


def test_without_the_optimizer_momentum_is_applied_once(ranks: Ranks) -> None:
    assert (
        "no optimizer passed to attach holds 0.weight" in ranks.run(1, told, _without_optimizer, None, (0.9, 0.99))[0]
    )
    assert "AdamW applies momentum a second time" in ranks.run(1, told, _without_optimizer, 0.9, (0.9, 0.99))[0]
    assert ranks.run(2, _without_optimizer, 0.9, (0.0, 0.99)) == ["trained"] * 2


def _not_held() -> None:
    run = Run("adamw")
    tw.attach(run.training.model, _recipe(), optimizer=torch.optim.AdamW([run.training.parameters()["0.weight"]]))


def test_an_optimizer_of_a_part_alone_is_refused(ranks: Ranks) -> None:
    assert "no optimizer passed to attach holds 0.bias" in ranks.run(1, told, _not_held)[0]


def _both_kinds() -> None:
    correcting = Compressed(
        memory=tw.memories.MomentumCorrection(momentum=0.9), codec=TopK(density=0.1), exchange=AllGather()
    )
    recipe = MinimumSize(minimum_size=MINIMUM, small=correcting, large=_recipe())
    tw.attach(Training("several buckets").model, recipe, optimizer=None)


def test_momentum_correction_and_fading_do_not_mix(ranks: Ranks) -> None:
    assert "use one of the two" in ranks.run(1, told, _both_kinds)[0]
