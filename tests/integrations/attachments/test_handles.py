"""Handles: the verbs they share, what they say of their steps, and what `why` says of a plan."""

import copy
import logging
import math
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ddp_models import Training, mlp
from ranks import Ranks, told
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire import trace
from thinwire.integrations import Attachment, Outer, Replicas, Scattered, Shards
from thinwire.planner import Why
from thinwire.trainer import Trainer

VERBS = {name for name in dir(tw.Handle) if not name.startswith("_")}


def test_every_handle_has_the_verbs() -> None:
    assert {
        "differing_parameters",
        "load_state_dict",
        "memory",
        "memory_bytes",
        "remove",
        "state_dict",
        "stats",
        "verify_replicas",
    } == VERBS
    for kind in (Attachment, Replicas, Scattered, Shards, Outer, tw.pipeline.Sparsified):
        assert issubclass(kind, tw.Handle)


# --- what one rank alone does wrong ---


def _one_alone(wrong: int) -> dict[str, str]:
    """Have one rank give what no rank should, and return what all are told."""
    mine = dist.get_rank() == wrong

    def module() -> nn.Module:
        return mlp(torch.float32)

    def attach(recipe: Any, **options: Any) -> str:
        return told(lambda: tw.attach(DistributedDataParallel(module()), recipe, **options))

    def replicate(modules: Any, recipe: Any, **options: Any) -> str:
        return told(lambda: tw.replicate(modules, recipe, **options))

    used, whole = tw.recipes.topk(), module()
    at_work = tw.replicate(module(), used)
    imaginary = nn.Linear(2, 2, dtype=torch.complex64)
    sgd = torch.optim.SGD((module() if mine else whole).parameters(), lr=0.1, momentum=0.9)
    said = {
        "attach: recipe": attach(3 if mine else tw.recipes.topk()),
        "attach: type": attach(tw.recipes.topk(), scaler=3 if mine else None),
        "attach: range": attach(tw.recipes.topk(), samples=0 if mine else None),
        "replicate: type": replicate(module(), tw.recipes.topk(), scaler=3 if mine else None),
        "attach: used": attach(used if mine else tw.recipes.topk()),
        "attach: momentum": told(lambda: tw.attach(DistributedDataParallel(whole), tw.recipes.dgc(), optimizer=sgd)),
        "replicate: recipe": replicate(module(), None if mine else tw.recipes.topk()),
        "replicate: modules": replicate([] if mine else [module()], tw.recipes.topk()),
        "replicate: complex": replicate(imaginary if mine else module(), tw.recipes.topk()),
        "replicate: used": replicate(module(), used if mine else tw.recipes.topk()),
    }
    assert at_work.attachment.step == 0
    return said


@pytest.mark.parametrize("wrong", [0, 1])
def test_what_is_wrong_on_one_rank_is_an_error_on_every_rank(ranks: Ranks, wrong: int) -> None:
    expected = {
        "attach: recipe": ("TypeError: ", "attach takes a recipe"),
        "attach: type": ("TypeError: ", "scaler is 3; expected"),
        "attach: range": ("ValueError: ", "samples is 0; expected"),
        "replicate: type": ("TypeError: ", "scaler is 3; expected"),
        "attach: used": ("RuntimeError: ", "attached to a model already"),
        "attach: momentum": ("MomentumError: ", "optimizer"),
        "replicate: recipe": ("TypeError: ", "replicate takes a recipe"),
        "replicate: modules": ("ValueError: ", "modules is []"),
        "replicate: complex": ("TypeError: ", "view_as_real"),
        "replicate: used": ("RuntimeError: ", "attached to a model already"),
    }
    for rank, messages in enumerate(ranks.run(2, _one_alone, wrong)):
        for name, (kind, words) in expected.items():
            blamed = "" if rank == wrong else f"rank {wrong}: "
            assert messages[name].startswith(kind + blamed), (name, messages[name])
            assert words in messages[name], (name, messages[name])


def _names_what_is_lacking() -> dict[str, str]:
    """Attach recipes by parameter, of which one is frozen and one misnamed, and return what is said."""

    def model(*, sharded: bool = False) -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[0].requires_grad_(False)
        if sharded:
            fully_shard(module, mesh=mesh)
        return module

    def recipe(name: str) -> tw.reducer.Reducer:
        given = {"topk": tw.recipes.topk()}
        parts = tw.reducer.PerTensor(
            reducers=given, chosen={name: "topk", "0.weight": "topk"}, otherwise=tw.recipes.dense()
        )
        return tw.reducer.MinimumSize(minimum_size=2, large=parts)

    def outer(name: str) -> tw.Handle:
        whole = model()
        optimizer = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.1)
        steps = tw.outer_steps.OuterSteps(every=2, recipe=recipe(name), fragments=2)
        return tw.outer(whole, optimizer, steps)

    mesh = init_device_mesh("cpu", (2,))
    verbs: dict[str, Any] = {
        "attach": lambda name: tw.attach(DistributedDataParallel(model()), recipe(name)),
        "replicate": lambda name: tw.replicate(model(), recipe(name)),
        "scatter": lambda name: tw.scatter(model(sharded=True), recipe(name), mesh=mesh),
        "outer": outer,
    }
    known = {verb: told(call, "1.weight") for verb, call in verbs.items()}
    assert set(known.values()) == {"nothing"}, known
    return {verb: told(call, "module.1.weight") for verb, call in verbs.items()}


def test_a_recipe_for_a_parameter_that_the_model_lacks_is_refused_by_name(ranks: Ranks) -> None:
    for said in ranks.run(2, _names_what_is_lacking):
        for verb, words in said.items():
            assert words.startswith("ValueError: PerTensor.chosen names 'module.1.weight'"), (verb, words)
            assert words.endswith("such as 1.weight, 0.weight"), (verb, words)


def test_without_a_process_group_they_say_what_to_call() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (
        lambda: tw.replicate(model, tw.recipes.topk()),
        lambda: tw.outer(model, optimizer, tw.outer_steps.diloco()),
    ):
        with pytest.raises(RuntimeError, match="init_process_group"):
            call()


def _one_loads_nothing(kind: str, evaluates: bool) -> str:
    """Have one rank train or evaluate where the others load. DDP sends the batch norm's buffers in its forward pass."""

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        if kind == "replicate":
            return module, tw.replicate(module, tw.recipes.topk())
        model = DistributedDataParallel(module)
        return model, tw.attach(model, tw.recipes.topk())

    def train(model: nn.Module, handle: Any) -> None:
        model(torch.randn(8, 4)).square().sum().backward()
        if kind == "replicate":
            handle.reduce()

    model, handle = made()
    train(model, handle)
    handle.keep_step()
    saved = handle.state_dict()
    model, handle = made()
    if not dist.get_rank():
        return told(handle.load_state_dict, saved)
    if evaluates:
        with torch.no_grad():
            model.eval()(torch.zeros(8, 4))
    return told(train, model.train(), handle)


@pytest.mark.parametrize(("kind", "evaluates"), [("attach", False), ("attach", True), ("replicate", False)])
def test_a_rank_that_loads_nothing_is_an_error_on_every_rank(ranks: Ranks, kind: str, evaluates: bool) -> None:
    for said in ranks.run(2, _one_loads_nothing, kind, evaluates):
        assert said.startswith("StateError: rank 0 resumes from {'step': 1"), said


# --- what becomes of the model around it ---


class _Growing(nn.Module):
    """Has an adapter beside its layer once somebody adds that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.adapter is None else self.layer(x) + self.adapter(x)


class _Door:
    """A model in training by one of the doors."""

    def __init__(self, door: str) -> None:
        torch.manual_seed(0)
        self.module: Any = _Growing()
        self.enter(door)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def enter(self, door: str) -> None:
        """Go through the door, for the first time or again."""
        recipe, self.reduces = tw.recipes.topk(density=0.1, minimum_size=0), door == "replicate"
        if door == "attach":
            self.model: Any = DistributedDataParallel(self.module)
            self.handle: Any = tw.attach(self.model, recipe)
        elif door == "replicate":
            self.model, self.handle = self.module, tw.replicate(self.module, recipe)
        else:
            shape = (2, 1) if door == "shard" else (2,)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "rest")[: len(shape)])
            self.model = fully_shard(self.module, mesh=mesh["rest"] if door == "shard" else mesh)
            self.handle = (tw.shard if door == "shard" else tw.scatter)(self.model, recipe, mesh=mesh)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 16)).square().mean().backward()
        if self.reduces:
            self.handle.reduce()
        self.optimizer.step()


DOORS = pytest.mark.parametrize("door", ["attach", "replicate", "shard", "scatter"])


def _no_mapping(door: str, given: object) -> tuple[str, str, bool]:
    """Load on rank 1 what is no state. Return what is said to that, to checking it, and whether the residual stays."""
    at = _Door(door)
    at.step()
    before = at.handle.state_dict()
    said = told(at.handle.load_state_dict, given if dist.get_rank() == 1 else before)
    states = before, at.handle.state_dict()
    one, other = ([x["residual"] for memory in each["memories"] for x in memory.values()] for each in states)
    return said, told(at.handle.check_state_dict, given), all(map(torch.equal, one, other)) and len(one) > 0


@pytest.mark.parametrize(("given", "name"), [(None, "NoneType"), ([3], "list")])
@DOORS
def test_what_is_no_mapping_is_refused_on_all_ranks(ranks: Ranks, door: str, given: object, name: str) -> None:
    words = rf"an attachment's state has the keys .*; got {name}$"
    for loaded, checked, kept in ranks.run(2, _no_mapping, door, given):
        assert re.search(f"^ValueError: .*{words}", loaded), loaded
        assert re.search(f"^ValueError: {words}", checked), checked
        assert kept


def _grown(door: str) -> list[str]:
    at = _Door(door)
    at.step()
    at.module.adapter = nn.Linear(16, 16)
    at.optimizer.add_param_group({"params": at.module.adapter.parameters()})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        at.step()
        at.step()
    return [str(each.message) for each in found]


@DOORS
def test_parameters_that_come_later_are_said_once(ranks: Ranks, door: str) -> None:
    for said in ranks.run(2, _grown, door):
        (message,) = said
        assert "'adapter.weight', 'adapter.bias', which were unfrozen or added" in message


def _loaded_late(door: str) -> list[str]:
    at = _Door(door)
    at.step()
    saved = copy.deepcopy(at.model.state_dict())
    said = [told(at.step)]
    at.model.load_state_dict(saved)
    said += [told(at.step), told(at.step)]
    at.handle.forget()
    return [*said, told(at.step), told(at.step)]


@DOORS
def test_a_model_that_is_loaded_while_something_waits_is_refused(ranks: Ranks, door: str) -> None:
    for first, *refused, after, later in ranks.run(2, _loaded_late, door):
        assert first == after == later == "nothing"
        assert all(each.startswith("StateError: a state was loaded into this model") for each in refused)


def _loaded_and_wrapped_again(door: str) -> list[str]:
    at = _Door(door)
    saved = copy.deepcopy(at.model.state_dict())
    at.step()
    at.step()
    at.model.load_state_dict(saved)
    at.enter(door)
    said = [told(at.step), told(at.step)]
    at.handle.load_state_dict(at.handle.state_dict())
    return [*said, told(at.step), told(at.step)]


@pytest.mark.parametrize("door", ["attach", "replicate"])
def test_what_was_loaded_is_not_forgotten_where_a_model_is_attached_anew(ranks: Ranks, door: str) -> None:
    for *refused, after, later in ranks.run(2, _loaded_and_wrapped_again, door):
        assert all(each.startswith("StateError: a state was loaded into this model") for each in refused)
        assert after == later == "nothing"


def _not_reduced(door: str) -> list[str]:
    at = _Door(door)
    at.reduces = False
    if door == "shard":
        at.model.set_requires_all_reduce(False)
    with warnings.catch_warnings(record=True) as found, at.model.no_sync() if door == "attach" else nullcontext():
        warnings.simplefilter("always")
        at.step()
        at.step()
    return [str(each.message) for each in found] + [repr(at.handle.stats().total)]


@pytest.mark.parametrize("door", ["attach", "replicate", "shard"])
def test_gradients_that_are_not_reduced_are_said_once(ranks: Ranks, door: str) -> None:
    for message, stats in ranks.run(2, _not_reduced, door):
        assert "that were never reduced" in message
        assert stats == "Figures(steps=0, nothing exchanged)"


# --- a CUDA graph of one's own ---


@contextmanager
def _capture() -> Iterator[None]:
    """Have work be captured, as far as anybody asks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def _captured(door: str) -> list[str]:
    """Return what is said to a reduction within a capture, and to steps of its optimizer and another."""
    at = _Door(door)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    at.step()
    at.optimizer.zero_grad()
    with _capture():
        loss = at.model(torch.randn(4, 16)).square().mean()
        loss = loss if door != "replicate" else loss.backward()
        said = [told(at.handle.reduce if door == "replicate" else loss.backward)]
        said += [told(at.optimizer.step), told(other.step)]
    return said


@DOORS
def test_the_capture_of_a_cuda_graph_is_refused(ranks: Ranks, door: str) -> None:
    for reduction, step, other in ranks.run(2, _captured, door):
        assert reduction.startswith("RuntimeError: gradients are reduced while a CUDA graph is captured"), reduction
        assert step.startswith("RuntimeError: SGD steps while a CUDA graph is captured"), step
        assert other == "nothing"


def _other_captures() -> list[str]:
    """Return what is said within captures to a sparse gradient, a gather, outer steps, a pipeline and a trainer."""
    sparse = DistributedDataParallel(nn.Embedding(4, 4, sparse=True))
    tw.attach(sparse, tw.recipes.topk())
    mesh = init_device_mesh("cpu", (2,))
    sharded: Any = fully_shard(nn.Linear(16, 16), mesh=mesh)
    tw.scatter(sharded, tw.recipes.topk(), mesh=mesh, gathers=tw.gathers.Lossless())
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters())
    tw.outer(model, inner, tw.outer_steps.diloco())
    with _capture():
        return [
            told(sparse(torch.zeros(1, dtype=torch.int64)).sum().backward),
            told(sharded, torch.randn(4, 16)),
            told(inner.step),
            told(tw.pipeline.TopKBoundary(0.5), torch.randn(4, 16)),
            told(Trainer.step, None),
        ]


def test_other_captures_are_refused(ranks: Ranks) -> None:
    what = [
        "gradients are reduced",
        "parameters are gathered",
        "SGD steps",
        "an activation is sent",
        "gradients are sent",
    ]
    for said in ranks.run(2, _other_captures):
        for each, words in zip(said, what, strict=True):
            assert each.startswith(f"RuntimeError: {words} while a CUDA graph is captured"), each


def _in_inference_mode(door: str) -> tuple[list[str], bool]:
    """Return what is said to a reduction in there, to steps of its optimizer and another, and to the next two steps.

    Also whether the residual is as it was.
    """
    at = _Door(door)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    at.step()
    before = copy.deepcopy(at.handle.state_dict()["memories"])
    at.optimizer.zero_grad()
    loss = at.model(torch.randn(4, 16)).square().mean()
    with torch.inference_mode():
        said = [told(loss.backward)] if door != "replicate" else [told(at.handle.reduce)]
        said += [told(at.optimizer.step), told(other.step)]
    if door == "attach":
        at.enter(door)
    kept = before, at.handle.state_dict()["memories"]
    waits = [fields["residual"] for each in kept for memory in each for fields in memory.values()]
    half = len(waits) // 2
    return [*said, told(at.step), told(at.step)], all(map(torch.equal, waits[:half], waits[half:])) and half > 0


@DOORS
def test_training_in_inference_mode_is_refused(ranks: Ranks, door: str) -> None:
    for (reduction, step, *others), kept in ranks.run(2, _in_inference_mode, door):
        assert reduction.startswith("RuntimeError: gradients are reduced within torch.inference_mode()"), reduction
        assert step.startswith("RuntimeError: SGD steps within torch.inference_mode()"), step
        assert (others, kept) == (["nothing"] * 3, True)


def _others_in_inference_mode() -> list[str]:
    """Return what is said there to an inner step and to a trainer's, and afterwards to two inner steps."""
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = tw.outer(model, inner, tw.OuterSteps(every=1))
    model(torch.ones(4)).sum().backward()
    with torch.inference_mode():
        said = [told(inner.step), told(Trainer.step, None)]
    said += [told(inner.step), told(inner.step)]
    assert handle.stats().total.steps == 2
    return said


def test_other_training_in_inference_mode_is_refused(ranks: Ranks) -> None:
    for inner, trainer, *later in ranks.run(2, _others_in_inference_mode):
        assert inner.startswith("RuntimeError: SGD steps within torch.inference_mode()"), inner
        assert trainer.startswith("RuntimeError: gradients are sent within torch.inference_mode()"), trainer
        assert later == ["nothing"] * 2


def _captured_measurements() -> list[str]:
    """Return what is said within a capture to a recipe chosen by measuring, and to a profile."""
    models = [DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2)]
    with _capture():
        return [
            told(tw.attach, models[0], "auto"),
            told(tw.profile, models[1], lambda: models[1](torch.ones(1, 4)).sum()),
        ]


def test_measuring_within_a_capture_is_refused(ranks: Ranks) -> None:
    for said in ranks.run(2, _captured_measurements):
        assert (
            said
            == [
                "RuntimeError: steps and links are measured while a CUDA graph is captured, and what is "
                "captured does not run: attach or plan before the capture"
            ]
            * 2
        )


def _evaluated_alone(rank: int, evaluations: int) -> tuple[list[float], list[float]]:
    """Have one rank evaluate before training. DDP would send the batch norm's buffers. Return weights and buffers."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tw.attach(model, tw.recipes.topk(density=0.5, minimum_size=0), optimizer=optimizer)
    if dist.get_rank() == rank:
        with torch.no_grad():
            for _ in range(evaluations):
                model.eval()(torch.ones(8, 4))
    dist.barrier()
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(torch.randn(8, 4) + dist.get_rank()).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        model.eval()(torch.ones(8, 4))
    return model.module[0].weight.flatten().tolist(), model.module[1].running_mean.tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_may_evaluate_before_training(ranks: Ranks, rank: int) -> None:
    found = ranks.run(2, _evaluated_alone, rank, 2)
    assert found[0] == found[1]
    assert found == ranks.run(2, _evaluated_alone, rank, 0)


# --- stats ---


def _figures(recipe: str) -> tuple[list[dict[str, float]], dict[str, float], float, float]:
    training = Training("several buckets", recipe)
    steps = []
    with trace.listen(trace.Recorder()) as recorder:
        for step in range(4):
            training.step(step)
            stats = training.attachment.stats()
            steps.append(asdict(stats.step))
    return steps, asdict(stats.total), recorder.totals["sent_bytes"], sum(p.nbytes for p in training.model.parameters())


@pytest.mark.parametrize("recipe", RECIPES)
def test_stats_add_up(ranks: Ranks, recipe: str) -> None:
    for steps, total, sent, nbytes in ranks.run(2, _figures, recipe):
        assert total["sent_bytes"] == pytest.approx(sent)
        for name in ("steps", "sent_bytes", "dense_bytes", "encode_ms", "exchange_ms", "decode_ms"):
            assert total[name] == pytest.approx(sum(step[name] for step in steps)), name
        for step in steps:
            assert step["dense_bytes"] == nbytes  # 2 (K − 1) / K of them, between two ranks
            assert step["ratio"] == step["sent_bytes"] / step["dense_bytes"] > 0
            assert 0 < step["density"] <= 1
            assert min(step[name] for name in ("encode_ms", "exchange_ms", "decode_ms")) > 0
        assert total["ratio"] == pytest.approx(sent / (len(steps) * nbytes))


def _norms() -> list[tuple[float, float]]:
    """Return residual_ratio and its reference, step by step."""
    training = Training("several buckets", "topk", dtype=torch.float64, momentum=0.0)
    attachment, pairs = training.attachment, []
    attachment.stats()
    for step in range(4):
        gradients = [g / dist.get_world_size() for g in training.local_gradients(step).values()]
        training.step(step)
        (memory,) = [m for m in attachment.state_dict()["memories"] if m]
        waits = [fields["residual"] for fields in memory.values()]
        norms = [math.sqrt(sum(float(x.double().square().sum()) for x in xs)) for xs in (waits, gradients)]
        pairs.append((attachment.stats().step.residual_ratio, norms[0] / norms[1]))
    return pairs


def test_the_residual_is_measured_against_the_gradient(ranks: Ranks) -> None:
    for pairs in ranks.run(2, _norms):
        for ours, reference in pairs:
            assert ours == pytest.approx(reference)
        assert pairs[-1][1] > 0


def _density(density: float) -> tuple[float, float]:
    """Return what a codec sent of one large tensor, and of a gradient that is mostly zero."""
    model = DistributedDataParallel(nn.Linear(100, 100, bias=False))
    handle = tw.attach(model, tw.recipes.topk(density=density))
    found = []
    for x in (torch.randn(4, 100), torch.eye(100)[:1]):
        model(x).sum().backward()
        found.append(handle.stats().step.density)
        handle.drop_step()
        model.zero_grad()
    return found[0], found[1]


def test_density_is_what_was_really_sent(ranks: Ranks) -> None:
    for dense, mostly_zero in ranks.run(2, _density, 0.05):
        assert dense == 0.05
        assert mostly_zero == 0.01, "one column of a hundred; the rest of the payload is padding"


def _of_rows(recipe: str) -> tuple[float, float, bool]:
    """An embedding whose gradient is sparse, with indices that repeat."""
    model = DistributedDataParallel(nn.Embedding(100, 16, sparse=True))
    handle = tw.attach(model, tw.recipes.METHODS[recipe].make())
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([3, 3, 3, 7 + dist.get_rank()])).sum().backward()
        handle.drop_step()
    figures = handle.stats().step
    return figures.dense_bytes, figures.ratio, figures.exchange_ms > 0 and figures.density == 1


@pytest.mark.parametrize("recipe", ["dense", "s2_union"])
def test_rows_count_as_ddp_sends_them(ranks: Ranks, recipe: str) -> None:
    for dense, ratio, known in ranks.run(2, _of_rows, recipe):
        assert dense == 2 * (16 * 4 + 8), "two rows, each with its index, to the other rank"
        assert ratio == 1 if recipe == "dense" else ratio > 0
        assert known


def _not_finite() -> tuple[bool, bool]:
    """One gradient that is not finite, between others."""
    model = DistributedDataParallel(nn.Linear(50, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    handle = tw.attach(model, tw.recipes.topk(density=0.05), scaler=scaler)
    nan = []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 50)).sum() * (torch.inf if step == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        nan.append(math.isnan(handle.stats().step.residual_ratio))
    return nan == [True, False, True, False, False], math.isfinite(handle.stats().total.residual_ratio)


def test_a_step_that_is_not_finite_leaves_the_total_alone(ranks: Ranks) -> None:
    assert ranks.run(2, _not_finite) == [(True, True)] * 2


def _resumed_at_the_same_step() -> tuple[int, float, float]:
    training = Training("several buckets", "topk")
    training.run(range(2))
    saved = training.attachment.state_dict()
    training.run(range(2, 3))
    sent = training.attachment.stats().step.sent_bytes
    training.attachment.load_state_dict(saved)
    training.run(range(2, 3))
    stats = training.attachment.stats()
    return stats.total.steps, stats.step.sent_bytes, sent


def test_a_step_done_again_is_another_step(ranks: Ranks) -> None:
    for steps, again, sent in ranks.run(2, _resumed_at_the_same_step):
        assert steps == 4
        assert again == pytest.approx(sent, rel=0.01)


def _called_when() -> tuple[Any, ...]:
    training = Training("several buckets", "topk")
    fresh = training.attachment.stats()
    training.run(range(3))
    first, again = training.attachment.stats(), training.attachment.stats()
    copied = copy.deepcopy(training.model)
    return (
        fresh.total.steps,
        first.total.steps,
        first == again,
        math.isnan(first.step.residual_ratio),
        copied is not None,
    )


def test_stats_may_be_called_at_any_time(ranks: Ranks) -> None:
    for result in ranks.run(2, _called_when):
        assert result == (0, 3, True, False, True)


def _copied_with_its_model() -> list[object]:
    net: Any = nn.Linear(8, 8)
    net.handle = tw.replicate(net, tw.recipes.topk(density=0.1, minimum_size=0))
    net(torch.ones(2, 8)).sum().backward()
    net.handle.reduce()
    return [copied.handle for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)))]


def test_a_handle_stays_behind_when_the_model_that_holds_it_is_copied(ranks: Ranks) -> None:
    assert ranks.run(1, _copied_with_its_model) == [[None, None]]


def _of_plain_steps() -> tuple[tw.trace.Figures, int]:
    """Nothing pays with an empty budget, so DDP stays plain."""
    training = Training("several buckets", None)
    attachment = tw.attach(training.model, tw.Budget(names=()))
    training.run(range(14))
    return attachment.stats().total, sum(p.nbytes for p in training.model.parameters())


def test_plain_steps_count_too(ranks: Ranks) -> None:
    for total, nbytes in ranks.run(2, _of_plain_steps):
        assert total.steps == 14
        assert (total.sent_bytes, total.ratio, total.density) == (14 * nbytes, 1.0, 1.0)
        assert math.isnan(total.exchange_ms), "DDP exchanges, and nobody watches"


# --- replicas ---


def _replicated() -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = mlp(torch.float32)
    replicas = tw.replicate(module, tw.recipes.topk(density=0.05, minimum_size=64))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(seed: int) -> tw.trace.Figures:
        generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        optimizer.zero_grad()
        module(torch.randn(8, 20, generator=generator)).square().mean().backward()
        replicas.reduce()
        optimizer.step()
        return replicas.stats().step

    before, saved = [step(seed) for seed in range(3)], replicas.state_dict()
    replicas.load_state_dict(saved)
    held = replicas.memory_bytes - replicas.attachment.memory_bytes
    assert replicas.memory.total == replicas.memory_bytes
    assert replicas.memory.scratch > 0
    replicas.remove()
    after = [step(seed) for seed in range(3, 5)]
    size = sum(p.nbytes for p in module.parameters())
    same = replicas.verify_replicas() and not replicas.differing_parameters()
    return [f.ratio for f in before], [f.ratio for f in after], held == size, same, saved["step"]


def test_replicas_have_them_all(ranks: Ranks) -> None:
    for before, after, held, same, step in ranks.run(2, _replicated):
        assert max(before) < 0.5
        assert after == [1.0, 1.0]
        assert (held, same, step) == (True, True, 3)


# --- remove ---


def _said() -> list[str]:
    records: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(f"{record.levelname}: {record.getMessage()}")

    logger, listener = logging.getLogger("thinwire"), Listener()
    logger.addHandler(listener)
    Training("several buckets", "topk").attachment.remove()
    logger.removeHandler(listener)
    return records


def test_remove_says_what_goes_on(ranks: Ranks) -> None:
    first, other = ranks.run(2, _said)
    assert len(first) == 1
    assert first[0].startswith("WARNING: removed: gradients are averaged uncompressed from now on")
    assert other == []


def _removed_while_plain() -> tuple[int, int, bool]:
    """Where DDP is still plain, nothing stays in it."""
    training = Training("several buckets", None)
    model = training.model
    before = len(model._forward_pre_hooks)
    attachment = tw.attach(model, "auto")
    training.run(range(2))
    attachment.remove()
    training.run(range(2, 4))
    hooked = bool(model._get_ddp_logging_data().get("comm_hook"))
    return before, len(model._forward_pre_hooks), hooked


@pytest.mark.slow
def test_a_plan_that_never_began_leaves_nothing_behind(ranks: Ranks) -> None:
    assert ranks.run(2, _removed_while_plain) == [(0, 0, False)] * 2


def _state_after_removal() -> tuple[str, bool]:
    training = Training("several buckets", "topk", momentum=0.0)
    training.run(range(2))
    training.attachment.remove()
    saved = training.attachment.state_dict()
    waits = any(bool(f["residual"].any()) for memory in saved["memories"] for f in memory.values())
    return told(training.attachment.load_state_dict, saved), waits


def test_what_waits_after_removal_can_be_loaded(ranks: Ranks) -> None:
    assert ranks.run(2, _state_after_removal) == [("nothing", True)] * 2


def _buckets_known() -> list[bool]:
    training = Training("several buckets", "topk")
    training.run(range(2))
    before = bool(training.attachment._seen)
    training.attachment.remove()
    return [before, bool(training.attachment._seen)]


def test_what_a_gpu_has_captured_of_buckets_goes_with_the_recipe(ranks: Ranks) -> None:
    assert ranks.run(2, _buckets_known) == [[True, False]] * 2


# --- why ---


def _why() -> tuple[str, Why, str]:
    training = Training("several buckets", None)
    attachment = tw.attach(training.model, "auto")
    early = told(attachment.why)
    training.run(range(60))
    decided = attachment.why()
    attachment.remove()
    return early, decided, str(attachment.why())


@pytest.mark.slow
def test_why_says_what_auto_chose_for_each_tensor(ranks: Ranks) -> None:
    found = ranks.run(2, _why)
    names = [name for name, _ in mlp(torch.float32).named_parameters()]
    for early, why, late in found:
        assert late == "uncompressed since remove()"
        assert early.startswith("RuntimeError: nothing is decided yet")
        assert why.decision.startswith("first plan: ")
        assert sorted(why.rows) == sorted(names)
        assert all(row.reason for row in why.rows.values())
        assert all(f"{name} " in str(why) for name in names)
    assert found[0] == found[1]


def _unasked() -> str:
    return told(Training("several buckets", "topk").attachment.why)


def test_why_has_no_answer_for_your_own_choice(ranks: Ranks) -> None:
    assert set(ranks.run(1, _unasked)) == {
        'RuntimeError: you chose the recipe yourself; why() explains the choice of a plan or of "auto"'
    }


def _refused() -> list[str]:
    model = DistributedDataParallel(nn.Linear(3, 3))
    wrong: list[Any] = ["always", 3, torch.ones(2), None]
    return [told(tw.attach, model, each) for each in wrong]


def test_what_is_no_recipe_plan_or_budget_is_refused(ranks: Ranks) -> None:
    expected = (
        "TypeError: attach takes a recipe such as recipes.topk(density=0.01), a plan from thinwire.plan, a Budget, or "
        '"auto"; got '
    )
    for said, got in zip(*ranks.run(1, _refused), ("'always'", "3", "tensor(", "None"), strict=True):
        assert said.startswith(expected + got)
