"""The shortest script that works: torchrun --nproc-per-node 2 examples/minimal.py [STEPS]"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire

dist.init_process_group("gloo")
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
attachment = thinwire.attach(model, thinwire.recipes.dgc(density=0.01), optimizer=optimizer)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
    x = torch.randn(64, 256)
    loss = (model(x) - x.sum(dim=1, keepdim=True).sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
print(f"rank {dist.get_rank()}: replicas identical: {attachment.verify_replicas()}", flush=True)
dist.destroy_process_group()
