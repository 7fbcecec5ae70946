"""Who enters the engine next: fair between tenants, and between the requests of one."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.scheduling.admission import Admission, Room

Item = TypeVar("Item")

TENANTS = ("a", "b", "c")
ONE = Room(num_seqs=1, num_tokens=1, short_len=0, num_short_tokens=0)


def take(queue: Admission[Item], room: Room) -> list[Item]:
    """Take into an engine that holds nothing yet."""
    return queue.take(room, num_inside=lambda _: 0)


def pop(queue: Admission[str]) -> str:
    (item,) = take(queue, ONE)
    return item


def push(queue: Admission[str], tenant: str, *lengths: int) -> None:
    """Queue a request whose prompts have these lengths; the item is the tenant."""
    queue.push(tenant, [(tenant, length) for length in lengths])


# --- between tenants ----------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 50)), max_size=60))
def test_nothing_is_lost(pushed: list[tuple[str, int]]) -> None:
    queue: Admission[int] = Admission()
    for i, (tenant, size) in enumerate(pushed):
        queue.push(tenant, [(i, size)])
    assert list(queue) == list(range(len(pushed))), "they are listed as they came"
    taken = []
    for left in range(len(pushed), 0, -1):
        assert len(queue) == left
        taken += take(queue, ONE)
    assert not queue
    assert sorted(taken) == list(range(len(pushed)))
    assert take(queue, ONE) == []


@given(st.sampled_from(TENANTS), st.integers(1, 9), st.integers(1, 30))
def test_equal_requests_of_a_tenant_keep_their_order(tenant: str, size: int, count: int) -> None:
    queue: Admission[int] = Admission()
    for i in range(count):
        queue.push(tenant, [(i, size)])
    assert [take(queue, ONE) for _ in range(count)] == [[i] for i in range(count)]


@given(st.lists(st.integers(1, 50), min_size=30, max_size=60))
def test_tenants_that_wait_are_served_alike(sizes: list[int]) -> None:
    """However large their requests, two who always wait are never further apart than a request."""
    queue: Admission[tuple[str, int]] = Admission()
    for size in sizes:
        queue.push("small", [(("small", size), size)])
        queue.push("large", [(("large", 5 * size), 5 * size)])
    served = {"small": 0, "large": 0}
    for _ in range(len(sizes)):
        ((tenant, size),) = take(queue, ONE)
        served[tenant] += size
        assert abs(served["small"] - served["large"]) <= 250


def test_who_was_away_cannot_save_up() -> None:
    queue: Admission[str] = Admission()
    for _ in range(20):
        push(queue, "busy", 100)
    for _ in range(10):
        pop(queue)
    for _ in range(10):
        push(queue, "new", 100)
    assert [pop(queue) for _ in range(10)].count("busy") == 5


def served_alone(num_tokens: int) -> Admission[str]:
    """A queue through which one tenant, "old", went alone; nobody waits in it now."""
    queue: Admission[str] = Admission()
    push(queue, "old", num_tokens)
    pop(queue)
    return queue


def test_who_was_served_long_shares_with_a_newcomer_from_now_on() -> None:
    queue = served_alone(1_000_000)
    for tenant in ("new", "old"):
        for _ in range(10):
            push(queue, tenant, 100)
    assert [pop(queue) for _ in range(10)].count("old") == 5


def test_a_newcomer_is_level_with_what_the_last_one_has_had_by_now() -> None:
    queue = served_alone(10)
    queue.charge("old", 500)  # its answer, after it left the queue
    for _ in range(3):
        push(queue, "new", 1)
    push(queue, "old", 1)
    pop(queue)
    assert pop(queue) == "old"


def test_no_counter_is_lowered_by_coming_back() -> None:
    """Who had more than the last one served still has, and waits until that is made up for."""
    queue = served_alone(1000)
    push(queue, "new", 10)
    pop(queue)
    queue.charge("old", 500)  # 1500; the one served last has 1010
    for _ in range(9):
        push(queue, "new", 100)
    push(queue, "old", 100)
    order = [pop(queue)]
    while order[-1] != "old":
        order.append(pop(queue))
    assert order.count("new") == 5


# --- between the requests of one tenant ---------------------------------------------------------


def test_prompts_of_one_request_share_its_turn() -> None:
    queue: Admission[str] = Admission()
    queue.push("a", [(f"big {i}", 100) for i in range(20)])
    queue.push("a", [("other 0", 100), ("other 1", 100)])
    order = [take(queue, ONE)[0] for _ in range(5)]
    assert order == ["big 0", "other 0", "big 1", "other 1", "big 2"]


def test_a_short_request_passes_all_long_ones_that_wait() -> None:
    queue: Admission[str] = Admission()
    for i in range(20):
        queue.push("a", [(f"long {i}", 8000)])
    assert take(queue, ONE) == ["long 0"]
    queue.push("a", [("short", 50)])
    assert take(queue, ONE) == ["short"]


@given(st.lists(st.integers(1, 100), min_size=100, max_size=200))
def test_a_long_request_is_not_passed_for_ever(lengths: list[int]) -> None:
    """Though a short one comes before each turn, it waits for its own length of them and one."""
    queue: Admission[int] = Admission()
    queue.push("a", [(8000, 8000)])
    passed = 0
    for length in lengths * 200:
        queue.push("a", [(length, length)])
        (taken,) = take(queue, ONE)
        if taken == 8000:
            break
        passed += taken
    assert taken == 8000
    assert passed <= 2 * 8000


# --- room ---------------------------------------------------------------------------------------


def test_what_fits_into_a_step_enters() -> None:
    queue: Admission[int] = Admission()
    for i in range(6):
        queue.push("a", [(i, 40)])
    assert take(queue, Room(9, 100, 10, 50)) == [0, 1, 2]  # the third is the first that is cut
    assert take(queue, Room(2, 100, 10, 50)) == [3, 4]
    assert take(queue, Room(0, 100, 10, 50)) == []


def test_answers_side_by_side_take_as_many_seats() -> None:
    queue: Admission[int] = Admission()
    for i in range(3):
        queue.push("a", [(i, 1)], num_seqs=2)
    assert take(queue, Room(3, 100, 10, 50)) == [0, 1]


@given(st.integers(8, 256), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_requests_of_many_answers_leave_seats_free(num_seats: int, answers: list[int]) -> None:
    """However many prompts they have; a single prompt may take all that it asks for."""
    queue: Admission[int] = Admission()
    num_inside = [0] * len(answers)
    for request, num_answers in enumerate(answers):
        queue.push("a", [(request, 1)] * 300, num_answers)
    for _ in range(300):
        room = Room(num_seats - sum(num_inside), 100, 10, 50)
        for request in queue.take(room, num_inside.__getitem__):
            num_inside[request] += answers[request]
    assert sum(num_inside) < num_seats or num_seats <= sum(answers)
    if len(num_inside) == 1:  # and takes most of them
        assert num_inside[0] + 2 * answers[0] > num_seats * 7 // 8


def test_a_request_that_leaves_seats_free_lets_others_in() -> None:
    queue: Admission[str] = Admission()
    queue.push("a", [("many", 1)] * 20, num_seqs=4)
    room = Room(12, 100, 10, 50)
    assert take(queue, room) == ["many", "many"]  # a third would leave none of twelve
    room = room._replace(num_seqs=4)
    assert queue.take(room, num_inside={"many": 8}.__getitem__) == []
    queue.push("a", [("one", 1)])
    assert queue.take(room, num_inside={"many": 8, "one": 0}.__getitem__) == ["one"]


def test_a_full_step_has_room_for_short_prompts_alone() -> None:
    queue: Admission[str] = Admission()
    queue.push("a", [("long", 90)])
    for i in range(4):
        queue.push("b", [(f"short {i}", 10)])
    full = Room(num_seqs=9, num_tokens=0, short_len=10, num_short_tokens=25)
    assert take(queue, full) == ["short 0", "short 1"]  # of 25 tokens 5 are left
    assert take(queue, full._replace(short_len=9)) == []
    assert len(queue) == 3


def test_removing_takes_out_exactly_what_is_named() -> None:
    queue: Admission[int] = Admission()
    for i in range(10):
        queue.push("ab"[i % 2], [(i, 5)])
    assert sorted(queue.remove(lambda i: i % 3 == 0)) == [0, 3, 6, 9]
    assert len(queue) == 6
    assert sorted(take(queue, ONE)[0] for _ in range(6)) == [1, 2, 4, 5, 7, 8]


def test_few_requests_begin_at_once_beside_another_tenant() -> None:
    queue: Admission[str] = Admission()
    room = ONE._replace(num_seqs=100, num_tokens=10_000)
    for _ in range(100):
        push(queue, "a", 1)
    assert len(take(queue, room)) == 100, "alone, all that there is room for"
    for _ in range(100):
        push(queue, "a", 1)
    push(queue, "b", 1)
    first = take(queue, room)
    assert "b" in first
    assert len(first) == 16, "what each costs is time that the other waits"
    assert len(take(queue, room)) == 16
