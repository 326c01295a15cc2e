# Everything from a machine with Python 3.11 or newer; clusters and Helm are built with Go. `make help` lists the targets.
PYTHON ?= python3
FINETUNE_CACHE ?= $(HOME)/.cache/finetune-operator
BUILDER ?= $$(docker info >/dev/null 2>&1 && echo docker || echo buildah)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Named after what is installed in it, so that a changed lock file makes a new one, and a changed linter setting does not.
KEY := $(shell (echo $(PYTHON) $(TORCH); cat requirements/*.txt tools/environment.py tools/local_wheels.py) | cksum | tr ' ' -)
VENV := $(FINETUNE_CACHE)/venvs/$(KEY)
ifeq ($(ENV),none)
# Use the packages of PYTHON, on a machine that cannot install the development environment.
RUN := $(PYTHON)
export PYTHONPATH := operator:trainer:tools:.:$(PYTHONPATH)
else
RUN := $(VENV)/bin/python
export PYTHONPATH := operator:trainer:tools:.
endif

export FINETUNE_CACHE TORCH

.PHONY: help
help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do printf '  %-20s %s\n' "$$name" "$$text"; done

$(VENV)/complete:
	@$(PYTHON) tools/environment.py $(VENV)

.PHONY: setup
setup: $(if $(filter none,$(ENV)),,$(VENV)/complete) ## install the development environment into the cache; TORCH=torch-cpu takes torch without GPU libraries
	@test -z "$<" || touch $<

.PHONY: generate
generate: setup ## generate the files that derive from the API models: CRD, reference, schema, install.yaml
	@$(RUN) tools/generate.py

.PHONY: check
check: setup ## check format, lint, types, imports, generated files, vocabulary, docs, chart and manifests
	@$(RUN) tools/check.py

.PHONY: test test-unit test-simulation test-integration test-e2e
test: setup ## run all test suites; the end-to-end tests start a throwaway cluster
	@$(RUN) tools/run_tests.py unit simulation integration e2e queue
test-unit: setup ## run the unit tests
	@$(RUN) tools/run_tests.py unit
test-simulation: setup ## run thousands of histories against a simulated API server
	@$(RUN) tools/run_tests.py simulation
test-integration: setup ## run the tests that train with local processes
	@$(RUN) tools/run_tests.py integration
test-e2e: setup ## run the tests on a real cluster
	@$(RUN) tools/run_tests.py e2e

.PHONY: test-long test-queue test-matrix test-upgrade test-image-cuda fuzz
test-long: setup ## run the tests that `make test` leaves out because they take long and resemble others
	@$(RUN) tools/run_tests.py --long integration e2e queue
test-queue: setup ## run all tests of queues and gangs on a cluster with Kueue and PodGroups
	@$(RUN) tools/run_tests.py queue && $(RUN) tools/run_tests.py --long queue
test-matrix: setup ## run end-to-end tests on other Kubernetes versions and with IPv6; ONLY=1.34.4,1.35.4
	@$(RUN) tools/run_matrix.py --only "$(ONLY)"
test-upgrade: setup ## upgrade and roll back the operator with jobs in every state; ARGS="--directions this-next,next-this"
	@$(RUN) -m testing.upgrade $(ARGS)
test-image-cuda: setup ## build the trainer image with torch for CUDA and examine it without a GPU; 3 GB of downloads, 24 GiB of disk
	@$(RUN) -m pytest -q -s --color=no tests/cuda_image
fuzz: setup ## run passes and parsers on random pods, jobs and messages; EXAMPLES=200000 SEED=0 MINUTES=25
	@$(RUN) -m testing.fuzz --passes $(or $(EXAMPLES),200000) $(if $(SEED),--seed $(SEED)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

.PHONY: reference
reference: setup ## compare random trainings with their definition, step by step; SEED=0 MINUTES=60 ARGS="--types"
	@$(RUN) -m testing.reference $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

.PHONY: pytest docs
pytest: setup ## run selected tests: ARGS="tests/unit/finetune_api -k quantity"
	@$(RUN) -m pytest -q $(ARGS)
docs: setup ## build the documentation site into build/site, strictly
	@$(VENV)/bin/zensical build --strict --clean

.PHONY: search
search: setup ## search more histories for violated invariants; HISTORIES=1000000 WORKERS=2 MINUTES=60 KINDS="queued_jobs strangers"
	@$(RUN) -m testing.simulator $(if $(HISTORIES),--histories $(HISTORIES)) $(if $(WORKERS),--workers $(WORKERS)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(KINDS),--kinds $(KINDS))

.PHONY: demo
demo: setup ## run a job on two nodes of a throwaway cluster until it is Complete; ARGS=--keep keeps the cluster
	@$(RUN) -m testing.demo $(ARGS)

.PHONY: bench bench-memory bench-recovery bench-queue soak bench-trainer bench-loss-head bench-checkpoints bench-client bench-failures bench-gpu
bench: setup ## measure latency, throughput and cost on a real API server; ARGS=--peer adds Kubeflow, ARGS="--jobs 1000 --nodes 2" for many jobs
	@$(RUN) -m benchmarks $(ARGS)
bench-memory: setup ## measure the operator's memory without a cluster; ARGS="--finished 10000 --running 1000"
	@$(RUN) -m benchmarks.memory $(ARGS)
bench-recovery: setup ## measure the recovery time after the kill of a rank, by stage, with real pods
	@$(RUN) -m benchmarks.recovery $(ARGS)
bench-queue: setup ## run 200 jobs through one queue of Kueue with preemption on simulated nodes; ARGS="--jobs 200 --quota 64"
	@$(RUN) -m benchmarks.queue $(ARGS)
soak: setup ## run jobs with faults while the operator is paused, killed and upgraded; MINUTES=120 JOBS=1200 ARGS="--disturb pause,kill"
	@$(RUN) -m benchmarks.soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(JOBS),--jobs $(JOBS)) $(ARGS)
bench-trainer: setup ## compare the speed of the trainer on CPU with TRL and ms-swift
	@$(RUN) -m benchmarks.trainer $(ARGS)
bench-loss-head: setup ## measure the memory of the output layer and the loss on CPU beside TRL
	@$(RUN) -m benchmarks.trainer.loss_head
bench-checkpoints: setup ## compare checkpoints in parts with gathered ones on four ranks; MILLIONS=100 parameters
	@folder=$$(mktemp -d) && $(RUN) -m torch.distributed.run --nproc-per-node=4 testing/processes/measure_checkpoints.py \
		$$folder $(or $(MILLIONS),100); status=$$?; rm -rf $$folder; exit $$status
bench-client: setup ## measure installed size and response time of the command line and the Python client
	@$(RUN) -m benchmarks.client
bench-failures: setup ## measure the accuracy of failure classification on held-out error messages
	@$(RUN) -m benchmarks.failures
bench-gpu: setup ## compare speed and memory of the trainer on a GPU with TRL; ENV=none uses the installed packages
	@$(RUN) -m benchmarks.trainer.gpu $(ARGS)

.PHONY: gpu-check gpu-check-wheels
gpu-check: setup ## prove the trainer on one GPU: PART=1, PART=2; ENV=none WHEELS=folder without network, ARGS=--small on CPU
	@$(RUN) -m benchmarks.gpu_check --part $(or $(PART),1) $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)
gpu-check-wheels: setup ## download the wheels that gpu-check needs on a machine without network; WHEELS=folder
	@$(RUN) -m benchmarks.gpu_check.wheels $(or $(WHEELS),build/gpu-check-wheels) $(ARGS)

.PHONY: chaos
chaos: setup ## inject all faults on a real cluster and write docs/operations/fault-matrix.md; RUNS=3, ONLY=name,name
	@$(RUN) -m testing.faults --runs $(or $(RUNS),3) --only "$(ONLY)" $(ARGS)

.PHONY: cluster-up cluster-install cluster-claim cluster-down
cluster-up: setup ## start the throwaway cluster and print its KUBECONFIG
	@$(RUN) -m testing.cluster up
cluster-install: setup ## build both images, load them into the throwaway cluster and install the operator by Helm
	@$(RUN) -m testing.processes.operator_stack
cluster-claim: setup ## create a claim that all nodes can mount and print its folder here; CLAIM=datasets NAMESPACE=default
	@$(RUN) -m testing.cluster shared-claim $(CLAIM) --namespace $(or $(NAMESPACE),default)
cluster-down: setup ## remove the throwaway cluster; binaries and images stay cached
	@$(RUN) -m testing.cluster down

.PHONY: images
images: ## build both images with docker or buildah; BUILD_ARGS="--build-arg BASE_IMAGE=..." is passed on
	$(BUILDER) build --target operator --tag ghcr.io/finetune-operator/operator:v$(VERSION) $(BUILD_ARGS) .
	$(BUILDER) build --target trainer --tag ghcr.io/finetune-operator/trainer:v$(VERSION) $(BUILD_ARGS) .

.PHONY: check-wheels
check-wheels: setup ## check that all locked packages have wheels for amd64 and arm64; needs the package index
	@$(RUN) tools/check_wheels.py

.PHONY: lock
lock: ## update requirements/ from pyproject.toml; UPGRADE=--upgrade takes the newest versions
	@$(PYTHON) tools/lock.py $(UPGRADE)

.PHONY: option-tables
option-tables: setup ## update the option tables of `finetune convert` from the released wheels; ARGS=--check compares only
	@$(RUN) tools/option_tables.py $(ARGS)

.PHONY: check-convert-corpus
check-convert-corpus: setup ## check the test inputs of `finetune convert` with the parsers of their tools; downloads up to 3 GB once
	@$(RUN) -m testing.convert_corpus

.PHONY: clean-cache
clean-cache: ## remove the cache with environments, built programs and images
	@test ! -d $(FINETUNE_CACHE)/cluster || test -z "$$(ls $(FINETUNE_CACHE)/cluster)" || $(MAKE) cluster-down
	rm -rf $(FINETUNE_CACHE)
