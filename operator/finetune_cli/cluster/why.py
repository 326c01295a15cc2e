"""Command `finetune why`, which explains what happened to a job."""

from collections.abc import Iterator
from datetime import UTC, datetime

from finetune_cli.cluster.options import ContextOption, JobArgument, KubeconfigOption, NamespaceOption
from finetune_client.client import Client
from finetune_client.explanation import Explanation, explain


def why(
    name: JobArgument,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Explain on one page what happened to a job, and what to do."""
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        job = client.get(name)
    print("\n".join(format_explanation(explain(job, now=datetime.now(UTC)))))


def format_explanation(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of an explanation: the headline, then one block per part."""
    yield explanation.headline
    blocks = (
        ("What happened", explanation.story),
        ("Whose fault", (explanation.fault,) if explanation.fault else ()),
        ("Evidence", explanation.evidence),
        ("What to do", explanation.advice),
    )
    for title, lines in blocks:
        if lines:
            yield ""
            yield title
            yield from (f"  {line}" for line in lines)
