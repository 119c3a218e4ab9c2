# make quickstart makes the environment and runs configs/quickstart.toml; make test makes it and runs the tests but for those of
# whole runs, and make test-all, as CI does, runs those too; make check is what CI runs before, and builds the site, as make docs
# alone does.
PYTHON ?= python3.12
TEST_WORKERS ?= 2
# A worker runs whole files. Folders run one after another, so that the engines and process groups of one end before the next.
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
# Whole pipelines and trainings, many of them killed and resumed: half of the time that all tests take.
LONG := $(patsubst %,tests/integration/test_%.py,bench bubbles kinds menu mtp_pipeline parallel_runs pipeline tutorial) \
	tests/slurm/test_slurm_sweep.py
LOCK ?= requirements/cpu.lock
BIN := .venv/bin

# Every process imports thousands of modules. Container images often forbid Python to keep their bytecode, and then each
# process compiles all of them again, which takes longer than all else that it does when it starts.
export PYTHONDONTWRITEBYTECODE :=

# A machine that gives pip a local folder of wheels gives it to uv too. The locks say torch===VERSION, which only PyPI's build
# is: == would also accept a +cpu build in such a folder.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
STAMP := .venv/.installed-$(notdir $(LOCK))
TOOLS := requirements/tools.lock
# Nothing is fetched whose hash the locks do not have: packages that are published as source only are built with the
# setuptools of TOOLS, and not in an environment that the installer would fill for each.
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation

# Transformer Engine's PyTorch part is published as source only, and fits no torch but the one it was built against.
pin = $(firstword $(shell grep '^$(1)==' $(LOCK)))
# The lines of a package in a lock: all but the last end in a backslash.
lines = /^$(1)==/,/[^\\]$$/
TE_PIN := $(call pin,transformer-engine-torch)
TE_STAMP := $(if $(TE_PIN),.venv/.$(TE_PIN)-$(call pin,torch))

.PHONY: env quickstart test test-all check docs format lock clean

env: $(STAMP) $(TE_STAMP)

$(STAMP): $(LOCK) $(TOOLS) pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r $(TOOLS)
	sed '$(call lines,transformer-engine-torch)d' $(LOCK) | $(INSTALL) --require-hashes -r -
	$(INSTALL) -e .
	touch $@

ifneq ($(TE_STAMP),)
# The build takes the machine's compiler and the headers of the locked CUDA packages, and needs neither a driver nor a CUDA
# toolkit; MAX_JOBS=N bounds its memory. uv's cache is not used, because a build in it may belong to another torch, and
# NVTE_PYTORCH_FORCE_BUILD keeps the package from looking for a finished build on GitHub.
$(TE_STAMP): | $(STAMP)
	@command -v $(CXX) >/dev/null || { echo "make env: $(TE_PIN) is compiled here, but there is no $(CXX): install g++, or set CXX to a C++ compiler"; exit 1; }
	sed -n '$(call lines,transformer-engine-torch)p' $(LOCK) | \
		CUDA_HOME= NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE CXX=$(CXX) \
		$(INSTALL) --require-hashes --no-cache --reinstall -r -
	touch $@
endif

quickstart: env
	$(BIN)/specrl run configs/quickstart.toml

test: env
	$(PYTEST) tests/exactness
	$(PYTEST) tests/integration tests/slurm tests/gpu tests/security $(addprefix --ignore=,$(LONG))
	$(PYTEST) tests/unit

test-all: LONG :=
test-all: test

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture
	$(BIN)/python -m tests.budgets
	$(MAKE) --no-print-directory docs

# The site is built in the environment that its reference is read from. docs.lock has only what the other locks lack.
DOCS := requirements/docs.lock
DOCS_STAMP := .venv/.installed-$(notdir $(DOCS))

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet, --strict would see no warning

$(DOCS_STAMP): $(STAMP) $(DOCS)
	$(INSTALL) --require-hashes -r $(DOCS)
	touch $@

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

COMPILE = cd requirements && ../$(BIN)/uv pip compile -q --generate-hashes --python-version 3.12 --no-emit-index-url \
	--no-emit-find-links --no-header --no-annotate

lock: env
	$(COMPILE) tools.in -o tools.lock
	$(COMPILE) cpu.in --override overrides.txt -o cpu.lock
	$(COMPILE) docs.in $$(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/--no-emit-package \1/p' cpu.lock) -o docs.lock
	$(COMPILE) gpu.in --override overrides.txt --python-platform x86_64-manylinux_2_28 -o gpu.lock
	cp requirements/gpu.lock requirements/aarch64.lock
	$(COMPILE) gpu.in --override overrides.txt --python-platform aarch64-manylinux_2_34 -o aarch64.lock
	cmp requirements/gpu.lock requirements/aarch64.lock  # GH200 and GB200 have the same packages, and hashes are of all wheels
	rm requirements/aarch64.lock
	sed -i 's/^torch==\([0-9]\)/torch===\1/' requirements/cpu.lock requirements/gpu.lock

clean:
	rm -rf .venv site
