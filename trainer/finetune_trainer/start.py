"""What torchrun starts for every rank: `python -m finetune_trainer.start`."""

import gc
import os
from pathlib import Path

from finetune_trainer.imports import hide_what_is_not_needed
from finetune_trainer.supervisor import contract


def main() -> None:
    hide_what_is_not_needed(Path(os.environ.get(contract.CONFIG, "")))
    from finetune_trainer.train import main as train

    gc.freeze()  # a million objects of modules, which every full collection would look at for half a second
    train()


if __name__ == "__main__":
    main()
