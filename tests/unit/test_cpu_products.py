"""Products of BF16 on CPUs without instructions for them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from specrl import cpu_products
from specrl.rollout.vllm.default_engine import GROUP_VARIABLES

REPLACED = """
import torch
import torch.nn.functional as F
from specrl import cpu_products

torch.manual_seed(0)
shapes = (5, 64), (64, 7), (3, 5, 64), (3, 64, 7), (5, 7), (3, 5, 7)
wide = [torch.randn(shape).bfloat16().float() for shape in shapes]
before = wide[0] @ wide[1]
into = torch.empty_like(before)
cpu_products.multiply_in_float32()
a, b, batch_a, batch_b, c, batch_c = (matrix.bfloat16() for matrix in wide)

# Every operator: exact products, added up in float32 and rounded once.
products = {
    "mm": (a.mm(b), wide[0] @ wide[1]),
    "mm out": (torch.mm(a, b, out=torch.empty_like(c)), wide[0] @ wide[1]),
    "transposed": (b.t().mm(a.t()), (wide[0] @ wide[1]).t()),
    "addmm": (torch.addmm(c, a, b, beta=2), torch.addmm(wide[4], wide[0], wide[1], beta=2)),
    "bmm": (torch.bmm(batch_a, batch_b), torch.bmm(wide[2], wide[3])),
    "bmm out": (torch.bmm(batch_a, batch_b, out=torch.empty_like(batch_c)), torch.bmm(wide[2], wide[3])),
    "baddbmm": (torch.baddbmm(batch_c, batch_a, batch_b), torch.baddbmm(wide[5], wide[2], wide[3])),
    "linear": (F.linear(a, b.t()), wide[0] @ wide[1]),
    "linear with a bias": (F.linear(a, b.t(), c[0]), torch.addmm(wide[4][0], wide[0], wide[1])),
}
for name, (found, expected) in products.items():
    assert found.dtype == torch.bfloat16, name
    assert torch.equal(found, expected.bfloat16()), name

# Products of float32 are those of before, and gradients go through both.
assert torch.equal(wide[0] @ wide[1], before)
assert torch.mm(wide[0], wide[1], out=into) is into and torch.equal(into, before)
weight = b.t().contiguous().requires_grad_()
F.linear(a, weight).float().sum().backward()
assert torch.equal(weight.grad, wide[0].sum(0).expand(7, 64).bfloat16())
with torch.inference_mode():
    assert torch.equal(a @ b, (wide[0] @ wide[1]).bfloat16())
"""


def test_products_of_bf16_are_those_of_float32_rounded_once() -> None:
    # A process of its own, because the change stays until it ends.
    subprocess.run([sys.executable, "-c", REPLACED], check=True)


@pytest.mark.skipif(cpu_products.has_bf16(), reason="this CPU has products of BF16 of its own")
def test_a_rank_widens_bf16_where_the_cpu_has_no_products_of_it() -> None:
    script = "import torch; from specrl.distributed import join; join(); from specrl import cpu_products as c; "
    script += "assert c.multiply_in_float32.cache_info().currsize == 1"
    # A test before this one may have left the variables of a process group that still listens.
    alone = {name: value for name, value in os.environ.items() if name not in GROUP_VARIABLES}
    subprocess.run([sys.executable, "-c", script], check=True, env=alone)
