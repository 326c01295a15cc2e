"""Paths below the mount point of the output that a job writes, which others could replace by links.

A test with a trace of all processes of a job compares them with the paths that it writes.
"""

import re
from collections.abc import Iterable
from pathlib import PurePath

# relative to the mount point; each is tried with planted links
TRIED = (
    "cache",
    "cache/hub",
    "cache/hub/KEY.json",
    "cache/hub/.tmp-KEY.json",
    "cache/huggingface",
    "cache/huggingface/hub",
    "cache/tokens",
    "cache/tokens/.KEY-uid-1-0.json",
    "cache/tokens/.tmp-.KEY-uid-1-0.json",
    "job",
    "job/job.json",
    "job/.tmp-job.json",
    "job/checkpoints",
    "job/checkpoints/.tmp-attempt-0-SUCCESS",
    "job/logs",
    "job/logs/attempt-0",
    "job/logs/attempt-0/attempt.json",
    "job/logs/attempt-0/.tmp-attempt.json",
    "job/logs/attempt-0/node-0.json",
    "job/logs/attempt-0/node-0.log",
    "job/logs/tensorboard",
    "job/result",
    "job/result/SUCCESS",
)
# Others cannot know these names, or a rename replaces a link with the name.
_SAFE = (
    r"cache/tokens/\.KEY-[0-9a-f]{16}(/.*)?",
    r"cache/tokens/KEY",
    r"job/checkpoints/step-\d+",
    r"job/logs/tensorboard/events\.out\.tfevents\..*\.[0-9a-f]{16}",
)
# the list of what remains in docs/operations/security.md
_REMAINING = (r"cache/huggingface/hub/.+", r"job/checkpoints/\.tmp-attempt-\d+-.+")
# names that were opened in a folder that was opened before: in new folders, or outside of the mount point
_SAFE_NAMES = (".", ".tmp-manifest.json", ".tmp-meta.json", "termination-log")


def find_untried(paths: Iterable[str]) -> set[str]:
    """Return the paths, relative to the mount point, that are neither tried with planted links nor listed."""
    tried_names = {PurePath(path).name for path in TRIED}
    untried = set()
    for path in map(_generalize, paths):
        is_tried = path in (TRIED if "/" in path or path in TRIED else (*tried_names, *_SAFE_NAMES))
        if not is_tried and not any(re.fullmatch(pattern, path) for pattern in (*_SAFE, *_REMAINING)):
            untried.add(path)
    return untried


def _generalize(path: str) -> str:
    """Replace keys of caches and numbers of attempts and nodes by those in TRIED."""
    path = re.sub(r"[0-9a-f]{32}|(?<=/hub/)[0-9a-f]{16}|(?<=^\.tmp-)[0-9a-f]{16}", "KEY", path)
    return re.sub(r"(attempt-|uid-1-|\bnode-)\d+", r"\g<1>0", path)
