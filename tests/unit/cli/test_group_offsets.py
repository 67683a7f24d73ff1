"""Files of offsets: what `pk groups reset-offsets --from-file` takes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from pk import errors
from pk.cli import group_offsets
from pk.types import TopicPartition


def read(tmp_path: Path, text: str) -> dict[TopicPartition, int]:
    path = tmp_path / "offsets.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return group_offsets.file_offsets(path)


def test_a_file_of_offsets_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, '"a",0,5\r\n\nb.c, 12 , 9223372036854775807\n')
    assert found == {TopicPartition("a", 0): 5, TopicPartition("b.c", 12): 2**63 - 1}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "names no partition"),
        ("a,0\n", "line 1: write TOPIC,PARTITION,OFFSET"),
        ("a,0,1\na,0,2\n", "line 2: a-0 is there twice"),
        ("a,0,-1\n", "write TOPIC"),
        ("a,0,٣\n", "write TOPIC"),
        ("a,0,9223372036854775808\n", "too large"),
        ("a,2147483648,0\n", "too large"),
        ("a b,0,0\n", "characters other than"),
        ("..,0,0\n", "directory's name"),
        ('"a,0,1\n', "has no lines"),
        ("a,0,\udcff\n", "has no lines"),
        ("a,0,1\n" + "9" * 200_000 + "\n", "has no lines"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(errors.InvalidOption, match=word):
        read(tmp_path, text)


def test_a_file_that_is_missing_or_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(errors.InvalidOption, match="cannot read"):
        group_offsets.file_offsets(tmp_path / "nope")
    monkeypatch.setattr(group_offsets, "LINES_MAX", 1)
    with pytest.raises(errors.InvalidOption, match="more than 1 lines"):
        read(tmp_path, "a,0,1\na,1,1\n")


@pytest.mark.parametrize(
    "given", [[], ["--to-latest", "--to-current"], ["--by-duration", "1h", "--to-time-ms", "5"]]
)
def test_exactly_one_target_is_taken(given: list[str]) -> None:
    from typer.testing import CliRunner

    from pk.cli.groups import app

    found = CliRunner().invoke(app, ["reset-offsets", "g", "--all-topics", *given])
    assert isinstance(found.exception, errors.InvalidOption)
    assert "--by-duration" in str(found.exception)
