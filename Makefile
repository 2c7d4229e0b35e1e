# make demo | test | test-slow | test-oldest | lint | test-adapters | clean. Needs Python 3.11 to 3.13; installs everything into .venv.
# To use another interpreter or folder: make test PYTHON=python3.12 VENV=.venv312

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
INSTALL = $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

# Tests run in two processes on two cores: a thread that waits must sleep, or it takes the core of the other process.
export OMP_WAIT_POLICY = passive

.PHONY: demo test test-slow test-oldest test-adapters lint clean

demo: $(VENV)/core ## train the embedded policy against the embedded reward model and plot the run
	$(VENV)/bin/python agents/grpo.py

test: $(VENV)/dev ## run the tests; tests that need an extra are skipped if it is not installed
	$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile -m 'not slow'

test-slow: $(VENV)/dev ## run the tests that take more than ten seconds each, such as worlds of torchrun
	$(VENV)/bin/python -m pytest -q -n 2 --dist worksteal -m slow --ignore tests/adapters

# Left out: the search and simulation of plans, the sandbox and code, which import neither torch nor transformers,
# and two files about signals: at every line of an environment, and to processes (test_replicas.py starts them too).
NOT_IN_OLDEST = tests/planning/nemo_rl tests/planning/test_search.py tests/planning/test_simulate.py \
	tests/envs/test_vector_interrupts.py tests/engine/executors/test_replica_processes.py \
	tests/sandbox tests/scorers/test_code.py tests/scorers/test_code_tests.py

test-oldest: $(VENV)-oldest/dev ## run the tests with the oldest supported versions (torch alone takes 5 GB on Linux)
	$(VENV)-oldest/bin/python -m pytest -q -n 2 --dist loadfile -m 'not slow' $(NOT_IN_OLDEST:%=--ignore %)

test-adapters: $(VENV)/extras $(VENV)-rllib/extras ## run the tests that need the libraries of the extras
	$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile tests/adapters tests/engine/loading tests/data tests/test_scores.py
	$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile tests/reports/test_evaluation_page.py tests/reports/test_run_page.py tests/training tests/agents -k 'page or adapter or lora or tensorboard or encoders_and_decoders or trl'
	$(VENV)/bin/python -m pytest -q -n 2 --dist worksteal tests/scorers/test_math.py tests/scorers/test_code.py tests/scorers/test_rules.py tests/scorers/test_remote_judge.py tests/generation tests/sandbox/test_forgeries.py
	$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile tests/server tests/scorers/test_remote.py tests/cli/test_serve.py tests/engine/executors/test_ray.py tests/planning/exports tests/training/test_remote_sampler.py
	$(VENV)-rllib/bin/python -m pytest -q tests/adapters/test_rllib.py tests/adapters/test_pages.py -k rllib

lint: $(VENV)/extras ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy gym_rm

clean: ## remove installed and generated files
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-rllib build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# An install creates an empty file, so that it runs again only if its inputs have changed.
$(VENV)/core: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 not found; set its path: make PYTHON=..." >&2; exit 1; }
	@echo "installing gym-rm into $(VENV) (takes a minute or more, because torch is large)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	@touch $@

$(VENV)/dev: $(VENV)/core
	$(INSTALL) -e '.[dev]'
	@touch $@

$(VENV)-oldest/dev: pyproject.toml constraints-oldest.txt | $(VENV)/core
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-oldest.txt -e '.[dev,lora]'
	@touch $@

$(VENV)/extras: $(VENV)/dev
	$(INSTALL) -e '.[code,data,language,lora,math,sb3,torchrl,trl,ray,server]' skrl 'ray[serve]' schemathesis playwright
	@touch $@

# Ray requires an older gymnasium, so it is installed into a separate environment with separate constraints.
$(VENV)-rllib/extras: pyproject.toml constraints-rllib.txt | $(VENV)/core
	$(PYTHON) -m venv $(VENV)-rllib
	$(VENV)-rllib/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-rllib.txt -e '.[dev,rllib]'
	@touch $@
