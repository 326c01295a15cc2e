"""A node without training: does as the environment variable PLAY says and leaves the last words of a real supervisor.

`3:crash` is for node 3, `0.3:crash` for node 3 of attempt 0, `*:crash` for all; the first of several, separated by
commas, that fits is played. Otherwise the node succeeds.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def say(outcome: str, **fields: object) -> None:
    node = {"nodeRank": int(os.environ["NODE_RANK"]), "attempt": int(os.environ["FINETUNE_ATTEMPT"])}
    message = {"outcome": outcome, **node, "final": outcome != "running", **fields}
    Path(os.environ["FINETUNE_TERMINATION_LOG"]).write_text(json.dumps(message))


def play(act: str) -> int:
    match act:
        case "succeed":
            say("succeeded", time=time.time())
            return 0
        case "rows":
            say("failed", errorType="DatasetError", message="train.jsonl: line 3: no messages", time=time.time())
            return 2
        case "crash":
            print("out of luck", flush=True)
            return 7
        case "wait":
            say("running")
            signal.pause()
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("running")
            time.sleep(600)
    raise AssertionError(act)


def stop(*_: object) -> None:
    say("stopped", message="stopped as asked", time=time.time())
    sys.exit(143)


def main() -> int:
    signal.signal(signal.SIGTERM, stop)
    node, attempt = os.environ["NODE_RANK"], os.environ["FINETUNE_ATTEMPT"]
    for part in os.environ["PLAY"].split(","):
        who, _, act = part.partition(":")
        if who in ("*", node, f"{attempt}.{node}"):
            return play(act)
    return play("succeed")


if __name__ == "__main__":
    sys.exit(main())
