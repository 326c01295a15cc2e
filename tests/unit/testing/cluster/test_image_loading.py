"""Bringing an image to a node, with a program in the place of containerd's."""

import sys
from pathlib import Path

import pytest

from testing.cluster.host.commands import ClusterError
from testing.cluster.host.layout import Layout, choose_network
from testing.cluster.images.image_loading import load_into_node
from testing.cluster.images.oci import write_single_layer_image

RUNTIME = """
import sys
from pathlib import Path
said, failures = Path(sys.argv[1]), int(sys.argv[2])
with said.open("a") as log:
    log.write(" ".join(sys.argv[3:]) + "\\n")
if sys.argv[4] == "import":
    sys.stdin.buffer.read()
    if said.read_text().count("import") <= failures:
        sys.exit("parent snapshot does not exist")
elif sys.argv[4:] == ["list"]:
    print("REF TYPE DIGEST")
"""


@pytest.mark.parametrize(("failures", "imports"), [(0, 1), (1, 2)])
def test_an_import_that_failed_is_tried_once_more(tmp_path: Path, failures: int, imports: int) -> None:
    assert load(tmp_path, failures=failures).count("images import") == imports


def test_an_import_that_fails_again_says_where_and_why(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"node1 cannot import .*small\.tar: parent snapshot does not exist"):
        load(tmp_path, failures=2)


def load(folder: Path, *, failures: int) -> str:
    """What the program was asked for."""
    image, said = folder / "small.tar", folder / "said"
    write_single_layer_image(image, name="localhost/small:1", files={"run": b"program"}, entrypoint=("/run",))
    node = Layout("test", folder, 1, choose_network("test", ())).nodes[0]
    load_into_node((sys.executable, "-c", RUNTIME, str(said), str(failures)), node, image)
    return said.read_text()
