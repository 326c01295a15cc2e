"""Builds the ConfigMap of an attempt, and the command with which a pod verifies its content (decisions/310)."""

import base64
import hashlib
from functools import cache

from finetune_operator import names
from finetune_operator.plan.object_metadata import Manifest, build_metadata
from finetune_operator.plan.run_plan import RunPlan

# Reads the file once, and runs a copy of these bytes, so that nobody can exchange the file after the check.
# The python3 of a user's image may be old: the program must run with 3.4, so that the bundle can report its version.
# Kubernetes replaces $(NAME) in commands, so the program must not contain it.
# The kernel drops signals for which PID 1 has no handler, but not blocked ones: SIGTERM waits for the supervisor.
_VERIFY_AND_RUN = f"""\
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
import hashlib, os, sys
path, expected, config_map = sys.argv[1:]
try:
    with open(path, "rb") as file:
        content = file.read()
    found = hashlib.sha256(content).hexdigest()
except OSError as error:
    found = str(error)
if found != expected:
    import json, time
    text = "ConfigMap %s, key %s: expected SHA-256 %s, found %s"
    text %= (config_map, os.path.basename(path), expected, found)
    message = {{"final": True, "outcome": "failed", "errorType": "{names.CONFIG_MAP_REPLACED}", "time": time.time()}}
    with open(os.environ["{names.ENV_TERMINATION_LOG}"], "w") as file:
        json.dump(dict(message, message=text), file)
    sys.exit("supervisor: " + text)
copy = os.path.join(os.environ["{names.ENV_RUN_DIR}"], os.path.basename(path))
with open(copy, "wb") as file:
    file.write(content)
os.execv(sys.executable, [sys.executable, copy])
"""


def build_config_map(run_plan: RunPlan) -> Manifest:
    """Return the ConfigMap with the user's spec and the recorded defaults, or with the supervisor for a command."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": build_metadata(run_plan, run_plan.config_map_name, with_attempt_label=True),
        "immutable": True,
        "data": dict(run_plan.config_files),
        **({"binaryData": {names.SUPERVISOR_KEY: run_plan.supervisor}} if run_plan.spec.command else {}),
    }


def build_supervisor_start(run_plan: RunPlan) -> list[str]:
    """Return the container command that runs the supervisor of the ConfigMap if its content has the right digest.

    The options exclude the modules of the user's image and its working directory from the check.
    """
    path = f"{names.CONFIG_DIR}/{names.SUPERVISOR_KEY}"
    digest = _compute_base64_digest(run_plan.supervisor)
    return ["python3", "-I", "-S", "-c", _VERIFY_AND_RUN, path, digest, run_plan.config_map_name]


def compute_config_hash(run_plan: RunPlan) -> str:
    """Return a hash of the content of the ConfigMap, which the record of the attempt contains."""
    digests = dict(run_plan.config_digests)
    if run_plan.spec.command:
        digests[names.SUPERVISOR_KEY] = _compute_base64_digest(run_plan.supervisor)
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


@cache
def _compute_base64_digest(content: str) -> str:
    return hashlib.sha256(base64.b64decode(content)).hexdigest()
