"""Tests of kernels in Triton's interpreter.

Triton decides when it is imported whether it interprets, so these run in a process of their own, which
`tests/kernels/test_interpreted.py` starts; pytest finds them by no other way.
"""
