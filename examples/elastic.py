"""Trains on bytes with as many workers as there are, and goes on when their number changes, under torchrun or srun.

torchrun --nproc-per-node 2 examples/elastic.py TEXT CHECKPOINTS [--steps 200] [--every 20], where CHECKPOINTS is a
folder that all hosts see. The plan of it: torchrun --nproc-per-node 2 -m thinwire plan examples/elastic.py:build
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

CONTEXT, BATCH, TIMEOUT = 16, 64, timedelta(seconds=60)


def build():
    """Return what `thinwire plan` asks for: the model, a function for the loss of a batch, and the optimizer."""
    torch.manual_seed(0)  # the same weights on every worker
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 1024), nn.Tanh(), nn.Linear(1024, 256)
    )
    windows = torch.randint(256, (BATCH, CONTEXT + 1))
    return model, lambda model: loss_of(model, windows), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model, windows):
    """Return how badly the model guesses the last byte of each window."""
    return nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def batch(text, step):
    """Return this worker's part of a step's windows: other ones for every step, the same for any number of workers."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(CONTEXT + 1)].tensor_split(dist.get_world_size())[dist.get_rank()]


def waiting(handle):
    """Return the norm of what the mean still lacks: the sum of the workers' residuals."""
    held = handle.state_dict()["memories"][0]
    nothing = {name: torch.zeros(p.numel()) for name, p in handle.parameters.items()}
    mine = nothing | {name: fields["residual"] for name, fields in held.items()}
    total = torch.cat([mine[name] for name in nothing]).double()
    dist.all_reduce(total)
    return total.norm().item()


def main():
    """Go on from the latest checkpoint, if there is one, and save now and then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    module, _, optimizer = build()
    model = DistributedDataParallel(module)
    handle = thinwire.attach(model, thinwire.recipes.dgc(density=0.01), optimizer=optimizer)
    first, latest = 0, args.checkpoints / "latest"
    if latest.exists():
        path = args.checkpoints / latest.read_text()
        saved = torch.load(path / "state.pt")
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dcp.load({"thinwire": thinwire.Checkpoint(handle, path)}, checkpoint_id=path)
        first = saved["step"]
    pending, restarts = waiting(handle), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    say(f"from step {first}, {dist.get_world_size()} workers, restarts {restarts}, ‖residual‖ {pending:.6f}")
    for step in range(first, args.steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(text, step))
        loss.backward()
        optimizer.step()
        if (step + 1) % args.every == 0:
            pending, path = waiting(handle), args.checkpoints / f"step-{step + 1}"
            dcp.save({"thinwire": thinwire.Checkpoint(handle)}, checkpoint_id=path)
            if dist.get_rank() == 0:  # DDP's state is the same on every worker
                parts = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(parts, path / "state.pt")
                (args.checkpoints / "writing").write_text(path.name)
                (args.checkpoints / "writing").replace(latest)
            total = handle.stats().total
            sent = f"sent {total.sent_bytes / 1e6:.2f} of {total.dense_bytes / 1e6:.0f} MB"
            say(f"step {step + 1}: loss {loss.item():.6f}, {sent}, ‖residual‖ {pending:.6f}")
    same = handle.verify_replicas()
    say(f"replicas {'identical' if same else 'DIFFER: ' + ', '.join(handle.differing_parameters())}")
    dist.destroy_process_group()


def say(line):
    """Print a line once, not once a worker."""
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
