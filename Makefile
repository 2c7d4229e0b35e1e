# make demo | test | test-all | lint | docs | clean. Needs Python 3.11 to 3.14; installs everything into .venv.
# To use another interpreter or folder: make test PYTHON=python3.12 VENV=.venv312

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
PIP = -m pip install --disable-pip-version-check --quiet
PYTEST = -m pytest -q -n 2 --durations=50 --durations-min=3

# Tests run in two processes on two cores: a thread that waits must sleep, or it takes the core of the other process.
export OMP_WAIT_POLICY = passive

# What touches the oldest supported torch, transformers and gymnasium.
OLDEST = tests/adapters/test_nemo_gym.py tests/adapters/test_rllib.py \
	tests/engine/backbones/test_tree_attention.py tests/engine/loading/test_checkpoint.py \
	tests/engine/test_parity.py tests/engine/test_compiled_cuda.py \
	tests/envs/tools/test_tool.py tests/envs/test_spaces.py tests/envs/test_steps.py tests/envs/test_vector.py tests/envs/test_wrappers.py \
	tests/generation/test_decoding.py tests/policy/test_trained_policy.py tests/test_constraints.py \
	tests/training/test_reward_runs.py

.PHONY: demo test test-rest test-long test-oldest test-real test-vllm test-trainers test-all lint docs docs-links clean

demo: $(VENV)/core ## train the embedded policy against the embedded reward model, and write a page about the run
	$(VENV)/bin/gym-rm demo

test: $(VENV)/dev ## run the tests that take less than five seconds or so each; those that need an extra skip if it is not installed
	@rm -f $(VENV)/passed-tests
	$(VENV)/bin/python $(PYTEST) --dist loadfile -m 'not slow' --passed-tests=$(VENV)/passed-tests

test-rest: $(VENV)/extras ## run the tests that have not passed in make test: slow ones, and those that need an extra
	$(VENV)/bin/python $(PYTEST) --dist worksteal -m 'not long' --passed-tests=$(VENV)/passed-tests

test-long: $(VENV)/extras ## run the tests that take minutes each: before a release, and after a change of what they train
	$(VENV)/bin/python $(PYTEST) --dist worksteal -m long

test-oldest: $(VENV)-oldest/dev ## run some tests with the oldest supported versions, kernels in Triton's interpreter, and RLlib's (torch takes 5 GB on Linux)
	$(VENV)-oldest/bin/python $(PYTEST) --dist loadfile -m 'not slow' $(OLDEST)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python $(PYTEST) --dist worksteal tests/engine/kernels
	$(VENV)-oldest/bin/python -m pytest -q tests/adapters/test_pages.py -k rllib

test-real: $(VENV)/extras ## run the tests with small real models, which are fetched once into ~/.cache/gym_rm (630 MB)
	-$(VENV)/bin/python scripts/real_models.py
	$(VENV)/bin/python $(PYTEST) --dist loadfile --no-loadscope-reorder -m real tests/real

test-vllm: $(VENV)/extras ## run the tests against a real vLLM for CPUs, which is installed once into ~/.cache/gym_rm (3.4 GB)
	vllm=$$(PYTHON=$(VENV)/bin/python scripts/vllm_environment.sh) && \
		$(VENV)/bin/python -m pytest -q --durations=20 --vllm="$$vllm" tests/real_vllm

TRAINERS = $(notdir $(patsubst %/requirements.txt,%,$(wildcard tests/trainers/*/requirements.txt)))

test-trainers: $(TRAINERS:%=test-trainer-%) ## run the tests with the real trainers, each in an environment of its own, .venv-NAME

test-trainer-%: $(VENV)/core ## run the tests with one of them: make test-trainer-verl
	folder=$$(PYTHON=$(VENV)/bin/python scripts/trainer_environment.sh $*) && \
		$$folder/bin/python -m pytest -q --durations=20 tests/trainers/$*

test-all: test test-rest test-long test-oldest lint ## run everything

lint: $(VENV)/extras ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy gym_rm

docs: $(VENV)/docs ## build the site, docs/_build/html; a warning is an error
	$(VENV)/bin/python -m sphinx -q -W --keep-going -j auto -b html docs docs/_build/html

docs-links: $(VENV)/docs ## check the links of the site to other sites; needs a network
	$(VENV)/bin/python -m sphinx -q -b linkcheck docs docs/_build/links

clean: ## remove installed and generated files
	rm -rf $(VENV) $(VENV)-* build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# An install creates an empty file, so that it runs again only if its inputs have changed.
$(VENV)/core: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 not found; set its path: make PYTHON=..." >&2; exit 1; }
	@echo "installing gym-rm into $(VENV) (takes a minute or more, because torch is large)"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/dev: $(VENV)/core
	$(VENV)/bin/python $(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/extras: $(VENV)/dev
	$(VENV)/bin/python $(PIP) -c constraints.txt -e '.[data,docs,lora,math,sb3,torchrl,trl,ray,server]' sb3-contrib skrl 'ray[serve]' schemathesis playwright \
		moviepy pygame-ce opencv-python-headless build check-jsonschema hatchling hatch-fancy-pypi-readme
	@touch $@

$(VENV)/docs: $(VENV)/core
	$(VENV)/bin/python $(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)-oldest/dev: pyproject.toml constraints-oldest.txt | $(VENV)/core
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python $(PIP) --no-compile -c constraints-oldest.txt -e '.[dev,lora,rllib,server]'
	@touch $@
