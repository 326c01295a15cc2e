"""Packs the sources of the supervisor into a zip file that the python3 of any image can run (decisions/302)."""

import base64
import io
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "finetune_supervisor"
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # constant timestamp, so that equal sources result in equal files
_MAIN = """import sys
if sys.version_info < (3, 9):
    sys.exit("supervisor: spec.image has python3 %d.%d; command mode needs 3.9 or newer" % sys.version_info[:2])
from finetune_supervisor.__main__ import main
sys.exit(main())
"""


class SupervisorMissing(Exception):
    """Raised if the sources of the supervisor are not installed together with the operator."""


def pack_supervisor() -> str:
    """Return the base64-encoded zip file for the binaryData of a ConfigMap; every Python build supports deflate.

    Raises: SupervisorMissing.
    """
    spec = find_spec(PACKAGE)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    modules = sorted(folder.rglob("*.py")) if folder else []
    if folder is None or not modules:
        raise SupervisorMissing(f"{PACKAGE} is not installed beside finetune_operator")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        _add_file(archive, "__main__.py", _MAIN)
        for module in modules:
            _add_file(archive, str(module.relative_to(folder.parent)), module.read_text(encoding="utf-8"))
    return base64.b64encode(buffer.getvalue()).decode()


def _add_file(archive: zipfile.ZipFile, name: str, source: str) -> None:
    archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), source, zipfile.ZIP_DEFLATED)
