"""Writes checkpoints without tensors, and finds the one to resume from."""

from pathlib import Path

from finetune_trainer.checkpoint.checkpoints import Checkpoints, ResumePoint


def write_files(folder: Path) -> list[Path]:
    """Write two small files, one of them in a subfolder."""
    paths = [folder / "weights", folder / "nested" / "state"]
    paths[1].parent.mkdir(exist_ok=True)
    paths[0].write_text("w" * 100)
    paths[1].write_text("s")
    return paths


def write_checkpoint(checkpoints: Checkpoints, step: int, *, retained_step: int | None = None) -> None:
    """Write and publish a complete checkpoint of one rank."""
    files = checkpoints.stage(step, write_files)
    checkpoints.publish_staged(step, [files], retained_step=retained_step)


def find_newest(checkpoints: Checkpoints) -> ResumePoint:
    """Return the newest intact checkpoint, as a new attempt does, which does not know the damaged ones yet."""
    return Checkpoints(checkpoints.output, checkpoints.keep_last).find_intact()
