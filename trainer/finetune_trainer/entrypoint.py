"""What every rank runs: `prepare` once per node, before the ranks are forked, then `main` in each."""

import gc
import importlib
import os
from pathlib import Path

from finetune_supervisor import contract
from finetune_supervisor.launch.rank_process import Target, become, leave
from finetune_trainer.lazy_imports import hide_what_is_not_needed, uses_gpus_when_imported

_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def prepare() -> None:
    """Import what training needs, unless that might take hold of a GPU, which forks could not use then."""
    if not any(Path(file).exists() for file in _GPU_FILES):  # on CPU DDP warns of what settings.py chooses with reason
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    spec_file = Path(os.environ.get(contract.CONFIG, ""))
    hide_what_is_not_needed(spec_file)
    importlib.import_module("torch" if uses_gpus_when_imported(spec_file) else "finetune_trainer.train")


def main() -> None:
    hide_what_is_not_needed(Path(os.environ.get(contract.CONFIG, "")))
    from finetune_trainer.train import main as train

    gc.freeze()  # a million objects of modules, which every full collection would look at for half a second
    train()


if __name__ == "__main__":  # of a rank that could not be a fork
    leave(become(Target(None, "finetune_trainer.entrypoint", ()), in_place=True))
