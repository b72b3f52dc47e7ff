import copy

import pytest
import torch
from torch.nn import functional as F

from labkit import models
from labkit.models.gpt import GPT, Block
from labkit.models.mlp import MLP
from labkit.models.resnet import BasicBlock, ResNet

INPUTS = {
    "mlp": lambda: torch.randn(4, 64),
    "resnet": lambda: torch.randn(4, 3, 32, 32),
    "gpt": lambda: torch.randint(256, (4, 16)),
}
PAPER_PARAMETERS = 0.27e6  # ResNet-20 of He et al., table 6


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", models.SIZES)
def test_a_model_learns_a_batch_and_every_parameter_gets_a_gradient(name):
    torch.manual_seed(0)
    model, inputs = models.build(name), INPUTS[name]()
    target = inputs if name == "gpt" else torch.arange(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = models.loss(name)(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert all(p.grad is not None and p.grad.count_nonzero() for p in model.parameters())


@pytest.mark.parametrize("name", models.SIZES)
def test_sizes(name):
    counts = [count(models.build(name, size)) for size in ("tiny", "small", "medium")]
    assert counts[0] < 100_000
    assert 0.8e6 < counts[1] < 1.2e6
    assert 9e6 < counts[2] < 11e6


@pytest.mark.parametrize("name", models.SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(name, dtype):
    model, inputs = models.build(name).to(dtype), INPUTS[name]()
    output = model(inputs.to(dtype) if inputs.is_floating_point() else inputs)
    assert output.dtype == dtype and output.shape[-1] == (256 if name == "gpt" else 10)
    output.float().sum().backward()


@pytest.mark.parametrize("name", models.SIZES)
def test_the_unit_keeps_the_shape_of_its_input(name):
    unit = models.unit(name)
    model, seen = models.build(name, "small"), []

    def compare(module, inputs, output):
        seen.append(inputs[0].shape == output.shape)

    for module in model.modules():
        if isinstance(module, unit) if isinstance(unit, type) else unit(module):
            module.register_forward_hook(compare)
    model(INPUTS[name]())
    assert len(seen) >= 3 and all(seen)


def test_overrides_and_unknown_names():
    assert len(models.build("gpt", "tiny", layers=3).blocks) == 3
    assert models.build("mlp", dtype=torch.float64)(torch.zeros(1, 64, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ValueError, match=r"unknown model 'bert': choose from 'mlp', 'resnet', 'gpt'"):
        models.build("bert")
    with pytest.raises(ValueError, match=r"unknown size 'huge': choose from 'tiny', 'small', 'medium'"):
        models.build("gpt", "huge")
    with pytest.raises(ValueError, match=r"unknown argument of GPT 'depth': choose from 'vocab', .*'tied'"):
        models.build("gpt", depth=3)
    for function in (models.loss, models.unit):
        with pytest.raises(ValueError, match="unknown model 'bert'"):
            function("bert")


def test_the_loss_is_the_mean_over_all_targets():
    logits, target = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    each = [F.cross_entropy(logits[b, t], target[b, t]) for b in range(2) for t in range(3)]
    torch.testing.assert_close(models.loss("gpt")(logits, target), torch.stack(each).mean())


# MLP


def test_mlp_is_its_formula():
    model = MLP((3, 5, 2))
    first, _, last = model.layers
    x = torch.randn(7, 3)
    torch.testing.assert_close(model(x), (x @ first.weight.T + first.bias).clamp(min=0) @ last.weight.T + last.bias)
    assert count(model) == 4 * 5 + 6 * 2
    with pytest.raises(ValueError, match="sizes=\\(3,\\)"):
        MLP((3,))


def test_he_s_weights_keep_the_mean_square_through_a_relu():
    torch.manual_seed(0)
    x = torch.randn(500, 400)
    for he, kept in ((True, 1.0), (False, 1 / 6)):  # torch draws from a variance of 1 / (3 inputs), He from 2 / inputs
        layers = MLP((400, 400, 400, 400), he=he).layers
        before, after = (layers[:depth](x).square().mean() for depth in (3, 5))
        assert abs(after / before / kept - 1) < 0.2


# ResNet


def test_resnet_has_the_paper_s_size_and_stages():
    assert abs(count(ResNet(depth=20, width=16)) / PAPER_PARAMETERS - 1) < 0.02
    model = ResNet(depth=14, width=8)
    assert [type(block) for block in model.blocks] == [BasicBlock] * 6
    shapes = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert shapes == [(2, 8, 32, 32)] * 2 + [(2, 16, 16, 16)] * 2 + [(2, 32, 8, 8)] * 2


def test_norms_of_a_resnet():
    images = torch.randn(4, 3, 32, 32)
    assert any(True for _ in ResNet(width=4).buffers())
    group = ResNet(width=4, norm="group")
    assert not any(True for _ in group.buffers())
    # Group statistics are each image's own, so half of a batch gives half of the output: batch statistics would not.
    torch.testing.assert_close(group(images)[:2], group(images[:2]))
    assert not torch.allclose(ResNet(width=4)(images)[:2], ResNet(width=4)(images[:2]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 10}, "depth=10 must be 6n \\+ 2"),
        ({"depth": 2}, "depth=2 must be"),
        ({"norm": "layer"}, "unknown norm 'layer': choose from 'batch', 'group'"),
        ({"norm": "group", "width": 6}, "width=6 must be divisible by 4"),
    ],
)
def test_wrong_resnets(arguments, message):
    with pytest.raises(ValueError, match=message):
        ResNet(**arguments)


# GPT


def test_gpt_sees_no_future():
    model = models.build("gpt").eval()
    tokens = torch.randint(256, (1, 10))
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6], after[:, 6])


def test_gpt_starts_knowing_nothing():
    model = models.build("gpt", "small")
    loss = models.loss("gpt")(model(torch.randint(256, (8, 64))), torch.randint(256, (8, 64)))
    assert abs(loss.item() - torch.tensor(256.0).log().item()) < 0.1


def test_tied_embeddings_are_one_parameter():
    tied, untied = models.build("gpt"), models.build("gpt", tied=False)
    assert tied.head.weight is tied.token_embedding.weight
    assert count(untied) - count(tied) == 256 * 32
    assert tied.state_dict().keys() == untied.state_dict().keys()
    for changed in (copy.deepcopy(tied), tied.double()):
        assert changed.head.weight is changed.token_embedding.weight

    # The gradient of the tied matrix is the sum over its two uses.
    untied.load_state_dict(tied.state_dict())
    untied.double()
    tokens = torch.randint(256, (2, 8))
    for model in (tied, untied):
        models.loss("gpt")(model(tokens), tokens).backward()
    torch.testing.assert_close(tied.head.weight.grad, untied.head.weight.grad + untied.token_embedding.weight.grad)


def test_dropout_is_off_in_eval_mode():
    model, tokens = models.build("gpt", dropout=0.5), torch.randint(256, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_wrong_gpts():
    with pytest.raises(ValueError, match="width=32 must be divisible by heads=3"):
        GPT(heads=3, width=32)
    with pytest.raises(ValueError, match="65 tokens exceed the model's context of 64"):
        models.build("gpt")(torch.zeros(1, 65, dtype=torch.int64))
    assert all(isinstance(block, Block) for block in models.build("gpt").blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("name", models.SIZES)
def test_on_cuda_as_on_cpu(name):
    model, inputs = models.build(name).double().eval(), INPUTS[name]()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    expected = model(inputs)
    torch.testing.assert_close(model.cuda()(inputs.cuda()).cpu(), expected)
