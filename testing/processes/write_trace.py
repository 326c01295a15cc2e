"""Record which paths a job writes, by an audit hook in each of its Python processes."""

import os
import re
from pathlib import Path

from testing.processes.supervisors import REPOSITORY

_HOOK = """
import os, sys

trace = os.open({trace!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def record(event, args):
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        path, descriptor = args[0], -1
    elif event == "os.mkdir":
        path, descriptor = args[0], args[2]
    elif event in ("os.rename", "os.link"):
        path, descriptor = args[1], args[3]
    elif event == "os.symlink":
        path, descriptor = args[1], args[2]
    else:
        return
    if isinstance(path, int):
        return
    if descriptor >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{{descriptor}}"), os.fspath(path))
    os.write(trace, os.fsencode(path) + b"\\n")

sys.addaudithook(record)
"""


def build_traced_environment(folder: Path) -> dict[str, str]:
    """Return variables with which each new interpreter of a job records the paths that it writes in the folder."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_HOOK.format(trace=str(folder / "trace")))
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, REPOSITORY / "operator", REPOSITORY / "trainer")))}


def read_written_paths(folder: Path, root: Path) -> set[str]:
    """Return the recorded paths below `cache` and `output` (here `job`) in the root, relative to it.

    Files that were opened in a folder that was opened before are only recorded with their name.
    """
    paths = {Path(line) for line in (folder / "trace").read_text().splitlines()}
    below = {str(path.relative_to(root)) for path in paths if path.is_relative_to(root)}
    renamed = {re.sub("^output(?=/|$)", "job", path) for path in below}
    names = {str(path) for path in paths if not path.is_absolute()}
    return {path for path in renamed if path.startswith(("cache", "job"))} | names
