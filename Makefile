# `make serve` and `make test` do all the set-up; see README.md.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 3000
ARGS ?=
# Processes that run tests beside each other; 0: none, for a debugger. One more than cores, as
# many tests wait: for servers to start and end, for browsers, for limits of time.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || sysctl -n hw.ncpu) + 1)
BIN := $(VENV)/bin

# Without the tests that start servers or need minutes; `make test` runs all.
FAST := tests/cli tests/client tests/deploy tests/ipc tests/router tests/shard/loop tests/shard/sampling \
	tests/shard/machine tests/tools/docs tests/tools/test_walk.py tests/test_wheel.py tests/test_references.py \
	tests/test_imports.py tests/test_logs.py tests/settings/test_settings.py
# A file of tests runs in one process. In the order of the files the last ones are short.
BESIDE := -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder


# A processor without AVX512, whatever this one has: for torch, what it calls, and the kernels.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	KERNEL_CPU_NAME=haswell KERNEL_CPU_FEATURES=+avx2,+fma,+bmi,+bmi2,+lzcnt,+popcnt

# What Python compiles is kept, whatever an image says: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE =

.PHONY: serve check test test-thorough test-avx2 test-agents gpu lint types docs clean

serve: $(VENV)/.serve
	$(BIN)/python -m tgi_trio --port $(PORT) $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(BESIDE) -m "not thorough" $(ARGS)

# The other cases of tests that have many alike: families, formats, sizes.
test-thorough: $(VENV)/.test
	$(BIN)/python -m pytest $(BESIDE) -m thorough $(ARGS)

# SDKs and frameworks of others, which bring packages of their own; without them they are skipped.
.PHONY: test-sdks
test-sdks: $(VENV)/.sdks
	$(BIN)/python -m pytest tests/compat/sdks $(ARGS)

# Tools of others that quantise, against our readers of what they make.
.PHONY: test-quantisers
test-quantisers: $(VENV)/.quantisers
	$(BIN)/python -m pytest $(BESIDE) tests/shard/made_by_tools $(ARGS)

# Ray, 80 MB, in an environment of its own, which sees the packages of the other.
.PHONY: test-ray
test-ray: $(VENV)/.ray
	$(VENV)-ray/bin/python -m pytest -m ray tests/cluster/test_controller.py $(ARGS)

# Kernels run under the sanitizer, in Triton's interpreter: four times, so an hour on two cores.
.PHONY: test-sanitized
test-sanitized: $(VENV)/.test
	SANITIZE=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest $(BESIDE) --timeout 1200 \
		$(or $(ARGS),tests/shard/torch_backend tests/shard/adapters tests/shard/media \
		tests/company/test_device.py)

check: lint types
	$(BIN)/python -m pytest -q $(BESIDE) -m "not system and not thorough" $(FAST) $(ARGS)

# Coding agents from npm, fetched into a cache outside the tree; skipped with a reason without npm.
test-agents: $(VENV)/.test
	TEST_NPM=1 $(BIN)/python -m pytest -s tests/compat/agents $(ARGS)

# Clients in JavaScript, the same way.
.PHONY: test-javascript
test-javascript: $(VENV)/.test
	TEST_NPM=1 $(BIN)/python -m pytest tests/compat/javascript $(ARGS)

gpu: $(VENV)/.test
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

test-avx2: $(VENV)/.test
	$(AVX2) $(BIN)/python -m pytest $(BESIDE) $(or $(ARGS),tests/shard tests/bench)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

docs: $(VENV)/.test
	$(BIN)/python -m tools.docs --write

$(BIN)/pip:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "tgi-trio needs Python 3.11 or later; say which with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e .
	-$(BIN)/python -m tgi_trio.shard.cpu_backend tgi_trio/demo/model # compiles, so that no start has to
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[test]'
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt --no-deps timm  # its torchvision is stood in for
	touch $@ $(VENV)/.serve

$(VENV)/.sdks: pyproject.toml constraints.txt $(VENV)/.test
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[test,sdks]'
	touch $@

$(VENV)/.quantisers: pyproject.toml constraints.txt $(VENV)/.test
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[test,quantisers]'
	touch $@

$(VENV)/.ray: pyproject.toml constraints.txt $(VENV)/.test
	$(PYTHON) -m venv --without-pip --clear $(VENV)-ray
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(VENV)-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tgi-trio.pth"
	$(BIN)/pip --python $(VENV)-ray/bin/python install --disable-pip-version-check -q -c constraints.txt -e '.[ray]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-ray .pytest_cache .mypy_cache .ruff_cache .hypothesis
