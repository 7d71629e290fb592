"""DDP with a recipe attached: what outlives a step, and what a bad step or a bad checkpoint must leave alone."""

import io
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ddp_models import SCENARIOS, SEVERAL, WIDTH, Scenario, Training, digest, flat, same, values
from ranks import Ranks, told
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.memories import MomentumCorrection
from thinwire.schedules import exponential_warmup

STATEFUL = [name for name, case in RECIPES.items() if any(memory.stateful for memory in case.make().memories())]


def _clipped(make: Callable[..., tw.reducer.Reducer] = tw.recipes.dgc) -> tw.reducer.Reducer:
    return make(density=0.05, clip_norm=0.05, minimum_size=64)


def _warming_up() -> tw.reducer.Reducer:
    return tw.recipes.dgc(density=exponential_warmup(0.02, stages=3, steps_each=2), minimum_size=64)


def _own_momentum() -> tw.reducer.Reducer:
    return tw.recipes.dgc(density=0.05, momentum=0.9, minimum_size=64)


MAKERS: dict[str, Callable[[], tw.reducer.Reducer]] = {name: case.make for name, case in RECIPES.items()}
MAKERS |= {"clipped": _clipped, "warming up": _warming_up, "own momentum": _own_momentum}


# --- checkpoints ---


def _through_a_file(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def _resumed(scenario: str, recipe: str, scaled: bool, optimizer_first: bool) -> tuple[str, str]:
    options: dict[str, Any] = {"nesterov": recipe == "dgc", "weight_decay": 0.01}
    old = Training(scenario, MAKERS[recipe](), scaler=_scaler(scaled), **options).run(range(5))
    saved = _through_a_file([x.state_dict() for x in (old.model, old.optimizer, old.attachment, old.scaler) if x])
    old.run(range(5, 7))

    new = Training(scenario, scaler=_scaler(scaled), **options)
    if optimizer_first:
        new.optimizer.load_state_dict(saved[1])
    attachment = new.attach(MAKERS[recipe]())
    new.model.load_state_dict(saved[0])
    new.optimizer.load_state_dict(saved[1])
    attachment.load_state_dict(saved[2])
    if new.scaler is not None:
        new.scaler.load_state_dict(saved[3])
    assert same(attachment.state_dict(), saved[2])
    new.run(range(5, 7))
    assert same(attachment.state_dict(), old.attachment.state_dict())
    return digest(old.model), digest(new.model)


def _scaler(scaled: bool, interval: int = 2) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=interval) if scaled else None


@pytest.mark.grid
@pytest.mark.parametrize(("scaled", "optimizer_first"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("recipe", MAKERS)
def test_a_resumed_run_makes_the_same_next_steps(
    ranks: Ranks, recipe: str, scaled: bool, optimizer_first: bool
) -> None:
    for uninterrupted, resumed in ranks.run(2, _resumed, "several buckets", recipe, scaled, optimizer_first):
        assert uninterrupted == resumed


@pytest.mark.grid
@pytest.mark.parametrize("recipe", ["topk", "dgc"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_kind_of_model_resumes(ranks: Ranks, scenario: str, recipe: str) -> None:
    for uninterrupted, resumed in ranks.run(2, _resumed, scenario, recipe, False, False):
        assert uninterrupted == resumed


def _frozen_copy(recipe: str) -> bool:
    training = Training("several buckets", recipe).run(range(3))
    state = training.attachment.state_dict()
    copy = _through_a_file(state)
    training.run(range(3, 5))
    unmoved = same(state, copy)
    training.attachment.load_state_dict(state)
    for memory in state["memories"]:
        for fields in memory.values():
            for tensor in fields.values():
                tensor.zero_()
    return unmoved and same(training.attachment.state_dict(), copy)


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_state_dict_is_a_copy_in_both_directions(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(1, _frozen_copy, recipe) == [True]


def _watched(recipe: str, watched: bool) -> str:
    """Train with somebody reading the attachment in the middle of backward, and in its last moments."""
    training = Training("several buckets", recipe)
    attachment, steps = training.attachment, []
    for p in training.parameters().values() if watched else ():
        p.register_hook(lambda gradient: steps.append((attachment.step, len(attachment.state_dict()))))
        p.register_post_accumulate_grad_hook(lambda p: steps.append((attachment.step, len(attachment.state_dict()))))
    training.run(range(4))
    return digest(training.model)


@pytest.mark.parametrize("recipe", STATEFUL)
def test_who_only_looks_changes_nothing(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(2, _watched, recipe, True) == ranks.run(2, _watched, recipe, False)


def _watched_in_flight(recipe: str, watched: bool) -> str:
    """Rank 0 looks while rank 1 holds the last bucket back until it has, once ranks have found that they agree."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()

    def call(model: nn.Module, x: Tensor, step: int) -> Tensor:
        x = x.requires_grad_() * 1
        if step == 0:
            return model(x)
        if watched and rank == 0:
            x.register_hook(lambda gradient: store.set(str(step), str(training.attachment.state_dict()["step"])))
        if watched and rank == 1:
            training.model.module[0].weight.register_hook(lambda gradient: store.wait([str(step)]))
        return model(x)

    training = Training(Scenario(call=call), recipe)
    return digest(training.run(range(4)).model)


@pytest.mark.parametrize("recipe", STATEFUL)
def test_looking_at_a_step_in_flight_changes_nothing(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(2, _watched_in_flight, recipe, True) == ranks.run(2, _watched_in_flight, recipe, False)


Damage = Callable[[dict[str, Any]], Any]

WAITING = object()
"""In a path: the first field, whatever a memory calls what waits."""


def _at(*path: Any, to: Any) -> Damage:
    """Replace what lies at `path`; `to` may be a function of what was there."""

    def damage(state: dict[str, Any]) -> Any:
        place: Any = state
        for key in path[:-1]:
            place = place[key]
        key = next(iter(place)) if path[-1] is WAITING else path[-1]
        place[key] = to(place[key]) if callable(to) else to
        return state

    return damage


def _without(*path: Any) -> Damage:
    def damage(state: dict[str, Any]) -> Any:
        place: Any = state
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        return state

    return damage


WEIGHT = ("memories", -1, "0.weight")
DAMAGES: dict[str, Damage] = {
    "none": lambda state: None,
    "a list": lambda state: list(state),
    "empty": lambda state: {},
    "no version": _without("version"),
    "no step": _without("step"),
    "no memories": _without("memories"),
    "no momentum": _without("momentum"),
    "no draw": _without("draw"),
    "no rank": _without("rank"),
    "no world size": _without("world_size"),
    "no recipe": _without("recipe"),
    "another rank's": _at("rank", to=1),
    "rank is text": _at("rank", to="0"),
    "of more ranks": _at("world_size", to=2),
    "recipe is none": _at("recipe", to=None),
    "negative draw": _at("draw", to=-1),
    "version 1": _at("version", to=1),
    "no loss scale": _without("loss_scale"),
    "other version": _at("version", to=99),
    "version is a list": _at("version", to=[1]),
    "version is a tensor": _at("version", to=torch.tensor([2, 2])),
    "negative step": _at("step", to=-1),
    "step beyond counting": _at("step", to=2**63),
    "broken step": _at("step", to=1.5),
    "step is text": _at("step", to="3"),
    "step is a tensor": _at("step", to=torch.tensor([1, 2])),
    "loss scale is text": _at("loss_scale", to="big"),
    "loss scale is zero": _at("loss_scale", to=0.0),
    "loss scale is NaN": _at("loss_scale", to=float("nan")),
    "memories are none": _at("memories", to=None),
    "memories are a mapping": _at("memories", to={}),
    "one memory more": _at("memories", to=lambda memories: [*memories, {}]),
    "a memory less": _at("memories", to=lambda memories: memories[1:]),
    "a memory is none": _at("memories", -1, to=None),
    "fields are none": _at(*WEIGHT, to=None),
    "other model": _at("memories", -1, to=lambda memory: {f"other.{name}": x for name, x in memory.items()}),
    "name is a number": _at("memories", -1, to=lambda memory: memory | {3: memory["0.weight"]}),
    "no residual": _at(*WEIGHT, to=lambda fields: {"leftover": next(iter(fields.values()))}),
    "a field too many": _at(*WEIGHT, to=lambda fields: fields | {"leftover": next(iter(fields.values()))}),
    "residual is a list": _at(*WEIGHT, WAITING, to=lambda x: x.tolist()),
    "residual is a number": _at(*WEIGHT, WAITING, to=0.5),
    "other shape": _at(*WEIGHT, WAITING, to=lambda x: x[1:].clone()),
    "two dimensions": _at(*WEIGHT, WAITING, to=lambda x: x.view(2, -1)),
    "half": _at(*WEIGHT, WAITING, to=lambda x: x.half()),
    "double": _at(*WEIGHT, WAITING, to=lambda x: x.double()),
    "integers": _at(*WEIGHT, WAITING, to=lambda x: x.int()),
    "sparse": _at(*WEIGHT, WAITING, to=lambda x: x.to_sparse()),
    "residual is NaN": _at(*WEIGHT, WAITING, to=lambda x: x * torch.nan),
    "residual has an infinity": _at(*WEIGHT, WAITING, to=lambda x: torch.where(x == x.max(), torch.inf, x)),
    "on no device": _at(*WEIGHT, WAITING, to=lambda x: x.to("meta")),
    "momentum is none": _at("momentum", to=None),
    "momentum of no memory": _at("momentum", to=lambda momentum: [*momentum, [0.9, False]]),
}
MOMENTUM_DAMAGES: dict[str, Damage] = {
    "momentum is a number": _at("momentum", to=[0.9]),
    "momentum is text": _at("momentum", 0, to=["0.9", False]),
    "momentum is too short": _at("momentum", 0, to=[0.9]),
    "nesterov is text": _at("momentum", 0, to=[0.9, "no"]),
    "velocity is half": _at(*WEIGHT, "velocity", to=lambda x: x.half()),
    "velocity is short": _at(*WEIGHT, "velocity", to=lambda x: x[:7]),
}


def _refused(recipe: str, damages: dict[str, Damage]) -> dict[str, str]:
    """Return what happened instead of a ValueError that changes nothing."""
    training = Training("several buckets", recipe, weight_decay=0.01).run(range(2))
    attachment, wrong = training.attachment, {}
    before = attachment.state_dict()
    for name, damage in damages.items():
        try:
            attachment.load_state_dict(damage(_through_a_file(before)))
            wrong[name] = "accepted"
        except ValueError as error:
            if not str(error):
                wrong[name] = "no message"
        except Exception as error:
            wrong[name] = repr(error)
        if not same(attachment.state_dict(), before):
            wrong[name] = f"{wrong.get(name)}, and the state has changed"
            attachment.load_state_dict(before)
    training.run(range(2, 4))
    if not attachment.verify_replicas():
        wrong["afterwards"] = "replicas differ"
    return wrong


# Pickling a lambda is not possible, so the ranks look them up.
def _refused_damages(recipe: str) -> dict[str, str]:
    corrected = any(isinstance(memory, MomentumCorrection) for memory in RECIPES[recipe].make().memories())
    damages = DAMAGES | MOMENTUM_DAMAGES if corrected else DAMAGES
    return _refused(recipe, damages)


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_wrong_state_is_refused_and_changes_nothing(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(1, _refused_damages, recipe) == [{}]


@cache
def _states() -> dict[str, dict[str, Any]]:
    return {name: Training("several buckets", name).run(range(2)).attachment.state_dict() for name in RECIPES}


def _states_of_others(recipe: str) -> list[str]:
    attachment = Training("several buckets", recipe).run(range(1)).attachment
    before, accepted = attachment.state_dict(), []
    for name, state in _states().items():
        try:
            attachment.load_state_dict(state)
            accepted.append(name)
            attachment.load_state_dict(before)
        except ValueError:
            assert same(attachment.state_dict(), before)
    return accepted


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_states_of_like_memories_are_accepted(ranks: Ranks, recipe: str) -> None:
    kept = {name: [sorted(memory.fields) for memory in case.make().memories()] for name, case in RECIPES.items()}
    assert ranks.run(1, _states_of_others, recipe) == [[name for name in RECIPES if kept[name] == kept[recipe]]]


def _without_thresholds() -> str:
    """Return what is said of a state whose notes have no element: the next step would look for one."""
    training = Training("several buckets", "dct_dp").run(range(3))
    saved = training.attachment.state_dict()
    held = [fields for memory in saved["memories"] for fields in memory.values() if "note" in fields]
    for fields in held:
        fields["note"] = fields["note"][:0]
    return told(training.attachment.load_state_dict, saved) if held else "no notes"


def test_a_note_without_numbers_is_refused(ranks: Ranks) -> None:
    (said,) = ranks.run(1, _without_thresholds)
    assert re.match(
        r"ValueError: note of '.*' in attachment state is torch.Size\(\[0\]\); expected .*one at least", said
    )


def _saved_of_a_compiled_model(recipe: str) -> bool:
    """Load what the same model would have saved inside torch.compile, or the other way round."""
    training = Training("several buckets", recipe).run(range(3))
    plain = training.attachment.state_dict()
    prefixed = [{name.replace(".", "._orig_mod.", 1): x for name, x in each.items()} for each in plain["memories"]]
    training.run(range(3, 5)).attachment.load_state_dict(plain | {"memories": prefixed})
    return same(training.attachment.state_dict(), plain)


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_compiled_models_state_loads(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(1, _saved_of_a_compiled_model, recipe) == [True]


def _saved_under_old_names(recipe: str) -> tuple[str, str]:
    """Return what is held after loading a state whose recipe is in the words of version 0.1, and what was saved."""
    training = Training("several buckets", recipe).run(range(2))
    now = training.attachment.state_dict()
    old = {**now, "recipe": now["recipe"].replace("minimum_size=", "numel=").replace("group_size=", "group=")}
    assert old["recipe"] != now["recipe"]
    again = Training("several buckets", recipe)
    again.attachment.load_state_dict(_through_a_file(old))
    return str(again.attachment.state_dict()), str(now)


@pytest.mark.parametrize("recipe", ["topk", "signsgd", "dgc"])
def test_a_state_saved_before_options_were_renamed_loads(ranks: Ranks, recipe: str) -> None:
    for found, saved in ranks.run(2, _saved_under_old_names, recipe):
        assert found == saved


# --- gradients that are not finite ---


def _spoil(value: float, gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    numbers = gradient._values() if gradient.is_sparse else gradient
    numbers.view(-1)[7 % numbers.numel()] = value
    return gradient


def _poisoned(scenario: str, recipe: str, parameter: str, value: float, at: int) -> list[str]:
    """Return what went wrong around a step in which one rank has one bad element."""
    wrong = []
    training = Training(scenario, MAKERS[recipe]()).run(range(at))
    before = training.attachment.state_dict()
    weights = digest(training.model)
    p = training.parameters()[parameter]
    if dist.get_rank() == dist.get_world_size() - 1:
        handle = p.register_hook(partial(_spoil, value))
    if training.step(at) or p.grad is None or bool(values(p.grad).isfinite().all()):
        wrong.append("not seen")
    if dist.get_rank() == dist.get_world_size() - 1:
        handle.remove()
    after = training.attachment.state_dict()
    if at == 0:
        tensors = [x for memory in after["memories"] for fields in memory.values() for x in fields.values()]
        kept = not any(bool(x.any()) for x in tensors)
    else:
        kept = same(after, before | {"draw": at + 1})
    if not kept:
        wrong.append("memory changed")
    assert digest(training.model) == weights
    if not training.step(at + 1) or digest(training.model) == weights:
        wrong.append("does not go on")
    asleep = same(training.attachment.state_dict()["memories"], before["memories"])
    if (recipe in STATEFUL or recipe == "clipped") and asleep:
        wrong.append("memory asleep")
    return wrong if training.attachment.verify_replicas() else [*wrong, "replicas differ"]


@pytest.mark.grid
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("scenario", "parameter"),
    [
        ("several buckets", "0.weight"),  # compressed, in the last bucket
        ("several buckets", "0.bias"),  # small
        ("several buckets", "4.weight"),  # in the first bucket
        ("unused", "trunk.weight"),
        ("sparse embedding", "words.weight"),
    ],
)
@pytest.mark.parametrize("recipe", [*RECIPES, "clipped"])
def test_a_bad_gradient_is_seen_by_all_and_kept_by_none(
    ranks: Ranks, recipe: str, scenario: str, parameter: str, value: float
) -> None:
    assert ranks.run(2, _poisoned, scenario, recipe, parameter, value, 3) == [[]] * 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bad_first_gradient_leaves_no_memory(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(2, _poisoned, "several buckets", recipe, "2.weight", float("nan"), 0) == [[]] * 2


def _opposed_infinities(recipe: str) -> bool:
    """Two infinities that cancel are seen too."""
    training = Training("several buckets", recipe)
    value = float("inf") if dist.get_rank() == 0 else -float("inf")
    training.parameters()["2.weight"].register_hook(partial(_spoil, value))
    return training.step(0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_opposed_infinities_do_not_hide_each_other(ranks: Ranks, recipe: str) -> None:
    assert ranks.run(2, _opposed_infinities, recipe) == [False, False]


def _scaled_training(recipe: str) -> list[tuple[float, str]]:
    training = Training("several buckets", MAKERS[recipe](), scaler=_scaler(True, interval=3))
    assert training.scaler is not None
    found = []
    p = training.parameters()["2.weight"]
    for step in range(8):
        if step == 4 and dist.get_rank() == 1:
            handle = p.register_hook(partial(_spoil, float("inf")))
        training.step(step)
        if step == 4 and dist.get_rank() == 1:
            handle.remove()
        found.append((training.scaler.get_scale(), digest(training.model)))
    assert training.attachment.verify_replicas()
    return found


@pytest.mark.parametrize("recipe", [*RECIPES, "clipped"])
def test_a_grad_scaler_skips_the_bad_step_on_all_ranks(ranks: Ranks, recipe: str) -> None:
    first, *others = ranks.run(3, _scaled_training, recipe)
    assert all(other == first for other in others)
    assert [scale for scale, _ in first] == [256, 256, 512, 512, 256, 256, 256, 512]
    digests = [digest for _, digest in first]
    assert digests[4] == digests[3]
    assert len(set(digests)) == 7


def _trajectory(recipe: str, scaled: bool, late: bool) -> list[str]:
    training = Training("several buckets", scaler=_scaler(scaled), weight_decay=0.01)
    if late:
        training.run(range(2))
    training.attach(MAKERS[recipe]())
    found = []
    for step in range(2, 8):
        if step == 5 and dist.get_rank() == 1:
            handle = training.parameters()["0.weight"].register_hook(partial(_spoil, float("nan")))
        training.step(step)
        if step == 5 and dist.get_rank() == 1:
            handle.remove()
        found.append(digest(training.model))
    return found


@pytest.mark.grid
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("recipe", [name for name in MAKERS if name != "fp16"])  # a scale saves what underflows there
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(ranks: Ranks, recipe: str, late: bool) -> None:
    assert ranks.run(2, _trajectory, recipe, True, late) == ranks.run(2, _trajectory, recipe, False, late)


def _scaled_books(recipe: str) -> float:
    """Return how far Σ applied + waiting is from the sum of mean gradients, in float64, over changing scales."""
    training = Training("several buckets", recipe, dtype=torch.float64, scaler=_scaler(True), momentum=0.0)
    assert training.scaler is not None
    parameters, missing = training.parameters(), 0.0
    books = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in parameters.items()}
    for step in range(7):
        mine = training.local_gradients(step)
        if step == 3 and dist.get_rank() == 1:
            handle = parameters["2.weight"].register_hook(partial(_spoil, float("nan")))
        finite = training.step(step)
        if step == 3 and dist.get_rank() == 1:
            handle.remove()
        assert finite == (step != 3)
        for name, gradient in training.gradients().items() if finite else ():
            # GradScaler.step has unscaled them
            books[name] += flat(mine[name], parameters[name]) / dist.get_world_size()
            books[name] -= flat(gradient, parameters[name]) / dist.get_world_size()
    state = training.attachment.state_dict()
    for name, book in books.items():
        for memory in state["memories"]:
            if "residual" in memory.get(name, {}):
                book -= memory[name]["residual"] / state["loss_scale"]
        dist.all_reduce(book)
        missing = max(missing, float(book.abs().max()))
    return missing


@pytest.mark.parametrize("recipe", [name for name, case in RECIPES.items() if not case.momentum and case.conserving])
def test_nothing_is_lost_while_the_loss_scale_changes(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _scaled_books, recipe)) < 1e-13


# --- a step that breaks off ---


class Fragile(torch.autograd.Function):
    """Passes everything on, and raises in backward while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Fragile.armed:
            raise ArithmeticError("broken")
        return gradient


class Breakable(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 40, dtype=dtype), nn.Linear(40, 40, dtype=dtype)
        self.early = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.early:
            return Fragile.apply(self.second(x.tanh()))
        return self.second(Fragile.apply(x).tanh())


def _broken(recipe: str, early: bool) -> tuple[bool, str, str]:
    scenario = Scenario(make=Breakable, options=SEVERAL)
    training, twin = (Training(scenario, recipe).run(range(3)) for _ in range(2))
    before = training.attachment.state_dict()
    training.model.module.early = early
    Fragile.armed = True
    with pytest.raises(ArithmeticError):
        training.step(3)
    Fragile.armed = False
    unchanged = same(training.attachment.state_dict(), before)
    if not early:  # DDP itself refuses to go on once part of a bucket was ready, so it is wrapped anew
        old, training = training, Training(scenario, recipe)
        training.model.load_state_dict(old.model.state_dict())
        training.optimizer.load_state_dict(old.optimizer.state_dict())
        training.attachment.load_state_dict(before)
    return unchanged, digest(training.run(range(3, 5)).model), digest(twin.run(range(3, 5)).model)


@pytest.mark.grid
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_that_breaks_off_leaves_no_trace(ranks: Ranks, recipe: str, early: bool) -> None:
    for unchanged, after, twin in ranks.run(2, _broken, recipe, early):
        assert unchanged
        assert after == twin


def _half_a_step(recipe: str) -> tuple[bool, str, str]:
    training, twin = (Training("several buckets", recipe).run(range(3)) for _ in range(2))
    before = training.attachment.state_dict()
    p = training.parameters()["4.weight"]  # of the first bucket
    gradient = torch.ones_like(p)
    training.attachment.reduce(gradient.view(-1), [p]).wait()
    unchanged = same(training.attachment.state_dict(), before)
    return unchanged, digest(training.run(range(3, 5)).model), digest(twin.run(range(3, 5)).model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_half_a_step_is_dropped_by_the_next(ranks: Ranks, recipe: str) -> None:
    for unchanged, after, twin in ranks.run(2, _half_a_step, recipe):
        assert unchanged
        assert after == twin


# --- momentum ---


def _densely(clip_norm: float | None = None, **options: Any) -> tw.reducer.Reducer:
    return tw.recipes.dense(memory=MomentumCorrection(clip_norm=clip_norm, **options))


def _both(options: dict[str, Any], late: int, scaled: bool) -> float:
    """Return how far a run with momentum in the memory is from SGD's own."""
    plain, moved = (
        Training("several buckets", dtype=torch.float64, scaler=_scaler(scaled), **options).run(range(late))
        for _ in range(2)
    )
    moved.attach(_densely())
    for training in (plain, moved):
        training.run(range(late, late + 5))
    keys = ("momentum", "nesterov", "weight_decay")
    groups = [[{key: g[key] for key in keys} for g in t.optimizer.param_groups] for t in (plain, moved)]
    assert groups[0] == groups[1]
    pairs = zip(plain.model.parameters(), moved.model.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.grid
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True},
        {"weight_decay": 0.1},
        {"nesterov": True, "weight_decay": 0.1, "momentum": 0.5},
        {"maximize": True, "weight_decay": 0.1},
        {"momentum": 0.0, "weight_decay": 0.1},
    ],
)
def test_moved_momentum_is_that_of_sgd(ranks: Ranks, options: dict[str, Any], late: int, scaled: bool) -> None:
    assert max(ranks.run(2, _both, options, late, scaled)) < 1e-13


def _clipped_mean() -> float:
    """Return how far a first gradient is from the mean of gradients clipped one by one."""
    training = Training("several buckets", dtype=torch.float64, momentum=0.5)
    training.attach(_densely(clip_norm=0.04))
    mine = training.local_gradients(0)
    limit = 0.04 / dist.get_world_size() ** 0.5
    assert any(gradient.norm() > limit for gradient in mine.values())
    assert any(gradient.norm() < limit for gradient in mine.values())
    training.step(0)
    far = 0.0
    for name, gradient in mine.items():
        gradient *= min(1.0, limit / float(gradient.norm())) / dist.get_world_size()
        dist.all_reduce(gradient)
        far = max(far, float((gradient - training.gradients()[name]).abs().max()))
    return far


def test_each_rank_clips_its_own_gradient(ranks: Ranks) -> None:
    assert max(ranks.run(2, _clipped_mean)) < 1e-15


def _clipped_anew() -> tuple[str, str]:
    """Wrap the model anew under a loss scale: the limit of clipping follows it, as before."""
    again, straight = (Training("several buckets", _clipped(), scaler=_scaler(True)).run(range(3)) for _ in range(2))
    old = again.model
    again.model = DistributedDataParallel(old.module, **again.scenario.options)
    again.attach(_clipped())
    del old
    return digest(again.run(range(3, 6)).model), digest(straight.run(range(3, 6)).model)


def test_clipping_follows_the_loss_scale_when_wrapped_anew(ranks: Ranks) -> None:
    for again, straight in ranks.run(2, _clipped_anew):
        assert again == straight


Attempt = Callable[[], object]


def _refusal(attempt: Attempt, *trainings: Training) -> str:
    """Return the message of a MomentumError that leaves optimizers and parameters as they were."""
    before = [(digest(t.model), _through_a_file(t.optimizer.state_dict())) for t in trainings]
    with pytest.raises(tw.errors.MomentumError) as error:
        attempt()
    for training, (weights, state) in zip(trainings, before, strict=True):
        assert digest(training.model) == weights
        assert same(training.optimizer.state_dict(), state)
    return str(error.value)


def _attach_refusals() -> dict[str, str]:
    found = {}

    def refused(
        name: str,
        make: Callable[[Training], torch.optim.Optimizer | None],
        recipe: tw.reducer.Reducer | None = None,
    ) -> None:
        training = Training("several buckets").run(range(2))
        optimizer, recipe = make(training), recipe or tw.recipes.dgc()
        found[name] = _refusal(lambda: tw.attach(training.model, recipe, optimizer=optimizer), training)
        assert training.attach("topk").step == 0  # the model is still free

    def parameters(training: Training) -> list[nn.Parameter]:
        return list(training.model.parameters())

    mixed = tw.reducer.WarmUp(steps=2, first=tw.recipes.dense(), then=tw.recipes.dgc())
    stranger = nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD
    refused("no optimizer", lambda t: None)
    refused("adam", lambda t: torch.optim.Adam(parameters(t)))
    refused("rmsprop", lambda t: torch.optim.RMSprop(parameters(t), momentum=0.9))
    refused("another model's", lambda t: sgd([stranger], momentum=0.9))
    refused("dampening", lambda t: sgd(parameters(t), momentum=0.9, dampening=0.1))
    refused("other momentum", lambda t: t.optimizer, tw.recipes.dgc(momentum=0.5))
    refused("unlike groups", lambda t: sgd([{"params": [p], "momentum": p.dim() / 4} for p in parameters(t)]))
    refused("mixed recipe", lambda t: t.optimizer, mixed)
    refused("shared group", lambda t: sgd([*parameters(t), stranger], momentum=0.9))
    refused("part of the model", lambda t: sgd(parameters(t)[1:], momentum=0.9))
    return found


def test_momentum_that_cannot_be_moved_is_refused_with_the_fix(ranks: Ranks) -> None:
    messages = ranks.run(1, _attach_refusals)[0]
    fixes = {
        "no optimizer": "optimizer=",
        "adam": "torch.optim.SGD",
        "rmsprop": "torch.optim.SGD",
        "another model's": "pass the one",
        "dampening": "dampening=0",
        "other momentum": "leave one of them out",
        "unlike groups": "make them equal",
        "mixed recipe": "dense(memory=memory)",
        "shared group": "group of their own",
        "part of the model": "0.weight",
    }
    assert messages.keys() == fixes.keys()
    for name, fix in fixes.items():
        assert fix in messages[name], messages[name]


def _embedding() -> str:
    training, other = Training("sparse embedding"), Training("sparse embedding")
    everything = torch.optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)
    recipe = tw.recipes.dgc()
    message = _refusal(lambda: tw.attach(training.model, recipe, optimizer=everything), training)
    other.attach("dgc")
    embedding = other.parameters()["words.weight"]
    other.backward(0)
    torch.optim.SparseAdam([embedding]).step()  # has momentum, but not of a corrected gradient
    return message


def test_a_sparse_embedding_keeps_its_own_optimizer(ranks: Ranks) -> None:
    assert "group of their own" in ranks.run(1, _embedding)[0]


def _momentum_twice() -> list[str]:
    moved = Training("several buckets", "dgc").run(range(2))
    adam = torch.optim.Adam(moved.model.parameters())
    other = _refusal(adam.step, moved)
    without = _refusal(torch.optim.Adam(moved.model.parameters(), betas=(0.0, 0.9)).step, moved)

    own = Training("several buckets")
    tw.attach(own.model, tw.recipes.dgc(momentum=0.9))
    own.backward(0)
    both = _refusal(own.optimizer.step, own)
    return [other, both, without]


def test_momentum_applied_twice_is_refused_at_the_step(ranks: Ranks) -> None:
    *twice, without = ranks.run(1, _momentum_twice)[0]
    for message in twice:
        assert "optimizer=optimizer" in message
    assert "took from another optimizer: pass all optimizers that step them" in without


def _unrelated() -> bool:
    moved, other = Training("several buckets", "dgc"), Training("several buckets", "topk")
    moved.run(range(2))
    other.run(range(2))
    return other.optimizer.param_groups[0]["momentum"] == 0.9 and any(
        "momentum_buffer" in state for state in other.optimizer.state.values()
    )


def test_an_unrelated_optimizer_keeps_its_momentum(ranks: Ranks) -> None:
    assert ranks.run(1, _unrelated) == [True]


def _freed() -> bool:
    training = Training("several buckets", "dgc").run(range(2))
    module = training.model.module
    del training
    torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9).step()
    return True


def test_a_model_that_is_no_longer_attached_may_have_momentum(ranks: Ranks) -> None:
    assert ranks.run(1, _freed) == [True]


def _thawed(recipe: str, saved: bool) -> list[bool]:
    """Freeze a layer and thaw it again, wrapping the model anew each time. Return whether the layer's memory stays."""
    training = Training("several buckets", recipe).run(range(2))
    before = [{n: x for n, x in m.items() if n[0] == "4"} for m in training.attachment.state_dict()["memories"]]
    for trained in (False, True):
        training.model.module[4].requires_grad_(trained)
        training.model = DistributedDataParallel(training.model.module)
        training.attach(recipe)
        if saved:
            training.attachment.load_state_dict(training.attachment.state_dict())
        after = training.attachment.state_dict()["memories"]
        training.run(range(2, 3) if not trained else range(0))
    return [same(x, m.get(name)) for old, m in zip(before, after, strict=True) for name, x in old.items()]


@pytest.mark.grid
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("recipe", STATEFUL)
def test_what_waits_for_a_frozen_layer_is_there_when_it_is_thawed(ranks: Ranks, recipe: str, saved: bool) -> None:
    for same_as_before in ranks.run(2, _thawed, recipe, saved):
        assert all(same_as_before)
