"""torchrun, as a module that keeps in files what torchrun only prints: exit codes of ranks, and its own error."""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from finetune_trainer.supervisor.contract import RUN_DIR, RunFolder
from finetune_trainer.supervisor.processes import die_with_parent


def main() -> int:
    die_with_parent()
    if not torch.cuda.is_available():  # on CPU DDP warns of an option that settings.py chooses with reason
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    run_folder = RunFolder(Path(os.environ[RUN_DIR]))
    try:
        run(parse_args(sys.argv[1:]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        write_exits(run_folder, error)
        print(error, file=sys.stderr, flush=True)
        return 1
    except SignalException as ended:
        print(f"torchrun: {ended}", file=sys.stderr, flush=True)
        return 1
    except Exception as error:  # the outermost place: a rendezvous that failed, a port that is taken
        write_agent_error(run_folder, error)
        raise
    return 0


def write_exits(run_folder: RunFolder, error: ChildFailedError) -> None:
    """By local rank; whole seconds, as torchrun has no more."""
    exits = {
        str(failure.local_rank): {"code": failure.exitcode, "time": failure.timestamp}
        for failure in error.failures.values()
    }
    beside = run_folder.exits.with_suffix(".tmp")
    beside.write_text(json.dumps(exits), encoding="utf-8")
    beside.replace(run_folder.exits)


def write_agent_error(run_folder: RunFolder, error: Exception) -> None:
    said = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"py_callstack": traceback.format_exc()}}
    run_folder.agent_error.write_text(json.dumps({"message": said}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
