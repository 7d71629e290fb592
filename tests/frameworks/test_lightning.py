"""Lightning: a callback that attaches when training starts, and keeps every rank's state in its checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, told
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from workers import checked_example, imported, launched, needs

import thinwire

needs("lightning")


@pytest.fixture(scope="module")
def workers() -> Iterator[Ranks]:
    """Processes that this framework has for itself, and that have imported it, which takes seconds."""
    workers = Ranks()
    workers.run(3, imported, "lightning.pytorch")
    yield workers
    workers.stop()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def _batch(place: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(place * 10 + rank))


def _loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - x.sum(1, keepdim=True).sin()).square().mean()


def _module() -> Any:
    """Return a small regression whose batches follow from the epoch and the place in it."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]  # mypy does not read Lightning
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

        def training_step(self, batch: object, index: int) -> torch.Tensor:
            return _loss(self.net, _batch(self.current_epoch * 6 + index, self.global_rank))

    return Module()


def _dgc() -> Any:
    return thinwire.recipes.dgc(density=0.05, minimum_size=0)


def _fit(callback: Any, epochs: int, folder: Path | None = None, **options: Any) -> tuple[Any, torch.Tensor]:
    """Train for epochs of 3 steps of 2 micro-batches each."""
    import lightning

    path = options.pop("ckpt_path", None)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        callbacks=options.pop("callbacks", [callback] if callback else []),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = _module()
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(6 * dist.get_world_size()))), ckpt_path=path)
    if folder:
        trainer.save_checkpoint(folder / "end.ckpt")
    return trainer, torch.cat([p.detach().flatten() for p in module.parameters()])


def _callback(**options: Any) -> Any:
    from thinwire.frameworks.lightning import ThinwireCallback

    return ThinwireCallback(options.pop("recipe", None) or _dgc(), **options)


def _interrupted(folder: Path) -> dict[str, Any]:
    with launched():
        _, whole = _fit(_callback(), 2, gradient_clip_val=10.0)
        _fit(_callback(), 1, folder, gradient_clip_val=10.0)
        again = _callback()
        _, rest = _fit(again, 2, gradient_clip_val=10.0, ckpt_path=folder / "end.ckpt")
        handle = again.handle
        same = torch.equal(whole, rest)
        return {"same": same, "replicas": handle.verify_replicas(), "step": handle.step, "waits": handle.waits}


@pytest.mark.slow
def test_it_goes_on_as_if_it_had_not_been_interrupted(workers: Ranks, tmp_path: Path) -> None:
    expected = {"same": True, "replicas": True, "step": 6, "waits": True}
    assert workers.run(2, _interrupted, tmp_path) == [expected] * 2


def _by_hand() -> torch.Tensor:
    model = DistributedDataParallel(_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    thinwire.attach(model, _dgc(), optimizer=optimizer)
    for place in range(6):
        model.require_backward_grad_sync = place % 2 == 1
        (_loss(model, _batch(place, dist.get_rank())) / 2).backward()
        if place % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _through_the_door() -> bool:
    with launched():
        return torch.equal(_fit(_callback(), 1, gradient_clip_val=10.0)[1], _by_hand())


@pytest.mark.slow
def test_it_trains_as_a_loop_by_hand_does(workers: Ranks) -> None:
    assert workers.run(2, _through_the_door) == [True, True]


def _probe(callback: Any) -> Any:
    """Return what notes the step and the sum of what waits when training starts."""
    import lightning

    class Probe(lightning.Callback):  # type: ignore[misc]  # mypy does not read Lightning
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.found = _held(callback.handle)

    return Probe()


def _held(handle: thinwire.integrations.Attachment) -> tuple[int, float]:
    held = [fields for memory in handle.state_dict()["memories"] for fields in memory.values()]
    return handle.step, sum(float(x.double().sum()) for fields in held for x in fields.values())


def _saved(folder: Path) -> tuple[int, float]:
    with launched():
        callback = _callback()
        _fit(callback, 1, folder)
        return _held(callback.handle)


def _loaded(folder: Path) -> tuple[int, float]:
    with launched():
        callback = _callback()
        probe = _probe(callback)
        _fit(callback, 2, callbacks=[callback, probe], ckpt_path=folder / "end.ckpt")
        found: tuple[int, float] = probe.found
        return found


@pytest.mark.slow
def test_another_number_of_workers_goes_on_with_all_that_waits(workers: Ranks, tmp_path: Path) -> None:
    saved, loaded = workers.run(3, _saved, tmp_path), workers.run(2, _loaded, tmp_path)
    assert {step for step, _ in (*saved, *loaded)} == {3}
    assert sum(x for _, x in loaded) == pytest.approx(sum(x for _, x in saved), rel=1e-5)


def _without(folder: Path) -> list[str]:
    with launched():
        _fit(None, 1, folder)
        return [told(_resumed, folder / "end.ckpt", fine) for fine in (False, True)]


def _resumed(path: Path, missing_ok: bool) -> None:
    _fit(_callback(missing_ok=missing_ok), 2, ckpt_path=path)


@pytest.mark.slow
def test_a_checkpoint_of_plain_training_is_refused_unless_that_is_fine(workers: Ranks, tmp_path: Path) -> None:
    for refused, fine in workers.run(2, _without, tmp_path):
        assert refused.startswith(f"StateError: nothing was loaded, as there is nothing of thinwire's in {tmp_path}")
        assert fine == "nothing"


def _scaled() -> float:
    from lightning.pytorch.plugins.precision import MixedPrecision

    with launched():
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        callback = _callback(recipe=thinwire.recipes.topk(density=0.05))
        _fit(callback, 1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        return float(callback.handle.state_dict()["loss_scale"])


@pytest.mark.slow
def test_what_waits_follows_the_loss_scale(workers: Ranks) -> None:
    assert workers.run(2, _scaled) == [1024.0] * 2


def _again() -> tuple[int, bool]:
    with launched():
        callback = _callback()
        _fit(callback, 1)
        first = callback.handle
        _fit(callback, 1)
        return callback.handle.step, first is callback.handle


@pytest.mark.slow
def test_a_callback_serves_several_fits(workers: Ranks) -> None:
    assert workers.run(2, _again) == [(3, False)] * 2


def _after_a_failure(folder: Path) -> tuple[str, int]:
    import lightning

    class Failing(lightning.Callback):  # type: ignore[misc]  # mypy does not read Lightning
        def on_fit_start(self, *_: object) -> None:
            raise KeyError("mine")

    with launched():
        _fit(_callback(), 1, folder)
        callback = _callback()
        said = told(lambda: _fit(None, 2, ckpt_path=folder / "end.ckpt", callbacks=[callback, Failing()]))
        _fit(callback, 1)
        return said, callback.handle.step


@pytest.mark.slow
def test_a_fit_that_failed_leaves_nothing_to_the_next(workers: Ranks, tmp_path: Path) -> None:
    assert workers.run(2, _after_a_failure, tmp_path) == [("KeyError: 'mine'", 3)] * 2


@pytest.mark.slow
def test_the_example_trains_and_resumes(workers: Ranks, tmp_path: Path) -> None:
    checked_example(workers, "gpt2_lightning.py", tmp_path)


def test_one_process_is_refused() -> None:
    import lightning

    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(RuntimeError, match="the only process"):
        _callback().setup(trainer, _module(), "fit")


def test_a_strategy_without_replicas_is_refused() -> None:
    trainer = type("Trainer", (), {"strategy": type("FSDPStrategy", (), {})(), "world_size": 2})()
    with pytest.raises(TypeError, match=r'the strategy is .*FSDPStrategy; pass lightning.Trainer\(strategy="ddp"\)'):
        _callback().setup(trainer, _module(), "fit")


@pytest.mark.parametrize("bad", [{"how": "fast"}, {"missing_ok": 1}])
def test_arguments_are_checked_before_training(bad: dict[str, Any]) -> None:
    from thinwire.frameworks.lightning import ThinwireCallback

    with pytest.raises((TypeError, ValueError), match=f"{next(iter(bad))} is .*; expected"):
        ThinwireCallback(**bad)


def test_the_handle_is_not_there_before_training() -> None:
    with pytest.raises(RuntimeError, match="before on_train_start"):
        _callback().handle  # noqa: B018 - it raises
