"""Fake supervisor that writes a real termination message without training.

The environment variable FAKE_BEHAVIOURS is a comma-separated list of behaviours such as `3:crash` (node 3), `0.3:crash`
(node 3 of attempt 0) or `*:crash` (all nodes). The first matching entry applies; by default the node succeeds.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def write_termination(outcome: str, **fields: object) -> None:
    node = {"nodeRank": int(os.environ["NODE_RANK"]), "attempt": int(os.environ["FINETUNE_ATTEMPT"])}
    message = {"outcome": outcome, **node, "final": outcome != "running", **fields}
    Path(os.environ["FINETUNE_TERMINATION_LOG"]).write_text(json.dumps(message))


def perform(behaviour: str) -> int:
    match behaviour:
        case "succeed":
            write_termination("succeeded", time=time.time())
            return 0
        case "rows":
            write_termination(
                "failed", errorType="DatasetError", message="train.jsonl: line 3: no messages", time=time.time()
            )
            return 2
        case "crash":
            print("out of luck", flush=True)
            return 7
        case "wait":
            write_termination("running")
            signal.pause()
        case "ignore-sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            write_termination("running")
            time.sleep(600)
    raise AssertionError(behaviour)


def stop(*_: object) -> None:
    write_termination("stopped", message="stopped on request", time=time.time())
    sys.exit(143)


def main() -> int:
    signal.signal(signal.SIGTERM, stop)
    node, attempt = os.environ["NODE_RANK"], os.environ["FINETUNE_ATTEMPT"]
    for entry in os.environ["FAKE_BEHAVIOURS"].split(","):
        target, _, behaviour = entry.partition(":")
        if target in ("*", node, f"{attempt}.{node}"):
            return perform(behaviour)
    return perform("succeed")


if __name__ == "__main__":
    sys.exit(main())
