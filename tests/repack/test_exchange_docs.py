"""The example of docs/repacking.md runs as printed, and its numbers are those of one process."""

from __future__ import annotations

import re
from pathlib import Path

import torch

DOCUMENT = Path(__file__).parents[2] / "docs" / "repacking.md"
TOKENS = 3038


def test_example(ranks) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    results = ranks(4).run("document_tasks:run_example", code)
    names: dict = {}
    reference = code[code.index("def attention") : code.index("def layer")]
    exec("import torch\nDIM = 16\n" + reference, names)
    HEADS, KV, DIM = 8, 2, 16
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HEADS * DIM)
    weights = [(torch.randn(HEADS * DIM, (HEADS + 2 * KV) * DIM) / 30).requires_grad_() for _ in range(4)]
    cu = torch.tensor([900, 350, 420, 130, 610, 88, 240, 300]).cumsum(0)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), cu])
    for number, weight in enumerate(weights):
        q, k, v = (x @ weight).split([HEADS * DIM, KV * DIM, KV * DIM], dim=1)
        q, k, v = (t.unflatten(1, (-1, DIM)) for t in (q, k, v))
        x = x + names["attention"](q, k, v, cu, None if number == 3 else 64).flatten(1)
    (x.square().sum() / TOKENS).backward()
    assert sum(len(index) for index, _, _ in results) == TOKENS
    for index, out, grads in results:
        torch.testing.assert_close(
            torch.tensor(out, dtype=torch.float64), x.detach()[index].double(), rtol=1e-4, atol=1e-4
        )
        for grad, weight in zip(grads, weights, strict=True):
            torch.testing.assert_close(
                torch.tensor(grad, dtype=torch.float64), weight.grad.double(), rtol=1e-3, atol=1e-4
            )


def test_break_even_figures() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for k, shown in ((0.005, "1.086"), (0.01, "1.164")):
        assert f"{(1 + 28 * k) / (1 + 10 * k):.3f}" == shown and f"k = {k}: {shown}" in text
