"""What strangers hold together: who gives way, and who holds nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.serve.http.edge.connection import Stranger, Strangers, Visitor
from ridgeline.serve.http.listening import Listener, bind

KIB = 1 << 10


class Crowd:
    """Strangers by name, of whom those who have given way are noted in their order."""

    def __init__(self, strangers: Strangers) -> None:
        self.strangers, self.gone = strangers, list[str]()

    def come(self, name: str, address: str = "a") -> Stranger:
        found = Stranger(self.strangers, address, lambda: self.gone.append(name))
        found.wait()
        return found


def test_who_waits_longest_gives_way_of_the_address_that_holds_most() -> None:
    crowd = Crowd(Strangers(most_places=4))
    crowd.come("alone", "b")
    for i in range(9):
        crowd.come(f"{i}")
    assert crowd.gone == ["0", "1", "2", "3", "4", "5"]


def test_who_asks_waits_anew_and_is_the_newest() -> None:
    crowd = Crowd(Strangers(most_places=2))
    first, _ = crowd.come("first"), crowd.come("second")
    first.rest()
    crowd.come("third")
    assert crowd.gone == []
    first.wait()
    assert crowd.gone == ["second"]


def test_bytes_are_counted_for_all_together() -> None:
    crowd = Crowd(Strangers(most_bytes=100))
    first, second, third = (crowd.come(name) for name in ("first", "second", "third"))
    second.hold(40)
    first.hold(30)
    second.hold(60)
    third.hold(10)
    assert crowd.gone == []
    third.hold(11)
    assert crowd.gone == ["second"], "it has held some for longest"
    first.hold(100)
    assert crowd.gone == ["second", "first"]
    third.hold(101)
    assert crowd.gone == ["second", "first", "third"], "alone it may not hold more either"
    assert third._all.bytes._total == 0


def test_who_has_proved_a_key_holds_nothing() -> None:
    crowd = Crowd(Strangers(most_places=1, most_bytes=10))
    member = crowd.come("member")
    member.hold(10)
    member.prove()
    for i in range(3):
        crowd.come(f"{i}").hold(10)
    member.wait()
    member.hold(1000)
    assert "member" not in crowd.gone


@given(steps=st.lists(st.tuples(st.integers(0, 9), st.sampled_from("whrpn"), st.integers(0, 60))))
def test_never_more_than_there_is(steps: list[tuple[int, str, int]]) -> None:
    strangers = Strangers(most_places=4, most_bytes=100)
    crowd = Crowd(strangers)
    here = {i: crowd.come(str(i), str(i % 3)) for i in range(10)}
    for who, what, amount in steps:
        one = here[who]
        act = {"w": one.wait, "r": one.rest, "p": one.prove, "h": lambda: one.hold(amount)}  # noqa: B023
        if what == "n":
            here[who] = crowd.come(str(who), str(who % 3))
        else:
            act[what]()
        for share, most in ((strangers.places, 4), (strangers.bytes, 100)):
            sums = {name: sum(amounts.values()) for name, amounts in share._amounts.items()}
            assert share._total == sum(sums.values()) <= most
            assert sums == {name: share._sums[name] for name in sums}
            assert all(share._amounts.values())


@pytest.fixture
def listener() -> Iterator[Listener]:
    with bind("127.0.0.1", 0) as found:
        found.listen()
        yield found


def test_a_connection_has_a_place_until_it_is_closed(listener: Listener) -> None:
    listener.strangers, listener.own_bytes = Strangers(most_places=2), 5
    with ExitStack() as stack:

        def connect() -> tuple[socket.socket, Visitor]:
            client = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
            visitor, _ = listener.accept()
            assert isinstance(visitor, Visitor)
            return client, stack.enter_context(visitor)

        (_, first), (second, _) = connect(), connect()
        assert first.stranger.address == "127.0.0.1"
        assert listener.strangers.bytes._total == 10
        first.close()
        first.close()
        connect()
        assert listener.strangers.places._total == 2
        connect()
        second.settimeout(60)
        assert second.recv(1) == b"", "the oldest sees its end"


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_a_network_of_ipv6_is_one_address(one: str, other: str, is_same: bool) -> None:
    found = []
    for host in (one, other):
        near, far = socket.socketpair()
        with near, far:
            accepted = socket.socket(socket.AF_INET6, fileno=near.detach())
            with Visitor(accepted, (host, 1, 0, 0), Strangers()) as visitor:
                found.append(visitor.stranger.address)
    assert (found[0] == found[1]) == is_same


def test_a_unix_socket_has_one_address_for_all(tmp_path: Path) -> None:
    near, far = socket.socketpair()
    with near, far, Visitor(near, "", Strangers()) as visitor:
        assert visitor.stranger.address == ""
