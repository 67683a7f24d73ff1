"""Apache Kafka as the peer: its jars, its configuration, and how it is started and timed."""
