"""A small GPT-2 with the Trainer of transformers, on bytes: torchrun --nproc-per-node 2 examples/gpt2_trainer.py TEXT.

--recipe fading | dense, --rate, --steps, --checkpoint FOLDER (saved in the middle; --resume goes on from it).
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import thinwire
from thinwire.frameworks.transformers import attach

CONTEXT, BATCH = 64, 4
PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
RECIPES = {
    "fading": thinwire.recipes.fading(clip_norm=0.1, values=thinwire.formats.Sign(group_size=96)),
    "dense": thinwire.recipes.dense(),
}
BETAS = {"fading": (0.95, 0.9), "dense": (0.9, 0.95)}


class Print(TrainerCallback):
    """Prints losses to the last digit."""

    def on_log(self, args, state, control, logs, **kwargs):
        """Print what the Trainer logs."""
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']:.9g}", flush=True)


@torch.no_grad()
def held_out(model, windows):
    """Return the mean loss on windows that are not trained on."""
    model.eval()
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in windows.split(64)]
    return sum(losses) / len(windows)


def options():
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--recipe", choices=RECIPES, default="fading")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main():
    """Train, accumulating gradients, and print losses and bytes."""
    args = options()
    set_seed(0)
    windows = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long().unfold(0, CONTEXT, CONTEXT)
    windows, rest = windows.tensor_split([len(windows) * 9 // 10])
    trainer = Trainer(
        GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=2, n_head=4, **PLAIN)),
        TrainingArguments(
            args.checkpoint,
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            learning_rate=args.rate,
            adam_beta1=BETAS[args.recipe][0],
            adam_beta2=BETAS[args.recipe][1],
            weight_decay=0.1,
            lr_scheduler_type="constant",
            save_steps=args.steps // 2,
            logging_steps=5,
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=[{"input_ids": window, "labels": window} for window in windows],
        callbacks=[Print()],
    )
    compress = attach(trainer, RECIPES[args.recipe])
    trainer.train(
        resume_from_checkpoint=str(args.checkpoint / f"checkpoint-{args.steps // 2}") if args.resume else None
    )
    same, sent = compress.handle.verify_replicas(), compress.handle.stats().total.sent_bytes / 1e6
    if trainer.is_world_process_zero():
        loss = held_out(trainer.model, rest[::10])
        print(f"held-out loss {loss:.9g}, replicas {'identical' if same else 'DIFFER'}, {sent:.1f} MB sent")


if __name__ == "__main__":
    main()
