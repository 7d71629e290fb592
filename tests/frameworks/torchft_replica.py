"""One replica under torchft, as a process: NAME LIGHTHOUSE RECIPE FOLDER TEXT. See test_torchft.py.

Prints a line a step. The first two begin together. The first one's exchange fails once. The second one dies, the first
goes on alone, and the third comes then. They hear of each other by files in FOLDER.
"""

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager
from transformers import GPT2Config, GPT2LMHeadModel

import thinwire as tw
from thinwire.frameworks.torchft import ProcessGroupGloo, replicate

_distributed: Any = dist  # whose names are not all exported, as mypy has it
FAILS, DIES, TOGETHER = 8, 14, 8
CONTEXT = 32
RECIPES = {
    "dgc": lambda: tw.recipes.dgc(density=0.05, minimum_size=0),
    "powersgd": lambda: tw.recipes.powersgd(rank=2, start=0),
}


PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}


def batch(data: torch.Tensor, name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * ord(name[0]) + step)
    return data[torch.randint(len(data) - CONTEXT, (2, 1), generator=generator) + torch.arange(CONTEXT)].long()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.1)


def main(name: str, lighthouse: str, recipe: str, folder: str, text: str) -> None:
    torch.set_num_threads(1)
    alone = Path(folder, "alone")
    if name == "third_2":
        wait_for(alone)
    store = _distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=_distributed.PrefixStore("own", store), rank=0, world_size=1)
    torch.manual_seed(ord(name[0]))  # torchft sends the first replica's weights to the others
    shape = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=32, n_layer=1, n_head=2, **PLAIN)
    model = GPT2LMHeadModel(shape)
    data = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    links = ProcessGroupGloo(timeout=timedelta(seconds=4))

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=links,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=name,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="localhost",
    )
    replicas = replicate(manager, links, model, RECIPES[recipe](), optimizer=optimizer)
    Path(folder, name).touch()
    for other in ("first_0", "second_1"):
        wait_for(Path(folder, other))
    fails, left = name == "first_0", TOGETHER
    while left:
        optimizer.zero_grad()
        manager.start_quorum()
        step = manager.current_step()
        if name == "second_1" and step == DIES:
            os._exit(9)
        x = batch(data, name, step)
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        if fails and step == FAILS:
            fails = False
            links.abort()
        replicas.reduce()
        kept = manager.should_commit()
        waits = hashlib.sha256()
        if kept:
            optimizer.step()
        for memory in replicas.state_dict()["memories"]:
            for held in memory.values():
                waits.update(b"".join(x.numpy().tobytes() for x in held.values()))
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        left -= alone.exists() and kept and manager.num_participants() == 2
        if manager.num_participants() == 1:
            alone.touch()
            time.sleep(0.1)  # or there would be thousands of steps
        line = {"step": step, "kept": kept, "replicas": manager.num_participants(), "loss": loss.item()}
        print(
            json.dumps(line | {"weights": hashlib.sha256(weights).hexdigest(), "waits": waits.hexdigest()}), flush=True
        )
    sys.stdout.flush()
    os._exit(0)  # torchft's threads would wait for replicas that have gone


if __name__ == "__main__":
    main(*sys.argv[1:])
