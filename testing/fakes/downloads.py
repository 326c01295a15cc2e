"""Download settings for tests."""

from pathlib import Path

from finetune_trainer.once_per_job import DownloadSettings


def build_download_settings(folder: Path, *, job: str = "job", writes: bool = True) -> DownloadSettings:
    return DownloadSettings(folder, job, writes, lambda: None, timeout_seconds=0.2)


NO_DOWNLOADS = build_download_settings(Path("/none"))
