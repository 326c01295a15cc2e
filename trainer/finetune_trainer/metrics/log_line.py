"""Format the log line of a training step."""

from finetune_supervisor.messages import TrainingProgress
from finetune_trainer.units import GIB


def format_log_line(progress: TrainingProgress, logs: dict[str, float]) -> str:
    """Format the log line of one step: loss, gradient norm, speed, memory and the metrics of the method."""
    parts = [
        f"step {progress.step}/{progress.total_steps}",
        f"loss {logs['loss']:.4f}",
        f"grad_norm {logs.get('grad_norm', 0.0):.4f}",
        f"lr {logs.get('learning_rate', 0.0):.3e}",
        f"{progress.step_seconds or 0:.3g} s/step",
        f"tokens/s {progress.tokens_per_second or 0:.0f}",
        f"samples/s {progress.samples_per_second or 0:.3g}",
        f"mfu {progress.mfu:.1%}" if progress.mfu is not None else "",
        f"efficiency {progress.scaling_efficiency:.0%}" if progress.scaling_efficiency is not None else "",
        f"gpu {progress.gpu_utilization:.0%}" if progress.gpu_utilization is not None else "",
        f"data {progress.data_wait_share or 0:.0%}",
        f"memory {progress.memory.peak_highest / GIB:.2f} GiB" if progress.memory else "",
        f"slowest {progress.slow_rank}" if progress.slow_rank else "",
        f"eta {_format_duration(progress.eta_seconds or 0)}",
        *(f"{name} {value:.4f}" for name, value in logs.items() if "/" in name),
    ]
    return "  ".join(part for part in parts if part)


def _format_duration(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"
