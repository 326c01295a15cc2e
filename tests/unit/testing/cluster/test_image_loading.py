"""Tests of loading an image into a node, with a fake `ctr`."""

import sys
from pathlib import Path

import pytest

from testing.cluster.host.commands import HarnessError
from testing.cluster.host.layout import Layout, choose_network
from testing.cluster.images.image_loading import load_into_node
from testing.cluster.images.oci import write_single_layer_image

FAKE_CTR = """
import sys
from pathlib import Path
log, failures = Path(sys.argv[1]), int(sys.argv[2])
with log.open("a") as file:
    file.write(" ".join(sys.argv[3:]) + "\\n")
if sys.argv[4] == "import":
    sys.stdin.buffer.read()
    if log.read_text().count("import") <= failures:
        sys.exit("parent snapshot does not exist")
elif sys.argv[4:] == ["list"]:
    print("REF TYPE DIGEST")
"""


@pytest.mark.parametrize(
    ("failures", "imports"), [pytest.param(0, 1, id="no failure"), pytest.param(1, 2, id="one failure")]
)
def test_failed_import_is_retried_once(tmp_path: Path, failures: int, imports: int) -> None:
    assert load(tmp_path, failures=failures).count("images import") == imports


def test_second_failure_reports_node_image_and_error(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"node1 cannot import .*small\.tar: parent snapshot does not exist"):
        load(tmp_path, failures=2)


def load(folder: Path, *, failures: int) -> str:
    """Load an image and return the logged arguments of the fake `ctr`."""
    image, log = folder / "small.tar", folder / "ctr.log"
    write_single_layer_image(image, name="localhost/small:1", files={"run": b"program"}, entrypoint=("/run",))
    node = Layout("test", folder, 1, choose_network("test", ())).nodes[0]
    load_into_node((sys.executable, "-c", FAKE_CTR, str(log), str(failures)), node, image)
    return log.read_text()
