"""A small GPT-2 with Accelerate, on bytes: torchrun --nproc-per-node 2 examples/gpt2_accelerate.py TEXT.

On GPUs, accelerate launch does as well. --recipe fading | dense, --rate, --steps, --checkpoint FOLDER (saved in the
middle; --resume goes on from it).
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import thinwire
from thinwire.frameworks.accelerate import attach

CONTEXT, BATCH, ACCUMULATE = 64, 4, 2
PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
RECIPES = {
    "fading": thinwire.recipes.fading(clip_norm=0.1, values=thinwire.formats.Sign(group_size=96)),
    "dense": thinwire.recipes.dense(),
}
BETAS = {"fading": (0.95, 0.9), "dense": (0.9, 0.95)}


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
    """Train, accumulating gradients, and print losses and bytes."""
    args = options()
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    windows = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long().unfold(0, CONTEXT, CONTEXT)
    windows, rest = windows.tensor_split([len(windows) * 9 // 10])
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=2, n_head=4, **PLAIN))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=BETAS[args.recipe], weight_decay=0.1)
    loader = DataLoader(windows, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = attach(accelerator, model, RECIPES[args.recipe], optimizer=optimizer)
    first = 0
    if args.resume:
        accelerator.load_state(args.checkpoint)
        first = args.steps // 2
        loader = accelerator.skip_first_batches(loader, first * ACCUMULATE)
    for batch, inputs in enumerate(islice(loader, (args.steps - first) * ACCUMULATE), first * ACCUMULATE):
        step, part = divmod(batch, ACCUMULATE)
        if args.checkpoint and not args.resume and (step, part) == (args.steps // 2, 0):
            accelerator.save_state(args.checkpoint)
        with accelerator.accumulate(model):
            loss = model(input_ids=inputs, labels=inputs).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process and step % 10 == part == 0:
            print(f"step {step}: loss {loss.item():.9g}", flush=True)
    same, sent = handle.verify_replicas(), handle.stats().total.sent_bytes / 1e6
    if accelerator.is_main_process:
        loss = held_out(accelerator.unwrap_model(model), rest[::10])
        print(f"held-out loss {loss:.9g}, replicas {'identical' if same else 'DIFFER'}, {sent:.1f} MB sent")
    accelerator.end_training()


if __name__ == "__main__":
    main()
