"""Checks the repair of a job whose micro-batch does not fit into the memory of the GPU."""

from benchmarks.gpu_check.context import CheckContext, require
from benchmarks.trainer.cases import OUT_OF_MEMORY_CASE, shrink_case, write_task
from benchmarks.trainer.out_of_memory import run_out_of_memory_job


def check_repair(context: CheckContext) -> None:
    """Run `finetune run` with a micro-batch of 32 rows of 4096 tokens, which the repair must halve until it fits."""
    settings = shrink_case(OUT_OF_MEMORY_CASE) if context.small else OUT_OF_MEMORY_CASE
    task = write_task(settings, context.scratch / "out-of-memory", context.settings, models=context.models)
    run = run_out_of_memory_job(task, context.scratch / "out-of-memory-job")
    attempts, batch = run.job.status.attempts, run.job.status.batch
    context.record(
        attempts=[f"{record.reason or record.state}: {record.message}" for record in attempts],
        batch=batch.model_dump(mode="json") if batch else None,
    )
    require(run.exit_code == 0, f"finetune run ended with {run.exit_code}: {run.output[-500:]}")
    require(len(attempts) > 1, "the first attempt did not run out of memory, so that nothing was repaired")
    reasons = {record.reason for record in attempts[:-1]}
    require(reasons == {"CudaOutOfMemory"}, f"attempts ended with {reasons}")
    effective = task.micro_batch_size * task.accumulation_steps
    require(batch and batch.effective == effective, f"the effective batch is {batch}, not {effective}")
