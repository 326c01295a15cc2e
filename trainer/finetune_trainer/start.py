"""What torchrun starts for every rank: `python -m finetune_trainer.start`."""

import json
import os
import sys
from pathlib import Path

from finetune_trainer.supervisor import contract


def hide_what_is_not_needed(spec_file: Path) -> None:
    """peft loads bitsandbytes wherever it is installed, which takes seconds, also of jobs without 4-bit weights."""
    try:
        spec = json.loads(spec_file.read_bytes())
    except (OSError, ValueError):  # which the trainer tells better
        return
    if not (isinstance(spec, dict) and (spec.get("lora") or {}).get("quantization")):
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # as Python says that there is no such module


def main() -> None:
    hide_what_is_not_needed(Path(os.environ.get(contract.CONFIG, "")))
    from finetune_trainer.train import main as train

    train()


if __name__ == "__main__":
    main()
