"""Downloads of tests that download nothing, and of those that do."""

from pathlib import Path

from finetune_trainer.data_sources.source_files import Downloads


def downloads(folder: Path, *, job: str = "job", writes: bool = True) -> Downloads:
    return Downloads(folder, job, writes, lambda: None, patience=0.2)


NONE = downloads(Path("/none"))
