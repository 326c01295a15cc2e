"""The supervisor as one file that any python3 runs: `python -m finetune_trainer.supervisor.bundle FILE` writes it."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
MAIN = """import sys
if sys.version_info < (3, 9):
    sys.exit("supervisor: spec.image has python3 %d.%d; command mode needs 3.9 or newer" % sys.version_info[:2])
from finetune_trainer.supervisor.__main__ import main
sys.exit(main())
"""


def write_bundle(path: Path) -> None:
    """Stored, not compressed: a foreign Python may lack zlib. Readable by whoever runs the user's image."""
    modules = sorted((PACKAGE / "supervisor").glob("*.py"))
    beside = path.with_name(path.name + ".tmp")
    with zipfile.ZipFile(beside, "w", zipfile.ZIP_STORED) as archive:
        for module in (PACKAGE / "__init__.py", *modules):
            archive.write(module, module.relative_to(PACKAGE.parent))
        archive.writestr("__main__.py", MAIN)
    beside.chmod(0o644)
    os.replace(beside, path)


if __name__ == "__main__":
    write_bundle(Path(sys.argv[1]))
