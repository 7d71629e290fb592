"""Boundaries under the schedules of torch.distributed.pipelining, against plain pipelines and unsplit models."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import stages
import torch
import torch.distributed as dist
from cases import BOUNDARIES, OFFSET_8
from ranks import Ranks
from stages import BATCH, KINDS, MICRO, WIDTH, Outcome, Trial
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, SplitPoint

from thinwire.integrations.training.gradients import local
from thinwire.pipeline import Boundary, LaplaceBoundary, TopKBoundary, sparsify
from thinwire_lab.bench.rows import HEADER_BYTES
from thinwire_lab.cluster.link import interface_bytes
from thinwire_lab.cluster.local import Cluster

OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
# Older pipelines want a gradient for everything that they sent, whole numbers too.
NAMED = pytest.mark.skipif(OLD, reason="needs torch 2.13")
# There, neighbouring stages may share a rank, and at first older pipelines have it send a message to itself.
ITSELF = pytest.mark.skipif(OLD, reason="Gloo sends no message from a rank to itself; torch 2.13 does without")
V = [pytest.param(kind, marks=ITSELF) for kind in ("zbv", "dual pipe v")]
STRAIGHT = [kind for kind in KINDS if kind not in ("zbv", "dual pipe v")]
kinds = pytest.mark.parametrize("kind", [*STRAIGHT, *V])
# The others differ from one of the first three in the order of their schedule alone.
ALIKE = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpipe", "looped bfs", "interleaved")]
unlike = pytest.mark.parametrize(
    "kind",
    ["1f1b", "interleaved zero-bubble", V[0], *ALIKE, pytest.param("dual pipe v", marks=[ITSELF, pytest.mark.slow])],
)


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Return what all ranks got as one."""
    (last,) = [outcome for outcome in outcomes if outcome.outputs]
    steps = zip(*(outcome.gradients for outcome in outcomes), strict=True)
    gradients = [{name: g for part in step for name, g in part.items()} for step in steps]
    return Outcome(last.outputs, last.losses, gradients)


def check_same(found: Outcome, expected: Outcome, steps: int) -> None:
    assert len(found.outputs) == len(found.losses) == len(found.gradients) == steps
    torch.testing.assert_close(found.outputs, expected.outputs, rtol=0, atol=0)
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=0)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=0, atol=0)
    assert all(bool(gradient.any()) for gradient in found.gradients[-1].values())


@pytest.mark.grid
@kinds
@pytest.mark.parametrize(
    ("world", "model"), [(2, "one"), (2, "two"), (3, "two"), pytest.param(2, "named", marks=NAMED)]
)
def test_a_sparse_pipeline_is_the_unsplit_model_with_boundaries_to_the_bit(
    ranks: Ranks, kind: str, model: str, world: int
) -> None:
    trial = Trial(kind=kind, model=model, density=0.25, steps=2)
    pairs = ranks.run(world, stages.both, trial)
    check_same(merged([pipe for pipe, _ in pairs]), pairs[0][1], trial.steps)


@pytest.mark.grid
@unlike
@pytest.mark.parametrize("model", ["two", pytest.param("named", marks=NAMED)])
def test_at_density_1_it_is_the_plain_pipeline_to_the_bit(ranks: Ranks, kind: str, model: str) -> None:
    trial = Trial(kind=kind, model=model, density=1.0, steps=2)
    pairs = ranks.run(2, stages.sparse_and_plain, trial)
    check_same(merged([sparse for sparse, _ in pairs]), merged([plain for _, plain in pairs]), trial.steps)


@pytest.mark.grid
@unlike
@pytest.mark.parametrize("values", [torch.bfloat16, OFFSET_8], ids=["bf16", "8 bits"])
def test_narrowed_values_give_the_unsplit_models_too(ranks: Ranks, kind: str, values: Any) -> None:
    trial = Trial(kind=kind, model="two", density=0.3, values=values, steps=2)
    pairs = ranks.run(2, stages.both, trial)
    check_same(merged([pipe for pipe, _ in pairs]), pairs[0][1], trial.steps)


def laplace() -> Boundary:
    return LaplaceBoundary(0.4)


@unlike
def test_one_threshold_for_a_batch(ranks: Ranks, kind: str) -> None:
    trial = Trial(kind=kind, boundary=laplace, steps=2)
    pairs = ranks.run(2, stages.both, trial)
    check_same(merged([pipe for pipe, _ in pairs]), pairs[0][1], trial.steps)


def evaluate(trial: Trial) -> tuple[Tensor | None, list[Tensor], Tensor]:
    """Return the outputs and losses of evaluation after a step of training, and what the unsplit model gives."""
    run, count = stages.pipeline(trial), KINDS[trial.kind].per_rank * dist.get_world_size()
    (args, targets), (others, _) = stages.batches(trial)
    run.step(args, targets)
    modules = stages.parts(trial.model, count)
    between: Sequence[nn.Module] = trial.boundaries(count - 1)
    output, losses = run.step(others, targets, train=False)
    chunks = [stages.through(modules, between, parts) for parts in zip(*(a.chunk(MICRO) for a in others), strict=True)]
    return output, losses, torch.cat(chunks).detach()


# Of those in a V, schedule.eval fails without boundaries too: torch 2.13 wants a backward there.
@pytest.mark.parametrize("kind", STRAIGHT)
def test_evaluation(ranks: Ranks, kind: str) -> None:
    for output, losses, expected in ranks.run(2, evaluate, Trial(kind=kind, model="two", density=0.25, steps=2)):
        if output is not None:
            assert len(losses) == MICRO
            assert torch.equal(output, expected)


def reports(trial: Trial) -> dict[int, Any]:
    run = stages.pipeline(trial)
    assert run.sparsified is not None
    (batch,) = stages.batches(trial)
    run.step(*batch)
    run.sparsified.reports()
    run.step(*batch)
    names = [list(stage.submod.state_dict()) for stage in run.stages]
    assert names == [[name for name in names if "boundary" not in name] for names in names]
    return run.sparsified.reports()


@unlike
def test_reports_are_those_of_the_stages_that_send(ranks: Ranks, kind: str) -> None:
    found = ranks.run(2, reports, Trial(kind=kind, density=0.25))
    place, count = KINDS[kind].place, KINDS[kind].per_rank
    for rank, mine in enumerate(found):
        assert set(mine) == set(place(rank, 2, count)) - {2 * count - 1}
        assert all((report.wanted, report.sent, report.kept) == (0.25, 0.25, 0.25) for report in mine.values())


def removed(trial: Trial) -> tuple[Outcome, Outcome, bool]:
    """Return what stages do after remove(), and what plain ones do; and whether all keep the names they had."""
    run, plain = stages.pipeline(trial), stages.pipeline(replace(trial, density=None))
    (batch,) = stages.batches(trial)
    names = [list(stage.submod.state_dict()) for stage in plain.stages]
    same = [list(stage.submod.state_dict()) for stage in run.stages] == names
    run.step(*batch)
    assert run.sparsified is not None
    run.sparsified.remove()
    same &= [list(stage.submod.state_dict()) for stage in run.stages] == names
    kind, outcomes = KINDS[trial.kind], []
    for old in (run.stages, plain.stages):
        again = [PipelineStage(s.submod, s.stage_index, s.num_stages, s.device) for s in old]
        for stage in again:
            stage.submod.zero_grad()
        pipe, outcome = stages.Pipeline(again, stages.scheduled(kind, again), None), Outcome()
        stages.note(outcome, *pipe.step(*batch), {stage.stage_index: stage.submod for stage in again})
        outcomes.append(outcome)
    sparsify([PipelineStage(s.submod, s.stage_index, s.num_stages, s.device) for s in run.stages], 0.5)
    return outcomes[0], outcomes[1], same


@pytest.mark.parametrize("kind", ["1f1b", V[0]])
def test_remove_makes_stages_what_they_were(ranks: Ranks, kind: str) -> None:
    found = ranks.run(2, removed, Trial(kind=kind, density=0.25))
    assert all(same for _, _, same in found)
    check_same(merged([mine for mine, _, _ in found]), merged([plain for _, plain, _ in found]), 1)


def told() -> list[str]:
    """Return what is said of stages that know their shapes."""
    x, rank, messages = torch.ones(2, WIDTH), dist.get_rank(), []
    module = nn.Linear(WIDTH, WIDTH)
    device, spec = torch.device("cpu"), {"1": SplitPoint.BEGINNING}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns of torch's own doings
        pipe = pipelining.pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), (x,), split_spec=spec)
    for stage in (
        PipelineStage(module, rank, 2, device, input_args=x, output_args=x),
        PipelineStage(module, rank, 2, device, input_args=(x,)),
        pipe.build_stage(rank, device),
    ):
        try:
            sparsify([stage], 0.5)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_stages_that_know_their_shapes_are_refused(ranks: Ranks) -> None:
    for rank, messages in enumerate(ranks.run(2, told)):
        assert len(messages) == 3
        for message in messages:
            assert message.startswith(f"stage {rank} has the shapes")
            assert "PipelineStage(module, index, num_stages, device)" in message


def half(sparse_rank: int, density: tuple[float, float] | None = None) -> str:
    """Step a pipeline of which one rank alone is sparsified, or each at its own density; return what this rank says."""
    trial = Trial(kind="gpipe")
    run = stages.pipeline(trial)
    if density is not None:
        sparsify(run.stages, density[dist.get_rank()])
    elif dist.get_rank() == sparse_rank:
        sparsify(run.stages, 0.5)
    (batch,) = stages.batches(trial)
    try:
        run.step(*batch)
    except (RuntimeError, ValueError) as error:
        dist.destroy_process_group()  # the other rank finds the connection closed
        return f"{error!r}, {error.__cause__!r}"
    return "nothing"


def test_a_neighbour_that_was_not_sparsified_is_told(ranks: Ranks) -> None:
    told = " ".join(ranks.run(2, half, 1))
    assert "expected what a boundary sends: sparsify all stages alike" in told
    told = " ".join(ranks.run(2, half, 1, (0.25, 0.5)))
    assert "both sides of a boundary need the same density and values" in told


def sharded(sparsified: str) -> list[Tensor] | str:
    """Return the outputs and gradients of a stage which FSDP2 has compute in 16 bits, or what went wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([each]) for each in range(world)]
    module = stages.parts("one", world)[rank]
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    if sparsified == "before":
        sparsify([stage], 1.0)
    casting = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(module, mesh=DeviceMesh.from_group(groups[rank], "cpu"), mp_policy=casting)
    if sparsified == "after":
        sparsify([stage], 1.0)
    run = stages.Pipeline([stage], stages.scheduled(KINDS["1f1b"], [stage]), None)
    (batch,) = stages.batches(Trial(kind="1f1b"))
    try:
        output, _ = run.step(*batch)
    except (RuntimeError, ValueError) as error:
        dist.destroy_process_group()  # the other rank finds the connection closed
        return f"{error!r}, {error.__cause__!r}"
    gradients = [local(p.grad) for p in module.parameters() if p.grad is not None]
    return [x.detach() for x in ([] if output is None else [output]) + gradients]


def test_stages_that_fsdp2_has_compute_in_16_bits(ranks: Ranks) -> None:
    plain = ranks.run(2, sharded, "never")
    assert [len(each) for each in plain] == [2, 3]
    torch.testing.assert_close(ranks.run(2, sharded, "after"), plain, rtol=0, atol=0)
    assert "call sparsify after it" in " ".join(ranks.run(2, sharded, "before"))


def by_hand(values: Any) -> tuple[Tensor, Tensor] | None:
    """Send words and gradients between two ranks without torch's pipelines; the receiver makes the frame itself."""
    first, last = stages.parts("one", 2)
    boundary, x = (
        TopKBoundary(0.25, values=values),
        torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(3)),
    )
    numel = boundary.nbytes(torch.Size((BATCH, WIDTH))) // 4
    if dist.get_rank() == 0:
        words, frame = boundary.send(first(x))
        dist.send(words.detach(), 1)
        gradient = torch.empty(numel)
        dist.recv(gradient, 1)
        torch.autograd.backward([words, frame], [gradient, torch.empty_like(frame)])
        plain, _ = stages.parts("one", 2)
        last(TopKBoundary(0.25, values=values)(plain(x))).square().sum().backward()
        return first.linear.weight.grad, plain.linear.weight.grad  # type: ignore[union-attr, return-value]
    words = torch.empty(numel)
    dist.recv(words, 0)
    last(boundary.receive(words.requires_grad_(), torch.empty(BATCH, WIDTH, 0))).square().sum().backward()
    assert words.grad is not None
    dist.send(words.grad, 0)
    return None


@pytest.mark.parametrize("values", [None, torch.bfloat16, OFFSET_8], ids=["as they are", "bf16", "8 bits"])
def test_stages_written_by_hand(ranks: Ranks, values: Any) -> None:
    found, expected = ranks.run(2, by_hand, values)[0]
    assert torch.equal(found, expected)
    assert bool(found.any())


def copied(kind: str) -> tuple[list[Tensor], list[Tensor], bool, bool]:
    """Return what `replicated` does for a dense recipe, and whether copies agree with everything sparsified."""
    dense = stages.replicated(Trial(kind=kind, model="two", density=1.0, steps=3), stages.by_replicate("dense"))
    _, _, alike = stages.replicated(Trial(kind=kind, density=0.25, steps=3), stages.by_replicate("gtopk"))
    return *dense, alike


@unlike
@pytest.mark.first(1)
def test_replicas_of_a_pipeline_are_the_unsplit_model_on_all_batches(ranks: Ranks, kind: str) -> None:
    for found, expected, *alike in ranks.run(4, copied, kind):
        assert alike == [True, True]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def wrapped(kind: str) -> tuple[list[Tensor], list[Tensor], bool, bool]:
    """The same with DDP around the stages."""
    dense = stages.replicated(Trial(kind=kind, model="two", density=1.0, steps=3), stages.by_ddp("dense"), ddp=True)
    _, _, alike = stages.replicated(Trial(kind=kind, density=0.25, steps=3), stages.by_ddp("gtopk"), ddp=True)
    return *dense, alike


# Of torch's schedules, 1F1B alone: DDP around the stages of the others fails, or has wrong gradients (torch 2.13).
def test_ddp_around_the_stages_works_too_with_1f1b(ranks: Ranks) -> None:
    for found, expected, *alike in ranks.run(4, wrapped, "1f1b"):
        assert alike == [True, True]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


WIDE, CROSSINGS = 5 << 16, 12


class Scale(nn.Module):
    """A cheap stage of wide activations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def work(job: dict[str, Any], emit: Any) -> None:
    """Take a step of a pipeline of two stages, and tell what this worker has sent, and what was declared."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, x = dist.get_rank(), torch.randn(CROSSINGS, WIDE, generator=torch.Generator().manual_seed(1))
    stage = PipelineStage(Scale(), rank, 2, torch.device("cpu"))
    make = partial(BOUNDARIES[job["boundary"]])
    sparsify([stage], boundary=make)
    schedule = KINDS["1f1b"].schedule(stage, CROSSINGS, _squares)
    step = partial(schedule.step, *((x,) if rank == 0 else ()), **({"target": x} if rank else {}))
    step()  # shapes are inferred
    dist.barrier()
    before = interface_bytes()
    step()
    dist.barrier()  # what a rank still has in its socket leaves before the other arrives here
    after = interface_bytes()
    if before is None or after is None:
        return
    net = after.nbytes - before.nbytes - HEADER_BYTES * (after.packets - before.packets)
    emit({"net": net, "declared": CROSSINGS * make().nbytes(torch.Size((1, WIDE)))})


@pytest.fixture(scope="module")
def linked() -> Iterator[Cluster]:
    with Cluster(2, None, "test_pipelining:work") as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("boundary", ["topk", "topk 8 bits", "laplace bf16"])
def test_bytes_on_the_interface_are_those_declared_each_way(linked: Cluster, boundary: str) -> None:
    events = [event for _, event in linked.run({"boundary": boundary})]
    if not events:
        pytest.skip(linked.label)
    assert len(events) == 2
    for event in events:
        assert event["declared"] > CROSSINGS * 100_000
        assert event["net"] == pytest.approx(event["declared"], rel=0.03)
