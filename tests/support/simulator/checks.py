"""Histories that must have nothing wrong with them; what led to a counterexample is told."""

from hypothesis import note
from hypothesis import strategies as st

from support.simulator.choices import DrawnChoices
from support.simulator.history import Scenario, Story, play


def check_history(scenario: Scenario, data: st.DataObject) -> Story:
    """No promise is broken, and the job comes to an end."""
    story = play(scenario, DrawnChoices(data))
    if story.violations:
        note("\n".join(story.trace))
    assert not story.violations, "\n".join(story.violations)
    return story


def check_undisturbed(scenario: Scenario, data: st.DataObject) -> None:
    """Nothing happens to pods or machines, so the first attempt completes."""
    story = check_history(scenario, data)
    if (story.phase, story.restarts) != ("Complete", 0):
        note("\n".join(story.trace))
    assert (story.phase, story.restarts) == ("Complete", 0), f"{story.phase} after {story.restarts} restarts"
