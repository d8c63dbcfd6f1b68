"""A small language model trained with the library's attention: the losses are those of training with PyTorch's."""

import pathlib

import pytest

torch = pytest.importorskip("torch")

import tilewave
import torch.nn.functional as F
from test_training import Block
from torch.nn.attention import SDPBackend, sdpa_kernel

STEPS, BATCH, LENGTH, WIDTH, HEADS = 50, 8, 64, 64, 4
# The two runs round differently, and training amplifies differences: up to 1.6e-6 of a loss with five seeds. An error of 1% in dQ, dK or dV
# alone changes a loss by 3.9e-5 or more with each of them.
RELATIVE = 2e-5


class Model(torch.nn.Module):
    """Predicts the next byte."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = torch.nn.Embedding(256, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.Sequential(Block(WIDTH, HEADS), Block(WIDTH, HEADS))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 256)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.bytes(ids) + self.places.weight)))


def losses(make_model=Model, steps=STEPS, rate=1e-2):
    """Of each step of training on the licence, the same each time."""
    text = (pathlib.Path(__file__).parents[3] / "LICENSE").read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    history = []
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH, (BATCH,))
        batch = data[starts[:, None] + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return torch.tensor(history)


def test_loss_curve():
    with sdpa_kernel(SDPBackend.MATH):
        wanted = losses()
    with tilewave.install_sdpa():
        before = tilewave.sdpa_counts().get("tilewave", 0)
        got = losses()
        assert tilewave.sdpa_counts()["tilewave"] == before + 2 * STEPS
    torch.testing.assert_close(got, wanted, rtol=RELATIVE, atol=0)
    assert got[-5:].mean() < 0.6 * got[0]


class Scores(torch.nn.Module):
    """A model of transformers, of whose results only the scores count."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


# Smaller steps, because 200 of them amplify differences further: up to 1e-6 of a loss with three seeds. An error of 1% in dQ, dK or dV
# alone changes a loss by 8.6e-5 or more with each of them.
LLAMA_STEPS, LLAMA_RATE, LLAMA_RELATIVE = 200, 1e-3, 2e-5


def llama():
    """Two layers of transformers' Llama, with heads that share keys."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    return Scores(transformers.LlamaForCausalLM(config))


def test_loss_curve_of_llama():
    with sdpa_kernel(SDPBackend.MATH):
        wanted = losses(llama, LLAMA_STEPS, LLAMA_RATE)
    with tilewave.install_sdpa():
        before = tilewave.sdpa_counts().get("tilewave", 0)
        got = losses(llama, LLAMA_STEPS, LLAMA_RATE)
        assert tilewave.sdpa_counts()["tilewave"] == before + 2 * LLAMA_STEPS
    torch.testing.assert_close(got, wanted, rtol=LLAMA_RELATIVE, atol=0)
    assert got[-5:].mean() < 0.6 * got[0]
