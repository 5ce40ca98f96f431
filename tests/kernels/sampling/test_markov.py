"""The draft's first-order term against its meaning."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.markov import markov_logits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("rows", "vocab", "width"), [(1, 64, 16), (3, 130, 24), (16, 65, 40), (17, 257, 16), (40, 100, 64), (0, 100, 16)]
)
def test_is_base_plus_product(device, rows, vocab, width):
    torch.manual_seed(rows)
    base = torch.randn(rows, 5, vocab, device=device)[:, 2]  # rows of a block are strided
    embedding, head = (torch.randn(vocab, width, device=device).bfloat16() for _ in range(2))
    previous = torch.randint(0, vocab, (rows,), device=device)
    found = markov_logits(base, previous, embedding, head)
    expected = base.double() + embedding[previous].double() @ head.double().T
    assert found.shape == expected.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_rows_do_not_depend_on_their_neighbours(device):
    torch.manual_seed(1)
    base, previous = torch.randn(33, 90, device=device), torch.randint(0, 90, (33,), device=device)
    embedding, head = (torch.randn(90, 32, device=device).bfloat16() for _ in range(2))
    whole = markov_logits(base, previous, embedding, head)
    for row in (0, 15, 16, 32):
        alone = markov_logits(base[row : row + 1], previous[row : row + 1], embedding, head)
        assert torch.equal(alone[0], whole[row])
