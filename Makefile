# make demo    the main job on real files, with a table of times
# make demo-slurm  one script, submitted twice to a real Slurm
# make demo-cdn  a cache node in front of a web server that is far away: cold, warm, and without the server; a picture
# make test    everything that a change must pass
# make bench   ratios to the native file system (ARGS=--quick: fewer pairs)
# make bench-observer   what the observer costs those that read
# make bench-pools   pools behind servers, to plain clients and to other programs
# make bench-jobs   staging ahead of real programs on a slow pool, and where nothing can be foreseen (ARGS="--runs 3 --only compile")
# make bench-http   a cache node beside nginx: requests per second and CPU per request (ARGS="ROUNDS SECONDS")
# make bench-cache-tests   the conformance suite for HTTP caches, with nginx, Varnish and Squid beside it
# make bench-slow-pool   how long writes wait while the pool takes less than programs write (ARGS="ROUNDS SIZE_IN_MIB ...")
# make bench-overload   whether writers are slowed smoothly for minutes, also while the pool is away (ARGS="none|pool SECONDS")
# make bench-peers   a job that starts on five nodes behind a slow pool, with peers and without (ARGS="ROUNDS NODES MIB_PER_SECOND")
# make bench-policy   decisions of a policy per second, with ten thousand rules
# make bench-foresight TRACES=DIR   eviction policies on traces of the oracleGeneral format, against LRU and Belady; what profiles cost
# make help    the rest
#
# Each target installs what it needs and is missing. One profile (--release) for all, so that RocksDB is compiled
# once. Every step has a time limit.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/forebay
TOOLS := $(CACHE)/tools
export CARGO_TARGET_DIR ?= $(CURDIR)/target
export PATH := $(HOME)/.cargo/bin:$(TOOLS)/bin:$(PATH)
# For tests, benches and the demo.
export FOREBAY_BIN := $(CARGO_TARGET_DIR)/release/forebay
export FOREBAY_TOOLS := $(TOOLS)/bin

CARGO := cargo
BUILD_LIMIT := timeout 3600
PJDFSTEST := pjdfstest@0.2.2
FSX := fsx@0.3.2
BPF_LINKER := bpf-linker@0.10.3
VERSITYGW := versitygw@v1.8.0
H2SPEC := h2spec@v2.2.1
FAKE_GCS := fake-gcs-server@v1.52.3
AZURITE := azurite@3.35.0
STORES := $(TOOLS)/$(FAKE_GCS) $(TOOLS)/$(AZURITE)
CACHE_TESTS := http-cache-tests@0.4.5
# A test fails by a panic.
TESTS_MAY := -A clippy::unwrap_used -A clippy::expect_used -A clippy::panic
PREFIX ?= /usr
DESTDIR ?=

.PHONY: help build demo demo-slurm demo-cdn test check test-kernels test-slurm24 programs check-programs compare-programs bench bench-observer bench-pools bench-foresight bench-jobs bench-http bench-cache-tests bench-peers bench-slow-pool bench-overload bench-policy lint deny advisories nightly mutants mutants-of-mounts deps man schema install clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo "make build   the program, in $(CARGO_TARGET_DIR)/release"
	@echo "make lint    formatting and clippy"
	@echo "make deny    licences and sources of what is linked"
	@echo "make advisories  known defects of what is linked (from the network)"
	@echo "make programs  the programs that run in the kernel, as they are checked in"
	@echo "make test-kernels   the program on other kernels, in emulation"
	@echo "make test-slurm24   the tests of jobs with Slurm 24.11, on Debian"
	@echo "make nightly the long randomised runs"
	@echo "make mutants which changes of the code no unit test notices (MUTANTS=\"-p CRATE -f FILE\")"
	@echo "make mutants-of-mounts  the same with the tests of mounts (MUTANT_MINUTES=60 MUTANT_TESTS=\"NAME ...\")"
	@echo "make man     manual pages and completions, from the command line's description"
	@echo "make schema  docs/api.schema.json, from the types of the control socket"
	@echo "make install to \$$(DESTDIR)\$$(PREFIX)"

deps:
	@packaging/deps build demo test

build:
	@packaging/deps build
	@$(BUILD_LIMIT) $(CARGO) build --release --quiet -p forebay

demo: build
	@packaging/deps demo
	@timeout 600 packaging/demo/demo.sh
	@if command -v slurmctld >/dev/null; then timeout 300 packaging/demo/slurm.sh; \
	else echo "make demo-slurm shows a job of Slurm, and installs Slurm for it"; fi

demo-slurm: build
	@packaging/deps slurm
	@timeout 300 packaging/demo/slurm.sh

demo-cdn: build
	@packaging/deps demo-cdn
	@timeout 600 packaging/demo/cdn.sh

# Another compiler than the one that the project is written with has other lints: it shows them.
lint:
	@packaging/deps build
	@timeout 120 $(CARGO) fmt --all --check
	@deny=; if rustc --version | cmp -s - ebpf/programs.made-by; then deny="-D warnings"; fi; \
	$(BUILD_LIMIT) $(CARGO) clippy --release --quiet --workspace -- $$deny; \
	$(BUILD_LIMIT) $(CARGO) clippy --release --quiet --workspace --all-targets -- $$deny $(TESTS_MAY)

# Suites that drive a mount from outside are tests of the crate in tests/. Cargo makes the program with them, since the
# crate in cli/ has tests: a build of its own would compile all of it a second time, because tests ask for other features
# of its libraries.
test: lint check-programs $(TOOLS)/$(PJDFSTEST) $(TOOLS)/$(FSX) $(TOOLS)/$(VERSITYGW) $(TOOLS)/$(H2SPEC) $(TOOLS)/$(CACHE_TESTS) $(STORES)
	@packaging/deps build test
	@timeout 7200 tests/run

# In emulation, half a minute each: the distribution's kernel, or those whose packages lie in KERNELS="DIR ...".
test-kernels: build
	@packaging/deps kernels
	@$(BUILD_LIMIT) $(CARGO) build --release --quiet -p forebay-tests --bin observed
	@timeout 3600 tests/kernels/boot $(FOREBAY_BIN) $(CARGO_TARGET_DIR)/release/observed $(KERNELS)

# The tests of jobs, in a root directory of Debian 13. ^C reaches them only in the foreground.
test-slurm24: $(TOOLS)/$(VERSITYGW)
	@packaging/deps build test slurm24
	@timeout --foreground 1200 tests/slurm24/root $(CACHE)/slurm24
	@FOREBAY_RUNNER="$(CURDIR)/tests/slurm24/enter $(CACHE)/slurm24" timeout --foreground 7200 tests/run burst_buffer burst_buffer_results burst_buffer_nodes slurm

programs: $(TOOLS)/$(BPF_LINKER)
	@ebpf/build-programs ebpf/programs.o
	@rustc --version > ebpf/programs.made-by

# Another compiler makes other code of the same source, and some distributions' have no LLVM that the linker can use: then
# there is nothing to compare.
check-programs:
	@packaging/deps build
	@if rustc --version | cmp -s - ebpf/programs.made-by; then \
		$(MAKE) --no-print-directory compare-programs; \
	else \
		echo "ebpf/programs.o was made by $$(cat ebpf/programs.made-by), and is not compared with what $$(rustc --version) makes"; \
	fi

compare-programs: $(TOOLS)/$(BPF_LINKER)
	@mkdir -p $(CARGO_TARGET_DIR)
	@ebpf/build-programs $(CARGO_TARGET_DIR)/programs.o
	@cmp $(CARGO_TARGET_DIR)/programs.o ebpf/programs.o \
		|| { echo "ebpf/programs.o is not what its source makes: make programs" >&2; exit 1; }

# What is run again and again while code is written: without a mount or a server.
check: lint
	@timeout 3600 $(CARGO) test --release --workspace --lib --bins --test engine --test own_names --test removed \
		--test late_answers --test unanswered --test refusals --test memory --test decorators --test tidy --test packaged

bench: build
	@packaging/deps test
	@FOREBAY_PASSTHROUGH_HP=$$(benches/passthrough_hp.sh $(CACHE)/libfuse || true) \
		timeout 7200 $(CARGO) bench -p forebay-benches --bench speed -- $(ARGS)

bench-observer: build
	@packaging/deps test
	@timeout 3600 $(CARGO) bench -p forebay-benches --bench observer -- $(ARGS)

bench-pools: build $(TOOLS)/$(VERSITYGW)
	@packaging/deps test bench-pools
	@timeout 7200 $(CARGO) bench -p forebay-benches --bench pools -- $(ARGS)

bench-foresight:
	@packaging/deps build
	@timeout 3600 $(CARGO) bench -p forebay-benches --bench foresight -- $(abspath $(TRACES))
	@timeout 600 $(CARGO) bench -p forebay-benches --bench profiles

bench-http: build
	@packaging/deps bench-http
	@timeout 1800 benches/http.sh $(ARGS)

bench-cache-tests: build $(TOOLS)/$(CACHE_TESTS)
	@packaging/deps bench-cache-tests
	@timeout 1800 benches/cache_tests.sh

bench-peers: build
	@packaging/deps bench-peers
	@timeout 1800 benches/peers.sh $(ARGS)

bench-slow-pool: build
	@packaging/deps bench-slow-pool
	@timeout 1800 benches/slow_pool.sh $(ARGS)

bench-overload: build $(TOOLS)/$(VERSITYGW)
	@packaging/deps bench-overload
	@timeout 1800 benches/overload.sh $(ARGS)

bench-policy:
	@timeout 600 $(CARGO) bench --workspace --bench policy

bench-jobs: build
	@packaging/deps test bench-jobs
	@timeout 7200 $(CARGO) bench -p forebay-benches --bench jobs -- $(ARGS)

nightly: test test-slurm24 deny advisories
	@FOREBAY_SEED=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ') FOREBAY_ALL=1 FOREBAY_CASES=1000000 \
		FOREBAY_KILLS=200 FOREBAY_OPERATIONS=300000 FOREBAY_LIMIT=43200 timeout 43200 tests/run

# Changes the code of some crates, one place at a time, and runs their unit tests. What no test notices is listed in
# mutants.out/missed.txt of the target directory. MUTANTS: which code, as `cargo mutants` takes it.
MUTANTS ?= -p forebay-policy -p forebay-prefetch -p forebay-catalog
mutants: $(TOOLS)/cargo-mutants
	@packaging/deps build
	@mkdir -p $(CARGO_TARGET_DIR)/mutants
	@CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/mutants/target $(CARGO) mutants --profile release --baseline skip --timeout 120 \
		--output $(CARGO_TARGET_DIR)/mutants $(MUTANTS) -- --lib

# The same for the bodies of functions alone, but all in one program, each behind a switch, so that the tests of mounts run
# against them, too: against changes taken at random, for MUTANT_MINUTES after the build. MUTANT_TESTS: names of test
# programs, beside the unit tests; all, if there are none. Of what is committed. The lists are in mutants/found of the
# target directory: what no test reaches, what none notices, what one notices.
MUTANT_MINUTES ?= 60
MUTANT_TESTS ?=
mutants-of-mounts: $(TOOLS)/cargo-mutants
	@packaging/deps build test
	@tests/mutants/run $(CARGO_TARGET_DIR)/mutants $(MUTANT_MINUTES) $(MUTANT_TESTS)

deny: $(TOOLS)/cargo-deny
	@timeout 600 $(CARGO) deny --all-features check licenses bans sources

# The list of advisories comes from the network: apart, so that the rest needs none.
advisories: $(TOOLS)/cargo-deny
	@timeout 600 $(CARGO) deny --all-features check advisories

# A tool is installed once for each version: the stamp carries it.
$(TOOLS)/$(PJDFSTEST) $(TOOLS)/$(FSX) $(TOOLS)/$(BPF_LINKER):
	@packaging/deps build
	@echo "installing: $(@F)"
	@CARGO_TARGET_DIR=$(CACHE)/tools-target $(BUILD_LIMIT) $(CARGO) install --quiet --locked --root $(TOOLS) $(@F)
	@touch $@

# An S3 server for the tests, in Go.
$(TOOLS)/$(VERSITYGW):
	@echo "installing: $(@F)"
	@mkdir -p $(TOOLS)/bin
	@GO=$$(packaging/go $(CACHE)/go) && GOBIN=$(TOOLS)/bin $(BUILD_LIMIT) $$GO install github.com/versity/versitygw/cmd/$(@F)
	@touch $@

# A conformance suite for HTTP/2 servers, in Go.
$(TOOLS)/$(H2SPEC):
	@echo "installing: $(@F)"
	@mkdir -p $(TOOLS)/bin
	@GO=$$(packaging/go $(CACHE)/go) && GOBIN=$(TOOLS)/bin $(BUILD_LIMIT) $$GO install github.com/summerwind/h2spec/cmd/$(@F)+incompatible
	@touch $@

# One of Google's, in Go.
$(TOOLS)/$(FAKE_GCS):
	@echo "installing: $(@F)"
	@mkdir -p $(TOOLS)/bin
	@GO=$$(packaging/go $(CACHE)/go) && GOBIN=$(TOOLS)/bin $(BUILD_LIMIT) $$GO install github.com/fsouza/$(@F)
	@touch $@

# One of Azure's, for Node.
$(TOOLS)/$(AZURITE):
	@command -v npm >/dev/null || packaging/deps npm
	@echo "installing: $(@F)"
	@mkdir -p $(TOOLS)/bin $(TOOLS)/node
	@timeout 600 npm install --silent --no-audit --no-fund --prefix $(TOOLS)/node $(@F)
	@ln -sf ../node/node_modules/.bin/azurite-blob $(TOOLS)/bin/azurite-blob
	@touch $@

# A conformance suite for HTTP caches, for Node.
$(TOOLS)/$(CACHE_TESTS):
	@command -v npm >/dev/null || packaging/deps npm
	@echo "installing: $(@F)"
	@mkdir -p $(TOOLS)/bin $(TOOLS)/node
	@timeout 600 npm install --silent --no-audit --no-fund --prefix $(TOOLS)/node $(@F)
	@ln -sf ../node/node_modules/http-cache-tests/cli.mjs $(TOOLS)/bin/http-cache-tests
	@touch $@

$(TOOLS)/cargo-deny $(TOOLS)/cargo-mutants:
	@packaging/deps build
	@echo "installing: $(@F)"
	@CARGO_TARGET_DIR=$(CACHE)/tools-target $(BUILD_LIMIT) $(CARGO) install --quiet --locked --root $(TOOLS) $(@F)
	@touch $@

man: build
	@$(FOREBAY_BIN) man packaging/man
	@$(FOREBAY_BIN) completions bash > packaging/completions/forebay.bash

schema:
	@packaging/deps build
	@FOREBAY_BLESS=1 $(BUILD_LIMIT) $(CARGO) test --release --quiet --workspace --test schema

install: build
	install -D -s -m 755 $(FOREBAY_BIN) $(DESTDIR)$(PREFIX)/bin/forebay
	install -D -m 755 packaging/mount.fuse.forebay $(DESTDIR)/sbin/mount.fuse.forebay
	install -D -m 644 packaging/forebay@.service $(DESTDIR)/lib/systemd/system/forebay@.service
	install -D -m 644 packaging/forebay-serve@.service $(DESTDIR)/lib/systemd/system/forebay-serve@.service
	install -d $(DESTDIR)$(PREFIX)/share/forebay/slurm
	install -m 755 packaging/slurm/{prolog,epilog,task-prolog} $(DESTDIR)$(PREFIX)/share/forebay/slurm
	install -m 644 packaging/slurm/{burst_buffer.lua,burst_buffer.conf,job_submit.lua} $(DESTDIR)$(PREFIX)/share/forebay/slurm
	sed -i 's|/usr/bin/forebay|$(PREFIX)/bin/forebay|' $(DESTDIR)/lib/systemd/system/forebay@.service \
		$(DESTDIR)/lib/systemd/system/forebay-serve@.service $(DESTDIR)$(PREFIX)/share/forebay/slurm/burst_buffer.lua
	install -d $(DESTDIR)$(PREFIX)/share/man/man1 $(DESTDIR)$(PREFIX)/share/bash-completion/completions
	install -m 644 packaging/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 644 packaging/completions/forebay.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/forebay

clean:
	@$(CARGO) clean
