# make quickstart: environment and the main job.   make test: environment and the tests.   make check: what CI checks first.
PYTHON ?= python3.11
UV_VERSION := 0.13.8
TEST_WORKERS ?= 2
# Whole files to two workers; folder by folder, so that engines and process groups of one end before the next.
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
LOCK ?= requirements/cpu.lock
BIN := .venv/bin

# A machine that gives pip a local folder of wheels gives it to uv too; elsewhere uv picks torch's CPU build.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
TORCH_BACKEND := $(if $(UV_FIND_LINKS),,--torch-backend=$(if $(findstring gpu,$(LOCK)),auto,cpu))
STAMP := .venv/.installed-$(notdir $(LOCK))

.PHONY: env quickstart test check format lock clean

env: $(STAMP)

$(STAMP): $(LOCK) pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(TORCH_BACKEND) -r $(LOCK)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $@

quickstart: env
	$(BIN)/specrl run configs/quickstart.toml

test: env
	$(PYTEST) tests/exactness
	$(PYTEST) tests/integration tests/slurm tests/gpu
	$(PYTEST) tests/unit

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: env
	cd requirements && ../$(BIN)/uv pip compile -q cpu.in --override overrides.txt --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-header --no-annotate -o cpu.lock
	sed -i 's/^torch==\([0-9.]*\)+cpu/torch==\1/' requirements/cpu.lock
	cd requirements && ../$(BIN)/uv pip compile -q gpu.in --override overrides-gpu.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-emit-find-links --no-header --no-annotate -o gpu.lock

clean:
	rm -rf .venv
