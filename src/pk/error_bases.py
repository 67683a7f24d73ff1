"""The bases of pk's errors (errors.py)."""

from __future__ import annotations

from typing import ClassVar

#: The errors that travel on the wire, by code.
BY_CODE: dict[int, type[PkError]] = {}


class PkError(Exception):
    """Base of all errors of pk; `details` holds machine-readable facts (strings)."""

    code: ClassVar[int] = -1
    retriable: ClassVar[bool] = False
    acts: ClassVar[str] = "user"

    def __init_subclass__(cls) -> None:
        if "code" in cls.__dict__ and cls.code >= 0:
            assert BY_CODE.setdefault(cls.code, cls) is cls, (cls, BY_CODE[cls.code])

    def __init__(self, message: str = "", **details: str) -> None:
        super().__init__(message or (type(self).__doc__ or "").splitlines()[0])
        self.details = details

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else ""


class RetriableError(PkError):
    """The same request may succeed later."""

    retriable = True
    acts = "client"


class UserError(PkError):
    """The caller's request, option or data is wrong."""


class OperatorError(PkError):
    """The person who runs pk must act."""

    acts = "operator"


class InternalError(PkError):
    """A bug in pk; please report it."""

    acts = "pk"
