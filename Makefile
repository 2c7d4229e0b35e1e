# make demo | test | lint | test-adapters | clean. Needs python 3.11 to 3.13; everything is installed into .venv.
# Another interpreter or folder: make test PYTHON=python3.12 VENV=/tmp/venv312

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
INSTALL = $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

.PHONY: demo test test-adapters lint clean

demo: $(VENV)/core ## train the embedded policy against the embedded reward model, with a picture at the end
	$(VENV)/bin/python agents/grpo.py

test: $(VENV)/dev ## everything; what needs an extra is skipped where that is not installed
	$(VENV)/bin/python -m pytest -q

test-adapters: $(VENV)/extras $(VENV)-rllib/extras ## what the tests of other libraries and file formats skip without their extras
	$(VENV)/bin/python -m pytest -q tests/adapters tests/engine/loading tests/data tests/test_scores.py
	$(VENV)-rllib/bin/python -m pytest -q tests/adapters/test_rllib.py tests/adapters/test_pages.py -k rllib

lint: $(VENV)/dev ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy gym_rm

clean: ## remove what make made
	rm -rf $(VENV) $(VENV)-rllib build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The installs leave an empty file behind, so that they run again only when what they read has changed.
$(VENV)/core: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python 3.11, 3.12 or 3.13 found; name one: make PYTHON=..." >&2; exit 1; }
	@echo "installing gym-rm into $(VENV) (torch is large: this takes a minute or more)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	@touch $@

$(VENV)/dev: $(VENV)/core
	$(INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/extras: $(VENV)/dev
	$(INSTALL) -e '.[data,lora,sb3,torchrl,trl]' skrl
	@touch $@

# Ray pins an older gymnasium: an environment of its own, with constraints of its own.
$(VENV)-rllib/extras: pyproject.toml constraints-rllib.txt | $(VENV)/core
	$(PYTHON) -m venv $(VENV)-rllib
	$(VENV)-rllib/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-rllib.txt -e '.[dev,rllib]'
	@touch $@
