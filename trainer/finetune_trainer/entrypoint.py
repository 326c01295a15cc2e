"""Entry point of the ranks: the launcher calls `prepare` once per node before forking, then `main` in each rank."""

import gc
import importlib
import os
from pathlib import Path

from finetune_supervisor import contract
from finetune_supervisor.launch.rank_process import RankProgram, exit_without_teardown, run_rank_program
from finetune_trainer.lazy_imports import hide_unused_libraries, may_use_gpu_on_import

_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def prepare() -> None:
    """Import the trainer, or only torch if importing the trainer might initialise CUDA, which breaks forked ranks."""
    if not any(Path(file).exists() for file in _GPU_FILES):  # silence a DDP warning about find_unused_parameters
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    spec_file = Path(os.environ.get(contract.CONFIG, ""))
    hide_unused_libraries(spec_file)
    importlib.import_module("torch" if may_use_gpu_on_import(spec_file) else "finetune_trainer.train")


def main() -> None:
    """Run the training of this rank."""
    hide_unused_libraries(Path(os.environ.get(contract.CONFIG, "")))
    from finetune_trainer.train import main as train

    gc.freeze()  # exclude imported modules from garbage collection; they slow down a full collection by half a second
    train()


if __name__ == "__main__":  # entry point of ranks that the launcher did not fork
    exit_without_teardown(run_rank_program(RankProgram(None, "finetune_trainer.entrypoint", ()), in_process=True))
