"""What ALTI-Logit follows and what it refuses, on a small decoder of one's own, spelled in many ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lrpx.errors import MethodError
from lrpx.methods import METHODS
from lrpx.model import BoundModel
from lrpx.questions import Question, Questions
from lrpx.targets import Contrast
from lrpx.tasks import Task
from tests.reference.models import randomise

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 7], [2, 8, 9, 4, 20, 6, 5]])
HEADS, WIDTH = 2, 8
BARE = ", no bias"


class Layer(nn.Module):
    """A pre-norm layer, whose sums are spelled by ``spelling``."""

    def __init__(self, spelling):
        super().__init__()
        self.spelling, self.biased = spelling.removesuffix(BARE), not spelling.endswith(BARE)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=self.biased)
        self.down, self.up = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.zeros(2, WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.zeros(WIDTH))

    def attend(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.spelling == "a mask of three dimensions":
            mask = torch.ones(HEADS, x.shape[1], x.shape[1], dtype=torch.bool).tril()
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        elif self.spelling == "a mask of two dimensions":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        elif self.spelling == "the first token sees nothing":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.spelling == "gated in place":
            mixed *= 2
        if self.spelling == "changed through a view":
            mixed[:, :, 1:].mul_(0.5)
        mixed = mixed.transpose(1, 2).reshape(x.shape)
        if self.spelling == "gated":
            mixed = mixed * torch.sigmoid(self.gate(x))
        if self.spelling == "a bias of its own":
            return F.linear(mixed, self.out.weight) + self.out.bias
        if self.spelling == "matmul":
            return mixed @ self.out.weight.T + self.out.bias
        if self.spelling == "addmm":
            return torch.addmm(self.out.bias, mixed.view(-1, WIDTH), self.out.weight.t()).view(x.shape)
        if self.spelling == "beside an adapter":
            return self.out(mixed) + self.up(self.down(mixed))
        if self.spelling == "beside an adapter of what is scaled":  # as DeLoRA
            return self.out(mixed) + self.up(self.down(2 * mixed))
        if self.spelling == "beside an adapter of sums":  # as MiSS
            return self.out(mixed) + F.linear(mixed.unflatten(-1, (2, -1)).sum(-2), self.out.weight[:, : WIDTH // 2])
        out = self.out(mixed)
        if self.spelling == "projected and changed":
            out[:, 1:] *= 0.5
        if self.spelling in ("projected and rotated", "projected and halves exchanged"):  # the first as RoAd
            halves = out.chunk(2, -1)
            parts = (-halves[1], halves[0]) if self.spelling == "projected and rotated" else (halves[1], halves[0])
            return out * 0.8 + torch.cat(parts, -1) * 0.6
        return out

    def forward(self, x):
        normed = self.norm1(x)
        attended, mlp = self.attend(normed), None
        if self.spelling in PARALLEL:
            mlp = self.up(F.gelu(self.down(normed)))
        if self.spelling == "constant += stream":
            attended += x
            x = attended
        elif self.spelling == "constant.add_(stream)":
            attended.add_(x)
            x = attended
        elif self.spelling == "stream += constant":
            x += attended
        elif self.spelling == "a scaled stream":
            x = self.scale * x + attended
        elif self.spelling == "attention += MLP":
            attended += mlp
            return x + attended
        elif self.spelling == "MLP += attention":
            mlp += attended
            return mlp + x
        elif self.spelling == "in one line":
            return attended + mlp + x
        else:
            x = x + attended
        y = self.norm2(x)
        if self.spelling == "experts in one matrix":
            both = torch.bmm(y.reshape(1, -1, WIDTH).expand(2, -1, -1), self.experts)
            return x + both.sum(0).view(x.shape)
        if self.spelling == "experts by einsum":
            return x + torch.einsum("btd,ndf->btf", y, self.experts)
        return x + self.up(F.gelu(self.down(y)))


PARALLEL = ("attention += MLP", "MLP += attention", "in one line")


class Decoder(nn.Module):
    """Two layers, tokens alone."""

    def __init__(self, spelling):
        super().__init__()
        self.embedding = nn.Embedding(31, WIDTH)
        self.layers = nn.ModuleList(Layer(spelling) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 31)

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x))}


def explained(spelling, ids=IDS, position=5, **options):
    model = Decoder(spelling).double().eval()
    randomise(model, 0)
    with torch.no_grad():
        expected = model(ids)["logits"][:, position]
    bound = BoundModel(model, task=Task.CAUSAL)
    asked = tuple(Question(i, position, Contrast(2, 7)) for i in range(len(ids)))
    questions = Questions(tuple(bound.reader.row(row) for row in ids), asked)
    found = METHODS["alti-logit"].attribute(bound, questions, **options)
    torch.testing.assert_close(found.answers.logits, expected, rtol=0, atol=1e-14)
    return found


def heads(found):
    return torch.stack([part.values for part in found.parts["heads"]])


SAME = {
    "plain": [
        "constant += stream", "constant.add_(stream)", "stream += constant", "a bias of its own", "matmul", "addmm",
        "a mask of three dimensions", "a mask of two dimensions",
    ],
    "in one line": ["attention += MLP", "MLP += attention"],
    # without a bias what attention writes shares its memory with what the model changes
    "plain" + BARE: ["constant += stream" + BARE, "constant.add_(stream)" + BARE, "stream += constant" + BARE],
    "in one line" + BARE: ["attention += MLP" + BARE, "MLP += attention" + BARE],
    "experts by einsum": ["experts in one matrix"],
}  # fmt: skip


@pytest.mark.parametrize(("plain", "spelling"), [(one, other) for one, others in SAME.items() for other in others])
def test_spelled_otherwise_it_is_the_same(plain, spelling):
    expected, found = explained(plain), explained(spelling)
    torch.testing.assert_close(found.relevance, expected.relevance, rtol=0, atol=1e-12)
    torch.testing.assert_close(heads(found), heads(expected), rtol=0, atol=1e-12)
    for row in IDS:
        kinds = explained(plain, row[None], ledger=True).ledgers[0].by_kind()
        assert explained(spelling, row[None], ledger=True).ledgers[0].by_kind() == pytest.approx(kinds, abs=1e-12)


@pytest.mark.parametrize("spelling", [*SAME, "a scaled stream", "the first token sees nothing"])
@pytest.mark.parametrize("position", [0, 5])
def test_the_ledger_closes(spelling, position):
    for row in IDS:
        found = explained(spelling, row[None], position, ledger=True)
        (ledger,), (relevance,) = found.ledgers, found.relevance
        kinds = ledger.by_kind()
        assert {"tokens", "MLPs", "biases"} <= set(kinds) <= {"tokens", "attention", "MLPs", "biases"}
        assert relevance.isfinite().all()
        assert abs(ledger.difference) < 1e-12
        assert float(heads(found).sum()) == pytest.approx(kinds.get("attention", 0.0), abs=1e-12)
        assert float(relevance.sum() - heads(found).sum()) == pytest.approx(kinds["tokens"], abs=1e-12)


BETWEEN = (
    "gated", "gated in place", "changed through a view", "projected and changed", "beside an adapter",
    "beside an adapter of what is scaled", "beside an adapter of sums", "projected and rotated",
    "projected and halves exchanged",
)  # fmt: skip


@pytest.mark.parametrize("spelling", BETWEEN)
def test_what_comes_between_is_refused(spelling):
    with pytest.raises(MethodError, match=r"attention in layers\.0 is .*projected.* use attnlrp or lrp"):
        explained(spelling)


class Skipping(Decoder):
    """Three layers; what the third is given, ``mixed`` makes of what all before have made; or of what all have made
    what the head is given, with ``at_end``."""

    def __init__(self, mixed, at_end=False):
        super().__init__("plain")
        self.at_end = at_end
        self.layers.append(Layer("plain"))
        self.positions, self.mixed = nn.Embedding(7, WIDTH), mixed

    def forward(self, input_ids):
        made = [self.embedding(input_ids)]
        for layer in self.layers[:2]:
            made.append(layer(made[-1]))
        place = self.positions(torch.arange(input_ids.shape[1])).expand_as(made[0])
        if self.at_end:
            return {"logits": self.head(self.norm(self.mixed(*made[1:], self.layers[2](made[-1]), place)))}
        return {"logits": self.head(self.norm(self.layers[2](self.mixed(*made, place))))}


def skipping(mixed, method, at_end=False):
    model = Skipping(mixed, at_end).double().eval()
    randomise(model, 0)
    bound = BoundModel(model, task=Task.CAUSAL)
    asked = tuple(Question(i, 5, Contrast(2, 7)) for i in range(len(IDS)))
    return METHODS[method].attribute(bound, Questions(tuple(bound.reader.row(row) for row in IDS), asked))


SKIPS = {
    "a layer's output": lambda x, y, z, place: z + 0.7 * y,
    "the embeddings": lambda x, y, z, place: torch.lerp(z, x, 0.3),
    "in place of the stream": lambda x, y, z, place: y,
    "a mean of all": lambda x, y, z, place: torch.stack([x, y, z]).mean(0),
    "weights for all": lambda x, y, z, place: torch.einsum(
        "n,nbtd->btd", x.new_tensor([0.2, 0.3, 0.5]), torch.stack([x, y, z])
    ),
}


@pytest.mark.parametrize("method", ["alti-logit", "alti", "ifr"])
@pytest.mark.parametrize("skip", SKIPS)
def test_what_leads_past_layers_is_no_single_stream(skip, method):
    with pytest.raises(
        MethodError, match=r"layers\.2 is given what was made before the layer below it.*use attnlrp or lrp"
    ):
        skipping(SKIPS[skip], method)


@pytest.mark.parametrize("method", ["alti", "ifr"])
@pytest.mark.parametrize("skip", SKIPS)
def test_what_leads_past_the_last_layer_is_no_single_stream(skip, method):
    """Shares of the stream behind the last layer left out what is added to it: 0.70 for 0.84 of a token's own."""
    with pytest.raises(MethodError, match=r"is read past the last of them, too, .*use attnlrp or lrp"):
        skipping(SKIPS[skip], method, at_end=True)


def test_parts_by_gradients_have_what_leads_past_the_last_layer():
    mixed, plain = (lambda x, y, z, place: z + 0.7 * y), (lambda x, y, z, place: z)
    for method in ("alti-logit", "logit"):
        found, without = (skipping(each, method, at_end=True) for each in (mixed, plain))
        assert (found.relevance[0] - without.relevance[0]).abs().max() > 1e-3
    kinds = ("alti", "ifr")
    assert all(skipping(lambda x, y, z, place: 2 * z + 0 * place, kind, at_end=True) for kind in kinds)


def test_a_scale_or_positions_between_layers_are_no_skip():
    plain, scaled, placed = (
        skipping(mixed, "alti-logit").relevance
        for mixed in (lambda *made: made[2], lambda *made: 2 * made[2], lambda *made: made[2] + 0 * made[3])
    )
    torch.testing.assert_close(placed, plain, rtol=0, atol=1e-12)
    assert scaled[0].isfinite().all()
