"""Tests of archives that a hostile pod sends: they change nothing outside of the copy, and use bounded memory."""

import io
import os
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from finetune_client.errors import ClientError
from finetune_client.tar_archive import CopyLimits, extract_archive

Member = tuple[str, bytes, dict[str, Any]]
GIB = 2**30
DEFAULT_LIMITS = CopyLimits()


def file(name: str, content: bytes = b"x", **fields: Any) -> Member:
    return (name, content, {"type": tarfile.REGTYPE, **fields})


def folder(name: str) -> Member:
    return (name, b"", {"type": tarfile.DIRTYPE})


def link(name: str, target: str, *, hard: bool = False) -> Member:
    return (name, b"", {"type": tarfile.LNKTYPE if hard else tarfile.SYMTYPE, "linkname": target})


def special(name: str, kind: bytes) -> Member:
    return (name, b"", {"type": kind})


def pack(*members: Member, is_pax: bool = False) -> bytes:
    """Return an archive; `size` in the fields of a member replaces the size of its content."""
    archive = b""
    for name, content, fields in members:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        for field, value in fields.items():
            setattr(info, field, value)
        archive += info.tobuf(tarfile.PAX_FORMAT if is_pax else tarfile.GNU_FORMAT)
        archive += content + b"\0" * (-len(content) % 512)
    return archive + b"\0" * 10240


def extract(archive: bytes, target: Path, limits: CopyLimits = DEFAULT_LIMITS) -> None:
    target.mkdir(exist_ok=True)
    extract_archive(io.BytesIO(archive), target, name="result", limits=limits)


def test_files_modes_and_links_of_a_result_are_copied(tmp_path: Path) -> None:
    archive = pack(
        folder("result"),
        folder("result/blobs"),
        link("result/model.bin", "blobs/abc"),
        file("result/blobs/abc", b"weights" * 1000),
        folder("result/snapshots"),
        link("result/snapshots/model.bin", "../blobs/abc"),
        link("result/copy.bin", "result/blobs/abc", hard=True),
        link("result/latest", "snapshots"),
        file("result/run.sh", b"#!", mode=0o6755),
        file("result/" + "n" * 200, b"long name"),
    )

    extract(archive, tmp_path / "copy")

    result = tmp_path / "copy" / "result"
    for name in ("model.bin", "snapshots/model.bin", "copy.bin", "latest/model.bin"):
        assert (result / name).read_bytes() == b"weights" * 1000
    assert (result / "run.sh").stat().st_mode & 0o7777 == 0o755
    assert (result / ("n" * 200)).read_bytes() == b"long name"


REFUSED: dict[str, tuple[bytes, str]] = {
    "link beside the copy": (pack(folder("result"), link("result/README.md", "../.ssh/id_rsa")), "outside of result"),
    "link far away": (pack(folder("result"), link("result/a", "../../../etc/passwd")), "outside of result"),
    "absolute link": (pack(folder("result"), link("result/a", "/etc/passwd")), "outside of result"),
    "link with dots after a folder": (
        pack(folder("result"), folder("result/p"), link("result/p/r", ".."), link("result/l", "p/r/../../.ssh")),
        "outside of result",
    ),
    "link with a hidden ascent": (pack(folder("result/a"), link("result/a/l", "./.././../x")), "outside of result"),
    "link through a link": (
        pack(folder("result/a/b"), link("result/a/b/up", "../.."), link("result/a/b/up/l", "../../x")),
        "is inside of a link",
    ),
    "file through a link": (pack(folder("result/a"), link("result/l", "a"), file("result/l/x")), "result/l"),
    "file in place of a link": (pack(folder("result"), link("result/l", "x"), file("result/l")), "exists"),
    "link as the result": (pack(link("result", "../.ssh")), "result is a link to ../.ssh"),
    "hard link as the result": (pack(link("result", "x", hard=True)), "result is a link to x"),
    "hard link outside": (pack(folder("result"), link("result/a", "/etc/passwd", hard=True)), ""),
    "hard link beside": (pack(folder("result"), link("result/a", "../secret", hard=True)), ""),
    "hard link to nothing": (pack(folder("result"), link("result/a", "result/b", hard=True)), "no file of the copy"),
    "another member": (pack(folder("result"), file("other")), "but result was requested"),
    "member with dots": (pack(file("result/../../x")), "but result was requested"),
    "absolute member": (pack(file("/result/x")), "but result was requested"),
    "name that begins alike": (pack(file("result-2/x")), "but result was requested"),
    "fifo": (pack(special("result/f", tarfile.FIFOTYPE)), "is a sparse, special or damaged file"),
    "device": (pack(special("result/f", tarfile.CHRTYPE)), "is a sparse, special or damaged file"),
    "unknown type": (pack(special("result/f", b"Z")), "is a sparse, special or damaged file"),
    "sparse file of GNU tar": (
        pack(special("result/f", tarfile.GNUTYPE_SPARSE)),
        "is a sparse, special or damaged file",
    ),
    "sparse file in a pax header": (
        pack(
            file(
                "result/f",
                pax_headers={"GNU.sparse.major": "0", "GNU.sparse.map": "0,1", "GNU.sparse.size": str(2**40)},
            ),
            is_pax=True,
        ),
        "is a sparse, special or damaged file",
    ),
    "negative size": (pack(file("result/f", b"", size=-5)), "damaged"),
    "no archive": (b"x" * 2000, ""),
    "time after the end of time": (
        pack(file("result/f", pax_headers={"mtime": "1e300"}), is_pax=True),
        "",
    ),
    "null in a name": (pack(file("result/f", pax_headers={"path": "result/a\0b"}), is_pax=True), ""),
    "null in a link": (
        pack(
            (link("result/l", "x")[0], b"", {"type": tarfile.SYMTYPE, "pax_headers": {"linkpath": "a\0b"}}),
            is_pax=True,
        ),
        "",
    ),
    "more bytes than free": (pack(file("result/f", b"", size=2**39)), "are free on this machine"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_hostile_archive_is_refused(case: str, tmp_path: Path) -> None:
    archive, problem = REFUSED[case]
    (tmp_path / "secret").write_text("mine")
    before = {path: os.lstat(path).st_ino for path in tmp_path.iterdir()}

    with pytest.raises((ClientError, tarfile.TarError, OSError)) as raised:
        extract(archive, tmp_path / "copy")

    assert problem in str(raised.value)
    assert {path: os.lstat(path).st_ino for path in tmp_path.iterdir() if path.name != "copy"} == before


def build_header(name: str, size: int, kind: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "kind",
    [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, b"Z"],
    ids=["long name", "long link", "pax", "global pax", "unknown type with data"],
)
def test_a_huge_header_is_refused_before_it_is_in_memory(kind: bytes, tmp_path: Path) -> None:
    start = pack(folder("result"))[:512] + build_header(
        "result/x" if kind == b"Z" else "././@LongLink", 400 * 2**20, kind
    )
    archive = start + b"1 " * (40 * 2**20)
    tracemalloc.start()
    with pytest.raises(ClientError):
        extract(archive, tmp_path / "copy")
    peak = tracemalloc.get_traced_memory()[1] - len(archive)
    tracemalloc.stop()

    assert peak < 8 * 2**20


def test_a_huge_sparse_map_is_refused(tmp_path: Path) -> None:
    headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "result/f",
        "GNU.sparse.realsize": "1",
    }
    archive = pack(file("result/f", b"9999999\n" + b"1\n" * 10**6, pax_headers=headers), is_pax=True)

    with pytest.raises(ClientError, match="header of more than"):
        extract(archive, tmp_path / "copy")


def test_limits_of_bytes_and_entries_count_the_content_of_the_result(tmp_path: Path) -> None:
    archive = pack(folder("result"), file("result/a", b"x" * 600), file("result/b", b"x" * 400))

    extract(archive, tmp_path / "fits", CopyLimits(max_bytes=1000, max_entries=2))

    for limits in (CopyLimits(max_bytes=999), CopyLimits(max_entries=1)):
        with pytest.raises(ClientError, match=r"the copy has more than \d+ entries or \d+ bytes$"):
            extract(archive, tmp_path / "copy", limits)


def test_the_default_limits_allow_a_result_of_one_tebibyte_and_a_hundred_thousand_entries() -> None:
    assert CopyLimits() == CopyLimits(max_bytes=1024 * GIB, max_entries=100_000)


def test_the_memory_of_many_members_with_large_headers_is_bounded(tmp_path: Path) -> None:
    names = {"comment": "c" * 8000}
    archive = pack(*(file(f"result/{n}", b"", pax_headers=names) for n in range(400)), is_pax=True)
    tracemalloc.start()
    extract(archive, tmp_path / "copy")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 2 * 2**20
