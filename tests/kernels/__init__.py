"""Kernels without a GPU: run by Triton's interpreter (`interpreted/`), and compiled ahead of time."""
