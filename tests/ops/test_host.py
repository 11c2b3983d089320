"""Device values on the host."""

import torch

from pithtrain.ops.host import read_floats, read_ints, to_host


def test_values_come_as_python_numbers() -> None:
    ints, floats = read_ints(torch.tensor([3, 2**40])), read_floats(torch.tensor([0.5, float("inf")]))
    assert ints == [3, 2**40] and all(type(value) is int for value in ints)
    assert floats == [0.5, float("inf")] and all(type(value) is float for value in floats)
    assert read_ints(torch.zeros(0, dtype=torch.int64)) == []
    assert to_host(torch.tensor([1, 2])).tolist() == [1, 2]
