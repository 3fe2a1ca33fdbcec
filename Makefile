# demo, test and bench are for everyone; each makes the environments it needs. README.md and CONTRIBUTING.md say more.
PYTHON ?= python3.11
CODE := src tests benchmarks hatch_build.py
KERNELS := $(wildcard src/penstock/kernels/native/*.[ch])
# Of a machine with a GPU: its own Python, with the torch that suits its driver.
GPU_PYTHON ?= python3

.NOTPARALLEL:
.PHONY: demo test check docs tests interop native gpu-test

demo: .venv/ready
	.venv/bin/penstock demo

# All that must pass before a change goes in; CI runs the same.
test: check docs tests interop

check: .venv/ready
	.venv/bin/ruff format --check $(CODE)
	.venv/bin/ruff check $(CODE)
	.venv/bin/mypy

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

tests: .venv/ready
	.venv/bin/pytest -m 'not interop and not gpu'

# In the second environment, for torchvision and torchaudio need the full build of torch.
interop: .venv-interop/ready
	.venv-interop/bin/python -c 'import torchaudio, torchvision'
	.venv-interop/bin/pytest -m interop

# On a machine with a GPU: the tests of GPU and Triton on the device, in the environment that is there.
gpu-test:
	$(GPU_PYTHON) hatch_build.py
	PYTHONPATH=src $(GPU_PYTHON) tests/gpu_check.py

# The C library alone, after a change in src/penstock/kernels/native; replaced atomically, or not at all.
native:
	.venv/bin/python hatch_build.py

.venv/ready: pyproject.toml hatch_build.py $(KERNELS)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install -q 'pip>=25.1'
	.venv/bin/pip install -q torch==2.13.0
	.venv/bin/pip install -q -e '.[all]' --group dev --group kernels
	touch $@

.venv/docs: docs/requirements.txt .venv/ready
	.venv/bin/pip install -q -r docs/requirements.txt
	touch $@

.venv-interop/ready: pyproject.toml hatch_build.py $(KERNELS)
	test -x .venv-interop/bin/python || $(PYTHON) -m venv .venv-interop
	.venv-interop/bin/pip install -q 'pip>=25.1'
	.venv-interop/bin/pip install -q torch===2.13.0 torchvision==0.28.0
	.venv-interop/bin/pip install -q --no-deps torchaudio==2.11.0
	.venv-interop/bin/pip install -q -e '.[all]' --group dev
	touch $@

-include benchmarks/bench.mk
