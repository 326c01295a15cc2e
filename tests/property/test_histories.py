"""Whatever happens to a job, its operator, its nodes and the way between them: what holds in every history.

Set FINETUNE_EXAMPLES to search longer than the default does.
"""

import os

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from support.simulator.choices import DrawnChoices
from support.simulator.history import Scenario, play
from support.simulator.scenarios import scenarios

EXAMPLES = int(os.environ.get("FINETUNE_EXAMPLES", "400"))

searching = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example),
)


def check(scenario: Scenario, data: st.DataObject) -> None:
    """Play it and tell what was wrong, with everything that led there."""
    story = play(scenario, DrawnChoices(data))
    if story.violations:
        note("\n".join(story.trace))
    assert story.violations == []


@searching
@given(scenarios(), st.data())
def test_one_operator_keeps_every_promise(scenario: Scenario, data: st.DataObject) -> None:
    check(scenario, data)


@searching
@given(scenarios(takeovers=True), st.data())
def test_operators_that_all_believe_they_lead_never_publish_twice(scenario: Scenario, data: st.DataObject) -> None:
    check(scenario, data)
