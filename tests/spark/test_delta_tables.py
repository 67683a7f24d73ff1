"""Delta's own Python interface works in a session of pk: `from delta.tables import DeltaTable`."""

from __future__ import annotations

from delta.tables import DeltaTable

from pk.tiering import checkpoint_files, delta_checkpoint, layout
from tests.unit.tiering.test_checkpoint_files import TOPIC, TOPIC_ID, table_of


def test_a_topic_is_merged_into_a_delta_table(spark, cluster, load, tmp_path) -> None:
    topic = cluster.topic(tier_enable=False)
    cluster.fill(topic, 20)  # keys k0 to k6, values 0 to 19: the last of each key are 13 to 19
    place = str(tmp_path / "latest")
    builder = DeltaTable.create(spark).location(place).addColumn("key", "STRING")
    table = builder.addColumn("value", "INT").execute()
    rows = load(topic, startingOffsets="earliest").selectExpr(
        "CAST(key AS STRING)", "CAST(CAST(value AS STRING) AS INT) AS value"
    )
    for _ in range(2):  # the second time changes nothing
        latest = rows.groupBy("key").agg({"value": "max"}).withColumnRenamed("max(value)", "value")
        merge = table.alias("old").merge(latest.alias("new"), "old.key = new.key")
        merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
    found = {row.key: row.value for row in DeltaTable.forPath(spark, place).toDF().collect()}
    assert found == {f"k{n % 7}": n for n in range(13, 20)}
    operations = [row.operation for row in table.history().select("operation").collect()]
    assert operations == ["MERGE", "MERGE", "CREATE TABLE"]


def test_spark_reads_a_checkpoint_that_carries_files(spark, tmp_path, monkeypatch) -> None:
    """tiering/checkpoint_files: pk writes it, and the commits before it are gone."""
    monkeypatch.setattr(delta_checkpoint, "CARRIED_ROWS_LEAST", 0)
    monkeypatch.setattr(checkpoint_files, "ROWS_AT_ONCE", 7)
    seen = table_of(tmp_path, 25, 20)
    place = str(tmp_path / layout.table_path(TOPIC, TOPIC_ID))
    found = spark.read.format("delta").load(place).inputFiles()
    assert {name.rpartition("/")[2] for name in found} == {
        path.rpartition("/")[2] for path in seen.files
    }
    (detail,) = DeltaTable.forPath(spark, place).detail().select("numFiles").collect()
    assert detail.numFiles == len(seen.files) > 50
