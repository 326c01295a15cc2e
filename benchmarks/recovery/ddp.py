"""A bare torch DDP loop, of 0.1 s a step: what trains while the time to recover is taken. It trains until the output
holds a file `finish`, saves nothing, and says when it comes to each stage of its start.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def say(words: str) -> None:
    """In one piece: what other processes write may come between two."""
    os.write(1, f"{words}\n".encode())


def main() -> None:
    say(f"imported at {time.time():.3f}")
    dist.init_process_group("gloo")
    say(f"joined at {time.time():.3f}")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    finish = Path(os.environ["FINETUNE_OUTPUT"]) / "finish"
    over = torch.zeros(1)
    step = 0
    while not over.item():
        time.sleep(0.1)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if dist.get_rank() == 0:
            say(f"step {step} at {time.time():.3f}")
            over.fill_(finish.exists())
        dist.broadcast(over, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
