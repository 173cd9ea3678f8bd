"""First weights: the same whoever draws which rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ridethrough.train.model import Llama
from ridethrough.train.presets import PRESETS
from ridethrough.train.sharding import fill, local_rows, seeded, shard


def test_any_run_of_rows_equals_that_part_of_the_whole() -> None:
    rows, shape = seeded(3, num_layers=2), torch.Size([10, 7])
    whole = rows("layers.0.mlp.up_proj.weight", shape, 0, 10)
    parts = [rows("layers.0.mlp.up_proj.weight", shape, first, count) for first, count in ((0, 3), (3, 3), (6, 4))]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(rows("layers.1.mlp.up_proj.weight", shape, 0, 10), whole)
    assert not torch.equal(seeded(4, 2)("layers.0.mlp.up_proj.weight", shape, 0, 10), whole)


def test_deviations_and_norms() -> None:
    rows = seeded(0, num_layers=8)
    shape = torch.Size([512, 512])
    assert rows("embed_tokens.weight", shape, 0, 512).std().item() == pytest.approx(0.02, rel=0.01)
    assert rows("layers.0.self_attn.o_proj.weight", shape, 0, 512).std().item() == pytest.approx(0.005, rel=0.01)
    assert torch.equal(rows("norm.weight", torch.Size([6]), 2, 3), torch.ones(3))


@pytest.mark.usefixtures("alone")
def test_a_model_split_on_the_meta_device_gets_the_same_weights() -> None:
    config = dataclasses.replace(PRESETS["tiny"], num_layers=1)
    whole = Llama(config)
    fill(whole, seeded(1, 1))
    with torch.device("meta"):
        split = Llama(config)
    from torch.distributed.device_mesh import init_device_mesh

    shard(split, init_device_mesh("cpu", (1,)), torch.float32)
    split.to_empty(device="cpu")
    fill(split, seeded(1, 1))
    for (name, a), (other, b) in zip(whole.named_parameters(), split.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, local_rows(b)[0])


def test_golden_losses() -> None:
    """Five AdamW steps of `tiny` on one synthetic batch. A change here is a change of what users train."""
    config = PRESETS["tiny"]
    model = Llama(config)
    fill(model, seeded(0, config.num_layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = (torch.arange(2 * 65) ** 2 % 251).view(2, 65)
    losses = []
    for _ in range(5):
        loss = model.loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx([5.6147861, 4.8904023, 4.0997024, 3.6023512, 3.1305087], abs=1e-5)
