"""Which controller a broker asks next, while it does not know the active one.  Pure.

Controllers are asked in rounds: in one round each is asked once, whom a refusal names first.  One
that did not answer in time is *silent*: to ask it again costs time in which another may be elected.

Invariants
  K4  within a round nobody is asked twice; a round that found nobody is followed by a wait, unless
      it ended with a silent one: that was a wait
  K5  a silent controller is asked last, one in a round, and only after `PATIENT_ROUNDS` rounds of
      the others, unless all are silent: between two waits for silent ones everybody else is asked
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Rounds in which those that answer may elect one of them, before silent ones are asked again.
PATIENT_ROUNDS = 5


class ControllerSearch:
    """See the module.  `address` is whom to ask now."""

    def __init__(self, addresses: Sequence[str]) -> None:
        assert addresses, "no controller to ask"
        self._given = tuple(addresses)
        self._known = tuple(dict.fromkeys(addresses))
        self.address = self._known[0]
        self.rounds = 0  #: that found nobody, since somebody served
        self._tried: dict[str, None] = {}  #: in this round
        #: how often in a row; whom was asked longest ago comes first
        self._silent: dict[str, int] = {}
        self._hint = ""

    @property
    def alone(self) -> bool:
        """There is nobody else to ask."""
        return len(self._known) == 1

    @property
    def doublings(self) -> int:
        """How often the controller at `address` did not answer in time: it may only be slow."""
        return self._silent.get(self.address, 0)

    def learn(self, addresses: Iterable[str]) -> None:
        """These are there, too, as far as anybody knows by now."""
        self._known = tuple(dict.fromkeys((*self._given, *addresses)))

    def found(self) -> None:
        """`address` serves, in good time or not."""
        self.rounds, self._tried, self._hint = 0, {}, ""

    def steady(self) -> None:
        """`address` answers in good time again."""
        self._silent.pop(self.address, None)

    def failed(self, *, hint: str = "", silent: bool = False) -> bool:
        """`address` does not serve: move on.  True = the round is over; wait before the next."""
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
        """Whom to ask in this round; None = nobody is left."""
        after = self._known.index(self.address) + 1 if self.address in self._known else 0
        order = [*([hint] if hint else []), *self._known[after:], *self._known[:after]]
        left = [each for each in order if each not in self._tried]
        for each in left:
            if each not in self._silent:
                return each
        if self.rounds < PATIENT_ROUNDS and any(each not in self._silent for each in self._known):
            return None
        return next((each for each in self._silent if each in left), None)
