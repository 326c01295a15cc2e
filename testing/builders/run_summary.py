"""A summary of a run with a restart, for tests of the report and the model card."""

from finetune_trainer.report.attempt_history import AttemptEnding, AttemptHistory, PastAttempt, RankTime
from finetune_trainer.report.run_summary import RunSummary

HISTORY = AttemptHistory(
    started_at=0.0,
    finished_at=7500.0,
    restarts=2,
    attempts=(
        PastAttempt(
            attempt=0,
            first_step=0,
            last_step=12,
            duration_seconds=3600.0,
            time=RankTime(useful=5400.0, starting=600.0, lost=1200.0),
            ending=AttemptEnding("node 1, rank 1: OutOfMemoryError", "CUDA out of memory <on> GPU 0"),
            changed_settings={},
        ),
        PastAttempt(
            attempt=2,
            first_step=10,
            last_step=30,
            duration_seconds=3600.0,
            time=RankTime(useful=6000.0, starting=1200.0),
            ending=None,
            changed_settings={"batch": "2 x 1 x 2 = 4 → 1 x 2 x 2 = 4"},
        ),
    ),
)
SUMMARY = RunSummary(
    outcome="completed 30 of 30 steps; the weights are those of the last step",
    batch="4 (1 x 2 x 2 = 4: per device x accumulation x ranks)",
    best_evaluation="eval_loss 1.5 at step 30",
    peak_bytes=2 * 2**30,
    forecast_bytes=3 * 2**30,
    on_gpu=True,
    history=HISTORY,
)
