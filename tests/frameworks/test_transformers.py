"""The Trainer of transformers: a callback that attaches when training begins, saves and resumes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks, told
from torch import Tensor, nn
from workers import checked_example, imported, launched, needs

import thinwire

needs("transformers", "accelerate")  # Trainer does not work without


@pytest.fixture(scope="module")
def workers() -> Iterator[Ranks]:
    """Processes that this framework has for itself, and that have imported it, which takes seconds."""
    workers = Ranks()
    workers.run(3, imported, "transformers.trainer")
    yield workers
    workers.stop()


class Regression(nn.Module):
    """A small model that returns its loss, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - x.sum(1, keepdim=True).sin()).square().mean()}


def _dgc() -> Any:
    return thinwire.recipes.dgc(density=0.05, minimum_size=0)


def _trainer(folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model, data = Regression(), torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=10.0,
        save_steps=3,
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Trainer(
        model, arguments, train_dataset=[{"x": x} for x in data], optimizers=(optimizer, schedule), **options
    )


def _attached(folder: Path, recipe: Any = None, **options: Any) -> tuple[Any, Any]:
    from thinwire.frameworks.transformers import attach

    trainer = _trainer(folder)
    return trainer, attach(trainer, recipe or _dgc(), **options)


def _flat(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def _interrupted(folder: Path) -> dict[str, Any]:
    with launched():
        whole, _ = _attached(folder)
        whole.train()
        rest, callback = _attached(folder)
        rest.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        handle = callback.handle
        return {
            "same": torch.equal(_flat(whole), _flat(rest)),
            "replicas": handle.verify_replicas(),
            "step": handle.step,
            "waits": handle.waits,
        }


@pytest.mark.slow
def test_it_goes_on_as_if_it_had_not_been_interrupted(workers: Ranks, tmp_path: Path) -> None:
    expected = {"same": True, "replicas": True, "step": 6, "waits": True}
    assert workers.run(2, _interrupted, tmp_path) == [expected] * 2


def _held(handle: thinwire.integrations.Attachment) -> tuple[int, float]:
    held = [fields for memory in handle.state_dict()["memories"] for fields in memory.values()]
    return handle.step, sum(float(x.double().sum()) for fields in held for x in fields.values())


def _noting(folder: Path, resume: bool) -> tuple[int, float]:
    """Return the step and the sum of what waits when step 3 has been saved, or has been loaded."""
    from transformers import TrainerCallback

    found: list[tuple[int, float]] = []

    class Probe(TrainerCallback):  # type: ignore[misc]  # mypy is told not to read transformers
        def on_save(self, *args: Any, **kwargs: Any) -> None:
            found.append(_held(callback.handle))

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            found.extend([_held(callback.handle)] * resume)

    with launched():
        trainer, callback = _attached(folder)
        trainer.add_callback(Probe())
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
        return found[0]


@pytest.mark.slow
def test_another_number_of_workers_goes_on_with_all_that_waits(workers: Ranks, tmp_path: Path) -> None:
    saved, loaded = workers.run(3, _noting, tmp_path, False), workers.run(2, _noting, tmp_path, True)
    assert {step for step, _ in (*saved, *loaded)} == {3}
    assert sum(x for _, x in loaded) == pytest.approx(sum(x for _, x in saved), rel=1e-5)


def _without(folder: Path) -> list[str]:
    with launched():
        _trainer(folder).train()
        return [told(_attached(folder, missing_ok=fine)[0].train, True) for fine in (False, True)]


@pytest.mark.slow
def test_a_checkpoint_of_plain_training_is_refused_unless_that_is_fine(workers: Ranks, tmp_path: Path) -> None:
    for refused, fine in workers.run(2, _without, tmp_path):
        assert refused.startswith(f"StateError: nothing was loaded, as there is nothing of thinwire's in {tmp_path}")
        assert fine == "nothing"


def _scaled_and_again(folder: Path) -> tuple[float, int]:
    with launched():
        trainer, callback = _attached(folder, thinwire.recipes.topk(density=0.05))
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        trainer.train()
        trainer.train()
        return float(callback.handle.state_dict()["loss_scale"]), callback.handle.step


@pytest.mark.slow
def test_what_waits_follows_the_loss_scale_and_further_training(workers: Ranks, tmp_path: Path) -> None:
    assert workers.run(2, _scaled_and_again, tmp_path) == [(1024.0, 12)] * 2


@pytest.mark.slow
def test_the_example_trains_and_resumes(workers: Ranks, tmp_path: Path) -> None:
    checked_example(workers, "gpt2_trainer.py", tmp_path)


def test_one_process_is_refused(tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState, GradientState

    try:
        trainer, _ = _attached(tmp_path)
        with pytest.raises(RuntimeError, match="the only process"):
            trainer.train()
        for bad in ({"how": "fast"}, {"missing_ok": 1}, {"trainer": 1}):
            with pytest.raises((TypeError, ValueError), match=f"{next(iter(bad))} is .*; expected"):
                _attach(**{"trainer": trainer, "how": thinwire.recipes.topk(), **bad})
        trainer.is_in_train = True
        with pytest.raises(RuntimeError, match="training already: call attach before"):
            _attach(trainer=trainer, how=thinwire.recipes.topk())
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _attach(**options: Any) -> None:
    from thinwire.frameworks.transformers import attach

    attach(**options)
