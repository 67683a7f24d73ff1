"""pk beside real Apache Kafka: `python -m bench NAME --json`.

How a figure is made
  M1  Both sides run in one invocation, each a broker of its own on loopback, one node, four
      partitions.  Rounds are interleaved and alternate who goes first; the figure is the median.
  M2  The side not measured is stopped: SIGSTOP to every one of its processes.  After SIGCONT
      nothing is timed until the side has answered metadata, stored and returned a record on every
      partition, and kept its leader epochs for two seconds (`sides.settle`).
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

`Side` (sides.py) is one system under test; a `Case` (cases.py) is one named benchmark; `runs.watch`
is one client process under watch.  `kafka/` holds Apache Kafka's configuration and how it is
started; `pk_side.py` and `pk_client.py` are pk's half.
"""
