"""End-to-end test of `make bench-gpu` with a small model on a CPU."""

import re

import pytest

from benchmarks.trainer import gpu

pytestmark = pytest.mark.slow


def test_gpu_benchmark_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--small", "--rounds", "1", "--only", "packed"]) == 0

    output = capsys.readouterr().out
    assert re.search(r"LoRA SFT 7B, packed to 4096: 8 rows, \d+ tokens an epoch", output)
    assert re.search(r"ours +\d+ tokens/s .* forecast \d\.\d GiB", output)
    assert re.search(r"TRL +\d+ tokens/s .* ours/TRL: \d+\.\d\d", output)
