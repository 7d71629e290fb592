"""Trainers that are pipelines: torchrun --nproc-per-node 6 examples/pipelines_on_servers.py [STEPS]

Two stages, two trainers. The first two ranks serve, one each stage; of the others, neighbours are one pipeline. Within
it a twentieth of each activation crosses, to the servers one percent of each gradient: DCT-MP inside, DCT-DP up.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import thinwire
from thinwire.pipeline import sparsify

STAGES, PORT = 2, 29600
dist.init_process_group("gloo")
rank, trainers = dist.get_rank(), (dist.get_world_size() - STAGES) // STAGES
pipelines = [dist.new_group([STAGES * (1 + i) + stage for stage in range(STAGES)]) for i in range(trainers)]

torch.manual_seed(0)  # the same weights on servers and trainers
halves = [
    nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()),  # cut after a ReLU
    nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)),
]
trainer, stage = divmod(rank - STAGES, STAGES)
model, address = halves[stage], f"127.0.0.1:{PORT + stage}"
recipe = thinwire.recipes.dct_dp(density=0.01)

if rank < STAGES:  # a server for each stage: it has that stage's parameters alone
    with thinwire.serve(
        model,
        recipe,
        make_optimizer=lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
        address=address,
        index=0,
        trainers=trainers,
    ) as server:
        server.wait()
        print(f"server of stage {stage}: {server.status().version} updates")
else:
    pipeline_stage = PipelineStage(model, stage, STAGES, torch.device("cpu"), group=pipelines[trainer])
    boundaries = sparsify([pipeline_stage], density=0.05, values=torch.bfloat16)
    schedule = Schedule1F1B(pipeline_stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    data, losses = torch.Generator().manual_seed(trainer), list[torch.Tensor]()
    with thinwire.connect(model, recipe, address=address, reconnect=60) as connected:
        for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 200):
            inputs = torch.randn(128, 32, generator=data)
            targets = inputs[:, :8].square().sum(1, keepdim=True) / 8
            model.zero_grad()
            losses.clear()
            if stage == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets, losses=losses)
            connected.step(loss=torch.stack(losses).mean() if losses else None)
            if step % 20 == 0 and losses:
                print(f"trainer {trainer}: step {step}, loss {torch.stack(losses).mean():.3f}")
        for index, report in boundaries.reports().items():
            print(f"trainer {trainer}: behind stage {index}, {report.kept:.1%} of the activations crossed")
dist.destroy_process_group()
