"""Read the limits of this process's cgroup: the memory and the CPUs of its container.

Only cgroup v2 is read; on a host with cgroup v1 no limit is found.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP_FILE = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Cgroup:
    """The cgroup of this process; each limit of an ancestor applies as well."""

    root: Path = CGROUP_ROOT
    membership_file: Path = MEMBERSHIP_FILE

    def read_memory_limit(self) -> int | None:
        """Return the lowest memory limit in bytes, or None without a limit."""
        return min((int(limit) for limit in self._read_all("memory.max") if limit.isdigit()), default=None)

    def read_cpu_quota(self) -> float | None:
        """Return the lowest quota in CPUs, or None without a quota; quota and period are in microseconds."""
        pairs = (content.split() for content in self._read_all("cpu.max"))
        quotas = (int(pair[0]) / int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0].isdigit())
        return min(quotas, default=None)

    def _read_all(self, name: str) -> Iterator[str]:
        """Yield the content of the file of this cgroup and of each ancestor that has it; `max` means unlimited."""
        own_folder = self.root / self._read_path().lstrip("/")
        for folder in (own_folder, *own_folder.parents):
            if folder.is_relative_to(self.root) and (folder / name).is_file():
                yield (folder / name).read_text(encoding="utf-8").strip()

    def _read_path(self) -> str:
        """Return the cgroup v2 path from the line that starts with `0::`; inside a container the path is the root."""
        try:
            lines = self.membership_file.read_text(encoding="utf-8").splitlines()
        except OSError:  # not Linux
            return ""
        return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
