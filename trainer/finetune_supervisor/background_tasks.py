"""Runs what only shows progress in threads that nobody waits for (decisions/710)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_MAX_PENDING = 1000


class BackgroundTasks:
    """Runs tasks one after another in a thread, so that a slow or lost volume neither ends nor delays a training.

    `problem` describes the first task that failed or was left out. Later tasks run nevertheless, because a full volume
    or a server may recover.
    """

    def __init__(self, name: str) -> None:
        self.problem = ""
        self._tasks: queue.Queue[Callable[[], object] | None] = queue.Queue(_MAX_PENDING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, task: Callable[[], object] | None) -> None:
        """Run a task after those before, or leave it out if too many are pending; None ends the thread."""
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self.problem = self.problem or "it is slower than the training, so that parts are left out"

    def finish(self, seconds: float) -> None:
        """Wait until all tasks have run, but not longer than this time."""
        self.add(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.problem = self.problem or f"it did not end within {seconds:.0f} seconds"

    def _run(self) -> None:
        while task := self._tasks.get():
            try:
                task()
            except BaseException as error:  # trackers raise errors of any class, also SystemExit
                self.problem = self.problem or (str(error).strip() or type(error).__name__).split("\n", 1)[0]
