"""Chooses the controller that a broker asks next while it does not know the active one.  Pure.

The broker asks controllers in rounds.  In one round it asks each controller once, beginning with
the controller that a refusal named.  A controller that did not answer in time is *silent*.
Asking it again costs time in which another may be elected.

Invariants
  K4  Within a round no controller is asked twice.  A round that found no active controller is
      followed by a wait.  There is no wait if the last controller of the round was silent, because
      its timeout was a wait already.
  K5  Unless all controllers are silent, the broker asks a silent controller only after
      `PATIENT_ROUNDS` rounds of the others, last in a round, and only one in a round.  So it asks
      every other controller between two timeouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Rounds in which the answering controllers may elect a leader, before silent ones are asked again.
PATIENT_ROUNDS = 5


class ControllerSearch:
    """The controllers that a broker knows.  `address` is the controller to ask now."""

    def __init__(self, addresses: Sequence[str]) -> None:
        assert addresses, "no controller to ask"
        self._given = tuple(addresses)
        self._known = tuple(dict.fromkeys(addresses))
        self.address = self._known[0]
        self.rounds = 0  #: rounds since an active controller last served
        self._tried: dict[str, None] = {}  #: asked in this round
        #: timeouts in a row of each silent controller; the one asked longest ago comes first
        self._silent: dict[str, int] = {}
        self._hint = ""

    @property
    def alone(self) -> bool:
        """Whether only one controller is known."""
        return len(self._known) == 1

    @property
    def doublings(self) -> int:
        """Return how often in a row the controller at `address` did not answer in time.

        Its timeout doubles as often, because it may only be slow.
        """
        return self._silent.get(self.address, 0)

    def learn(self, addresses: Iterable[str]) -> None:
        """Replace the learned controllers by `addresses`; the configured ones stay known."""
        self._known = tuple(dict.fromkeys((*self._given, *addresses)))

    def found(self) -> None:
        """Note that the controller at `address` serves, even if slowly."""
        self.rounds, self._tried, self._hint = 0, {}, ""

    def steady(self) -> None:
        """Note that the controller at `address` answers in time again."""
        self._silent.pop(self.address, None)

    def failed(self, *, hint: str = "", silent: bool = False) -> bool:
        """Choose the next controller, as `address` does not serve.  True = the round is over.

        After a round the caller waits before it begins the next.
        """
        if silent:
            self._silent[self.address] = 1 + self._silent.pop(self.address, 0)
        else:
            self.steady()
        self._hint = hint or self._hint
        self._tried[self.address] = None
        following = None if silent and self.rounds >= PATIENT_ROUNDS else self._next(hint)
        over = following is None
        if following is None:
            self.rounds += 1
            self._tried = {}
            following = self._next(self._hint)
            self._hint = ""
        assert following is not None
        self.address = following
        return over

    def _next(self, hint: str) -> str | None:
        """Return the next controller of this round; None = every one was asked."""
        after = self._known.index(self.address) + 1 if self.address in self._known else 0
        order = [*([hint] if hint else []), *self._known[after:], *self._known[:after]]
        left = [each for each in order if each not in self._tried]
        for each in left:
            if each not in self._silent:
                return each
        if self.rounds < PATIENT_ROUNDS and any(each not in self._silent for each in self._known):
            return None
        return next((each for each in self._silent if each in left), None)
