"""A small GPT-2 with Ray Train, on bytes: python examples/gpt2_ray.py TEXT.

--workers, --steps, --recipe dgc | dense, --storage FOLDER. In the middle all workers report a checkpoint. With --again
they fail at the end, once: Ray starts them from the checkpoint, and the same losses come again.
"""

import argparse
import hashlib
import os
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import GPT2Config, GPT2LMHeadModel

import thinwire
from thinwire.frameworks.ray import load, prepare_model, save

CONTEXT, BATCH = 64, 4
PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
RECIPES = {"dgc": lambda: thinwire.recipes.dgc(density=0.05), "dense": thinwire.recipes.dense}


def train(config):
    """Train on one worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, **PLAIN)
    model = prepare_model(GPT2LMHeadModel(shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = thinwire.attach(model, RECIPES[config["recipe"]](), optimizer=optimizer)
    data = torch.frombuffer(bytearray(Path(config["text"]).read_bytes()), dtype=torch.uint8)
    rank, first, checkpoint = ray.train.get_context().get_world_rank(), 0, ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            saved = torch.load(Path(directory, "state.pt"))
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            first = saved["step"]
            load(handle, directory)  # last, and on every worker
    for step in range(first, config["steps"]):
        if step == config["steps"] // 2 and not checkpoint:
            with tempfile.TemporaryDirectory() as directory:
                if rank == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(directory, "state.pt"))
                save(handle, directory)
                ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = data[
            torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=generator) + torch.arange(CONTEXT)
        ].long()
        optimizer.zero_grad()
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == config["steps"] - 1):
            print(f"from {first}: step {step}: loss {loss.item():.9g}", flush=True)
    same, digest = handle.verify_replicas(), hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().numpy().tobytes())
    if rank == 0:
        weights = digest.hexdigest()[:16]
        print(f"from {first}: weights {weights}, replicas {'identical' if same else 'DIFFER'}", flush=True)
    if config["again"] and not checkpoint:
        raise RuntimeError("on purpose: Ray starts the workers again")


def main():
    """Have Ray train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipe", choices=RECIPES, default="dgc")
    parser.add_argument("--storage", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    ray.init(num_cpus=args.workers + 1, include_dashboard=False, object_store_memory=100 << 20)
    trainer = TorchTrainer(
        train,
        train_loop_config={k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(
            storage_path=str(args.storage.absolute()),
            name=f"thinwire-{os.getpid()}",
            failure_config=FailureConfig(max_failures=int(args.again)),
        ),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
