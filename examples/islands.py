"""Two islands of fast links, a thin link between.

    torchrun --nproc-per-node 4 examples/islands.py TEXT [STEPS] [--fsdp]

Ranks 0 and 1 are one island, ranks 2 and 3 the other. Within an island DDP, or with --fsdp FSDP2, reduces gradients at
every step. Every ten steps the islands exchange how far they have moved, one value in twenty of it in two bits.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire

CONTEXT, WIDTH, BATCH = 8, 128, 64
if len(sys.argv) < 2:
    sys.exit(__doc__)
text, *options = sys.argv[1:]
sharded, count = "--fsdp" in options, int(next((each for each in options if each.isdigit()), 300))

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
rank, between, inside = dist.get_rank(), mesh["between"].get_group(), mesh["inside"].get_group()
data = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).long()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 256)
)
model = fully_shard(model, mesh=mesh["inside"]) if sharded else DistributedDataParallel(model, process_group=inside)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
steps = thinwire.outer_steps.sparseloco(every=10, density=0.05)
handle = thinwire.outer(model, optimizer, steps, group=between)

for step in range(count):
    windows = torch.Generator().manual_seed(4 * step + rank)  # other windows on each rank
    starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=windows)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(data[starts + torch.arange(CONTEXT)]), data[starts[:, 0] + CONTEXT])
    loss.backward()
    optimizer.step()
    if rank == 0 and (step + 1) % 50 == 0:
        print(f"step {step + 1}: loss {loss.item():.3f}")

same, total = handle.verify_replicas(), handle.stats().total
if rank == 0:
    elements = sum(p.numel() for p in handle.parameters.values())
    bits = 8 * total.sent_bytes / elements / count
    print(f"global parameters {'identical' if same else 'DIFFER'} on both islands; {bits:.3f} bit a parameter and step")
dist.destroy_process_group()
