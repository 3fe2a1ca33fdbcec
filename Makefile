PYTHON ?= python3.11

.venv/ready: pyproject.toml hatch_build.py
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install -q torch==2.13.0
	.venv/bin/pip install -q -e '.[all]' --group dev
	touch $@

# The C library alone, after a change in src/penstock/kernels/native; replaced atomically, or not at all.
.PHONY: native
native:
	.venv/bin/python hatch_build.py
