"""The Trainer of Hugging Face transformers: a callback that attaches when training begins, saves and resumes."""

from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from thinwire.checked import checked
from thinwire.frameworks.attaching import How, attached, check_replicas, load, save
from thinwire.integrations import Attachment

__all__ = ["ThinwireCallback", "attach"]


@checked
def attach(trainer: Trainer, how: How, *, missing_ok: bool = False) -> "ThinwireCallback":
    """Add a callback to the Trainer that attaches when training begins: call it before `trainer.train()`.

    Every rank's state goes into the folder `thinwire` of each checkpoint. `train(resume_from_checkpoint=...)` reads it,
    also on another number of ranks, as `thinwire.Checkpoint` does. `train` raises TypeError for a model that is not in
    DDP, RuntimeError for a single process or a hyperparameter search, StateError for a checkpoint without thinwire's
    part, and whatever `thinwire.attach` and `thinwire.Checkpoint` raise.

    Args:
        trainer: One that is not training yet.
        how: As in `thinwire.attach`, which also gets the Trainer's optimizer and GradScaler.
        missing_ok: Whether to go on, with empty memories, from a checkpoint that was saved without thinwire.

    Returns:
        The callback, whose `handle` is what `thinwire.attach` returned, once training has begun.

    Raises:
        RuntimeError: While the Trainer trains.
    """
    if trainer.is_in_train:
        raise RuntimeError("the Trainer is training already: call attach before trainer.train()")
    callback = ThinwireCallback(trainer, how, missing_ok=missing_ok)
    trainer.add_callback(callback)
    train = trainer.train

    @wraps(train)
    def noting_where_from(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        callback.resumed = resume_from_checkpoint  # Trainer tells no callback
        return train(resume_from_checkpoint, *args, **kwargs)

    trainer.train = noting_where_from
    return callback


@checked
class ThinwireCallback(TrainerCallback):  # type: ignore[misc]  # mypy is told not to read transformers
    """What `attach` adds to a Trainer; `handle` is what `thinwire.attach` returned, and None before training."""

    def __init__(self, trainer: Trainer, how: How, *, missing_ok: bool) -> None:
        self.handle: Attachment | None = None
        self.resumed: str | bool | None = None
        self._trainer, self._how, self._missing_ok = trainer, how, missing_ok
        self._model: nn.Module | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach: the model is in DDP and the optimizer has its state by now. Then resume."""
        if state.is_hyper_param_search:
            raise RuntimeError("thinwire cannot save the trials of a hyperparameter search: run the search without it")
        trainer = self._trainer
        check_replicas(trainer.model_wrapped, args.world_size, "leave out DeepSpeed and other wrappers")
        if self.handle is None or trainer.model_wrapped is not self._model:  # a later train() goes on with the same
            self._model, optimizer = trainer.model_wrapped, trainer.optimizer.optimizer  # Accelerate has wrapped both
            self.handle = attached(self._model, self._how, [optimizer], trainer.accelerator.scaler)
        if self.resumed:
            folder = get_last_checkpoint(args.output_dir) if self.resumed is True else self.resumed
            load(self.handle, Path(folder, "thinwire"), missing_ok=self._missing_ok)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put every rank's state beside the optimizer's. A collective."""
        if self.handle is not None and not args.save_only_model:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            save(self.handle, folder / "thinwire")
