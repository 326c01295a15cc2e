"""Bare torch DDP loop with steps of 0.1 s, to measure start and recovery.

It trains until a file `finish` exists in the output folder, saves nothing, and logs the time of each start stage.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def log(line: str) -> None:
    """Write the line with one system call, so that output of other processes cannot split it."""
    os.write(1, f"{line}\n".encode())


def main() -> None:
    log(f"imported at {time.time():.3f}")
    dist.init_process_group("gloo")
    log(f"joined at {time.time():.3f}")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    finish = Path(os.environ["FINETUNE_OUTPUT"]) / "finish"
    is_finished = torch.zeros(1)
    step = 0
    while not is_finished.item():
        time.sleep(0.1)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if dist.get_rank() == 0:
            log(f"step {step} at {time.time():.3f}")
            is_finished.fill_(finish.exists())
        dist.broadcast(is_finished, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
