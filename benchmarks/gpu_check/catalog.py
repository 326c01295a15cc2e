"""The cases of both parts of the GPU check, the most valuable case first. Uses the standard library only.

The time limits of a part add up to more than its total time, because few cases need their whole limit.
"""

from __future__ import annotations

from benchmarks.gpu_check.case import CUDA, GpuCheckCase

CHECKS = "benchmarks.gpu_check.checks"
DEEPSPEED_PRESETS = ("zero2", "zero3", "zero1", "zero2_offload", "zero3_offload")


def _preset(name: str, proves: str, *, requires: tuple[str, ...] = (), resume: bool = False) -> GpuCheckCase:
    suffix = ", resume" if resume else ""
    arguments = (name, "resume") if resume else (name,)
    return GpuCheckCase(f"preset {name}{suffix}", proves, f"{CHECKS}.presets:check_preset", 75, arguments, requires)


LAUNCH = (
    GpuCheckCase(
        "fork after import",
        "a fork of the launcher can use CUDA; native threads before the fork; NVML instead of the driver",
        f"{CHECKS}.fork:check_fork",
        60,
    ),
    GpuCheckCase(
        "launch",
        "finetune run: forked rank, NCCL eager init, loader processes with pinned memory, heartbeats",
        f"{CHECKS}.launcher:check_launch",
        90,
    ),
    GpuCheckCase(
        "kill and resume",
        "after SIGKILL of the rank, the next attempt resumes from the checkpoint with the same losses",
        f"{CHECKS}.launcher:check_kill_and_resume",
        120,
    ),
)
KERNELS = (
    GpuCheckCase(
        "attention shapes",
        "cost of new (batch, length) shapes with and without cuDNN and masks; masks do not change the output",
        f"{CHECKS}.attention:check_shapes",
        75,
    ),
    GpuCheckCase(
        "varlen attention",
        "torch's varlen_attn, as the trainer calls it, has the outputs and gradients of SDPA for each row of a pack,"
        " also for pairs that share prompts",
        f"{CHECKS}.varlen:check_varlen",
        40,
        requires=(CUDA, "torch.nn.attention.varlen"),
    ),
    GpuCheckCase(
        "loss head peak",
        "peak memory of the loss of 4096 and 32768 tokens in tiles, beside that from all logits, and forecasts",
        f"{CHECKS}.loss_head:check_peak",
        60,
    ),
    GpuCheckCase(
        "direct loading",
        "weights are read into the GPU without a copy of the model in host memory",
        f"{CHECKS}.loading:check_direct_loading",
        60,
    ),
)
PRESETS = (
    _preset("ddp", "reference losses of full fine-tuning on one rank"),
    _preset("fsdp", "FSDP2 has the losses of DDP"),
    _preset("fsdp_offload", "fsdp.cpuOffload: gradient clipping and checkpoints of tensors in host memory"),
    *(
        _preset(name, "losses of DDP; streams of DeepSpeed with overlap_comm", requires=("deepspeed",))
        for name in DEEPSPEED_PRESETS
    ),
    _preset("lora", "reference losses of LoRA on one rank"),
    _preset("nf4", "weights in nf4 by bitsandbytes have the losses of LoRA within 5 %", requires=("bitsandbytes",)),
    _preset(
        "adamw_8bit",
        "moments in 8 bits by bitsandbytes have the losses of float32 within 1 %, and are restored",
        requires=("bitsandbytes",),
        resume=True,
    ),
    _preset("torch_compile", "compiled layers have the losses of DDP within 1 %, and are resumed", resume=True),
    _preset("fsdp_offload", "optimizer states are restored to the device of their weights", resume=True),
    _preset("zero3", "sharded states are restored", requires=("deepspeed",), resume=True),
)
TWO_RANKS = tuple(
    GpuCheckCase(f"two ranks, {name}", proves, f"{CHECKS}.two_ranks:check_two_ranks", 100, (name,), requires)
    for name, proves, requires in (
        ("ddp", "DDP without search for unused parameters has the losses of one rank", ()),
        ("zero2", "ZeRO-2 in 16 bits has the losses of DDP, with overlap_comm on CUDA streams", ("deepspeed",)),
        ("fsdp", "FSDP2 in 16 bits has the losses of DDP", ()),
    )
)


def _comparison(name: str, proves: str, limit_seconds: int, *, peer: bool = True) -> GpuCheckCase:
    arguments = (name, "peer") if peer else (name,)
    requires = ("trl", "datasets") if peer else ()
    return GpuCheckCase(name, proves, f"{CHECKS}.training:check_training", limit_seconds, arguments, requires)


LORA_PACKED = _comparison("LoRA SFT 7B, packed to 4096", "speed and memory of packs beside TRL, and the forecast", 180)
TRAINING = (
    _comparison("LoRA SFT 7B, 4096", "speed and memory of rows of different lengths beside TRL", 150),
    GpuCheckCase(
        "out-of-memory repair",
        "a micro-batch of 32 does not fit; the repair halves it until it fits",
        f"{CHECKS}.out_of_memory:check_repair",
        150,
    ),
    _comparison("LoRA DPO 7B, 2048", "speed and memory of DPO beside TRL", 150),
    _comparison(
        "LoRA SFT Qwen2-VL-7B, 768 image tokens", "images of real size; forecast of the tower", 120, peer=False
    ),
    _comparison("full SFT 3B, 2048", "full fine-tuning with float32 weights; forecast", 90, peer=False),
    _comparison("QLoRA SFT 7B, packs of 4096", "memory of nf4 and its forecast", 90, peer=False),
)
PARTS: dict[int, tuple[GpuCheckCase, ...]] = {
    1: (*LAUNCH, *KERNELS, LORA_PACKED, *PRESETS),
    2: (*TWO_RANKS, *TRAINING),
}
