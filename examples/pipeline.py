"""Two stages, any number of replicas: torchrun --nproc-per-node 4 examples/pipeline.py [STEPS]"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import thinwire
from thinwire.pipeline import sparsify

STAGES = 2
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // STAGES, STAGES), mesh_dim_names=("replica", "stage"))
stage, replica = mesh.get_local_rank("stage"), mesh.get_local_rank("replica")

torch.manual_seed(0)  # the same weights on every replica
halves = [
    nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()),  # cut after a ReLU
    nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)),
]
model = halves[stage]
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# Between the replicas of a stage one percent of each gradient travels, between stages a twentieth of each activation.
recipe = thinwire.recipes.dgc(density=0.01)
replicas = thinwire.replicate(model, recipe, group=mesh.get_group("replica"), optimizer=optimizer)
pipeline_stage = PipelineStage(model, stage, STAGES, torch.device("cpu"), group=mesh.get_group("stage"))
boundaries = sparsify([pipeline_stage], density=0.05, values=torch.bfloat16)
schedule = Schedule1F1B(pipeline_stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)

data = torch.Generator().manual_seed(replica)
losses: list[torch.Tensor] = []
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 200):
    inputs = torch.randn(128, 32, generator=data)
    targets = inputs[:, :8].square().sum(1, keepdim=True) / 8
    optimizer.zero_grad()
    if stage == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=losses)
    replicas.reduce()
    optimizer.step()
    if step % 20 == 0 and losses:
        print(f"rank {dist.get_rank()}: step {step}, loss {torch.stack(losses).mean():.3f}")
    losses.clear()

for index, report in boundaries.reports().items():
    print(f"rank {dist.get_rank()}: behind stage {index}, {report.kept:.1%} of the activations crossed")
print(f"rank {dist.get_rank()}: replicas identical: {replicas.verify_replicas()}")
dist.destroy_process_group()
