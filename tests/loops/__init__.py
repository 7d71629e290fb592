"""Every loop by its name. Each is `loop(make, steps)`, and `make` attaches a recipe, or leaves the model to DDP."""

from collections.abc import Callable

from loops import everyday, models, several, skipping
from loops.material import Attach, Outcome

Loop = Callable[[Attach, int], Outcome]

_LOOPS: tuple[Loop, ...] = (
    everyday.ordinary,
    everyday.adamw,
    everyday.accumulation,
    everyday.accumulation_no_sync,
    everyday.accumulation_by_counter,
    everyday.clipping,
    everyday.clipping_with_momentum,
    everyday.schedule,
    everyday.zeroed_in_place,
    everyday.in_eval_mode,
    everyday.by_hand,
    everyday.by_hand_on_data,
    several.gan,
    several.gan_sgd,
    several.gradient_penalty,
    several.gradient_penalty_apart,
    several.two_losses,
    several.two_optimizers,
    several.head_every_other_step,
    several.probing,
    several.lbfgs,
    several.sgd_closure,
    several.adam_closure,
    models.ema_teacher,
    models.lora_thawed,
    models.wrapped_anew,
    models.heads_in_turns,
    models.checkpointing,
    models.checkpointing_reentrant,
    models.compiled,
    skipping.nan_skipped,
    skipping.nan_before_backward,
    skipping.norm_skipped,
    skipping.norm_skipped_with_momentum,
    skipping.accumulation_abandoned,
    skipping.scaler,
    skipping.scaler_with_clipping,
    skipping.scaler_two_optimizers,
)

LOOPS: dict[str, Loop] = {loop.__name__: loop for loop in _LOOPS}
