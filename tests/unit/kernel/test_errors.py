"""The tree of errors: complete, unambiguous, and the same on both ends of a stream."""

from __future__ import annotations

import re

import pytest

from pk import errors
from pk.wire import frames

KINDS = sorted(errors.BY_CODE.values(), key=lambda kind: kind.code)


def public_kinds() -> list[type[errors.PkError]]:
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.PkError)
    ]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = set(re.findall(r"\b[A-Z][A-Za-z]+(?:[A-Z][a-z]+)\b|\bDataLoss\b", errors.__doc__ or ""))
    missing = {kind.__name__ for kind in public_kinds()} - drawn
    assert not missing, f"draw {sorted(missing)} in the docstring of pk/errors.py"


def test_every_error_but_the_bases_has_a_code_of_its_own() -> None:
    bases = {errors.PkError, errors.RetriableError, errors.UserError, errors.OperatorError}
    coded = set(errors.BY_CODE.values()) | bases | {errors.InternalError}
    assert set(public_kinds()) == coded


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_wire(kind: type[errors.PkError]) -> None:
    there = kind("it is so", topic="t")
    back = frames.raise_error(frames.error_of(there))
    assert type(back) is kind
    assert (back.message, back.details) == ("it is so", {"topic": "t"})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_without_words_says_what_its_class_means(kind: type[errors.PkError]) -> None:
    assert len(kind().message) > 10
    assert kind.acts in {"client", "user", "operator", "pk"}


def test_an_unknown_code_is_kept() -> None:
    error = errors.from_wire(31_337, "from the future")
    assert isinstance(error, errors.InternalError)
    assert "31337" in error.message
    assert "from the future" in error.message
