"""The benchmarks: each measured thing runs in a process of its own, alternating with what it is compared to.

`contest` (image pipelines), `opaque` (any dataset through a DataLoader), `overhead` (what the training process pays),
`startup` (first batch, memory, respawn). Each runs as `python -m benchmarks.NAME` from the root of the repository,
prints a table and writes its samples with their environment to `benchmarks/results/`. `docs/benchmarks.md` says how to
reproduce the published figures.
"""
