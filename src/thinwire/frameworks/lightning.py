"""Lightning: a callback that attaches when training starts, and keeps every rank's state in Lightning's checkpoints."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from thinwire.checked import checked
from thinwire.errors import StateError
from thinwire.frameworks.attaching import MISSING, How, attached, check_replicas, gathered
from thinwire.integrations import Attachment, redistribute

__all__ = ["ThinwireCallback"]
_KEY = "thinwire"


@checked
class ThinwireCallback(Callback):  # type: ignore[misc]  # mypy is told not to read Lightning
    """`thinwire.attach` for Lightning: `Trainer(strategy="ddp", callbacks=[ThinwireCallback(recipe)])`.

    It attaches when training starts, with all of the Trainer's optimizers and its GradScaler. A later `fit` goes on
    with the residuals. Checkpoints hold every rank's state: rank 0 gathers it, and Lightning writes it where it writes
    the rest. `fit` with `ckpt_path` reshards it as `thinwire.redistribute` does, also to another number of ranks. `fit`
    raises TypeError for a strategy other than DDP, RuntimeError for a single process, StateError for a checkpoint
    without thinwire's part, and whatever `thinwire.attach` and `Attachment.load_state_dict` raise.

    Args:
        how: As in `thinwire.attach`.
        missing_ok: Whether to go on, with empty memories, from a checkpoint that was saved without thinwire.
    """

    def __init__(self, how: How, *, missing_ok: bool = False) -> None:
        self._how, self._missing_ok = how, missing_ok
        self._handle: Attachment | None = None
        self._saved: dict[str, Any] | None = None

    @property
    def handle(self) -> Attachment:
        """What `thinwire.attach` returned; raises RuntimeError before training has started."""
        if self._handle is None:
            raise RuntimeError(
                "there is no handle before on_train_start, as Lightning wraps the model in fit(): read it after that"
            )
        return self._handle

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reject strategies other than DDP before anything is set up, and forget what an earlier `fit` has read."""
        self._saved = None
        if stage == "fit" and not isinstance(trainer.strategy, DDPStrategy):
            got = f"{type(trainer.strategy).__module__}.{type(trainer.strategy).__name__}"
            fix = f'the strategy is {got}; pass lightning.Trainer(strategy="ddp")'
            check_replicas(pl_module, trainer.world_size, fix)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: optimizers have their state by now. Then resume."""
        saved, self._saved = self._saved, None
        if saved is None and trainer.ckpt_path and not self._missing_ok:
            raise StateError(MISSING.format(place=trainer.ckpt_path))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._handle = attached(trainer.strategy.model, self._how, trainer.optimizers, scaler)
        if saved is not None:
            self._handle.load_state_dict(saved)
        elif trainer.ckpt_path and self._handle.step:
            self._handle.forget()  # it is of an earlier fit

    def state_dict(self) -> dict[str, Any]:
        """Return something, so that Lightning warns if a checkpoint is resumed without this callback."""
        return {} if self._handle is None else {"step": self._handle.step}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put every rank's state into the checkpoint, which rank 0 writes. A collective."""
        if self._handle is not None:
            checkpoint[_KEY] = gathered(self._handle)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        """Keep the state that this rank will resume from."""
        if trainer.state.fn == "fit" and _KEY in checkpoint:
            place = {"rank": trainer.global_rank, "world_size": trainer.world_size}
            self._saved = redistribute(checkpoint[_KEY], **place)
