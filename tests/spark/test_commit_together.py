"""Log and table together: drivers that die between the steps of a batch (rule X11)."""

from __future__ import annotations

from collections import Counter

import pytest

from pk import errors
from pk.sparkconnector import commit_together, together


class Died(Exception):
    """The driver dies here."""


class Lake:
    """A topic, a Delta table, and batches that both get."""

    def __init__(self, spark, cluster, folder) -> None:
        self.spark, self.cluster = spark, cluster
        self.topic = cluster.topic(2, tier_enable=False)
        self.table = f"file://{folder}/table"
        self.rows(0, 0).write.format("delta").save(self.table)

    def rows(self, first: int, last: int):
        return self.spark.range(first, last, 1, 2).selectExpr("cast(id as string) as value")

    def write(self, batch: int, first: int, last: int) -> bool:
        options = {"pk.bootstrap.servers": self.cluster.address}
        return commit_together(
            self.rows(first, last), batch, "app-" + self.topic, self.table, self.topic,
            options=options,
        )  # fmt: skip

    def check(self, first: int, last: int, *, transaction_open: bool = False) -> None:
        """Both have each number once."""
        expected = Counter(str(n) for n in range(first, last))
        consumed = self.cluster.consumed(self.topic, transaction_open=transaction_open)
        assert Counter(row[3].decode() for row in consumed) == expected
        read = self.spark.read.format("delta").load(self.table).collect()
        assert Counter(row.value for row in read) == expected

    @property
    def state(self) -> str:
        [found] = self.cluster.admin.describe_transactions([f"app-{self.topic}:+table"])
        return found.state


@pytest.fixture
def lake(spark, cluster, tmp_path):
    return Lake(spark, cluster, tmp_path)


def test_each_batch_is_in_both_once(lake) -> None:
    assert not lake.write(0, 0, 10)
    assert not lake.write(1, 10, 10)  # an empty batch is recorded, too
    assert not lake.write(2, 10, 20)
    assert lake.write(2, 10, 20)
    assert lake.write(1, 10, 10)
    lake.check(0, 20)
    with pytest.raises(errors.ReplayDiffers):
        lake.write(2, 10, 21)
    lake.check(0, 20)


def test_a_driver_that_dies_before_the_table_writes_both_again(lake, monkeypatch) -> None:
    lake.write(0, 0, 10)

    def die(*_: object) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(together, "_write_table", die)
        with pytest.raises(Died):
            lake.write(1, 10, 20)
    assert lake.state == "AwaitingTable"
    lake.check(0, 10, transaction_open=True)
    assert not lake.write(1, 10, 20)
    lake.check(0, 20)


def test_a_driver_that_dies_after_the_table_is_completed_by_the_next(lake, monkeypatch) -> None:
    lake.write(0, 0, 10)
    write = together._write_table

    def write_and_die(*given: object) -> None:
        write(*given)
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(together, "_write_table", write_and_die)
        with pytest.raises(Died):
            lake.write(1, 10, 20)
    assert lake.state == "AwaitingTable"
    assert lake.write(1, 10, 20)
    lake.check(0, 20)


def test_a_table_that_forgets_transactions_is_refused(lake) -> None:
    lake.spark.sql(
        f"ALTER TABLE delta.`{lake.table}` SET TBLPROPERTIES "
        "('delta.setTransactionRetentionDuration' = 'interval 1 days')"
    )
    with pytest.raises(errors.UnsupportedFeature, match="setTransactionRetentionDuration"):
        lake.write(0, 0, 10)
    assert lake.cluster.consumed(lake.topic) == []
