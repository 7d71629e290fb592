"""Accelerate: after `prepare`, with accumulation, and through `save_state` and `load_state`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks, told
from torch import nn
from workers import checked_example, imported, launched, needs

import thinwire

needs("accelerate")


@pytest.fixture(scope="module")
def workers() -> Iterator[Ranks]:
    """Processes that this framework has for itself, and that have imported it, which takes seconds."""
    workers = Ranks()
    workers.run(3, imported, "accelerate")
    yield workers
    workers.stop()


def _prepared(recipe: Any, **options: Any) -> tuple[Any, ...]:
    from accelerate import Accelerator

    from thinwire.frameworks.accelerate import attach

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = options.pop("scaler", None)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    handle = attach(accelerator, model, recipe, optimizer=optimizer, **options)
    return accelerator, model, optimizer, handle


def _train(accelerator: Any, model: nn.Module, optimizer: Any, first: int, last: int) -> torch.Tensor:
    for step in range(first, last):
        for part in range(2):
            x = torch.randn(
                8, 64, generator=torch.Generator().manual_seed(step * 10 + part + 5 * accelerator.process_index)
            )
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - x.sum(1, keepdim=True).sin()).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _dgc() -> Any:
    return thinwire.recipes.dgc(density=0.05, minimum_size=0)


def _interrupted(folder: Path) -> dict[str, Any]:
    with launched():
        accelerator, model, optimizer, handle = _prepared(_dgc())
        _train(accelerator, model, optimizer, 0, 3)
        accelerator.save_state(folder)
        whole = _train(accelerator, model, optimizer, 3, 6)
        accelerator, model, optimizer, again = _prepared(_dgc())
        accelerator.load_state(folder)
        rest = _train(accelerator, model, optimizer, 3, 6)
        return {
            "same": torch.equal(whole, rest),
            "replicas": again.verify_replicas(),
            "steps": (handle.step, again.step),
            "waits": again.waits,
        }


@pytest.mark.slow
def test_it_goes_on_as_if_it_had_not_been_interrupted(workers: Ranks, tmp_path: Path) -> None:
    expected = {"same": True, "replicas": True, "steps": (6, 6), "waits": True}
    assert workers.run(2, _interrupted, tmp_path) == [expected] * 2


def _through_the_door() -> tuple[torch.Tensor, torch.Tensor]:
    with launched():
        accelerator, model, optimizer, _ = _prepared(_dgc())
        framework = _train(accelerator, model, optimizer, 0, 4)
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        own = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
        model = nn.parallel.DistributedDataParallel(plain)
        thinwire.attach(model, _dgc(), optimizer=own)
        return framework, _by_hand(model, own, accelerator.process_index)


def _by_hand(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> torch.Tensor:
    for step in range(4):
        for part in range(2):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step * 10 + part + 5 * rank))
            model.require_backward_grad_sync = part == 1
            ((model(x) - x.sum(1, keepdim=True).sin()).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.slow
def test_it_trains_as_a_loop_by_hand_does(workers: Ranks) -> None:
    for framework, by_hand in workers.run(2, _through_the_door):
        assert torch.equal(framework, by_hand)


def _bad() -> list[str]:
    from accelerate import Accelerator

    from thinwire.frameworks.accelerate import attach

    with launched():
        accelerator, model = Accelerator(cpu=True), nn.Linear(64, 64)
        return [told(attach, accelerator, model, _dgc()), told(attach, accelerator, accelerator.prepare(model), _dgc())]


@pytest.mark.slow
def test_a_model_that_is_not_prepared_is_refused(workers: Ranks) -> None:
    early, without = workers.run(2, _bad)[0]
    assert early.startswith(
        "TypeError: thinwire attaches to a model in DistributedDataParallel; got Linear on 2 processes"
    )
    assert "accelerator.prepare" in early
    assert without.startswith("MomentumError: this recipe applies momentum and was not given any")


def _elsewhere(folder: Path, then: bool) -> list[Any]:
    with launched():
        accelerator, model, optimizer, handle = _prepared(_dgc(), missing_ok=False)
        if then:
            accelerator.load_state(folder)
        else:
            _train(accelerator, model, optimizer, 0, 3)
            accelerator.save_state(folder)
        held = [fields for memory in handle.state_dict()["memories"] for fields in memory.values()]
        return [handle.step, sum(float(x.double().sum()) for fields in held for x in fields.values())]


@pytest.mark.slow
def test_another_number_of_workers_goes_on_with_all_that_waits(workers: Ranks, tmp_path: Path) -> None:
    saved, loaded = workers.run(3, _elsewhere, tmp_path, False), workers.run(2, _elsewhere, tmp_path, True)
    assert {step for step, _ in (*saved, *loaded)} == {3}
    assert sum(x for _, x in loaded) == pytest.approx(sum(x for _, x in saved), rel=1e-5)


def _without(folder: Path) -> list[str]:
    with launched():
        from accelerate import Accelerator

        torch.manual_seed(0)
        plain = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        plain.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        plain.save_state(folder)
    with launched():
        return [told(_prepared(_dgc(), missing_ok=fine)[0].load_state, folder) for fine in (False, True)]


@pytest.mark.slow
def test_a_checkpoint_of_plain_training_is_refused_unless_that_is_fine(workers: Ranks, tmp_path: Path) -> None:
    for refused, fine in workers.run(2, _without, tmp_path):
        assert refused.startswith("StateError: nothing was loaded, as there is nothing of thinwire's in")
        assert fine == "nothing"


def _one_of_two(folder: Path) -> tuple[str, int]:
    """Load a checkpoint that lacks the second model's part. Return what that raises, and the first handle's step."""
    from thinwire.frameworks.accelerate import attach

    with launched():
        accelerator, model, optimizer, handle = _prepared(_dgc())
        attach(accelerator, accelerator.prepare(nn.Linear(8, 8)), thinwire.recipes.topk(density=0.05))
        _train(accelerator, model, optimizer, 0, 2)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (folder / "thinwire_1" / ".metadata").unlink()
        accelerator.wait_for_everyone()
        _train(accelerator, model, optimizer, 2, 3)
        return told(accelerator.load_state, folder), handle.step


@pytest.mark.slow
def test_nothing_is_loaded_where_one_of_several_models_cannot_be(workers: Ranks, tmp_path: Path) -> None:
    for said, step in workers.run(2, _one_of_two, tmp_path):
        assert said.startswith("StateError: nothing was loaded")
        assert step == 3


def _scaled() -> float:
    with launched():
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        *parts, handle = _prepared(thinwire.recipes.topk(density=0.05), scaler=scaler)
        accelerator, model, optimizer = parts
        _train(accelerator, model, optimizer, 0, 2)
        return float(handle.state_dict()["loss_scale"])


@pytest.mark.slow
def test_what_waits_follows_the_loss_scale(workers: Ranks) -> None:
    assert workers.run(2, _scaled) == [1024.0] * 2


@pytest.mark.slow
def test_the_example_trains_and_resumes(workers: Ranks, tmp_path: Path) -> None:
    checked_example(workers, "gpt2_accelerate.py", tmp_path)


def test_one_process_is_refused() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from thinwire.frameworks.accelerate import attach

    try:
        accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match="the only process"):
            attach(accelerator, model, _dgc())
        for bad in ({"how": "fast"}, {"missing_ok": 1}, {"accelerator": model}, {"model": 1}):
            with pytest.raises((TypeError, ValueError), match=f"{next(iter(bad))} is .*; expected"):
                attach(**{"accelerator": accelerator, "model": model, **bad})
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
