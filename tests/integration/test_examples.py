"""The examples in the docstrings of the clients run, against a real server."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import pk
from pk.cli.embedded import EmbeddedServer

#: The address that the examples name.
ADDRESS = "localhost:9092"
#: The order matters: each example uses the records of the one before.
CLASSES = (pk.AdminClient, pk.Producer, pk.Consumer)


def run(example: doctest.DocTest) -> list[str]:
    """Return every failure of an example, as doctest describes it."""
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    return said


def example_of(documented: type, address: str) -> doctest.DocTest:
    """Return the example in the docstring of a class, with another address."""
    text = (documented.__doc__ or "").replace(ADDRESS, address)
    names = {each.__name__: each for each in CLASSES}
    return doctest.DocTestParser().get_doctest(text, names, documented.__name__, None, 0)


@pytest.mark.integration
def test_the_examples_of_the_clients_run(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        for documented in CLASSES:
            example = example_of(documented, server.address)
            assert example.examples, documented
            assert not run(example)


def test_a_wrong_example_is_caught() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert run(wrong)
