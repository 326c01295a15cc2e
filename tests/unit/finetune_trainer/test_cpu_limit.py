"""Tests of the limit of CPU time, which also ends native code."""

import signal
import subprocess
import sys
import time

import pytest

from finetune_trainer.cpu_limit import limit_cpu_seconds
from finetune_trainer.errors import DatasetError


def compute(seconds: float) -> None:
    started_at = time.process_time()
    while time.process_time() - started_at < seconds:
        pass


def test_a_loop_raises_the_error() -> None:
    with pytest.raises(DatasetError, match="too slow"), limit_cpu_seconds(0.1, DatasetError("too slow")):
        compute(seconds=10.0)


def test_waiting_does_not_count_and_the_limit_ends_with_the_block() -> None:
    with limit_cpu_seconds(0.1, DatasetError("too slow")):
        time.sleep(0.3)
    compute(seconds=0.3)

    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL


def test_native_code_that_does_not_return_ends_the_process() -> None:
    program = (
        "from finetune_trainer.cpu_limit import limit_cpu_seconds\n"
        "with limit_cpu_seconds(0.2, ValueError()):\n"
        "    sum(range(10**13))\n"
    )

    process = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)

    assert process.returncode == -signal.SIGVTALRM
