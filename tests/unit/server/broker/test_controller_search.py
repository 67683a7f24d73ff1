"""The order in which controllers are asked (broker/controller_search K4, K5)."""

from __future__ import annotations

from pk.server.broker.controller_search import PATIENT_ROUNDS, ControllerSearch


def test_each_is_asked_once_a_round() -> None:
    search = ControllerSearch(["a", "b", "c", "a"])
    asked = []
    over = False
    while not over:
        asked.append(search.address)
        over = search.failed()
    assert asked == ["a", "b", "c"]
    assert search.address == "a"


def test_whom_a_refusal_names_comes_next() -> None:
    search = ControllerSearch(["a", "b", "c"])
    assert not search.failed(hint="c")
    assert search.address == "c"
    assert not search.failed(hint="x")
    assert search.address == "x", "it need not be one that was known"
    search.found()
    assert not search.failed()
    assert search.address == "a"


def test_a_hint_to_one_that_failed_is_followed_in_the_next_round() -> None:
    """Followers of a dead leader name it until another controller is elected."""
    search = ControllerSearch(["a", "b", "c"])
    assert not search.failed()
    assert not search.failed(hint="a")
    assert search.address == "c"
    assert search.failed(hint="a")
    assert search.address == "a"


def test_one_that_is_silent_waits_until_the_others_had_their_rounds() -> None:
    search = ControllerSearch(["a", "b", "c"])
    assert not search.failed(silent=True)
    asked = []
    for _ in range(PATIENT_ROUNDS):
        while True:
            asked.append(search.address)
            if search.failed(hint="a"):
                break
    assert asked == ["b", "c"] * PATIENT_ROUNDS
    asked = []
    while True:
        asked.append(search.address)
        if search.failed(silent=search.address == "a", hint="" if search.address == "a" else "a"):
            break
    assert asked == ["b", "c", "a"]
    assert search.address in "bc"


def test_two_silent_ones_are_not_asked_one_after_the_other() -> None:
    """broker/controller_search K5: another controller may have been elected in between."""
    search = ControllerSearch(["a", "b", "c", "d", "e"])
    asked = []
    for _ in range(60):
        asked.append(search.address)
        search.failed(silent=search.address in "ab")
    late = "".join(asked[5:])
    assert "ab" not in late
    assert "ba" not in late
    assert "a" in late
    assert "b" in late


def test_all_silent_are_asked_in_turn() -> None:
    search = ControllerSearch(["a", "b", "c"])
    asked = []
    for _ in range(9):
        asked.append(search.address)
        search.failed(silent=True)
    assert sorted(asked[3:6]) == ["a", "b", "c"]
    assert sorted(asked[6:]) == ["a", "b", "c"]


def test_patience_grows_with_one_that_may_be_slow() -> None:
    search = ControllerSearch(["a", "b"])
    assert search.doublings == 0
    search.failed(silent=True)
    while search.address != "a":
        search.failed(hint="a")
    assert search.doublings == 1
    search.found()
    assert search.doublings == 1, "it was found, and may still be slow"
    search.steady()
    assert search.doublings == 0


def test_with_one_controller_each_try_is_a_round() -> None:
    search = ControllerSearch(["a"])
    assert search.alone
    assert search.failed(silent=True)
    assert search.failed()
    assert search.address == "a"


def test_those_that_came_later_are_asked_after_those_that_were_given() -> None:
    search = ControllerSearch(["a", "b"])
    search.learn(["b", "x"])
    asked = []
    over = False
    while not over:
        asked.append(search.address)
        over = search.failed()
    assert asked == ["a", "b", "x"]
    search.learn(["y"])
    assert not search.failed()
    assert not search.failed()
    assert search.address == "y", "x is none any more"
