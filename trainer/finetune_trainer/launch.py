"""torchrun, as a module that also leaves the exit codes of failed ranks in a file: torchrun itself only prints them."""

import json
import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from finetune_trainer.supervisor.contract import RUN_DIR, RunFolder
from finetune_trainer.supervisor.processes import die_with_parent


def main() -> int:
    die_with_parent()
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        write_exits(RunFolder(Path(os.environ[RUN_DIR])), error)
        print(error, file=sys.stderr, flush=True)
        return 1
    except SignalException as ended:
        print(f"torchrun: {ended}", file=sys.stderr, flush=True)
        return 1
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


if __name__ == "__main__":
    sys.exit(main())
