import torch

from model.tally import tally


def test_counts_what_bincount_counts():
    index = torch.randint(7, (40, 3), generator=torch.Generator().manual_seed(0))
    assert torch.equal(tally(index, size=9), torch.bincount(index.flatten(), minlength=9))
    assert tally(index[:0], size=2).tolist() == [0, 0]
