"""Functions of elements whose results would depend on where an element lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.adapted.steady import FUNCTIONS, Steady, steadied

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x.clone(), inplace=True),
    "a module": torch.nn.SiLU(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "a method": lambda x: x.sigmoid(),
    "a method in place": lambda x: x.clone().sigmoid_(),
    "softplus": F.softplus,
    "mish": F.mish,
    "elu": F.elu,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "pow": lambda x: (x.abs() + 0.1) ** -0.3,
    "hardswish": F.hardswish,
}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_a_row_is_the_same_however_many_are_beside_it(name: str, dtype: torch.dtype, threads: int) -> None:
    call = CALLS[name]
    for columns in (107, 72):
        x = (3 * torch.randn(1, 1000, columns, generator=torch.Generator().manual_seed(columns))).to(dtype)
        with Steady():
            whole = call(x)
            for first, stop in ((0, 1), (3, 4), (5, 12), (17, 700)):
                assert torch.equal(call(x[:, first:stop]), whole[:, first:stop])
        torch.testing.assert_close(whole, call(x), atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


def test_other_calls_pass() -> None:
    run = steadied(lambda x: (torch.relu(x), x.long().float(), torch.pow(2, x)))
    assert [found.tolist() for found in run(torch.tensor([-1.0, 2.0]))] == [[0, 2], [-1, 2], [0.5, 4]]
    assert "silu" in FUNCTIONS
