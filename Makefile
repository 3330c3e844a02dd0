# `make help` lists the targets. ARGS go to the tool. PYTHON is the interpreter of the environment, and TORCH the version of
# torch in it. Each combination has its own environment: .venv, or .venv-3.10-torch2.10.0 with PYTHON=python3.10 TORCH=2.10.0.
PYTHON ?= python3
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
JOBS ?=
ARGS ?=
TORCH ?=

version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(call version,$(PYTHON)))$(if $(TORCH),-torch$(TORCH))
BIN := $(VENV)/bin
PINS = $(if $(filter 3.10,$(call version,$(PYTHON))),constraints-3.10.txt,constraints.txt)
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-input --constraint $(VENV)/constraints.txt
EXTRAS := dev,demo,docs,dp,tensorboard
DEMO_EXTRAS := sklearn,dp

# One thread a process: results do not depend on the machine, and parallel tests do not fight for cores.
export OMP_NUM_THREADS = 1
# The tests start a hundred processes: a cache of the library's bytecode saves half a second in each, and halves the collection.
unexport PYTHONDONTWRITEBYTECODE
# The theme's notice about its own future would stand in every build.
export NO_MKDOCS_2_WARNING = 1

.DEFAULT_GOAL := help
.PHONY: demo test test-fast test-long test-pythons coverage check wheel release bench bench-private bench-peers conformance conformance-peers clients kills campaign mutants two-jobs launchers hostile attacks differential dp-table docs lock clean help

demo: $(VENV)/.stamp-demo ## half a minute: train, kill and resume, replay, use two processes, and train privately
	$(BIN)/python examples/demo.py $(ARGS)

# JOBS processes at a time. On 2 cores, four: tests of several processes wait for each other for a third of their time.
test: $(VENV)/.stamp ## run the tests; make test ARGS="tests/backends -x" runs some of them
	$(BIN)/python -m pytest -n $(or $(JOBS),4) --dist worksteal $(ARGS)

test-fast: $(VENV)/.stamp ## the tests that start no process and are not slow
	$(BIN)/python -m pytest -n $(or $(JOBS),2) --dist worksteal --fast $(ARGS)

# A pyenv shim exists for each version and fails if its version is not selected, so the loop starts the interpreter.
test-pythons: ## the fast tests on each Python that is installed; PYTHONS="python3.10 python3.13"
	@failed=; for python in $(PYTHONS); do \
	  if $$python --version >/dev/null 2>&1; then \
	    echo "== $$python"; $(MAKE) --no-print-directory test-fast PYTHON=$$python || failed="$$failed $$python"; \
	  else echo "== $$python is not installed: skipped"; fi; \
	done; [ -z "$$failed" ] || { echo "failed on:$$failed"; exit 1; }

coverage: $(VENV)/.stamp ## the share of lines and branches that the fast tests run; all tests with ARGS=tests
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(or $(JOBS),2) --dist worksteal $(or $(ARGS),--fast)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

test-long: $(VENV)/.stamp ## batteries that take hours; continues where an interrupted run ended; ARGS="--restart" begins again
	$(BIN)/python -m tools.long_tests $(ARGS)

check: $(VENV)/.stamp ## format, lint, types, the table of features and the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@if [ -f tools/features.py ]; then echo "$(BIN)/python tools/features.py --check"; $(BIN)/python tools/features.py --check; fi
	$(BIN)/python tools/messages.py --check
	$(BIN)/python tools/words.py --check
	$(BIN)/python -m tools.editor_types
	@$(MAKE) --no-print-directory docs

bench: $(VENV)/.stamp ## time a training step
	$(BIN)/python -m tools.bench $(ARGS)

bench-private: $(VENV)/.stamp ## time private steps beside plain ones, a loop by hand and opacus
	$(BIN)/python -m tools.bench private $(ARGS)

bench-peers: .venv-peers/.stamp ## the same beside other trainers, in .venv-peers
	.venv-peers/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input \
	  --constraint tools/conformance/peers-constraints.txt --constraint constraints.txt --editable '.[tensorboard]'
	.venv-peers/bin/python -m tools.bench $(ARGS)

conformance: $(VENV)/.stamp ## put trainers to the public suite and print the table; ARGS="--trainer trainstack"
	$(BIN)/python -m tools.conformance $(ARGS)

conformance-peers: .venv-peers/.stamp ## make .venv-peers, with the other trainers at their pinned releases

clients: ## run scripts of users of 40 other projects, in environments of their own; continues after a kill; ARGS="--only timm"
	$(PYTHON) -m tools.clients $(ARGS)

kills: $(VENV)/.stamp ## kill trainings at 200 random moments and compare what the resumed ones end with
	$(BIN)/python -m tools.kills $(ARGS)

two-jobs: $(VENV)/.stamp ## start two jobs on one directory 50 times, with kills, stops and clock jumps; ARGS="--cases 5"
	$(BIN)/python -m tools.two_jobs $(ARGS)

launchers: $(VENV)/.stamp ## start trainings by torchrun on two hosts, SLURM, Ray, submitit and in pods, where they are installed; ARGS="slurm"
	$(BIN)/python -m tools.launchers $(ARGS)

dp-table: $(VENV)/.stamp ## published accuracies of private training beside ours, in hours; continues after a kill; ARGS="--rows cnn"
	$(BIN)/python -m tools.dp_table $(ARGS)

hostile: $(VENV)/.stamp ## read 20,000 hostile and 6,000 damaged checkpoints
	$(BIN)/python -m tools.hostile_checkpoints $(ARGS)

attacks: $(VENV)/.stamp ## attack private training through 54 kinds of user code; ARGS="--short", "--kinds dropout", "--guesses 0"
	$(BIN)/python -m tools.attacks $(ARGS)

campaign: $(VENV)/.stamp ## kill modules that keep state in many places, 120 times
	$(BIN)/python -m tools.kills.campaign $(ARGS)

mutants: $(VENV)/.stamp ## change 200 places of the source at random and count the changes that tests detect; continues after a kill; ARGS="--list"
	$(BIN)/python -m tools.mutants $(ARGS)

differential: $(VENV)/.stamp ## compare random trainings with a plain loop, bit by bit; ARGS="--cases 500 --seed 3"
	$(BIN)/python -m tools.differential $(ARGS)

# Not with --quiet: it drops the warnings before --strict can count them (mkdocs 1.6.1), so that no dead link fails.
docs: $(VENV)/.stamp ## build the documentation into build/site
	$(BIN)/mkdocs build --strict --site-dir build/site
	$(BIN)/python tools/public_names.py build/site
	$(BIN)/python -m tools.site_checks build/site

wheel: $(VENV)/.stamp ## build the wheel, install it alone in a fresh environment, and run the quickstart there
	$(BIN)/python -m tools.wheel

release: $(VENV)/.stamp ## build the distributions into dist/, check them, install the wheel alone and run README and quickstart
	@$(PIP) --editable '.[release]'
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tools.wheel dist

lock: ## resolve the pins of this Python again, constraints.txt or constraints-3.10.txt; make lock TORCH=x.y.z changes torch
	$(PYTHON) tools/lock.py --torch "$(TORCH)"

clean: ## remove what was built, the environment too
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## show this
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r target what; do printf '%-24s %s\n' "$$target" "$$what"; done

# A stamp is written last. Without the one of the demo nothing in the environment is trusted and it is made from scratch;
# with it, the other packages and a change of the pins are installed on top. No stamp is there during an installation, so
# an interrupted one is not trusted. The first import compiles: that takes 5 s for the demo, and 42 s for all of torch.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt constraints-3.10.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "trainstack needs Python 3.10 or newer, $(PYTHON) is older or missing. Name another: make PYTHON=python3.12 ..."; exit 1; }
	@if [ -f $@ ] || [ -f $(VENV)/.stamp ]; then rm -f $@ $(VENV)/.stamp; echo "[setup] pins have changed: updating $(VENV)"; \
	  else echo "[setup] 1/3 making $(VENV) with $(PYTHON)"; rm -rf $(VENV); $(PYTHON) -m venv $(VENV); fi
	@sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' $(PINS) > $(VENV)/constraints.txt
	@echo "[setup] 2/3 installing torch (about half a minute, more on a slow connection)"
	@$(PIP) --no-compile torch
	@echo "[setup] 3/3 installing trainstack and the packages of the demo (about a quarter of a minute)"
	@$(PIP) --no-compile --editable '.[$(DEMO_EXTRAS)]'
	@$(BIN)/python -m compileall -q -q -j 0 $(VENV)/lib || true # on all cores, unlike pip; templates in packages fail
	@touch $@
	@echo "[setup] done"

$(VENV)/.stamp: $(VENV)/.stamp-demo
	@echo "[setup] installing the tools of tests, checks and documentation (about a minute)"
	@rm -f $(VENV)/.stamp-demo $@
	@$(PIP) --editable '.[$(EXTRAS)]'
	@touch $(VENV)/.stamp-demo $@
	@echo "[setup] done"

.venv-peers/.stamp: tools/conformance/peers.txt tools/conformance/peers-constraints.txt
	@rm -rf .venv-peers && $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input \
	  --constraint tools/conformance/peers-constraints.txt --requirement tools/conformance/peers.txt
	@touch $@
