"""pk beside real Apache Kafka: `python -m bench NAME --json`.

How a figure is made
  M1  Both sides run in one invocation, each a broker of its own on loopback, one node, four
      partitions.  Rounds are interleaved and alternate who goes first; the figure is the median.
      Bytes on disk are the same in every round: they are taken once.
  M2  The side not measured is stopped: SIGSTOP to every one of its processes, its Spark session
      included.  After SIGCONT nothing is timed until the side has answered metadata, stored and
      returned a record on every partition, and kept its leader epochs for two seconds
      (`sides.settle`); a Spark session has answered a query.
  M3  Every client is a process of its own, started afresh each round, and warmed with the first
      million records of its run.  Its parent reads the lines that it prints and takes what `/proc`
      says of all processes of the side when the steady window opens and when it closes, so neither
      start-up nor just-in-time compilation counts on any side.
  M4  Both sides get the same values (`values.py`): 100 bytes, from one file, so that no side pays
      for making them up while it is timed.
  M5  A topic is new in every produce round and deleted after it.  Consume rounds read one topic of
      each side, filled before with the same records in batches of the producer's size.
  M6  Before anything else a file of `TOUCH_BYTES` is written and removed: a virtual machine pays up
      to four times as much for the first use of a page of memory as for the next; the side that
      writes first would pay it for both.
  M7  Spark: one session a role and a run (local[2], the same settings), and in it an untimed pass
      of the very query before the first timed one.  A round that did not see every record fails.
  M8  What pk is compared with besides Kafka: itself on an empty topic (deep_log), and Spark's own
      Parquet reader on the tier's files (cold_read).
  M9  Clusters are three nodes a side, each controller and broker, replication factor 3,
      min_insync_replicas 2, sessions and quorum timing as each side's defaults have them.  A
      failover is timed in one process for client and clock: from just before the signals to the
      acknowledgement of the first record that was handed over after them.  CPU is of all nodes.
  M10 The members of a group run the same script on both sides (group_members.py), with equal
      sessions and heartbeats.  A change of the group is timed from just before it to the first poll
      of the last partition by its new owner: nothing is committed, and each partition has a record,
      so a new owner always has one to read.

`Side` (sides.py) is one system under test; a `Case` (cases.py) is one named benchmark, its `plan`
(plans/) is how a round goes, `measuring.Bench` runs the rounds; `runs.watch` is one client process
under watch, `spark/` a Spark session.  `kafka/` holds Apache Kafka's configuration and how it is
started; `pk_side.py` and `pk_client.py` are pk's half; `pk_cluster.py` and `kafka/cluster.py` the
same for three nodes.  `report.py` makes lines and keeps the store (docs/bench.jsonl), `page.py` the
page and the plot.
"""
