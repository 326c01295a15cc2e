"""Tests of loading an image into a node, with a fake `ctr`."""

import sys
from pathlib import Path

import pytest

from testing.cluster.host.commands import HarnessError
from testing.cluster.host.layout import ClusterLayout, choose_network
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
    ("failure_count", "import_count"), [pytest.param(0, 1, id="no failure"), pytest.param(1, 2, id="one failure")]
)
def test_failed_import_is_retried_once(tmp_path: Path, failure_count: int, import_count: int) -> None:
    assert load_image(tmp_path, failure_count=failure_count).count("images import") == import_count


def test_error_after_second_failure_contains_node_and_image(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"node1 cannot import .*small\.tar: parent snapshot does not exist"):
        load_image(tmp_path, failure_count=2)


def load_image(folder: Path, *, failure_count: int) -> str:
    """Load an image with a fake `ctr` and return its logged arguments."""
    image, log = folder / "small.tar", folder / "ctr.log"
    write_single_layer_image(image, name="localhost/small:1", files={"run": b"program"}, entrypoint=("/run",))
    node = ClusterLayout("test", folder, 1, choose_network("test", ())).nodes[0]
    load_into_node((sys.executable, "-c", FAKE_CTR, str(log), str(failure_count)), node, image)
    return log.read_text()
