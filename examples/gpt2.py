"""A GPT-2 of 3 M parameters from transformers, trained on bytes: torchrun --nproc-per-node 2 examples/gpt2.py TEXT.

--recipe orthogonal | fading | dense, --rate, --seed, --steps, --checkpoint FOLDER (saved in the middle, and --resume
goes on from it).
"""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import thinwire

CONTEXT, BATCH, WARM_UP = 64, 8, 20
PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
RECIPES = {
    "orthogonal": thinwire.recipes.orthogonal(),
    "fading": thinwire.recipes.fading(clip_norm=0.1, values=thinwire.formats.Sign(group_size=96)),
    "dense": thinwire.recipes.dense(),
}
BETAS = {"orthogonal": (0.9, 0.9), "fading": (0.95, 0.9), "dense": (0.9, 0.95)}


def options():
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--recipe", choices=RECIPES, default="fading")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def batch(data, step, seed):
    """Return this rank's batch of a step: other windows for every step, rank and seed."""
    generator = torch.Generator().manual_seed(hash((seed, step, dist.get_rank())))
    starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=generator)
    return data[starts + torch.arange(CONTEXT)].long()


@torch.no_grad()
def held_out(model, data):
    """Return the mean loss on windows of the last tenth, which is not trained on."""
    model.eval()
    windows = data[: len(data) // CONTEXT * CONTEXT].view(-1, CONTEXT)[::10].long()
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in windows.split(64)]
    model.train()
    return sum(losses) / len(windows)


def main():
    """Train, and print losses and bytes."""
    args = options()
    dist.init_process_group("gloo")
    data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    data, rest = data.tensor_split([len(data) * 9 // 10])
    torch.manual_seed(args.seed)  # the same weights on every rank
    config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=256, n_layer=4, n_head=4, **PLAIN)
    model = DistributedDataParallel(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=BETAS[args.recipe], weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps)),
    )
    handle = thinwire.attach(model, RECIPES[args.recipe], optimizer=optimizer)
    first, file = 0, args.checkpoint and args.checkpoint / f"rank{dist.get_rank()}.pt"
    parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler, "thinwire": handle}
    if args.resume:
        saved = torch.load(file)
        first = saved.pop("step")
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step in range(first, args.steps):
        if file and step == args.steps // 2 and not args.resume:
            args.checkpoint.mkdir(exist_ok=True)
            torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, file)
        windows = batch(data, step, args.seed)
        optimizer.zero_grad()
        loss = model(input_ids=windows, labels=windows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0 and (step % 10 == 0 or step + 1 == args.steps):
            print(f"step {step}: loss {loss.item():.9g}", flush=True)
    same, loss = handle.verify_replicas(), held_out(model.module, rest)
    if dist.get_rank() == 0:
        sent = handle.stats().total.sent_bytes / 1e6
        print(f"held-out loss {loss:.4f}, replicas {'identical' if same else 'DIFFER'}, {sent:.1f} MB sent")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
