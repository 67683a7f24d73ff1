# Every task of pk.  `make demo` and `make test` set everything up by themselves, in .venv/.
# They need Python 3.11 or newer, Java 17 and make; the S3 tests also need Go (make test says how).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV := .venv
PY := $(VENV)/bin/python
# Arguments for pytest or for the tool behind a target: make test-unit ARGS="-k batch -x"
ARGS ?=
SEED ?=
SEEDS ?= 1000
ROUNDS ?=
SECONDS ?=
MINUTES ?=
MUTATIONS ?=
NAME ?= all
# S3=required turns "skipped, Go is missing" into a failure (CI).
S3 ?= optional
VERSITYGW := github.com/versity/versitygw/cmd/versitygw@v1.8.0

PYTEST := $(PY) -m pytest -q --durations=20 --durations-min=15 $(ARGS)
# One worker for each core, and one more for tests of real processes, of which most wait for a time
# to pass.  There a worker takes a whole file, the long ones first (tests/conftest.py).
SPREAD := -n 2 --dist worksteal
REAL_SPREAD := -n 3 --dist loadfile
FAST := $(wildcard tests/unit tests/contract tests/property tests/soak tests/chaos tests/jepsen)
REAL := $(wildcard tests/contract tests/integration tests/spark tests/s3 tests/chaos tests/audit tests/owners tests/eos tests/groups tests/jepsen tests/spark_exactly_once tests/golden tests/soak)
# Few files: the others need not be collected again.
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' $(REAL))
PLAIN := not s3 and not spark and not chaos and not peer
PROCESSES := (integration or spark or s3 or chaos) and not peer

##@ The main job
.PHONY: demo
demo: $(VENV)/.jars ## real data: producer, broker, log, tier and Spark; the counts must agree
	$(VENV)/bin/pk demo $(ARGS)

.PHONY: cluster
cluster: $(VENV)/.ready ## three nodes on this machine, in .cluster/; Ctrl-C drains them
	$(PY) examples/cluster/run.py

.PHONY: notebooks
notebooks: $(VENV)/.jars ## run all notebooks, each in a fresh kernel, into build/notebooks/*.html (ARGS="01": one)
	$(PY) notebooks/run.py $(ARGS)

##@ Tests
.PHONY: test
test: java setup test-fast test-real ## all that CI runs: without processes, then with
	@echo "make test: all suites passed"

.PHONY: test-fast
test-fast: test-unit test-sim

.PHONY: test-real
test-real: $(VENV)/.jars build/spark.jsa s3-server
	$(PYTEST) $(REAL_SPREAD) $(REAL) -m "$(PROCESSES) and not alone"
	$(PYTEST) $(ALONE) -m "$(PROCESSES) and alone"

.PHONY: test-unit
test-unit: $(VENV)/.ready ## pure parts, contracts, properties (no process, no JVM)
	$(PYTEST) $(SPREAD) $(FAST) -m "$(PLAIN) and not integration"

.PHONY: test-sim
test-sim: $(VENV)/.ready ## nodes and whole clusters in virtual time, from seeds
	$(PYTEST) $(SPREAD) tests/sim

.PHONY: test-integration
test-integration: test-sim ## whole clusters: simulated from seeds, and real processes
	$(PYTEST) $(REAL_SPREAD) $(REAL) -m "$(PLAIN) and integration and not alone"
	$(PYTEST) $(ALONE) -m "$(PLAIN) and integration and alone"

.PHONY: test-spark
test-spark: $(VENV)/.jars build/spark.jsa ## Spark source and sink, Delta tables read by Spark
	$(PYTEST) $(REAL) -m "spark and not s3 and not peer and not chaos"

.PHONY: test-s3
test-s3: $(VENV)/.ready s3-server ## the tier on a real S3 server (needs Go, else skipped)
	$(PYTEST) $(REAL) -m s3

.PHONY: black-hole
black-hole: $(VENV)/.ready s3-server ## a real S3 server is silent for 30 s under load, then refuses requests and loses answers; figures
	BLACK_HOLE=long $(PYTEST) tests/s3/test_black_hole.py -m s3 -s

.PHONY: test-chaos
test-chaos: $(VENV)/.ready ## five rounds of kill -9 under load, and four faults of a cluster
	$(PYTEST) tests/chaos -m chaos

.PHONY: check
check: $(VENV)/.ready ## lint, types, layers, generated pages
	$(VENV)/bin/ruff check .
	$(VENV)/bin/codespell src log server client tiering sparkconnector sim notebooks docs *.md
	$(VENV)/bin/mypy -p pk -p bench & types=$$!; \
	  $(PYTEST) tests/test_tidy*.py || { wait $$types; exit 1; }; wait $$types

##@ Long runs and comparisons
.PHONY: sim
sim: $(VENV)/.ready ## one seeded run of the whole cluster in virtual time (SEED=)
	$(PY) -m pk.sim $(or $(SEED),1) $(ARGS)

.PHONY: sim-long
sim-long: $(VENV)/.ready ## a campaign of simulated clusters (SEEDS=), resumable from docs/sim-long.jsonl, into docs/sim-long.md
	$(PY) -m pk.sim.long --seeds $(SEEDS) --summary docs/sim-long.md $(ARGS)

.PHONY: canaries
canaries: $(VENV)/.ready ## look again for the seeds that notice what is broken on purpose
	$(PY) -m pk.sim.canaries $(ARGS)

.PHONY: canaries-faster
canaries-faster: $(VENV)/.ready ## look for seeds that notice a canary in less CPU time than the recorded ones
	$(PY) tests/sim/faster_canaries.py $(ARGS)

.PHONY: chaos
chaos: $(VENV)/.ready ## 50 rounds of kill -9 under load (ROUNDS=, SEED=); a verdict table
	$(PY) tests/chaos/run.py --rounds $(or $(ROUNDS),50) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: chaos-cluster
chaos-cluster: $(VENV)/.ready ## three nodes: kills, freezes, cut networks, lost disks (SEED=); a verdict
	$(PY) tests/chaos/cluster_run.py $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: eos
eos: $(VENV)/.ready ## exactly once: a read-process-write loop in transactions, brokers and clients killed (SEED=); a verdict
	$(PY) tests/eos/run.py $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: groups
groups: $(VENV)/.ready ## two groups of five members: rolling restarts, coordinators killed, offsets in transactions (SEED=); a verdict
	$(PY) tests/groups/run.py $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: spark-exactly-once
spark-exactly-once: $(VENV)/.jars ## a streaming query whose driver and tasks are killed at each step of a batch (STORE=file|s3, SEED=; ARGS=--together: with commit_together); a verdict
	$(PY) tests/spark_exactly_once/run.py --store $(or $(STORE),file) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: audit
audit: $(VENV)/.jars ## maintained tables: jobs, tier processes and leaders killed, OPTIMIZE from outside (STORE=file|s3, SEED=); a verdict table
	$(PY) tests/audit/run.py --store $(or $(STORE),file) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: owners
owners: $(VENV)/.jars ## ten owners of one table of 100,000 files, under constant retention and the job optimize (STORE=file|s3); a verdict
	$(PY) tests/owners/run.py --store $(or $(STORE),file) $(ARGS)

.PHONY: jepsen
jepsen: $(VENV)/.ready ## Jepsen's queue workload: sends, polls, transactions under kills, pauses, cut links (SECONDS=, ROUNDS=, SEED=); a verdict table
	$(PY) tests/jepsen/run.py --seconds $(or $(SECONDS),300) --rounds $(or $(ROUNDS),5) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: abuse
abuse: $(VENV)/.ready ## bit flips, wrong clocks, full disks, hostile peers (SEED=); a verdict table
	$(PY) tests/abuse/run.py $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: golden
golden: $(VENV)/.jars ## the golden directory of a new format; that of a format is written once
	$(PY) tests/golden/golden.py

.PHONY: upgrade
upgrade: $(VENV)/.ready ## three nodes under load, from the first build of this format to this one and back
	$(PY) tests/golden/upgrade.py $(ARGS)

.PHONY: soak
soak: $(VENV)/.ready ## ten minutes at half the produce peak (MINUTES=): memory, disk, descriptors
	$(PY) tests/soak/run.py --minutes $(or $(MINUTES),10) $(ARGS)

.PHONY: soak-cluster
soak-cluster: $(VENV)/.ready ## an hour of three nodes under full load (MINUTES=): is a living one taken for dead?
	$(PY) tests/soak/cluster_run.py --minutes $(or $(MINUTES),60) $(ARGS)

.PHONY: bench
bench: $(VENV)/.jars ## side by side with Apache Kafka (NAME=produce_columnar, or all), into docs/bench.md
	$(PY) -m bench $(NAME) --json --write docs/bench.md $(ARGS)

.PHONY: peer
peer: $(VENV)/.jars ## the same scenarios on Apache Kafka
	$(PYTEST) tests/peer -m peer

##@ The house
.PHONY: help
help: ## this list
	@awk 'BEGIN {FS = ":.*## "} \
	  /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(VENV)/.jars ## the environment in .venv/, and the jars Spark needs
	@$(PY) -m pk.sparkconnector.columnar_jar >/dev/null

.PHONY: columnar-versions
columnar-versions: $(VENV)/.jars ## compile the columnar reader against each supported Spark; downloads 94 MB once
	$(PY) tests/spark/compile_columnar.py $(VERSIONS)

.PHONY: columnar-fuzz
columnar-fuzz: $(VENV)/.jars ## the columnar reader's decoder beside Python's (MUTATIONS=, SEED=, MINUTES=), resumable with its seed
	$(PY) tests/spark/columnar_fuzz.py --mutations $(or $(MUTATIONS),10000000) $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

.PHONY: docs
docs: $(VENV)/.ready ## the pages of docs/ that are made from the tables the code runs on
	$(PY) docs/generate.py

.PHONY: docs-site
docs-site: $(VENV)/.ready ## the documentation site, into build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "build/site is ready: $(PY) -m http.server --bind 127.0.0.1 --directory build/site"

.PHONY: format
format: $(VENV)/.ready ## sort imports, fix what ruff can fix, format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

.PHONY: proto
proto: $(VENV)/.ready ## src/pk/wire/pk_pb2.py from proto/pk.proto
	cd src/pk/wire && PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(CURDIR)/$(PY) -m grpc_tools.protoc \
	  -I../../../proto --python_out=. --mypy_out=. ../../../proto/pk.proto

.PHONY: clean
clean: ## everything that can be made again, .venv/ included
	rm -rf $(VENV) build dist .demo .cluster .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info spark-warehouse metastore_db derby.log

.PHONY: java
java:
	@if [ ! -x "$${JAVA_HOME:-/nonexistent}/bin/java" ] && ! command -v java >/dev/null; then \
	  echo "error: Java 17 is missing: apt-get install openjdk-17-jre-headless (Debian, Ubuntu)," \
	    "dnf install java-17-openjdk-headless (Fedora), or set JAVA_HOME"; exit 1; \
	fi

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "error: pk needs Python 3.11 or newer; $(PYTHON) is not: make PYTHON=/path/to/python3.11"; exit 1; }
	[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[spark,s3,demo,bench,notebooks,docs,dev]'
	@touch $@

$(VENV)/.jars: $(VENV)/.ready | java
	$(PY) -m pk.sparkconnector.jars >/dev/null
	@touch $@

# JVMs of the tests map it instead of loading classes from jars.
build/spark.jsa: $(VENV)/.jars tests/fixtures/java_archive.py
	$(PY) tests/fixtures/java_archive.py $@

.PHONY: s3-server
s3-server:
	@mkdir -p $(VENV)/bin; \
	if [ -x $(VENV)/bin/versitygw ] || command -v versitygw >/dev/null; then :; \
	elif command -v go >/dev/null; then \
	  echo "building the S3 server (a few minutes, once)"; \
	  GOBIN="$(CURDIR)/$(VENV)/bin" GOTOOLCHAIN="$${GOTOOLCHAIN:-auto}" GOFLAGS=-buildvcs=false \
	    go install $(VERSITYGW); \
	elif [ "$(S3)" = required ]; then \
	  echo "error: the S3 tests need Go: apt-get install golang"; exit 1; \
	else \
	  echo "S3 tests are skipped: they need Go 1.21 or newer (https://go.dev/dl, or apt-get install golang)"; \
	fi
