"""The end of a run: whose weights are published, with what lies beside them, and the marker that says so."""

from pathlib import Path

from finetune_supervisor import contract
from finetune_trainer.checkpoint.checkpoints import step_of
from finetune_trainer.checkpoint.output_folder import Output
from finetune_trainer.distributed.collectives import on_rank_zero
from finetune_trainer.hubs import upload
from finetune_trainer.metrics.html_report import Run, write_report
from finetune_trainer.model.load import Pretrained
from finetune_trainer.model.merge import write_merged
from finetune_trainer.parallel.full_state import read_weights
from finetune_trainer.training.base_trainer import ExactTrainer
from finetune_trainer.training.early_stopping import Ending, conclude
from finetune_trainer.vision.save_processor import save_processor

_REPORTED = {"model", "dataset", "sft", "dpo", "lora", "training", "num_nodes"}  # env may hold secrets


def publish_result(trainer: ExactTrainer, output: Output, pretrained: Pretrained, *, title: str) -> None:
    """The adapter or the whole model, its tokenizer, the log of losses and the report; then the marker."""
    trainer.parts.reporter.enter(contract.PUBLISH)
    weights, lora = trainer.whole_weights(), trainer.parts.spec.lora
    ending = on_rank_zero(lambda: end_of(trainer))
    if ending:
        trainer.parts.reporter.ended(ending.words, early=ending.stopped_early)

    def write(folder: Path) -> None:
        if ending and ending.checkpoint:
            weights.update(read_weights(ending.checkpoint))
        # of full tuning they are in float32
        trainer.save_result(weights if lora else {n: w.to(pretrained.dtype) for n, w in weights.items()}, folder)
        pretrained.tokenizer.save_pretrained(folder)
        if pretrained.vision:
            save_processor(pretrained.vision, pretrained.name, folder)
        trainer.state.save_to_json(str(folder / "trainer_state.json"))
        write_report(run_of(trainer, title=title, ending=ending), folder)
        if lora is not None and lora.merge:
            write_merged(pretrained, folder, folder / "merged")

    def publish() -> None:
        best = step_of(ending.checkpoint) if ending and ending.checkpoint else None
        trainer.parts.checkpoints.publish(output.result, write, spared=best)
        if push := trainer.parts.spec.output.push_to_hub:
            print(f"pushed: {upload(push, output.result, title=title)}", flush=True)
        output.mark_success()
        print(f"result: {output.result}", flush=True)

    on_rank_zero(publish)


def end_of(trainer: ExactTrainer) -> Ending | None:
    """Told on rank 0; None where evaluations are not compared and there is nothing to tell."""
    if trainer.comparison is None:
        return None
    state, checkpoints = trainer.state, trainer.parts.checkpoints
    steps = {"last_step": state.global_step, "total_steps": trainer.args.max_steps}
    ending = conclude(trainer.comparison, state.log_history, checkpoints, **steps)
    for problem in ending.passed_over:
        print(f"checkpoint passed over: {problem}", flush=True)
    print(ending.words, flush=True)
    return ending


def run_of(trainer: ExactTrainer, *, title: str, ending: Ending | None) -> Run:
    parts, monitor = trainer.parts, trainer.monitor
    asked = parts.spec.model_dump(mode="json", by_alias=True, exclude_none=True, include=_REPORTED)
    made = {"effective batch": parts.batch, "steps": trainer.state.global_step, "samples": len(parts.data.train)}
    made |= {"end": ending.words} if ending else {}
    return Run(
        title=f"{title}: {parts.spec.model.name}",
        job={**made, **asked},
        history=trainer.state.log_history,
        lengths=parts.data.train.lengths,
        measured=monitor.latest,
        own_seconds=monitor.own_seconds,
        expected_memory=parts.expected_memory,
    )
