# SPDX-License-Identifier: Apache-2.0
# A thin front door: all is done by meson, ninja, pip and the scripts in tools/.

BUILD ?= build
PREFIX ?= /usr/local
KILLS ?= 200
JOBS ?= $(shell nproc)
SECONDS ?= 60

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-test setup-proof setup-analyze build demo test test-fast sanitize tsan valgrind python package pythons wheel soak soak-torch prove \
        prove-the-proof blocks fuzz coverage analyze bench bench-peers filesystems install lint format clean

help:
	@echo 'make demo      set up, build, and show a run that is killed and resumes to the same bits'
	@echo 'make test      set up, build, and run all tests'
	@echo
	@echo 'make build     set up and build only (in $(BUILD)/)'
	@echo 'make install   install program, library and headers under PREFIX (now $(PREFIX))'
	@echo 'make wheel     build the Python wheel (pip install . needs no make)'
	@echo 'make soak      kill training runs KILLS times (now $(KILLS)), with and without --async, and compare the bits'
	@echo 'make soak-torch  kill PyTorch runs of two ranks 50 times, and 50 under torchrun; the same, with DDP and FSDP2'
	@echo 'make prove     the evidence made anew: power cuts, faults, kills, damage, fuzzing; a table (an hour)'
	@echo 'make prove-the-proof  take out one sync or check at a time: does a test notice?'
	@echo 'make fuzz      every parser, the geometry, the round trip: SECONDS each (now $(SECONDS)); fuzz/README.md'
	@echo 'make bench     measure saving, loading and planning; docs/benchmarks.md'
	@echo 'make bench-peers   beside torch.save, DCP, safetensors and others; an hour; docs/benchmarks-peers.md'
	@echo
	@echo 'make test-fast only the C tests;  make python: what PyTorch and safetensors read'
	@echo 'make package   the tests of the Python package;  make pythons: with each Python from 3.10 to 3.13 that is here'
	@echo 'make sanitize  the C tests under ASan and UBSan;  make tsan, make valgrind: under those'
	@echo 'make coverage  lines and branches that the C tests reach'
	@echo 'make analyze   gcc -fanalyzer and clang-tidy over the C sources'
	@echo 'make filesystems  what moves data, with every engine, on ext4, xfs, btrfs and tmpfs (as root)'
	@echo 'make blocks    power cuts below ext4, xfs and btrfs, write by write (as root; ten minutes)'
	@echo 'make lint      formatting, shell scripts, documentation, symbols;  make format: reformat'

setup:
	@tools/setup

setup-test:
	@tools/setup test

# Reconfigures by itself when a meson.build changes. What the first call found
# missing (MPI, say) is looked for again after `make clean`.
build: setup
	@test -f $(BUILD)/build.ninja || meson setup $(BUILD)
	@ninja -C $(BUILD) -j $(JOBS)

demo: build
	@BUILD=$(BUILD) tools/demo

test: setup-test build
	@BUILD=$(BUILD) JOBS=$(JOBS) tools/run-tests

test-fast: setup-test build
	@BUILD=$(BUILD) JOBS=$(JOBS) tools/run-tests suite

sanitize valgrind python package lint: setup-test build
	@BUILD=$(BUILD) JOBS=$(JOBS) tools/run-tests $@

tsan: setup-test build
	@BUILD=$(BUILD) JOBS=$(JOBS) tools/run-tests tsan-all

pythons: setup-test build
	@BUILD=$(BUILD) JOBS=$(JOBS) tools/run-tests pythons

wheel: setup-test
	@BUILD=$(BUILD) tools/wheel

filesystems: setup-test build
	@BUILD=$(BUILD) tools/filesystems

soak: build
	@BUILD=$(BUILD) tools/soak --kills $(KILLS)
	@BUILD=$(BUILD) tools/soak --kills $(KILLS) --async

soak-torch: setup-test build
	@python=$$(BUILD=$(BUILD) tools/python-package) && BUILD=$(BUILD) "$$python" tools/soak-torch && \
	    BUILD=$(BUILD) "$$python" tools/soak-torch --torchrun

prove: setup-test build
	@BUILD=$(BUILD) JOBS=$(JOBS) tools/run-tests prove

blocks: setup-test build
	@LASTGOOD_PROVE=full $(BUILD)/tests/test_blocks

prove-the-proof: setup-test
	@BUILD=$(BUILD) JOBS=$(JOBS) tools/prove-the-proof

setup-proof:
	@tools/setup proof

fuzz: setup-proof build
	@BUILD=$(BUILD) JOBS=$(JOBS) tools/fuzz --seconds $(SECONDS) $(if $(AFL),--afl)

coverage: setup-proof
	@BUILD=$(BUILD) JOBS=$(JOBS) tools/coverage

setup-analyze:
	@tools/setup analyze

analyze: setup-analyze build
	@BUILD=$(BUILD) JOBS=$(JOBS) tools/run-tests analyze

bench: build
	@$(BUILD)/bench/io
	@$(BUILD)/bench/io --small
	@$(BUILD)/bench/stall
	@$(BUILD)/bench/plan

# The disk that is measured: FOLDER.
bench-peers: setup-test build
	@python=$$(BUILD=$(BUILD) tools/peers-env) && "$$python" bench/peers.py --json bench/peers/results.json \
	    $(if $(FOLDER),--folder $(FOLDER))

install: build
	@at="$$DESTDIR$(abspath $(PREFIX))"; if ! { mkdir -p "$$at" && [ -w "$$at" ]; }; then \
	    echo "make install: cannot write to $$at; another place: make install PREFIX=\$$HOME/.local" >&2; exit 1; fi
	@meson configure $(BUILD) --prefix=$(abspath $(PREFIX)) --libdir=lib
	@meson install -C $(BUILD) --quiet
	@if [ "$$(id -u)" -eq 0 ] && [ -z "$$DESTDIR" ]; then ldconfig; fi
	@echo 'installed under $(abspath $(PREFIX))'

format: setup-test
	@git ls-files '*.c' '*.h' | xargs clang-format -i

clean:
	@rm -rf $(BUILD)
