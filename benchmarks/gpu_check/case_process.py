"""Process of one case: `python -m benchmarks.gpu_check.case_process CASE CONTEXT.json`.

The exit code is 0 if the case passed, 3 if it cannot run here, and 1 if it failed; the last fact is the reason.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from benchmarks.gpu_check.case import EXIT_FAILED, EXIT_PASSED, EXIT_SKIPPED, GpuCheckCase
from benchmarks.gpu_check.context import CheckContext, CheckSkipped
from finetune_supervisor.launch.child_process import die_with_parent


def main(case_file: Path) -> int:
    die_with_parent()
    description = json.loads(case_file.read_text())
    case = GpuCheckCase(**description["case"])
    folders = {name: Path(path) for name, path in description["folders"].items()}
    context = CheckContext(**folders, small=description["small"], on_gpu=description["on_gpu"])
    module, _, function = case.function.partition(":")
    try:
        check = getattr(importlib.import_module(module), function)
        check(context, *case.arguments)
    except CheckSkipped as reason:
        context.record(reason=str(reason))
        return EXIT_SKIPPED
    except BaseException as error:  # every error, such as SystemExit of a library, is the result of this case
        traceback.print_exc()
        lines = [line for line in str(error).splitlines() if line.strip()]
        context.record(reason=f"{type(error).__name__}: {lines[0] if lines else 'no message'}")
        return EXIT_FAILED
    return EXIT_PASSED


if __name__ == "__main__":
    exit_code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # threads of collectives may block the shutdown of the interpreter
