"""DDP with a recipe attached: what is trained, what waits, and what is sent when."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import RECIPES
from ddp_models import SCENARIOS, WIDTH, Scenario, Tied, Training, batch, digest, flat, mlp
from ranks import Ranks, told
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire import trace
from thinwire.codecs import TopK
from thinwire.collectives import gathers
from thinwire.exchanges import AllGather, AllReduce, Exchange, UnionAllReduce
from thinwire.formats import Sign
from thinwire.integrations.attachments.assembly import check_fingerprint
from thinwire.integrations.training.gradients import shape_in_memory
from thinwire.memories import ErrorFeedback
from thinwire.reducer import Bucket, Compressed, Mean, Reducer, Round, WarmUp
from thinwire.schedules import exponential_warmup

STEPS = 4
EVERY_SIZE = ("several buckets", "static graph", "unused", "uneven inputs")
SIZES = [(scenario, size) for scenario in SCENARIOS for size in (1, 2, 3, 4) if size == 3 or scenario in EVERY_SIZE]
STATEFUL = [name for name, case in RECIPES.items() if any(memory.stateful for memory in case.make().memories())]
LINEAR = [name for name, case in RECIPES.items() if not case.momentum and case.conserving]


# --- plain DDP ---


def _plain_and_dense(scenario: str, dtype: torch.dtype) -> tuple[str, str]:
    return digest(Training(scenario, dtype=dtype).run(range(STEPS)).model), digest(
        Training(scenario, "dense", dtype=dtype).run(range(STEPS)).model
    )


@pytest.mark.parametrize(("scenario", "world_size"), SIZES)
def test_dense_is_plain_ddp_bit_for_bit(ranks: Ranks, scenario: str, world_size: int) -> None:
    for plain, dense in ranks.run(world_size, _plain_and_dense, scenario, torch.float32):
        assert plain == dense


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dense_is_plain_ddp_bit_for_bit_in_other_dtypes(ranks: Ranks, dtype: torch.dtype) -> None:
    for plain, dense in ranks.run(3, _plain_and_dense, "several buckets", dtype):
        assert plain == dense


# --- replicas ---


def _trained(scenario: str, recipe: str) -> tuple[str, bool, int, bool]:
    training = Training(scenario, recipe)
    initial = digest(training.model)
    training.run(range(STEPS))
    final = digest(training.model)
    finite = all(bool(p.isfinite().all()) for p in training.model.parameters())
    return final, training.attachment.verify_replicas(), training.attachment.step, finite and final != initial


@pytest.mark.grid
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("scenario", "world_size"), SIZES)
def test_replicas_stay_bit_identical(ranks: Ranks, scenario: str, recipe: str, world_size: int) -> None:
    results = ranks.run(world_size, _trained, scenario, recipe)
    assert len({final for final, *_ in results}) == 1
    assert all(result[1:] == (True, STEPS, True) for result in results), results


def _differing(dtype: torch.dtype, damage: Callable[[Tensor], None]) -> tuple[bool, bool, list[str]]:
    training = Training("several buckets", "topk", dtype=dtype)
    before = training.attachment.verify_replicas()
    if dist.get_rank() == dist.get_world_size() - 1:
        damage(training.parameters()["2.weight"].detach().view(-1))
    return before, training.attachment.verify_replicas(), training.attachment.differing_parameters()


def _flip_lowest_bit(x: Tensor) -> None:
    x.view(torch.uint8)[100 * x.element_size()] ^= 1


def _flip_sign(x: Tensor) -> None:
    x.view(torch.uint8)[101 * x.element_size() - 1] ^= 128


def _swap(x: Tensor) -> None:
    assert x[3] != x[800]
    x[[3, 800]] = x[[800, 3]]


@pytest.mark.grid
@pytest.mark.parametrize("damage", [_flip_lowest_bit, _flip_sign, _swap])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_wrong_bit_is_found(ranks: Ranks, dtype: torch.dtype, damage: Callable[[Tensor], None]) -> None:
    assert ranks.run(3, _differing, dtype, damage) == [(True, False, ["2.weight"])] * 3


def _differing_elsewhere(what: str) -> list[str]:
    """Let something differ on rank 1 that is not among what is trained."""
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    layers = nn.Sequential(first, nn.Linear(4, 4), nn.BatchNorm1d(4))
    layers.register_buffer("scale", torch.ones(3))
    first.requires_grad_(what not in ("frozen", "thawed"))
    model = DistributedDataParallel(layers)
    attachment = tw.attach(model, tw.recipes.topk())
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))).square().sum().backward()
    first.requires_grad_(what != "frozen")
    if dist.get_rank() == 1:
        first.weight.data[0] += what in ("frozen", "thawed")
        layers.get_buffer("scale")[0] += what == "buffer"
        if what == "added":
            layers.add_module("added", nn.Linear(1, 1, bias=False))
    return attachment.differing_parameters()


@pytest.mark.parametrize(
    ("what", "found"),
    [("frozen", "0.weight"), ("thawed", "0.weight"), ("buffer", "scale"), ("added", "added.weight"), ("nothing", None)],
)
def test_what_is_not_trained_is_compared_too(ranks: Ranks, what: str, found: str | None) -> None:
    assert ranks.run(2, _differing_elsewhere, what) == [[found] if found else []] * 2


def _opposites(dtype: torch.dtype, first: int, second: int) -> list[str]:
    training = Training(Scenario(make=_large, options={}), "dense", dtype=dtype)
    weight = training.parameters()["weight"].detach().view(-1)
    weight.zero_()
    weight[first], weight[second] = (1, -1) if dist.get_rank() == 0 else (-1, 1)
    return training.attachment.differing_parameters()


@pytest.mark.grid
@pytest.mark.parametrize(("first", "second"), [(7, 11), (7, 7 + 4096), (9, 9000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_swapped_opposites_are_found(ranks: Ranks, dtype: torch.dtype, first: int, second: int) -> None:
    assert ranks.run(2, _opposites, dtype, first, second) == [["weight"]] * 2


# --- nothing is lost ---


def _books(scenario: str, recipe: str) -> dict[str, tuple[float, float]]:
    """Return, by parameter, how far applied + waiting is from the sum of mean gradients, and how large that sum is."""
    training = Training(scenario, recipe, dtype=torch.float64, momentum=0.0)
    parameters = training.parameters()
    books = {name: torch.zeros(2, p.numel(), dtype=torch.float64) for name, p in parameters.items()}
    steps = range(6)
    with training.joined():
        for step in steps[: len(steps) - dist.get_rank()] if training.scenario.uneven else steps:
            for name, gradient in training.local_gradients(step).items():
                books[name][0] += flat(gradient, parameters[name]) / dist.get_world_size()
            assert training.step(step)
            for name, gradient in training.gradients().items():
                books[name][1] += flat(gradient, parameters[name])
    memories = training.attachment.state_dict()["memories"]
    return {
        name: _balance(book, [m[name]["residual"] for m in memories if "residual" in m.get(name, {})])
        for name, book in books.items()
    }


def _balance(book: Tensor, residuals: list[Tensor]) -> tuple[float, float]:
    local, applied = book
    waiting = sum(residuals, torch.zeros_like(local))
    dist.all_reduce(local)
    dist.all_reduce(waiting)
    dist.broadcast(applied, 0)  # rank 0 takes part in every step
    return float((local - applied - waiting).norm()), float(local.norm())


@pytest.mark.grid
@pytest.mark.parametrize("recipe", LINEAR)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_applied_and_waiting_are_all_there_was(ranks: Ranks, scenario: str, recipe: str) -> None:
    books = ranks.run(3, _books, scenario, recipe)[0]
    for name, (missing, total) in books.items():
        assert missing <= (1e-5 if name.startswith("middle") else 1e-12), name
        unused = name.startswith("never") or scenario == "static graph, unused"
        assert total > 1e-4 or unused or name == "empty", name


def _resting(recipe: str) -> list[bool]:
    training = Training("unused", recipe)
    training.run(range(2))
    before = training.attachment.state_dict()["memories"]
    training.run(range(2, 3))  # an even step: right is used nowhere; left on rank 0, but all take its gradient
    after = training.attachment.state_dict()["memories"]
    return [
        all(
            torch.equal(tensor, new[name][field])
            for old, new in zip(before, after, strict=True)
            for name, fields in old.items()
            if name.startswith(branch)
            for field, tensor in fields.items()
            if field != "note"  # which PowerSGD shares between ranks
        )
        for branch in ("right", "left", "trunk")
    ]


@pytest.mark.parametrize("recipe", STATEFUL)
def test_the_memory_of_a_parameter_that_is_used_nowhere_rests(ranks: Ranks, recipe: str) -> None:
    (right, left, trunk), (same, _, moved) = ranks.run(2, _resting, recipe)  # nothing may wait for left on rank 1
    assert (right, left, trunk, same, moved) == (True, False, False, True, False)


def _weighted(recipe: str) -> float:
    """Train on batches of unequal sizes. Return how far applied + waiting is from the sum of weighted means."""
    rank, size, rate = dist.get_rank(), dist.get_world_size(), 0.05
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, 40, bias=False, dtype=torch.float64)
    model, start = DistributedDataParallel(layer), layer.weight.detach().clone()
    attachment = tw.attach(model, RECIPES[recipe].make(), samples=1 + rank)
    optimizer, due = torch.optim.SGD(model.parameters(), lr=rate), torch.zeros_like(start)
    for step in range(4):
        sizes = [1 + each + step * (each == 0) for each in range(size)]
        attachment.samples = sizes[rank]
        x = batch(step, 0, torch.float64)
        due += torch.autograd.grad(layer(x).square().mean(), layer.weight)[0] * sizes[rank] / sum(sizes)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for memory in attachment.state_dict()["memories"]:
        due -= memory.get("weight", {}).get("residual", torch.zeros(due.numel())).view_as(due)
    dist.all_reduce(due)
    return float((due - (start - layer.weight.detach()) / rate).abs().max())


@pytest.mark.parametrize("recipe", LINEAR)
def test_means_count_by_samples(ranks: Ranks, recipe: str) -> None:
    assert max(ranks.run(2, _weighted, recipe)) < 1e-12


def _misused_samples() -> list[str]:
    models = [DistributedDataParallel(mlp(torch.float32)) for _ in range(3)]
    return [
        told(lambda: tw.attach(models[0], tw.recipes.topk(), samples=3 if dist.get_rank() else None)),
        told(lambda: setattr(tw.attach(models[1], tw.recipes.topk()), "samples", 3)),
        told(lambda: tw.attach(models[2], tw.recipes.orthogonal(), samples=3)),
    ]


def test_samples_are_given_everywhere_or_nowhere(ranks: Ranks) -> None:
    for messages in ranks.run(2, _misused_samples):
        for message, part in zip(messages, ("FingerprintError", "on every rank", "discards the size"), strict=True):
            assert part in message


# --- what is sent when ---


class Noting(Reducer):
    """Notes every bucket in `events`, then hands it on."""

    def __init__(self, inner: Reducer, events: list[str]) -> None:
        self.inner, self.events = inner, events

    def __repr__(self) -> str:
        return f"Noting({self.inner})"

    def reduce(self, bucket: Bucket, at: Round) -> "torch.futures.Future[Mean]":
        self.events.append("bucket")
        return self.inner.reduce(bucket, at)

    def memories(self) -> Any:
        return self.inner.memories()

    def memory_of(self, segment: Any) -> Any:
        return self.inner.memory_of(segment)


def _events(recipe: str) -> list[list[str]]:
    """Return what happened in each step, in order."""
    events: list[str] = []
    training = Training("several buckets", Noting(RECIPES[recipe].make(), events))
    for name, p in training.parameters().items():
        p.register_hook(lambda g, name=name: events.append(name))
    training.attachment.membership.agree()  # once, before the first step
    patched = pytest.MonkeyPatch()
    found = []
    with patched.context() as patch:
        for module, function in ((dist, "all_reduce"), (gathers, "_all_gather"), (dist, "isend")):
            patch.setattr(module, function, _noted(getattr(module, function), events))
        for step in range(3):
            training.step(step)
            found.append(events.copy())
            events.clear()
    return found


def _noted(function: Callable[..., Any], events: list[str]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        events.append("collective")
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("recipe", [name for name, case in RECIPES.items() if not case.rounds])
def test_two_collectives_per_bucket_at_most_and_during_backward(ranks: Ranks, recipe: str) -> None:
    most = 1 if recipe == "dense" else 2
    for first, *later in ranks.run(2, _events, recipe):
        assert 1 <= first.count("collective") <= most * first.count("bucket")
        for events in later:
            assert events.count("bucket") == 5
            assert events.count("bucket") <= events.count("collective") <= most * events.count("bucket")
            assert events.index("bucket") < events.index("collective") < events.index("0.weight")


def _large(dtype: torch.dtype) -> nn.Module:
    return nn.Linear(WIDTH, 500, bias=False, dtype=dtype)


def _bytes_by_step(recipe: Reducer, steps: int) -> list[float]:
    training = Training(Scenario(make=_large), recipe)
    found = []
    for step in range(steps):
        with trace.listen(trace.Recorder()) as recorder:
            training.step(step)
        found.append(recorder.totals["sent_bytes"])
    return found


def _sparse_bytes(density: float, *, slots: bool = False) -> int:
    """Return the bytes of header, float32 values, and indices: as slots with a seed, or as Elias-Fano."""
    count, numel = round(10_000 * density), 10_000
    low = (numel // count).bit_length() - 1
    named = [64, 64 + count * (-(-numel // count)).bit_length()] if slots else [low * count, count + (numel - 1 >> low)]
    sections = [32 * count, sum(named)] if slots else [32 * count, *named]
    return 16 + sum(-(-bits // 64) * 8 for bits in sections)


def test_warm_up_switches_at_its_step(ranks: Ranks) -> None:
    memory = ErrorFeedback()
    topk = Compressed(memory=memory, codec=TopK(density=0.01), exchange=AllGather())
    recipe = WarmUp(steps=2, first=tw.recipes.dense(memory=memory), then=topk)
    dense = 4 * 10_000
    for found in ranks.run(2, _bytes_by_step, recipe, 4):
        assert found == [dense, dense, _sparse_bytes(0.01), _sparse_bytes(0.01)]


@pytest.mark.parametrize("make", [tw.recipes.topk, tw.recipes.dgc, tw.recipes.dragonn])
def test_density_is_warmed_up_by_step(ranks: Ranks, make: Callable[..., Reducer]) -> None:
    recipe = make(density=exponential_warmup(0.01, stages=2, steps_each=2))
    slots = make is tw.recipes.dragonn
    expected = [_sparse_bytes(density, slots=slots) for density in (1 / 4, 1 / 4, 1 / 16, 1 / 16, 0.01, 0.01)]
    assert ranks.run(2, _bytes_by_step, recipe, 6) == [expected] * 2


# --- what attach refuses ---


def _fingerprint_message(recipes: list[Reducer]) -> str:
    with pytest.raises(tw.errors.FingerprintError) as error:
        Training("several buckets", recipes[dist.get_rank()])
    return str(error.value)


@pytest.mark.parametrize(
    ("other", "named"),
    [(tw.recipes.topk(density=0.02), "density=0.02"), (tw.recipes.randomk(density=0.01), "RandomK")],
)
def test_ranks_with_different_recipes_are_told_so(ranks: Ranks, other: Reducer, named: str) -> None:
    for message in ranks.run(3, _fingerprint_message, [tw.recipes.topk(density=0.01)] * 2 + [other]):
        assert "recipe differs" in message
        assert "rank 2" in message
        assert named in message


def _shape_message() -> str:
    group = dist.group.WORLD
    assert group is not None
    parameters = {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(2, 3 + dist.get_rank()))}
    with pytest.raises(tw.errors.FingerprintError) as error:
        check_fingerprint(tw.recipes.dense(), parameters, group)
    return str(error.value)


def _order_message() -> str:
    found = {name: nn.Parameter(torch.zeros(2, 3)) for name in ("ab" if dist.get_rank() == 0 else "ba")}
    return told(check_fingerprint, tw.recipes.dense(), found, dist.group.WORLD)


def test_parameters_that_ranks_have_in_another_order_are_refused(ranks: Ranks) -> None:
    for said in ranks.run(2, _order_message):  # what is broadcast and summed goes by the order
        assert "the order of parameters differs: rank 0 has parameter a, rank 1 has parameter b" in said


def _on_two_gpus(recipe: Reducer) -> str:
    """Compare fingerprints as ranks do whose GPUs are of two models: here the parameters lie nowhere."""
    assembly, rank = "thinwire.integrations.attachments.assembly", dist.get_rank()
    parameters = {"a": nn.Parameter(torch.zeros(40, 30, device="meta"))}
    with patch(f"{assembly}.gpu_of", lambda device: f"GPU {rank}"):
        return told(check_fingerprint, recipe, parameters, dist.group.WORLD)


@pytest.mark.parametrize("name", ["powersgd", "fft", "topk", "fading", "randomk"])
def test_what_a_gpus_library_computes_needs_the_same_gpus(ranks: Ranks, name: str) -> None:
    by_library = name in ("powersgd", "fft")
    for said in ranks.run(2, _on_two_gpus, getattr(tw.recipes, name)()):
        assert ("rank 1 has (40, 30) torch.float32, which GPU 1 computes" in said) == by_library
        assert by_library or said == "nothing"


def test_ranks_with_different_parameters_are_told_so(ranks: Ranks) -> None:
    for message in ranks.run(2, _shape_message):
        assert message == "parameter b differs: rank 0 has (2, 3) torch.float32, rank 1 has (2, 4) torch.float32"


def _partly_ignored(recipe: str | None) -> str:
    training = Training(Scenario(make=_tied_and_ignored), recipe).run(range(STEPS))
    return digest(training.model)


def _tied_and_ignored(dtype: torch.dtype) -> nn.Module:
    module = Tied(dtype)
    module._ddp_params_and_buffers_to_ignore = ["first.weight"]  # type: ignore[assignment]
    return module


def test_a_tied_weight_ignored_by_one_name_is_reduced_by_the_other(ranks: Ranks) -> None:
    assert ranks.run(2, _partly_ignored, "dense") == ranks.run(2, _partly_ignored, None)


def _refusals() -> dict[str, str]:
    model = DistributedDataParallel(mlp(torch.float32))
    used = tw.recipes.topk()
    tw.attach(model, used)
    hooked, mixed, builtin, python = (DistributedDataParallel(mlp(torch.float32)) for _ in range(4))
    hooked.register_comm_hook(None, _hook)
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined]
    mixed.mixed_precision = object()  # type: ignore[assignment]
    python._use_python_reducer = True
    imaginary = nn.Linear(2, 2, dtype=torch.complex64)
    frozen = mlp(torch.float32)
    frozen[0].requires_grad_(False)  # type: ignore[index]
    thawed = DistributedDataParallel(frozen)
    frozen.requires_grad_(True)
    attempts: dict[str, Callable[[], object]] = {
        "module": lambda: tw.attach(mlp(torch.float32), tw.recipes.topk()),  # type: ignore[arg-type]
        "compiled": lambda: tw.attach(torch.compile(hooked, backend="eager"), tw.recipes.topk()),  # type: ignore[arg-type]
        "recipe": lambda: tw.attach(hooked, TopK(density=0.1)),  # type: ignore[arg-type]
        "factory": lambda: tw.attach(hooked, tw.recipes.topk),  # type: ignore[arg-type]
        "twice": lambda: tw.attach(model, tw.recipes.topk()),
        "hooked": lambda: tw.attach(hooked, tw.recipes.topk()),
        "builtin": lambda: tw.attach(builtin, tw.recipes.topk()),
        "mixed": lambda: tw.attach(mixed, tw.recipes.topk()),
        "python": lambda: tw.attach(python, tw.recipes.topk()),
        "shared": lambda: tw.attach(DistributedDataParallel(mlp(torch.float32)), used),
        "parts": lambda: tw.attach(DistributedDataParallel(mlp(torch.float32)), _parts(AllReduce())),
        "rounds": lambda: tw.replicate(mlp(torch.float32), _parts(UnionAllReduce())),
        "complex": lambda: tw.attach(DistributedDataParallel(imaginary), tw.recipes.dense()),
        "thawed": lambda: tw.attach(thawed, tw.recipes.topk()),
    }
    return {name: _message(attempt) for name, attempt in attempts.items()}


def _parts(exchange: Exchange) -> Reducer:
    return Compressed(memory=ErrorFeedback(), codec=TopK(density=0.1, values=Sign()), exchange=exchange)


def _hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    raise NotImplementedError


def _message(attempt: Callable[[], object]) -> str:
    with pytest.raises((TypeError, RuntimeError)) as error:
        attempt()
    return f"{error.type.__name__}: {error.value}"


def test_attach_refuses_with_the_fix(ranks: Ranks) -> None:
    expected = {
        "module": ("TypeError", "wrap it in DDP"),
        "compiled": ("TypeError", "torch.compile after attach"),
        "recipe": ("TypeError", "recipes.topk"),
        "factory": ("TypeError", "recipes.topk"),
        "twice": ("RuntimeError", "again"),
        "hooked": ("RuntimeError", "again"),
        "builtin": ("RuntimeError", "again"),
        "mixed": ("RuntimeError", "autocast"),
        "python": ("RuntimeError", "optimize_ddp", "set it to True"),
        "shared": ("RuntimeError", "make a new recipe"),
        "parts": ("TypeError", "use AllGather"),
        "rounds": ("TypeError", "use AllGather"),
        "complex": ("TypeError", "view_as_real"),
        "thawed": ("RuntimeError", "again"),
    }
    messages = ranks.run(1, _refusals)[0]
    for name, parts in expected.items():
        assert all(part in messages[name] for part in parts), messages[name]


# --- sparse embeddings ---


def _sparse_rows(recipe: str) -> tuple[bool, float, float]:
    """Return whether the embedding's gradient stays sparse, its error against the true mean, and the bytes sent."""
    training = Training("sparse embedding", recipe)
    mine = training.local_gradients(0)["words.weight"].to_dense()
    dist.all_reduce(mine)
    with trace.listen(trace.Recorder()) as recorder:
        training.backward(0)
    found = training.gradients()["words.weight"]
    error = (found.to_dense() - mine / dist.get_world_size()).norm() / mine.norm() * dist.get_world_size()
    return found.is_sparse, float(error), recorder.totals["sent_bytes"]


def test_rows_of_sparse_embeddings_are_summed_on_the_way(ranks: Ranks) -> None:
    plain, exact, sketched = (ranks.run(3, _sparse_rows, recipe)[0] for recipe in ("topk", "s2_union", "s2_reducer"))
    assert all(result[0] for result in (plain, exact, sketched))
    assert exact[1] < 1e-6
    assert 0.1 < sketched[1] < 3
    assert sketched[2] < exact[2] < plain[2]


class Product(nn.Module):
    """x·W, with W stored row by row, or its transpose stored column by column: the same in memory."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, 60, generator=torch.Generator().manual_seed(0))
        self.transposed, self.weight = transposed, nn.Parameter(weight.t() if transposed else weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.t() if self.transposed else self.weight)


READ_AS_MATRICES: dict[str, Callable[[], Reducer]] = {
    "orthogonal": tw.recipes.orthogonal,
    "fading": tw.recipes.fading,
    "powersgd": lambda: tw.recipes.powersgd(start=0),
}


def _trained_product(recipe: str, transposed: bool) -> Tensor:
    model = DistributedDataParallel(Product(transposed))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9))
    tw.attach(model, READ_AS_MATRICES[recipe](), optimizer=optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, 0, torch.float32)).square().mean().backward()
        optimizer.step()
    weight = model.module.weight.detach()
    return (weight.t() if transposed else weight).contiguous()


@pytest.mark.parametrize("recipe", READ_AS_MATRICES)
def test_a_transposed_parameter_is_the_matrix_that_lies_in_memory(ranks: Ranks, recipe: str) -> None:
    stored, transposed = (ranks.run(2, _trained_product, recipe, way)[0] for way in (False, True))
    assert torch.equal(stored, transposed)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.empty(()), ()),
        (torch.empty(3, 1).t(), (1, 3)),
        (torch.empty(3, 5).t(), (3, 5)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (2, 4, 5, 3)),
        (torch.empty(2, 3, 4).permute(2, 0, 1), (2, 3, 4)),
        (torch.empty(0, 3).t(), (3, 0)),
    ],
)
def test_shapes_are_read_in_memory_order(x: Tensor, expected: tuple[int, ...]) -> None:
    assert shape_in_memory(x) == expected
