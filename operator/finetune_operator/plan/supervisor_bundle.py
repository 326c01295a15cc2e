"""The supervisor as one file that any python3 runs, for images that know nothing of us: sources, not an import."""

import base64
import io
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "finetune_supervisor"
_MADE = (1980, 1, 1, 0, 0, 0)  # so that the same sources make the same file
_MAIN = """import sys
if sys.version_info < (3, 9):
    sys.exit("supervisor: spec.image has python3 %d.%d; command mode needs 3.9 or newer" % sys.version_info[:2])
from finetune_supervisor.__main__ import main
sys.exit(main())
"""


class SupervisorMissing(Exception):
    """This installation of the operator lacks the sources of the supervisor."""


def pack_supervisor() -> str:
    """A zip in base64, as a ConfigMap takes it; deflated, which whatever Python torch was installed in can read.

    Raises SupervisorMissing.
    """
    found = find_spec(PACKAGE)
    folder = Path(found.origin).parent if found is not None and found.origin else None
    modules = sorted(folder.rglob("*.py")) if folder else []
    if folder is None or not modules:
        raise SupervisorMissing(f"{PACKAGE} is not installed beside finetune_operator")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        _add(archive, "__main__.py", _MAIN)
        for module in modules:
            _add(archive, str(module.relative_to(folder.parent)), module.read_text(encoding="utf-8"))
    return base64.b64encode(packed.getvalue()).decode()


def _add(archive: zipfile.ZipFile, name: str, source: str) -> None:
    archive.writestr(zipfile.ZipInfo(name, _MADE), source, zipfile.ZIP_DEFLATED)
