# SPDX-License-Identifier: Apache-2.0
# A thin front door: everything is done by meson, ninja, pip and tools/.

BUILD ?= build
PREFIX ?= /usr/local
KILLS ?= 200
JOBS ?= $(shell nproc)

.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-fast sanitize tsan valgrind soak bench install lint format clean

help:
	@echo 'make demo      set up, build, and show a run that is killed and resumes to the same bits'
	@echo 'make test      set up, build, and run all tests'
	@echo
	@echo 'make build     set up and build only (in $(BUILD)/)'
	@echo 'make install   install program, library and headers under PREFIX (now $(PREFIX))'
	@echo 'make soak      kill a training run KILLS times (now $(KILLS)) and compare the bits'
	@echo 'make bench     measure planning at scale; docs/benchmarks.md'
	@echo 'make test-fast only the tests of the normal build'
	@echo 'make sanitize  the suite under ASan and UBSan;  make tsan, make valgrind: those'
	@echo 'make lint      formatting, static analysis, documentation;  make format: reformat'

setup:
	@tools/setup

$(BUILD)/build.ninja: | setup
	@test -f $@ || meson setup $(BUILD)

build: setup $(BUILD)/build.ninja
	@ninja -C $(BUILD) -j $(JOBS)

demo: build
	@BUILD=$(BUILD) tools/demo

test: build
	@BUILD=$(BUILD) tools/run-tests

test-fast: build
	@BUILD=$(BUILD) tools/run-tests suite

sanitize tsan valgrind lint: build
	@BUILD=$(BUILD) tools/run-tests $@

soak: build
	@BUILD=$(BUILD) tools/soak --kills $(KILLS)

bench: build
	@$(BUILD)/bench/plan

install: build
	@meson configure $(BUILD) --prefix=$(abspath $(PREFIX)) --libdir=lib
	@meson install -C $(BUILD) --quiet
	@echo 'installed under $(abspath $(PREFIX))'

format:
	@git ls-files '*.c' '*.h' | xargs clang-format -i

clean:
	@rm -rf $(BUILD)
