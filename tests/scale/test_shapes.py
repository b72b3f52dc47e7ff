"""Shapes are compared with real modules, GPUs with their names."""

from dataclasses import replace

import pytest
import torch
from autograd_bytes import kept_bytes
from torch import nn
from torch.nn import functional as F

from labkit.measure.flops import step_flops
from labkit.memory import estimate
from labkit.models.gpt import GPT, Block
from labkit.scale.answer import model_flops
from labkit.scale.hardware import GPUS, find_gpu
from labkit.scale.job_config import job_of
from labkit.scale.model_row import row_of, shape_of
from labkit.scale.shapes import Shape

CONTEXT = 32
GPT_SHAPE = Shape(
    layers=3, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=96, gated=False, tied=True, positions=CONTEXT, biases=True
)
LLAMA_SHAPE = Shape(layers=2, hidden=64, heads=8, kv_heads=2, ffn=160, vocab=96)


class Network(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden) for _ in range(2))
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key = nn.Linear(shape.hidden, shape.key_width, bias=False)
        self.value = nn.Linear(shape.hidden, shape.key_width, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.networks = nn.ModuleList(Network(shape.hidden, shape.ffn) for _ in range(shape.experts))
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False) if shape.experts > 1 else None

    def forward(self, x):
        B, T, C = x.shape
        y = self.norms[0](x)
        q, k, v = (
            p(y).view(B, T, -1, C // self.shape.heads).transpose(1, 2) for p in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, C))
        return x + self.networks[0](self.norms[1](x))


class Llama(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.Sequential(*(Layer(shape) for _ in range(shape.layers)))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.embedding(tokens))))


def real(shape):
    """The module that a shape describes, without data."""
    with torch.device("meta"):
        if shape.gated:
            return Llama(shape)
        sizes = {"vocab": shape.vocab, "context": CONTEXT, "layers": shape.layers}
        return GPT(heads=shape.heads, width=shape.hidden, **sizes)


@pytest.mark.parametrize("shape", [GPT_SHAPE, LLAMA_SHAPE], ids=["gpt", "llama"])
def test_parameters_and_flops_are_those_of_the_module(shape):
    module = real(shape)
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    tokens = torch.zeros(2, CONTEXT, dtype=torch.int64, device="meta")
    counted = step_flops(module, tokens, tokens, lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
    masked = shape.layers * shape.attention_flops(CONTEXT)  # the counter does not know what a mask hides
    assert counted == 3 * tokens.numel() * (shape.forward_flops(CONTEXT) + masked)


@pytest.mark.parametrize("last", [0, 1, 3])
def test_flops_of_the_last_layers_are_those_of_a_module_that_is_frozen(last):
    module = real(replace(LLAMA_SHAPE, layers=3)).requires_grad_(False)
    for part in (*module.layers[3 - last :], module.head):
        part.requires_grad_(True)
    tokens = torch.zeros(2, CONTEXT, dtype=torch.int64, device="meta")
    counted = step_flops(module, tokens, tokens, lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
    row = {"layers": 3, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 160, "vocab": 96, "gated": "true"}
    row |= {"gpu": "H100", "seq_len": CONTEXT, "train": f"last:{last}" if last else "head"}
    assert counted == tokens.numel() * model_flops(job_of(row))


def test_experts_are_held_and_met():
    shape = Shape(layers=1, hidden=64, heads=4, kv_heads=4, ffn=96, vocab=32, experts=4, top_k=2)
    layer = Layer(shape)
    assert shape.layer_parameters == sum(p.numel() for p in layer.parameters())
    idle = sum(p.numel() for n in layer.networks[2:] for p in n.parameters())
    norms = sum(p.numel() for p in layer.norms.parameters())
    assert shape.layer_products == shape.layer_parameters - idle - norms


def test_a_block_keeps_the_bytes_that_are_counted():
    B, T = 2, CONTEXT
    module = Block(GPT_SHAPE.hidden, GPT_SHAPE.heads).eval()
    x = torch.randn(B, T, GPT_SHAPE.hidden, requires_grad=True)
    statistics = 4 * B * T * (4 + GPT_SHAPE.heads)  # mean and deviation of two norms, a sum per head
    assert kept_bytes(module, x) == B * T * GPT_SHAPE.saved_bytes(width=4) + statistics


def test_a_block_more_is_what_the_budget_says():
    B, T = 2, CONTEXT

    def most(shape):
        tokens = torch.zeros(B, T, dtype=torch.int64, device="meta")
        found = estimate(real(shape), tokens, device="cpu")
        assert found.held["parameters"] == 4 * shape.parameters
        return max(kinds["activations"] for _, kinds in found.samples)

    statistics = 4 * B * T * (4 + GPT_SHAPE.heads)
    assert most(replace(GPT_SHAPE, layers=4)) - most(GPT_SHAPE) == B * T * GPT_SHAPE.saved_bytes(width=4) + statistics


def test_a_gated_network_keeps_the_bytes_that_are_counted():
    module, x = Network(64, 160), torch.randn(10, 64, requires_grad=True)
    plain = Shape(layers=1, hidden=64, heads=4, kv_heads=4, ffn=160, vocab=32, gated=True)
    attention_and_norms = 4 * (4 + 2 + 1) * 64
    assert kept_bytes(module, x) == 10 * (plain.saved_bytes(width=4) - attention_and_norms)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layers": 0}, "layers must be at least 1"),
        ({"hidden": float("nan")}, "hidden must be at least 1, got nan"),
        ({"heads": 7}, "heads must divide hidden"),
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"top_k": 2}, "top_k=2 must be at most experts=1"),
    ],
)
def test_an_impossible_shape_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Shape(**{"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 8} | wrong)


def test_a_gpu_goes_by_many_names():
    assert find_gpu("NVIDIA H100 SXM5 80GB HBM3").name == find_gpu("h100").name == "H100-80GB"
    for name in ("rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090"):
        assert find_gpu(name).name == "RTX-4090"
    assert find_gpu("a100-40").memory_gbs == 1555 and find_gpu("GB200 NVL72").gpus_per_node == 72
    assert find_gpu("A100-64GB").memory_gib == pytest.approx(63.3, abs=0.1)
    assert find_gpu("H100-96GB-500W").peak("bf16") < find_gpu("H100-80GB").peak("bf16")
    with pytest.raises(ValueError, match="did you mean H100-80GB"):
        find_gpu("H1000")


def test_a_gpu_has_the_precisions_of_its_datasheet():
    lacks = {"fp8": ("V100", "T4", "A10", "A100", "A800"), "bf16": ("V100", "T4")}
    for precision, gpus in lacks.items():
        assert not any(find_gpu(gpu).has(precision) for gpu in gpus)
    assert all(find_gpu(gpu).has("amp_fp8") for gpu in ("L40S", "RTX-4090", "H100", "B300", "MI300X", "MI355X"))
    assert find_gpu("H20").watts == 400 and find_gpu("H20").memory_gbs == 4000


def test_every_gpu_has_a_source_and_sane_units():
    for gpu in GPUS.values():
        assert gpu.source
        assert 50 < gpu.tflops["bf16"] < 5000 and 10 < gpu.memory_gib < 300
        assert 250 < gpu.memory_gbs < 10000 and 15 <= gpu.node_gbs < 2000
        assert all(0 < share < 1 for share in gpu.achievable.values())


def test_adapters_are_on_every_matrix_of_a_layer():
    sides = sum(sum(part.weight.shape) for part in Layer(LLAMA_SHAPE).modules() if isinstance(part, nn.Linear))
    assert LLAMA_SHAPE.adapters(8) == (8 * sides, 0)


@pytest.mark.parametrize(("name", "published"), [("llama3-8b", 41_943_040), ("llama3-70b", 207_093_760)])
def test_adapters_have_the_parameters_that_peft_prints(name, published):
    """With LoraConfig(r=16) on the seven matrices of a layer, print_trainable_parameters says so."""
    shape = shape_of(row_of(name), 8192)
    assert shape.layers * shape.adapters(16)[0] == published
