"""Before the engine: promises enter at once, others in turn, the background while it is quiet."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.front import QUIET_S, Front
from ridgeline.core.scheduling.admission import Room

ROOM = Room(num_seqs=4, num_tokens=100, short_len=0, num_short_tokens=0)


def take(
    front: Front[str], room: Room = ROOM, *, is_busy: bool = True, gives_way: bool = False
) -> list[str]:
    """Take into an engine that holds nothing of these requests."""
    return front.take(lambda: room, lambda item: 0, is_busy=is_busy, gives_way=gives_way)


def push(front: Front[str], *items: str, tenant: str = "a", **kind: bool) -> None:
    front.push(tenant, [(item, 1) for item in items], 1, **kind)


def test_prompts_enter_as_far_as_there_is_room() -> None:
    front = Front[str]()
    assert not front.is_wanted
    push(front, *"abc")
    push(front, *"de")
    assert (front.is_wanted, len(front), list(front)) == (True, 5, [*"abcde"])
    assert take(front, ROOM._replace(num_seqs=2)) == ["a", "d"], "side by side"
    assert (front.is_wanted, len(front), front.load.num_outside) == (True, 3, 3)
    assert take(front) == ["b", "e", "c"]
    assert (front.is_wanted, len(front), list(front), front.load.num_outside) == (False, 0, [], 0)


def test_a_request_holds_no_more_than_its_part() -> None:
    """It has seven sequences inside: one free slot is left to others."""
    front = Front[str]()
    push(front, "a")
    room = ROOM._replace(num_seqs=2)
    assert front.take(lambda: room, lambda item: 7, is_busy=True, gives_way=False) == []
    assert front.take(lambda: room, lambda item: 6, is_busy=True, gives_way=False) == ["a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.integers(0, 3))))
def test_it_does_not_matter_when_within_a_step_somebody_comes(
    turns: list[tuple[str, int, int]],
) -> None:
    """Two servers see the same pushes before the same takes; one sees them before the step ends."""
    early, late = Front[str](), Front[str]()
    for number, (tenant, num_served, num_slots) in enumerate(turns):
        other = "abc"["abc".index(tenant) - 1]
        push(early, f"{number}", f"{number}!", tenant=tenant)
        early.charge(other, num_served)
        late.charge(other, num_served)
        push(late, f"{number}", f"{number}!", tenant=tenant)
        room = ROOM._replace(num_seqs=num_slots)
        assert take(early, room) == take(late, room)
        assert list(early) == list(late)


def test_who_was_served_more_comes_later() -> None:
    front = Front[str]()
    push(front, "a1", "a2", tenant="a")
    push(front, "b1", "b2", tenant="b")
    one = ROOM._replace(num_seqs=1)
    assert take(front, one) == ["a1"]
    front.charge("b", 5)
    assert take(front, one) == ["a2"]
    assert take(front, one) == ["b1"]


# --- promises ------------------------------------------------------------------------------------


def test_promises_enter_at_once_and_others_beside_them_later() -> None:
    front = Front[str]()
    push(front, "plain")
    push(front, "due", "due too", is_promised=True)
    assert (front.is_wanted, len(front), list(front)) == (True, 1, ["plain"])
    assert take(front, ROOM._replace(num_seqs=0)) == ["due", "due too"]
    assert take(front) == ["plain"]


def test_who_has_less_than_its_share_enters_beside_the_promises_to_others() -> None:
    front = Front[str]()
    push(front, "plain", tenant="b")
    push(front, "due", tenant="a", is_promised=True)
    assert take(front, ROOM._replace(max_num_seqs=8, inside={"a": 8})) == ["due", "plain"]


def test_a_promise_counts_as_served() -> None:
    """So ``b``, which has the older prompt, comes behind ``a``."""
    front, one = Front[str](), ROOM._replace(num_seqs=1)
    push(front, "b1", "b2", tenant="b")
    push(front, "a1", "a2", tenant="a")
    front.push("b", [("due", 10)], 1, is_promised=True)
    assert take(front) == ["due"]
    assert [take(front, one) for _ in range(4)] == [["a1"], ["a2"], ["b1"], ["b2"]]


def test_as_many_enter_beside_promises_as_are_permitted() -> None:
    front = Front[str]()
    for item in "abcdef":
        push(front, item)
    front.num_permitted = 2
    assert front.load.num_outside == 0, "nobody has looked yet"
    assert take(front) == ["a", "b"]
    assert (front.num_permitted, front.load.num_outside) == (0, 0), (
        "who is held back is not waited for"
    )
    assert take(front) == []
    assert take(front, ROOM._replace(num_seqs=1), is_busy=False) == ["c"], "an idle engine waits"
    front.num_permitted = inf
    assert take(front) == ["d", "e", "f"]
    assert front.num_permitted == inf


# --- the background ------------------------------------------------------------------------------


def test_the_background_goes_on_when_nobody_has_asked_for_a_while() -> None:
    front = Front[str]()
    assert not front.is_waited_for(0.0, is_inside=False)
    assert front.is_waited_for(1.0, is_inside=True)
    assert front.is_waited_for(1.0 + 0.9 * QUIET_S, is_inside=False), "a client may ask again"
    assert not front.is_waited_for(1.0 + QUIET_S, is_inside=False)
    for is_promised in (True, False):
        push(front, "person", is_promised=is_promised)
        assert front.is_waited_for(9.0, is_inside=False)
        assert take(front) == ["person"]
        assert front.quiet_at_s == 9.0 + QUIET_S


def test_the_background_enters_while_it_does_not_give_way_and_nobody_else_enters() -> None:
    front = Front[str]()
    assert not front.has_background
    for item in "xyz":
        push(front, item, is_background=True)
    push(front, "person")
    assert front.has_background
    assert (len(front), list(front)) == (1, ["person"])
    assert take(front) == ["person"]
    assert (front.has_background, front.is_wanted, front.load.num_outside) == (True, False, 3)
    assert take(front, gives_way=True) == []
    assert (front.load.gives_way, front.load.num_outside) == (True, 0)
    assert take(front, ROOM._replace(num_seqs=2)) == ["x", "y"]
    assert (front.load.gives_way, front.load.num_outside) == (False, 1)
    assert take(front) == ["z"]
    assert not front.has_background


def test_what_the_background_was_served_is_counted_apart() -> None:
    front, one = Front[str](), ROOM._replace(num_seqs=1)
    for is_background in (True, False):
        push(front, "a1", "a2", tenant="a", is_background=is_background)
        push(front, "b1", "b2", tenant="b", is_background=is_background)
    people = [take(front, one)]
    front.charge("a", 50, is_background=True)
    people += [take(front, one) for _ in range(3)]
    assert people == [["a1"], ["b1"], ["a2"], ["b2"]]
    assert [take(front, one) for _ in range(4)] == [["b1"], ["b2"], ["a1"], ["a2"]]


# --- who leaves ----------------------------------------------------------------------------------


def test_who_leaves_is_taken_out() -> None:
    front = Front[str]()
    push(front, *"abc")
    push(front, *"xyz", is_background=True)
    assert take(front, ROOM._replace(num_seqs=1), gives_way=True) == ["a"]
    assert front.load.num_outside == 2
    assert sorted(front.remove(lambda item: item in "bxy")) == ["b", "x", "y"]
    assert (list(front), front.load.num_outside) == (["c"], 1)
    assert take(front) == ["c"]
    assert take(front) == ["z"]


def test_all_are_taken_out() -> None:
    front = Front[str]()
    push(front, *"ab")
    push(front, "x", is_background=True)
    take(front, ROOM._replace(num_seqs=0))
    push(front, "c")
    push(front, "y", is_background=True)
    push(front, "due", is_promised=True)
    front.clear()
    assert (front.is_wanted, front.has_background, len(front)) == (False, False, 0)
    assert take(front) == []
