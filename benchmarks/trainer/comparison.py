"""Contenders as processes that train in turn, so that whatever else the machine does hits all of them alike."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.trainer.task import Answer, Content, Task

REPOSITORY = Path(__file__).parents[2]
PATHS = os.pathsep.join(str(REPOSITORY / part) for part in ("operator", "trainer", "."))
OURS = "ours"


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    title: str
    task: Task
    content: Content


@dataclass
class Outcome:
    """The answers of one contender to one case, round by round, or why there are none."""

    answers: list[Answer] = field(default_factory=list)
    error: str = ""

    @property
    def seconds(self) -> float:
        return median(answer.seconds for answer in self.answers)


Outcomes = dict[str, Outcome]  # by contender


class Contender:
    """A process of its own, in its own environment, started at its first task."""

    def __init__(self, name: str, python: Path | None, *, threads: int, why_not: str = "") -> None:
        self.name = name
        self._python = python
        self._why_not = why_not
        self._threads = str(threads)
        self._process: subprocess.Popen[str] | None = None

    def ask(self, task: Task) -> Answer:
        if self._python is None:
            return Answer(error=self._why_not)
        process = self._process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        print(json.dumps(asdict(task)), file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            self.close()
            return Answer(error=f"its process ended with {process.wait()}")
        return Answer(**json.loads(line))

    def close(self) -> None:
        if self._process:
            assert self._process.stdin
            self._process.stdin.close()
            self._process.wait(timeout=60)
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        log = tempfile.NamedTemporaryFile(prefix=f"bench-{self.name}-", suffix=".log", delete=False)  # noqa: SIM115
        print(f"{self.name}'s log: {log.name}", file=sys.stderr)
        command = [self._python or sys.executable, "-m", "benchmarks.trainer.worker", self.name]
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        environment = {**os.environ, **quiet, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": self._threads}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True)


def hold(case: Case, contenders: Mapping[str, Contender], *, rounds: int, fresh: bool) -> Outcomes:
    """Every contender once per round, in turn; one that fails is out. `fresh`: nothing of it is left in between."""
    outcomes = {name: Outcome() for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            outcome = outcomes[name]
            if outcome.error:
                continue
            answer = contender.ask(case.task)
            if fresh:
                contender.close()
            if answer.error:
                outcome.error = answer.error
            else:
                outcome.answers.append(answer)
    return outcomes
