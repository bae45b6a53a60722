# make serve   run the server on the demo model        (ARGS="MODEL --port 9000 ...")
# make test    run one test of every kind              (ARGS="tests/engine -k cancel"; ARGS=--whole for all of them)
# make check   lint, types and tests, as CI does
# make docs    build the documentation site into site/
# make dist    build wheel and sdist into dist/, reproducibly
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
ARGS    ?=
WORKERS ?= 2

# On Linux: MLX's CUDA build where an NVIDIA driver is found, its CPU build elsewhere. On macOS: plain MLX.
ifeq ($(shell uname -s),Linux)
  DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1)
  ifeq ($(DRIVER),)
    EXTRA ?= cpu
  else
    EXTRA ?= $(shell [ "$(DRIVER)" -ge 580 ] && echo cuda || echo cuda12)
  endif
endif

# What the server needs, and what only tests need: developer tools, and clients of other projects.
comma  := ,
DEVICE := $(if $(EXTRA),[$(EXTRA)])
TESTS  := [dev,clients$(if $(EXTRA),$(comma)$(EXTRA))]
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup serve test check lint page-check page-format chromium types docs dist clean

setup: $(VENV)/.ready-tests

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Millstream needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python venv failed: on Debian, apt-get install python3-venv"; exit 1; }
	$(PIP) -e '.$(DEVICE)' pillow
	@# Without what they declare for video, microphones and training; what their models import is there already.
	$(PIP) --no-deps mlx-vlm mlx-audio
	@touch $@

$(VENV)/.ready-tests: $(VENV)/.ready
	@# mlx-vlm and mlx-audio lack packages on purpose, see above: no warnings.
	$(PIP) --no-warn-conflicts -e '.$(TESTS)'
	@touch $@

# Packages of Node, where npm is: the AI SDK, and what checks the pages. Their tests are skipped elsewhere.
NODE := $(VENV)/node
export MILLSTREAM_NODE_PACKAGES ?= $(CURDIR)/$(NODE)

$(NODE)/.ready: tests/clients/package.json $(VENV)/.ready
	@mkdir -p $(NODE) && cp tests/clients/package.json $(NODE)
	@if command -v npm > /dev/null; then npm install --prefix $(NODE) --no-package-lock --no-audit --no-fund --loglevel error || echo "npm failed: the tests of the AI SDK and the checks of the pages are skipped"; fi
	@touch $@

serve: $(VENV)/.ready
	$(BIN)/millstream serve $(ARGS)

# The suite runs in parallel. A choice of tests does not: it would wait longer for the workers than for the tests.
PARALLEL := $(if $(filter-out --whole,$(ARGS)),,-n $(WORKERS) --dist worksteal)

# The browser that the tests of the pages drive. Only root on Debian installs it; the tests say how, where it is missing.
chromium:
	@if ! command -v chromium > /dev/null && ! command -v google-chrome > /dev/null && command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y chromium > /dev/null || echo "no Chromium: the tests of the pages are skipped"; fi

# On CI's machine, which others use too, a test that fails runs once more, and the summary lists it as RERUN: one that
# passes then is still a defect, of the test or of what it tests.
RERUNS := $(if $(CI),--reruns 1 -rR)

# Tests start hundreds of servers and engines. Where PYTHONDONTWRITEBYTECODE is set, each would compile all modules anew.
test: setup $(NODE)/.ready chromium
	@$(BIN)/python -m compileall -q -j 0 src
	$(BIN)/python -m pytest $(PARALLEL) $(RERUNS) $(ARGS)

SOURCES := src tests bench examples scripts

lint: setup page-check
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

# The pages' scripts: types, rules and layout. `make page-format` lays them out.
PAGES := 'src/millstream/page/!(vendor)/**/*.{js,css}' 'src/millstream/page/*.html'
TOOLS := $(NODE)/node_modules/.bin

page-check: $(NODE)/.ready
	@if [ -x $(TOOLS)/tsc ]; then $(TOOLS)/tsc -p tests/page && $(TOOLS)/eslint -c tests/page/eslint.config.mjs src/millstream/page && $(TOOLS)/prettier --print-width 120 --log-level warn --check $(PAGES); else echo "no npm: the pages are not checked"; fi

page-format: $(NODE)/.ready
	$(TOOLS)/prettier --print-width 120 --log-level warn --write $(PAGES)

types: setup
	$(BIN)/mypy

check: lint types test

$(VENV)/.ready-docs: $(VENV)/.ready
	$(PIP) --no-warn-conflicts -e '.[docs]'
	@touch $@

docs: $(VENV)/.ready-docs
	@# Not --quiet: it would not count warnings, and let broken links pass.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "built: site/index.html"

# The time in the files is that of the last commit, so that whoever builds this commit gets the same bytes.
dist: setup
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis site dist
