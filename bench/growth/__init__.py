"""How cost grows: one curve for each thing that a cluster may have many of.

    python -m bench growth [--only CURVE,…] [--side pk|kafka] [--least N] [--most N] [--write]
    python -m bench growth --draw

A curve is a list of points (`curves`).  A point is one number of partitions or consumers, measured
on servers of its own; it becomes one row of JSON (`rows`).  `docs/growth.jsonl` keeps the newest
row of each point.  `picture` draws it, and docs/capacity_costs.py fits the costs of
`pk doctor capacity` to it.

Invariants
  B1  A row says what it was measured on: machine, load before and after, time.  CPU seconds hold on
      a busy machine; seconds of the clock do not.
  B2  A point needs nothing of another point, so a curve can be measured in pieces.
  B3  Costs are those of the server's processes.  What the client spends is named `client_…`.
"""
