"""For all tests: OpenMP takes one thread, as the tensors are small and there are as many workers as cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
