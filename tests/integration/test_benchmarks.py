"""End-to-end tests of `make bench-gpu` and `make gpu-check` with a small model on a CPU."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.trainer import gpu

pytestmark = pytest.mark.slow


@pytest.mark.long("covers a benchmark only")
def test_gpu_benchmark_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--small", "--rounds", "1", "--only", "packed to 4096"]) == 0

    output = capsys.readouterr().out
    assert re.search(r"LoRA SFT 7B, packed to 4096: 8 rows, \d+ tokens an epoch", output)
    assert re.search(r"ours +\d+ tokens/s .* forecast \d\.\d GiB", output)
    assert re.search(r"TRL +\d+ tokens/s .* ours/TRL: \d+\.\d\d", output)


def test_gpu_check_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--small", "--only", "preset ddp", "--results", str(tmp_path)]) == 0

    assert re.search(r"1 passed, 0 failed, 0 skipped", capsys.readouterr().out)
    machine, case = (json.loads(line) for line in (tmp_path / "part-1.jsonl").read_text().splitlines())
    assert machine["machine"]["packages"]["torch"]
    assert (case["case"], case["outcome"], len(case["facts"]["losses"])) == ("preset ddp", "passed", 5)
