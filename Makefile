# What people type. `make help` lists it; everything is built into .venv and target/.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEPS := $(VENV)/.deps-installed
NATIVE := $(VENV)/.native-built
NATIVE_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find rust -name '*.rs' -o -name Cargo.toml)

# One interpreter for every build of the extension, so that its build cache stays valid.
export PYO3_PYTHON := $(abspath $(BIN)/python)
# As many builds, and as many processes of Python tests, run at a time.
JOBS ?= 2
# Tests whose examples are drawn.
RANDOM_RUST_TESTS := --test model --test shared_model --test geometry --test chains --test extra_keys --test extend \
  --test partial

FUZZ := rust/disk-store/fuzz
FUZZ_TARGETS := entry manifest store
FUZZ_SECONDS ?= 600

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint lint-rust lint-python types stubs test-builds test-rust test-loom test-threads test-python test-faults test-long fuzz fuzz-keep dist-check bench docs wheel sdist lock clean tools

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(NATIVE) ## serve a small model and two hybrids, stop one and start it again with its KV on disk, replay a thousand requests
	$(BIN)/python examples/serve.py
	$(BIN)/python examples/serve.py --sliding-window 64
	$(BIN)/python examples/serve.py --mamba --conversations 3
	$(BIN)/python examples/restart.py
	$(BIN)/pagekeeper replay --generate 1000 --pool-tokens 200000 --host 4x

# Builds and static checks first, beside each other: Python's packages arrive while Rust compiles. Then the tests, one
# target after the other and beside no build, since some check how long a call takes.
test: ## everything that continuous integration checks
	$(MAKE) --jobs=$(JOBS) --output-sync=target lint-python lint-rust test-builds
	$(MAKE) --jobs=1 test-rust test-loom test-python test-faults

lint: lint-rust lint-python ## formats, clippy, ruff, mypy, the stub against the binary, Rust docs; warnings are errors

lint-rust: | $(BIN)/python ## the Rust half of `lint`
	cargo fmt --all --check
	cargo fmt --manifest-path $(FUZZ)/Cargo.toml --check
	cargo clippy --workspace --all-targets --features bindings/faults --locked -- -D warnings
	cargo clippy --manifest-path $(FUZZ)/Cargo.toml --no-default-features --target-dir target --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

lint-python: types stubs ## the Python half of `lint`

types: $(DEPS)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy benches # by itself: it has a conftest of its own

stubs: $(NATIVE)
	$(BIN)/python -m mypy.stubtest pagekeeper._native

# The builds of the test targets, with the same features and folders, after clippy and not beside it: they share a lock.
test-builds: lint-rust
	if cargo nextest --version >/dev/null 2>&1; \
	  then cargo nextest run --workspace --locked --no-run; \
	  else cargo test --workspace --locked --lib --bins --tests --no-run; fi
	$(FAULTS_BUILD)
	$(LOOM_TEST) --no-run

test-rust: | $(BIN)/python ## Rust tests (cargo-nextest where it is installed) and doctests
	if cargo nextest --version >/dev/null 2>&1; \
	  then cargo nextest run --workspace --locked; \
	  else cargo test --workspace --locked --lib --bins --tests; fi
	cargo test --workspace --exclude bindings --locked --doc

LOOM_TEST = CARGO_TARGET_DIR=target/loom RUSTFLAGS="--cfg loom" \
  cargo test -p completion -p tiered-connector --lib --locked

test-loom: ## every interleaving of small models: the completion handle, the end of copies; by loom
	$(LOOM_TEST) models::

# ThreadSanitizer with the stable compiler and its prebuilt standard library.
test-threads: ## Rust stress tests under ThreadSanitizer (a build of its own: minutes at first)
	CARGO_TARGET_DIR=target/threads RUSTC_BOOTSTRAP=1 \
	  RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" \
	  TSAN_OPTIONS="suppressions=$(abspath .config/tsan-suppressions.txt)" \
	  cargo test -p completion -p cache-manager -p tiered-connector --test threads --target x86_64-unknown-linux-gnu --locked

test-python: $(NATIVE) ## pytest, the docstrings' examples included
	$(BIN)/pytest --numprocesses=$(JOBS) --dist=worksteal -m "not alone"
	$(BIN)/pytest -m alone

FAULTS_BUILD = cargo build -p bindings --features faults --target-dir target --locked

test-faults: $(NATIVE) ## panics, copies and disks that fail, busy lanes, in a build of the extension that fails on purpose
	$(FAULTS_BUILD)
	$(BIN)/pytest tests/test_broken_state.py tests/test_failed_copies.py tests/test_busy_lanes.py \
	  tests/test_offload_races.py tests/test_failing_disks.py --native target/debug/lib_native.so

test-long: $(NATIVE) fuzz ## random tests with many more examples, freshly drawn; `fuzz` (an hour)
	$(BIN)/pytest tests --long --timeout 1800
	seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); echo "PROPTEST_RNG_SEED=$$seed"; \
	  PROPTEST_RNG_SEED=$$seed PROPTEST_CASES=2000 cargo test --workspace --locked $(RANDOM_RUST_TESTS)
	seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); echo "SIMULATOR_SEED=$$seed"; \
	  SIMULATOR_SEED=$$seed SIMULATOR_SEEDS=10000 cargo test --release -p cache-manager --test simulator --locked
	seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); echo "CRASH_SEED=$$seed FUZZ_SEED=$$seed"; \
	  CRASH_SEED=$$seed CRASH_IMAGES=2000 cargo test -p disk-store --test crash --locked && \
	  FUZZ_SEED=$$seed FUZZ_SECONDS=60 cargo test -p disk-store --test fuzz --locked

# cargo-fuzz with the stable compiler: one target, the corpora that it reads, new inputs going into the first.
FUZZ_RUN = RUSTC_BOOTSTRAP=1 PATH="$(abspath target/fuzz-tools/bin):$$PATH" \
  cargo fuzz run --fuzz-dir $(FUZZ) --target-dir target/fuzz

fuzz: | tools ## fuzz what reads the disk store's files, guided by coverage: FUZZ_SECONDS (600) for each of three targets
	@command -v c++ >/dev/null || { echo "a C++ compiler is missing as 'c++' (Debian: apt install g++)" >&2; exit 1; }
	test -x target/fuzz-tools/bin/cargo-fuzz || \
	  cargo install --quiet --locked --root target/fuzz-tools cargo-fuzz@0.13.1
	for each in $(FUZZ_TARGETS); do \
	  mkdir -p target/fuzz-corpus/$$each && \
	  $(FUZZ_RUN) $$each target/fuzz-corpus/$$each $(FUZZ)/corpus/$$each -- -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

fuzz-keep: ## copy what `make fuzz` found into the repository, as far as it reaches code that nothing there does
	for each in $(FUZZ_TARGETS); do \
	  $(FUZZ_RUN) $$each $(FUZZ)/corpus/$$each target/fuzz-corpus/$$each -- \
	    -set_cover_merge=1 -use_counters=0 -use_cmp=0 || exit 1; \
	done

bench: $(NATIVE) ## pytest-benchmark and criterion suites
	$(BIN)/pytest benches --benchmark-enable --benchmark-only
	cargo bench --workspace --locked --benches
	if command -v valgrind >/dev/null; then cargo run --release -p block-pool --locked --example eviction_cost; fi

docs: $(NATIVE) ## docs/configuration.md from the docstrings; the Rust crates' documentation, in target/doc
	$(BIN)/python docs/generate_configuration.py
	cargo doc --workspace --no-deps --locked

wheel: $(DEPS) ## one abi3 wheel, in dist/
	$(BIN)/maturin build --release --out dist

sdist: $(DEPS) ## the source distribution, in dist/
	$(BIN)/maturin sdist --out dist

# What a user of the source distribution does, with nothing from this checkout but the test itself.
dist-check: $(DEPS) ## build the sdist, install it into a fresh environment and serve a request there
	rm -rf target/dist-check
	$(BIN)/maturin sdist --out target/dist-check
	$(PYTHON) -m venv target/dist-check/venv
	CARGO_TARGET_DIR=$(abspath target/dist-check-build) \
	  target/dist-check/venv/bin/pip install --quiet --disable-pip-version-check target/dist-check/*.tar.gz
	cd target/dist-check && venv/bin/python -I $(abspath tests/installed_life.py)

# The resolver lives in an environment of its own: .venv holds what the lock says and nothing else.
lock: | tools ## resolve the Python development dependencies anew
	$(PYTHON) -m venv target/lock
	target/lock/bin/pip install --quiet --disable-pip-version-check uv==0.13.9
	target/lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --extra dev \
	  --no-emit-package pagekeeper --custom-compile-command "make lock" \
	  --output-file requirements/dev.lock pyproject.toml

clean: ## remove everything that was built, .venv included
	rm -rf $(VENV) dist target .pytest_cache .mypy_cache .ruff_cache .benchmarks
	rm -f python/pagekeeper/_native*.so
	find python tests benches examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Named with how to get them, before anything is half made.
tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "CPython 3.11 or newer is needed as '$(PYTHON)' (Debian: apt install python3 python3-venv;" \
	    "or name one: make PYTHON=/path/to/python3.12)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "the module 'ensurepip' of '$(PYTHON)' is missing (Debian: apt install python3-venv)" >&2; exit 1; }
	@command -v cargo >/dev/null || \
	  { echo "a Rust toolchain with cargo is missing: install one with rustup (https://rustup.rs)" >&2; exit 1; }
	@cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || \
	  { echo "rustfmt or clippy is missing: rustup component add rustfmt clippy" >&2; exit 1; }
	@command -v cc >/dev/null || \
	  { echo "a C compiler is missing as 'cc' (Debian: apt install gcc)" >&2; exit 1; }

# The interpreter comes before the packages: it is all that Rust's builds need.
$(BIN)/python: | tools
	$(PYTHON) -m venv $(VENV)

$(DEPS): requirements/dev.lock | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --requirement requirements/dev.lock
	@touch $@

$(NATIVE): $(NATIVE_SOURCES) $(DEPS)
	$(BIN)/maturin develop --release
	@touch $@
