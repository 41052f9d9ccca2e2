# Two commands on a machine with Python >= 3.11: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := Fix the spelling and print the whole text: The quick brwon fox jumps over the lazy dog. It then runs into the forrest, where it meets a wise old owl. The owl asks the fox why it is in such a hury.

# A process that may not keep its bytecode compiles all that it imports, 2.5 s of CPU time in place of 1.0; tests start many.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-tpu-compile test-gpu-compile test-peers lint linked types check docs docs-serve dist format bench clean

# Decode a prompt with SmolLM2 next to plain decoding, and say whether the texts are identical.
demo: $(VENV)/.demo
	$(BIN)/specjax generate "$(DEMO)" --compare

# Lint, types, the site and every test that fits on a CPU. The first three take one core each.
test:
	$(MAKE) -j 2 lint types docs
	$(MAKE) check

lint: $(VENV)/.dev linked
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/linked && $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml

# The packages live in several folders; mypy and import-linter see them where the wheel puts them.
linked:
	@rm -rf build/linked && mkdir -p build/linked/specjax
	@ln -s $(CURDIR)/specjax/* $(CURDIR)/models $(CURDIR)/configs $(CURDIR)/pallas_kernels build/linked/specjax/

types: $(VENV)/.dev linked
	cd build/linked && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/build/mypy -p specjax

# The site of docs/, into build/site; a link that leads nowhere fails. The reference reads the packages as they are linked.
SITE := PYTHONPATH=build/linked DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
docs: $(VENV)/.dev linked
	$(SITE) build -q

docs-serve: $(VENV)/.dev linked
	$(SITE) serve

# Compilers allocate much and keep little: memory that is kept is not zeroed and merged anew (four folders: 167 s of CPU
# time without, 148 with).
MALLOC := GLIBC_TUNABLES=glibc.malloc.mxfast=0:glibc.malloc.trim_threshold=4294967296:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.top_pad=67108864

# A worker that dies ends the run: with another one in its place, pytest-xdist waits forever at the end.
check: $(VENV)/.dev
	$(MALLOC) $(BIN)/pytest -n auto --max-worker-restart 0 --dist loadfile -m "not exhaustive"

# With what repeats a proof for more methods, meshes and settings (an hour on two cores): before a release.
test-all: lint types
	$(BIN)/pytest -n auto --dist loadfile

# Compile for TPUs that are not here; needs libtpu, no TPU: pip install -e '.[tpu-compile]'.
test-tpu-compile: $(VENV)/.dev
	$(BIN)/uv pip install -q --python $(BIN)/python -e '.[tpu-compile]'
	$(BIN)/pytest -m tpu_compile

# Compile for GPUs that are not here; needs the CUDA compiler, no GPU: pip install -e '.[gpu-compile]'.
test-gpu-compile: $(VENV)/.dev
	$(BIN)/uv pip install -q --python $(BIN)/python -e '.[gpu-compile]'
	$(BIN)/pytest -m gpu_compile

# Models of Tunix and gemma, `decode` as the sampler of Tunix, and llm-comply against the server: Tunix and gemma want
# older packages beside them.
PEERS := build/peers
test-peers: $(VENV)/.dev
	$(BIN)/uv venv -q --allow-existing --python $(BIN)/python $(PEERS)
	$(BIN)/uv pip install -q --python $(PEERS)/bin/python -e '.[server,constraints]' google-tunix==0.1.7 gemma==3.3.0 llm-comply==0.5.0 flatbuffers etils httpx pytest pytest-xdist hypothesis scipy
	JAX_PLATFORMS=cpu $(PEERS)/bin/python -m pytest -q -rs tests/models/test_tunix.py tests/models/test_gemma.py tests/models/test_jax_llm_examples.py tests/examples/test_tunix_grpo.py tests/server/test_llm_comply.py

# The wheel and the source archive, checked as an index would.
dist: $(VENV)/.dev
	rm -rf build/dist
	$(BIN)/uv pip install -q --python $(BIN)/python build twine check-wheel-contents
	$(BIN)/python -m build -q --outdir build/dist .
	$(BIN)/twine check --strict build/dist/*
	$(BIN)/check-wheel-contents build/dist/*.whl

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/specjax bench $(PROMPTS) --method prompt_lookup --method token_recycling --out bench.json

clean:
	rm -rf $(VENV) build

# uv resolves and installs in a minute what takes pip ten; torch comes by pip, which also looks where a local build lies.
$(VENV)/bin/uv:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "specjax needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/uv
	$(BIN)/uv pip install -q --python $(BIN)/python -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/uv
	$(BIN)/python -m pip install -q --no-compile torch==2.13.0
	$(BIN)/uv pip install -q --python $(BIN)/python -e '.[dev]'
	@touch $@ $(VENV)/.demo
