"""Asynchronous training in ten lines: torchrun --nproc-per-node 3 examples/parameter_server.py [STEPS]"""

import os
import sys

import torch

import thinwire

model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
recipe = thinwire.recipes.dct_dp(density=0.01)
if os.environ["RANK"] == "0":
    with thinwire.serve(model, recipe, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.01), trainers=2) as server:
        server.wait()
        print(f"{server.status().version} updates, staleness {dict(server.status().staleness)}")
else:
    with thinwire.connect(model, recipe, reconnect=300) as trainer:  # seconds in which the server has to start
        for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 200):
            x = torch.randn(64, 256)
            loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
            model.zero_grad()
            loss.backward()
            trainer.step()
        print(f"rank {os.environ['RANK']}: loss {loss:.4f}, {trainer.traffic().sent_bytes / 2**20:.1f} MiB sent")
