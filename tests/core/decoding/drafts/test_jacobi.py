"""Lookahead: draws behind wrong drafts are guesses, and rounds of them make n-grams."""

from __future__ import annotations

from ridgeline.core.decoding.drafts.jacobi import Lookahead
from ridgeline.core.request import Request
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.core.step import StepOutput, Work
from tests.core.harness import make_request, make_scheduler


def behind(request: Request, drafts: tuple[int, ...]) -> Work:
    """The work that verifies drafts behind all tokens of a request."""
    (seq,) = request.sequences
    tokens = (seq.tokens[-1], *drafts)
    start = len(seq.tokens) - 1
    return Work(seq.id, start, tokens, (), (1,), request.sampling, (), (), len(drafts))


def drafted(drafter: Lookahead, request: Request, most: int) -> tuple[int, ...]:
    (guess,) = drafter.draft([(request.sequences[0], most)])
    assert len(guess.tokens) <= most
    return guess.tokens


def test_the_first_guesses_are_what_was_said_last() -> None:
    drafter = Lookahead()
    request = make_request(0, (1, 2, 3))
    assert drafted(drafter, request, 2) == (2, 3)
    assert drafted(drafter, request, 5) == (1, 2, 3), "there is no more"


def test_draws_are_the_next_guesses_of_their_places() -> None:
    drafter = Lookahead()
    request = make_request(0, (1, 2, 3))
    drafts = drafted(drafter, request, 3)
    drafter.note_draws(behind(request, drafts), (50, 51, 52, 53))
    request.sequences[0].tokens.append(50)  # the one that is sure
    assert drafted(drafter, request, 3) == (51, 52, 53)
    assert drafted(drafter, request, 2) == (51, 52)
    assert drafted(drafter, request, 5) == (51, 52, 53, 3, 50), "then what was said last"
    request.sequences[0].tokens += [60, 61, 62, 63]
    assert drafted(drafter, request, 2) == (62, 63), "these places are past"


def test_n_grams_are_of_successive_rounds() -> None:
    drafter = Lookahead()
    request = make_request(0, (9, 9))
    (seq,) = request.sequences
    drafted(drafter, request, 3)
    # By place: 2, 3, 4, .. Each round draws behind the drafts of the one before.
    drafter.note_draws(behind(request, (10, 11, 12)), (20, 21, 22, 23))
    seq.tokens.append(20)
    drafter.note_draws(behind(request, (21, 22, 23)), (31, 32, 33, 34))
    seq.tokens.append(31)
    drafter.note_draws(behind(request, (32, 33, 34)), (42, 43, 44, 45))
    for last, ngram in ((10, (21, 32, 43)), (11, (22, 33, 44)), (12, (23, 34, 45))):
        seq.tokens[-1] = last
        assert drafted(drafter, request, 3) == ngram
        assert drafted(drafter, request, 2) == ngram[:2]
    seq.tokens[-1] = 10
    assert drafted(drafter, request, 4) == (21, 32, 43, 45), "behind it the draw of this place"
    seq.tokens += [50, 51, 52, 53]
    drafter.note_draws(behind(request, (60, 61)), (70, 71, 72))
    seq.tokens.append(60)
    assert drafted(drafter, request, 1) == (71,), "the rounds before had no token there"


def test_draws_that_end_early_or_come_late_do_no_harm() -> None:
    drafter = Lookahead()
    request = make_request(0, (1, 2, 3))
    work = behind(request, drafted(drafter, request, 3))
    drafter.note_draws(work, ())  # the backend failed on it
    drafter.note_draws(work, (7,))
    request.sequences[0].tokens.append(7)
    assert drafted(drafter, request, 2) == (3, 7)
    drafter.forget(request)
    drafter.note_draws(work, (7, 8, 9))  # it was aborted while its step was computed
    assert not drafter._rounds


def test_a_step_tells_the_drafter_what_was_drawn() -> None:
    drafter = Lookahead()
    speculation = Speculation(drafter)
    scheduler = make_scheduler(speculation=speculation)
    request = make_request(0, (1, 2, 3), max_tokens=9)
    scheduler.add(request)
    step = scheduler.schedule()
    speculation.note_step(step, StepOutput(((5,),)), 1.0)
    assert not drafter._rounds, "a step without drafts tells nothing"
    work = behind(request, drafted(drafter, request, 2))
    speculation.note_step(step._replace(work=(work,)), StepOutput(((5, 6, 7),)), 1.0)
    request.sequences[0].tokens.append(5)
    assert drafted(drafter, request, 2) == (6, 7)
