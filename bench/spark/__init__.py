"""Spark sessions under measurement: `session.py` is the child process, `worker.py` its handle."""
