"""Typical training script of a user, with plain torch, DDP, custom arguments and checkpoints."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save_dir", required=True)
    parser.add_argument("--data_path")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--raise_on_rank", type=int, default=-1)
    parser.add_argument("--seconds_per_step", type=float, default=0.0)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    features = torch.randn(count_rows(args.data_path) if args.data_path else 256, 8)
    rows = TensorDataset(features, features.sum(dim=1, keepdim=True))
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    checkpoint = os.path.join(args.save_dir, "model.pt")
    first_epoch = 0
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        first_epoch = saved["epoch"] + 1

    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(rows, shuffle=True)
    loader = DataLoader(rows, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            time.sleep(args.seconds_per_step)
            if rank == args.raise_on_rank and step == 1:
                raise ValueError(f"row {step} of rank {rank} has no label")
        if rank == 0:
            print(
                f"epoch {epoch} loss {loss.item():.6f} of {len(rows)} rows on {dist.get_world_size()} ranks", flush=True
            )
            os.makedirs(args.save_dir, exist_ok=True)
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, checkpoint)
    dist.destroy_process_group()


def count_rows(path: str) -> int:
    with open(path) as file:
        return sum(1 for _ in file)


if __name__ == "__main__":
    main()
