"""Runs contenders as processes that train alternately, so that other load on the host affects all of them equally."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks.trainer.task import EpochContent, Measurement, Task

REPOSITORY = Path(__file__).parents[2]
# Inherited paths may contain packages that a machine without package index lacks.
PYTHON_PATH = os.pathsep.join(
    [
        *(str(REPOSITORY / folder) for folder in ("operator", "trainer", "")),
        *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(path).is_absolute()),
    ]
)
OURS = "ours"


@dataclass(frozen=True)
class BenchmarkCase:
    """Training task for all contenders, with the content of one epoch."""

    title: str
    task: Task
    content: EpochContent


@dataclass
class ContenderResult:
    """Measurements of one contender for one case, with one measurement per round, or an error."""

    measurements: list[Measurement] = field(default_factory=list)
    error: str = ""
    tensor_bytes: int = 0  # peak memory of tensors on a CPU, which is measured in a run of its own

    @property
    def seconds(self) -> float:
        return median(measurement.seconds for measurement in self.measurements)


ResultsByContender = dict[str, ContenderResult]  # results by contender name


class Contender:
    """Trains in a separate process with its own Python environment; the first task starts the process."""

    def __init__(
        self,
        name: str,
        python: Path | None,
        *,
        threads: int,
        unavailable_reason: str = "",
        log_folder: Path | None = None,
    ) -> None:
        self.name = name
        self._python = python
        self._unavailable_reason = unavailable_reason
        self._threads = str(threads)
        self._log_folder = log_folder
        self._process: subprocess.Popen[str] | None = None

    def run_task(self, task: Task) -> Measurement:
        if self._python is None:
            return Measurement(error=self._unavailable_reason)
        process = self._process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        print(json.dumps(asdict(task)), file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            self.close()
            return Measurement(error=f"its process exited with code {process.wait()}")
        return Measurement(**json.loads(line))

    def close(self) -> None:
        if self._process:
            assert self._process.stdin
            self._process.stdin.close()
            self._process.wait(timeout=60)
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        log = tempfile.NamedTemporaryFile(  # noqa: SIM115
            prefix=f"bench-{self.name}-", suffix=".log", dir=self._log_folder, delete=False
        )
        print(f"{self.name}'s log: {log.name}", file=sys.stderr)
        command = [self._python or sys.executable, "-m", "benchmarks.trainer.contenders.worker", self.name]
        quiet_environment = {
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        environment = {**os.environ, **quiet_environment, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": self._threads}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True)


def run_rounds(
    case: BenchmarkCase, contenders: Mapping[str, Contender], *, rounds: int, restart_processes: bool
) -> ResultsByContender:
    """Run the case once per round with each contender; skip contenders that have failed.

    restart_processes: end the process of a contender after each run, to free its memory.
    """
    results = {name: ContenderResult() for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            result = results[name]
            if result.error:
                continue
            measurement = contender.run_task(case.task)
            if restart_processes:
                contender.close()
            if measurement.error:
                result.error = measurement.error
            else:
                result.measurements.append(measurement)
    return results


def count_tensors(case: BenchmarkCase, contenders: Mapping[str, Contender], results: ResultsByContender) -> None:
    """Run the case on a CPU once more with each contender, and record the peak memory of its tensors."""
    for name, contender in contenders.items():
        if not results[name].error:
            measurement = contender.run_task(replace(case.task, counts_tensors=True))
            results[name].error, results[name].tensor_bytes = measurement.error, measurement.peak_bytes
