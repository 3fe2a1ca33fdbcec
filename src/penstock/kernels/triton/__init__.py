"""Kernels of the GPU lane, in Triton: decoded planes in, batches out, by the numbers of `table.py`.

Each module holds the kernel and the function that launches it; a launch allocates nothing and waits for nothing.
"""
