"""Shard weights, gradients and optimizer states over the ranks with DDP, DeepSpeed ZeRO or FSDP2."""
