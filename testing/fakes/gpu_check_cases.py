"""Cases of the GPU check that pass, fail, are skipped or hang, to test its runner.

`python -m testing.fakes.gpu_check_cases SCRATCH RESULTS` runs a case that passes and a case that hangs.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check.case import GpuCheckCase
from benchmarks.gpu_check.catalog import PARTS
from benchmarks.gpu_check.context import CheckContext, CheckSkipped, require
from benchmarks.gpu_check.runner import RunSettings

MODULE = "testing.fakes.gpu_check_cases"


def succeed(context: CheckContext, word: str) -> None:
    context.record(first=1, word=word)
    context.record(first=2)


def fail(context: CheckContext) -> None:
    context.record(measured=3)
    require(False, "3 GiB, forecast at most 2 GiB")


def skip(context: CheckContext) -> None:
    raise CheckSkipped("there are no losses to compare with")


def crash(context: CheckContext) -> None:
    context.record(before_crash=True)
    os.abort()


def hang(context: CheckContext) -> None:
    """Record the pids of this process and of a child in a session of its own, and never return."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    context.record(pids=[os.getpid(), child.pid])
    Path(os.environ["PIDS_FILE"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def main(scratch: Path, results: Path) -> int:
    signal.signal(signal.SIGTERM, gpu_check.exit_on_signal)
    PARTS[1] = (
        GpuCheckCase("succeed", "a property", f"{MODULE}:succeed", 60, ("text",)),
        GpuCheckCase("hang", "a property", f"{MODULE}:hang", 60),
    )
    machine = {"cuda": False, "modules": {}}
    return gpu_check.run_part(RunSettings(scratch, results, 1, True, machine, os.environ, 600), only="")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
