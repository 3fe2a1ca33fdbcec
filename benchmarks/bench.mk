# The benchmarks: `make bench` runs them all; `make bench PENSTOCK_PHOTOS=folder` on photographs of yours.
.venv-bench/ready: benchmarks/requirements.txt pyproject.toml hatch_build.py
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install -q -r benchmarks/requirements.txt
	.venv-bench/bin/pip install -q -e .
	touch $@

# Every benchmark runs, also after one that fails; the status is that of the worst.
.PHONY: bench bench-quick
bench bench-quick: .venv-bench/ready
	@status=0; \
	for run in "contest" "contest --augment rand" opaque overhead startup cache cache_share decoded \
		"diagnosis --part truth" "diagnosis --part overhead"; do \
		.venv-bench/bin/python -m benchmarks.$$run $(if $(filter bench-quick,$@),--quick) || status=1; \
	done; \
	$(if $(filter bench-quick,$@),true,.venv-bench/bin/python -m benchmarks.report) && exit $$status

# On a machine with a GPU, with its own Python; GPU_PARTS='--only vit-compiled-2cores' measures a part of the matrix.
.PHONY: gpu-bench
gpu-bench:
	$(GPU_PYTHON) hatch_build.py
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.gpu $(GPU_PARTS)
