"""The script of docs/tutorial.md: torchrun --nproc-per-node 2 examples/tutorial.py dgc [STEPS]"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

CONTEXT = 32


def build():
    """Return a byte-level model, its loss function on random batches of Python source, and SGD."""
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = nn.Sequential(
        nn.Embedding(256, 64),
        nn.Flatten(),
        nn.Linear(64 * CONTEXT, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_of(model):
        starts = torch.randint(len(data) - CONTEXT - 1, (256, 1))
        windows = data[starts + torch.arange(CONTEXT + 1)]
        return nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])

    return model, loss_of, optimizer


def main():
    """Train for 300 steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    module, loss_of, optimizer = build()
    model = DistributedDataParallel(module)
    name = sys.argv[1]
    recipe = {"dense": thinwire.recipes.dense, "dgc": thinwire.recipes.dgc}[name]()
    handle = thinwire.attach(model, recipe, optimizer=optimizer)
    rows = []
    torch.manual_seed(dist.get_rank())  # different batches on each rank
    for step in range(int(sys.argv[2]) if len(sys.argv) > 2 else 300):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append({"loss": loss.item(), "sent": handle.stats().total.sent_bytes})
        if step % 50 == 0 and dist.get_rank() == 0:
            sent = f"{rows[-1]['sent'] / 1e6:.1f} MB sent"
            print(f"step {step}: loss {loss.item():.3f}, {sent}", flush=True)
    if dist.get_rank() == 0:
        Path(f"{name}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
