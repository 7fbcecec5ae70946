"""How many tokens a draft model guesses: what a step counts for."""

from __future__ import annotations

from ridgeline.core.decoding.drafts.pace import Pace

MOST = 4


def in_its_trial() -> Pace:
    """Return a pace that knows what steps without drafts take, and has not tried any."""
    pace = Pace(MOST)
    for _ in range(8):
        assert pace.begin(1) == 0
        pace.note_step(1, 1, 1.0)
    return pace


def test_drafts_that_cost_nothing_are_as_long_as_they_may_be_after_a_trial() -> None:
    pace = in_its_trial()
    for _ in range(3):
        assert pace.begin(1) == 2
        pace.note_step(1, 3, 1.0)
    assert pace.begin(1) == MOST


def test_a_step_for_which_nothing_was_guessed_after_all_says_nothing_of_drafts() -> None:
    pace = in_its_trial()
    pace.note_none()  # between two steps there is nothing to take back
    for _ in range(3):
        assert pace.begin(1) == 2
        pace.note_none()
        pace.note_step(1, 1, 1.0)
    assert pace.begin(1) == 2, "they are still to be tried"


def test_a_step_that_was_not_begun_says_nothing() -> None:
    pace = in_its_trial()
    for _ in range(3):
        assert pace.begin(1) == 2
        pace.note_step(1, 3, 1.0)
        pace.note_step(1, 3, 1000.0)
    assert pace.begin(1) == MOST


def test_no_prompt_is_caught_up_with_where_drafts_save_nothing() -> None:
    pace = in_its_trial()
    for _ in range(3):
        assert pace.begin(1) == 2
        pace.note_step(1, 3, 50.0)
    assert pace.begin(1) == 0
    assert not pace.may_catch_up(100, num_generated=10_000, num_left=10_000)
    assert pace.may_catch_up(4, num_generated=10_000, num_left=10_000), "so few are always behind"
