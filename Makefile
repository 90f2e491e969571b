# Every target sets up what it needs; all are safe to repeat.

PYTHON ?= python3
BIN := .venv/bin
# Where the environment forbids to keep what is compiled, every process would compile torch again.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := sh docs/scripts/install.sh $(BIN)/python --constraint constraints.txt
INSTALLED := .venv/.installed
DEVELOPMENT := .venv/.development
NOTEBOOKS := .venv/.notebooks
DOCS := .venv/.docs
FINDINGS := .venv-findings/.installed
# Of these pip gives the newest; torch is the pinned one, of which a machine without CUDA can take a CPU wheel.
NEWEST ?= $(shell grep '^torch==' constraints.txt) transformers plotly flash-linear-attention triton
NEWEST_TESTS := tests/unit/huggingface tests/unit/laws/test_adapters*.py tests/unit/analysis/pages \
	tests/unit/analysis/matrices/test_heatmaps.py tests/parity/test_opened_*.py tests/parity/test_adapters_peers.py \
	tests/parity/test_attention.py tests/parity/test_blocks.py tests/parity/test_small_models.py

.PHONY: install development mqar test check format lint types arch collect shapes cluster verify faults mutants bench notebooks docs gallery gpu browser findings newest clean

# What the commands of the README use.
install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable ".[browser]"
	touch $@

# All that tests, checks and benchmarks use, in one installation, as each takes seconds of its own:
# tools, loggers, what runs cells of notebooks, and public implementations to compare with. mamba-ssm's own
# requirements are for CUDA, and so is its compiled extension: both are left out.
development: $(DEVELOPMENT)

$(DEVELOPMENT): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) setuptools wheel ninja --editable ".[dev,browser,peers,tensorboard,wandb]"
	MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE $(INSTALL) --no-deps --no-build-isolation mamba-ssm
	touch $(INSTALLED) $@

# What runs notebooks.
$(NOTEBOOKS): $(INSTALLED)
	$(INSTALL) --editable ".[notebooks]"
	touch $@

# What builds the site of docs/ and draws the gallery.
$(DOCS): $(INSTALLED)
	$(INSTALL) --editable ".[docs]"
	touch $@

# The main job: the paper's hardest recall, then the verdict and the path of its report.
mqar: install
	$(BIN)/lab mqar --seq-len 2048 --d-model 64 --out runs/mqar

test: development browser
	$(BIN)/pytest -n 2 --dist worksteal

# Types take most of the time, on one core: the others are checked meanwhile.
check: development
	@$(MAKE) --no-print-directory --jobs 2 types format lint arch collect

format: development
	$(BIN)/ruff format --check .

lint: development
	$(BIN)/ruff check .

# More room for young objects saves a sixth of its time; a second thread saves none.
types: development
	NODE_OPTIONS="$(NODE_OPTIONS) --max-semi-space-size=64" $(BIN)/pyright

arch: development
	$(BIN)/lint-imports

# Whether all tests can be imported. It compiles what they import, which both workers of `make test` would do.
collect: development
	$(BIN)/pytest --collect-only -qq > .venv/.collected || (cat .venv/.collected; false)

# Laws and properties with the shapes and dtypes of all arguments checked at every call. The lab's
# own plugin would import the lab before its functions can be wrapped.
shapes: development
	$(BIN)/pytest -n 2 --dist worksteal -p no:lawful --jaxtyping-packages=lab,tasks,analysis,beartype.beartype \
		tests/property tests/unit/laws/test_cases.py tests/unit/ops tests/unit/layers

# A sweep on a Ray cluster of this machine, to the same bits; `make verify` kills parts of one, too.
cluster: development
	$(BIN)/pytest -m cluster tests/unit/sweeps

# What takes minutes: thousands of random examples a property, whole notebooks, every planted fault.
verify: shapes cluster
	$(BIN)/pytest -n 2 --dist worksteal tests/property --hypothesis-profile=thorough
	$(BIN)/pytest -n 2 --dist worksteal -m thorough

# Thousands of faults and odd values, the same ones again by number: FAULTS is how many
# of each suite, FAULTS_FROM the first number.
faults: export FAULTS ?= 2000
faults: development
	$(BIN)/pytest -n 2 --dist worksteal -s -m '' tests/faults

# Faults planted in a copy of the sources, one after another: the tests named for each must notice.
mutants: development
	$(BIN)/python tests/mutants/run.py

# JupyterLab refuses root, whom containers run as, without the flag; for others it means nothing.
notebooks: $(NOTEBOOKS)
	$(BIN)/jupyter lab --allow-root --ServerApp.root_dir=notebooks

# The pages of docs/ with an API reference: site/index.html.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Repeats what docs/gallery.md prints, takes its pictures anew, and runs the notebooks that have changed.
gallery: $(DOCS) browser
	$(BIN)/python docs/scripts/draw_gallery.py
	$(BIN)/python docs/scripts/run_notebooks.py

bench: development
	$(BIN)/lab bench

# What needs CUDA; the benchmarks' table is for LOG.md.
gpu: development
	$(BIN)/pytest -m gpu
	$(BIN)/lab bench --markdown --only gpu

# The report's tests need a browser: Debian's Chromium without windows, else one that playwright brings.
browser: development
	@command -v chromium-headless-shell >/dev/null || \
		(apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell) || \
		$(BIN)/playwright install --with-deps chromium

# Faults found in public packages, each shown by a program that needs no part of this one.
findings: $(FINDINGS)
	.venv-findings/bin/python docs/findings/programs/run.py

# A place of their own, for the versions named; their requirements are listed whole.
$(FINDINGS): docs/findings/programs/requirements.txt constraints.txt
	$(PYTHON) -m venv .venv-findings
	sh docs/scripts/install.sh .venv-findings/bin/python --constraint constraints.txt torch setuptools
	sh docs/scripts/install.sh .venv-findings/bin/python --no-deps --requirement docs/findings/programs/requirements.txt
	touch $@

# What users get who install today: constraints.txt does not hold here.
newest:
	$(PYTHON) -m venv .venv-newest
	sh docs/scripts/install.sh .venv-newest/bin/python --upgrade $(NEWEST) pytest pytest-xdist hypothesis \
		--editable ".[browser,hf]"
	@command -v chromium-headless-shell >/dev/null || .venv-newest/bin/playwright install --with-deps chromium
	.venv-newest/bin/pytest -n 2 --dist worksteal $(NEWEST_TESTS)

clean:
	rm -rf .venv .venv-findings .venv-newest .pytest_cache .ruff_cache .hypothesis .import_linter_cache runs site
