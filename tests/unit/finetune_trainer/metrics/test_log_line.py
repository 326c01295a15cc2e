"""Test the log line of a training step."""

from finetune_supervisor.messages import TrainingProgress
from finetune_trainer.metrics.log_line import format_log_line
from finetune_trainer.metrics.slow_rank import find_slow_rank
from finetune_trainer.metrics.step_meter import MeasuredInterval
from finetune_trainer.metrics.throughput import describe_speed, summarise_ranks

GIB = 2**30


def build_interval(**fields: float) -> MeasuredInterval:
    default = MeasuredInterval(
        steps=4, seconds=8, data_wait_seconds=0.4, loss_seconds=2, samples=32, tokens=4000, flops=8e12, peak_bytes=GIB
    )
    return default._replace(**fields)


def test_log_line_contains_loss_speed_memory_and_method_metrics() -> None:
    summary = summarise_ranks(
        [build_interval(compute_seconds=4), build_interval(loss_seconds=3, compute_seconds=4, gpu_utilization=0.9)],
        peak_flops=1e13,
    )
    progress = TrainingProgress(
        step=3,
        total_steps=9,
        eta_seconds=75,
        slow_rank=str(find_slow_rank(summary.own_step_seconds)),
        memory=summary.memory,
        **describe_speed(summary),
    )

    line = format_log_line(progress, {"loss": 1.25, "grad_norm": 0.5, "learning_rate": 1e-4, "rewards/margins": 0.1})

    assert line == (
        "step 3/9  loss 1.2500  grad_norm 0.5000  lr 1.000e-04  2 s/step  tokens/s 1000  samples/s 8  mfu 10.0%"
        "  efficiency 50%  gpu 90%  data 5%  memory 1.00 GiB  slowest rank 1 +42%  eta 01:15  rewards/margins 0.1000"
    )
