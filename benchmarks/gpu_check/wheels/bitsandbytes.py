"""Reduces the wheel of bitsandbytes to the library of one CUDA version; the whole wheel has over 100 MB."""

import base64
import csv
import hashlib
import io
import re
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

_CUDA_LIBRARY = re.compile(r"bitsandbytes/libbitsandbytes_(cuda(?P<version>\d+)[^/]*|rocm[^/]*|xpu[^/]*)\.so")
_RECORD = ".dist-info/RECORD"


def reduce_wheel(wheel: Path, *, cuda: str) -> None:
    """Remove the libraries of all other CUDA versions and accelerators. cuda: without point, such as 130.

    Raises: ValueError if the wheel has no library of this version
    """
    with ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    libraries = {name: match["version"] for name in contents if (match := _CUDA_LIBRARY.fullmatch(name))}
    if cuda not in libraries.values():
        versions = ", ".join(sorted(filter(None, libraries.values())))
        raise ValueError(f"{wheel.name} has no library for CUDA {cuda}, only for {versions}")
    kept = {name: content for name, content in contents.items() if libraries.get(name, cuda) == cuda}
    (record,) = (name for name in kept if name.endswith(_RECORD))
    kept[record] = _render_record(kept, record)
    with ZipFile(wheel, "w", ZIP_DEFLATED) as archive:
        for name, content in kept.items():
            archive.writestr(name, content)


def _render_record(contents: dict[str, bytes], record: str) -> bytes:
    """Return the list of all files with their hashes, as the wheel format requires."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    for name, content in contents.items():
        if name == record:
            writer.writerow((name, "", ""))
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={digest}", len(content)))
    return output.getvalue().encode()
