"""A small GPT-2 in Lightning, on bytes, with two workers: python examples/gpt2_lightning.py TEXT (or under torchrun).

--recipe fading | dense, --rate, --steps, --checkpoint FOLDER (saved in the middle; --resume goes on from it).
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import thinwire
from thinwire.frameworks.lightning import ThinwireCallback

CONTEXT, BATCH = 64, 8
PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
RECIPES = {
    "fading": thinwire.recipes.fading(clip_norm=0.1, values=thinwire.formats.Sign(group_size=96)),
    "dense": thinwire.recipes.dense(),
}
BETAS = {"fading": (0.95, 0.9), "dense": (0.9, 0.95)}


class GPT2(lightning.LightningModule):
    """The model and its AdamW."""

    def __init__(self, rate, betas):
        super().__init__()
        self.rate, self.betas = rate, betas
        self.model = GPT2LMHeadModel(
            GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=2, n_head=4, **PLAIN)
        )

    def configure_optimizers(self):
        """Return the optimizer, which the callback finds."""
        return torch.optim.AdamW(self.parameters(), lr=self.rate, betas=self.betas, weight_decay=0.1)

    def training_step(self, windows):
        """Return the loss, and print it now and then."""
        loss = self.model(input_ids=windows, labels=windows).loss
        if self.global_rank == 0 and self.global_step % 10 == 0:
            print(f"step {self.global_step}: loss {loss.item():.9g}", flush=True)
        return loss


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
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main():
    """Train for two epochs, and print losses and bytes."""
    args = options()
    lightning.seed_everything(0, verbose=False)
    windows = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long().unfold(0, CONTEXT, CONTEXT)
    windows, rest = windows.tensor_split([len(windows) * 9 // 10])
    compress = ThinwireCallback(RECIPES[args.recipe])
    keep = ModelCheckpoint(args.checkpoint, "epoch{epoch}", auto_insert_metric_name=False, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        limit_train_batches=args.steps // 2,
        gradient_clip_val=1.0,
        callbacks=[compress, keep] if args.checkpoint else [compress],
        enable_checkpointing=bool(args.checkpoint),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    model = GPT2(args.rate, BETAS[args.recipe])
    trainer.fit(
        model,
        DataLoader(windows, batch_size=BATCH, shuffle=True),
        ckpt_path=args.checkpoint / "epoch0.ckpt" if args.resume else None,
    )
    same, sent = compress.handle.verify_replicas(), compress.handle.stats().total.sent_bytes / 1e6
    if trainer.is_global_zero:
        loss = held_out(model.model, rest[::10])
        print(f"held-out loss {loss:.9g}, replicas {'identical' if same else 'DIFFER'}, {sent:.1f} MB sent")


if __name__ == "__main__":
    main()
