"""Command `finetune report`, which opens the report of a job in the browser."""

import re
import tempfile
import webbrowser
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from finetune_cli.cluster.options import ContextOption, JobArgument, KubeconfigOption, NamespaceOption
from finetune_cli.errors import BadInput
from finetune_client.client import Client
from finetune_client.tar_archive import CopyLimits

REPORT = "result/report.html"
LIMITS = CopyLimits(max_bytes=64 * 2**20, remedy="; finetune cp copies it")
# The frame has no scripts, forms, pop-ups and refreshes, and inherits the policy, which forbids all requests.
PAGE = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'">
<meta http-equiv="x-dns-prefetch-control" content="off">
<title>{title}</title>
<iframe sandbox title="{title}" style="position:fixed;inset:0;width:100%;height:100%;border:0"
 srcdoc="{report}"></iframe>
"""
_LINK = re.compile(r"<(?=link\b)", re.IGNORECASE)


def report(
    name: JobArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write (default: JOB-report.html).", show_default=False),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the file in the browser.")] = True,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Open the report of a complete job: curves, memory, environment.

    The file shows the report without scripts, forms and network.
    """
    path = output or Path(f"{name}-report.html")
    if path.exists():
        raise BadInput(f"{path}: exists already; choose another --output, or remove it")
    with (
        Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client,
        tempfile.TemporaryDirectory(prefix="finetune-") as folder,
    ):
        copy = client.download(name, Path(folder) / "report.html", path=REPORT, limits=LIMITS)
        try:
            path.write_text(build_report_page(name, copy.read_text(encoding="utf-8", errors="replace")), "utf-8")
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}") from error
    print(path)
    if browser:
        webbrowser.open(path.absolute().as_uri())


def build_report_page(name: str, report_html: str) -> str:
    """Return a page that shows a report, which a job has written, in a frame without scripts, forms and network."""
    # browsers connect to the target of <link rel=preconnect> in spite of the policy
    isolated = _LINK.sub("&lt;", report_html)
    return PAGE.format(title=escape(f"Report of {name}"), report=escape(isolated))
