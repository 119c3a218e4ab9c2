# make quickstart makes the environment and runs configs/quickstart.toml; make test makes it and runs the tests; make check is
# what CI runs before the tests.
PYTHON ?= python3.11
UV_VERSION := 0.13.8
TEST_WORKERS ?= 2
# A worker runs whole files. Folders run one after another, so that the engines and process groups of one end before the next.
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
LOCK ?= requirements/cpu.lock
BIN := .venv/bin

# Every process imports thousands of modules. Container images often forbid Python to keep their bytecode, and then each
# process compiles all of them again, which takes longer than all else that it does when it starts.
export PYTHONDONTWRITEBYTECODE :=

# A machine that gives pip a local folder of wheels gives it to uv too; elsewhere uv is told to take torch's CPU build.
# The GPU lock says torch===VERSION, which only PyPI's CUDA build is, so that uv does not look for a driver to choose a build.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
TORCH_BACKEND := $(if $(UV_FIND_LINKS)$(findstring gpu,$(LOCK)),,--torch-backend=cpu)
STAMP := .venv/.installed-$(notdir $(LOCK))
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps

# Transformer Engine's PyTorch part is published as source only, and fits no torch but the one it was built against.
TE_PIN := $(shell grep '^transformer-engine-torch==' $(LOCK))
TE_STAMP := $(if $(TE_PIN),.venv/.$(TE_PIN)-$(shell grep '^torch==' $(LOCK)))

.PHONY: env quickstart test check format lock clean

env: $(STAMP) $(TE_STAMP)
	@$(BIN)/python -m specrl.report.package_files

$(STAMP): $(LOCK) pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	grep -v '^transformer-engine-torch==' $(LOCK) | $(INSTALL) $(TORCH_BACKEND) -r -
	$(INSTALL) --no-build-isolation -e .
	touch $@

ifneq ($(TE_STAMP),)
# The build takes the machine's compiler and the headers of the locked CUDA packages, and needs neither a driver nor a CUDA
# toolkit; MAX_JOBS=N bounds its memory. uv's cache is not used, because a build in it may belong to another torch, and
# NVTE_PYTORCH_FORCE_BUILD keeps the package from looking for a finished build on GitHub.
$(TE_STAMP): | $(STAMP)
	@command -v $(CXX) >/dev/null || { echo "make env: $(TE_PIN) is compiled here, but there is no $(CXX): install g++, or set CXX to a C++ compiler"; exit 1; }
	CUDA_HOME= NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE CXX=$(CXX) \
		$(INSTALL) --no-cache --reinstall --no-build-isolation '$(TE_PIN)'
	touch $@
endif

quickstart: env
	$(BIN)/specrl run configs/quickstart.toml

test: env
	$(PYTEST) tests/exactness
	$(PYTEST) tests/integration tests/slurm tests/gpu
	$(PYTEST) tests/unit tests/security

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: env
	cd requirements && ../$(BIN)/uv pip compile -q cpu.in --override overrides.txt --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-header --no-annotate -o cpu.lock
	sed -i 's/^torch==\([0-9.]*\)+cpu/torch==\1/' requirements/cpu.lock
	cd requirements && ../$(BIN)/uv pip compile -q gpu.in --override overrides-gpu.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-emit-find-links --no-header --no-annotate -o gpu.lock
	sed -i 's/^torch==/torch===/' requirements/gpu.lock

clean:
	rm -rf .venv
