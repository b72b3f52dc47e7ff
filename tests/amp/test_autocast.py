"""The oracle of autocast is torch.autocast: the same dtypes operation by operation, the same bits model by model."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from labkit import models
from labkit.amp.autocast_lists import TABLES, functions
from labkit.amp.autocast_mode import autocast, why_not
from labkit.recompute import checkpoint

LOW = (torch.bfloat16, torch.float16)


def batch(name, size=4):
    data = models.data.load("auto", name)
    return [
        torch.stack([torch.as_tensor(part) for part in parts])
        for parts in zip(*(data[i] for i in range(size)), strict=True)
    ]


def one_backward(name, context):
    torch.manual_seed(0)
    model = models.build(name)
    inputs, targets = batch(name)
    with context:
        output = model(inputs)
        loss = models.loss(name)(output, targets)
    loss.backward()
    return [output, loss, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_a_model_computes_what_it_computes_under_torch_autocast(name, dtype):
    ours = one_backward(name, autocast("cpu", dtype))
    theirs = one_backward(name, torch.autocast("cpu", dtype))
    assert ours[0].dtype == dtype and ours[1].dtype == torch.float32  # logits low, the loss in fp32
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


# ---- operation by operation: (function, arguments), run with fp32 and with 16-bit arguments


def x(*shape):
    return torch.rand(shape or (4, 4)) + 0.5


CLASSES = torch.tensor([0, 1, 2, 3])
CALLS = {
    "matmul": (torch.matmul, x(), x()),
    "@": (lambda a, b: a @ b, x(), x()),
    "method": (lambda a, b: a.mm(b), x(), x()),
    "linear": (F.linear, x(), x(), x(4)),
    "linear by name": (lambda a, b: F.linear(input=a, weight=b), x(), x()),
    "bmm": (torch.bmm, x(2, 4, 4), x(2, 4, 4)),
    "baddbmm": (torch.baddbmm, x(2, 4, 4), x(2, 4, 4), x(2, 4, 4)),
    "addmm": (torch.addmm, x(), x(), x()),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), x(), x()),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), x(), x()),
    "chain_matmul": (torch.linalg.multi_dot, [x(), x(), x()]),
    "mv": (torch.mv, x(), x(4)),
    "conv1d": (F.conv1d, x(1, 4, 4), x(4, 4, 1)),
    "conv2d": (F.conv2d, x(1, 2, 4, 4), x(2, 2, 3, 3), x(2)),
    "conv_transpose2d": (F.conv_transpose2d, x(1, 2, 4, 4), x(2, 2, 3, 3)),
    "attention": (F.scaled_dot_product_attention, x(1, 4, 4), x(1, 4, 4), x(1, 4, 4)),
    "prelu": (F.prelu, x(), x(1)),
    "softmax": (lambda a: F.softmax(a, -1), x()),
    "softmax in fp64": (lambda a: torch.softmax(a, -1, torch.float64), x()),
    "log_softmax": (lambda a: a.log_softmax(-1), x()),
    "layer_norm": (lambda a, w: F.layer_norm(a, (4,), w, w), x(), x(4)),
    "group_norm": (lambda a: F.group_norm(a, 2), x(2, 4, 4)),
    "exp": (torch.exp, x()),
    "log": (lambda a: a.log(), x()),
    "pow": (lambda a: a**2, x()),
    "rpow": (lambda a: 2**a, x()),
    "reciprocal": (lambda a: 1 / a, x()),
    "sum": (lambda a: a.sum(), x()),
    "mean": (lambda a: a.mean(), x()),
    "prod": (lambda a: a.prod(), x()),
    "norm": (lambda a: a.norm(), x()),
    "cumsum": (lambda a: a.cumsum(0), x()),
    "cross_entropy": (lambda a: F.cross_entropy(a, CLASSES), x()),
    "nll_loss": (lambda a: F.nll_loss(a, CLASSES), x()),
    "mse_loss": (F.mse_loss, x(), x()),
    "bce with logits": (F.binary_cross_entropy_with_logits, x(), x()),
    "quantile": (lambda a: a.quantile(0.5), x()),
    "svd": (torch.linalg.svdvals, x()),
    "fft": (lambda a: torch.fft.fft(a).real, x()),
    "cat": (lambda a, b: torch.cat([a, b.float()]), x(), x()),
    "stack": (lambda a, b: torch.stack((a, b)), x(), x()),
    "add": (torch.add, x(), x()),
    "gelu": (F.gelu, x()),
    "relu": (F.relu, x()),
    "fp64 stays": (torch.matmul, x().double(), x().double()),
    "integers stay": (torch.matmul, CLASSES, CLASSES),
    "multi-head attention": (lambda a, m: m(a, a, a)[0], x(1, 4, 8), nn.MultiheadAttention(8, 2)),
}


def cast(value, dtype):
    if isinstance(value, list):
        return [cast(item, dtype) for item in value]
    floats = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.to(dtype) if floats else value


def outcome(function, inputs):
    """The result, or the class of the error."""
    try:
        return function(*inputs)
    except RuntimeError as error:
        return type(error)


def same_operation(calls, device_type, dtype):
    for name, (function, *args) in calls.items():
        for given in (torch.float32, dtype):
            inputs = [cast(arg, given) for arg in args]
            with torch.autocast(device_type, dtype):
                theirs = outcome(function, inputs)
            with autocast(device_type, dtype):
                ours = outcome(function, inputs)
            if isinstance(theirs, type):  # such as quantile in 16 bits on a GPU
                assert ours is theirs, (name, given)
                continue
            assert ours.dtype == theirs.dtype, (name, given)
            assert torch.equal(ours, theirs), (name, given)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_operation_by_operation_it_is_torch_autocast(dtype):
    same_operation(CALLS, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_operation_by_operation_it_is_torch_autocast_on_a_gpu(dtype):
    calls = {
        name: (function, *[arg.cuda() if hasattr(arg, "cuda") else arg for arg in args])
        for name, (function, *args) in CALLS.items()
        if name not in ("cross_entropy", "nll_loss", "integers stay", "chain_matmul", "fft")
    }
    same_operation(calls, "cuda", dtype)


def fake_cuda(value, given):
    """A tensor that only has shape, dtype and device: enough for the table of a device that is not there."""
    if isinstance(value, list):
        return [fake_cuda(item, given) for item in value]
    dtype = given if value.dtype == torch.float32 else value.dtype
    return torch.empty(value.shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("multi-head attention", "quantile", "fft")])
def test_without_a_gpu_the_dtypes_on_one_are_those_of_torch_autocast(monkeypatch, name, dtype):
    monkeypatch.setattr("labkit.amp.autocast_mode.why_not", lambda *_: None)
    function, *args = CALLS[name]
    for given in (torch.float32, dtype):
        with FakeTensorMode():
            inputs = [fake_cuda(arg, given) for arg in args]
            monkeypatch.setitem(globals(), "CLASSES", torch.empty(4, dtype=torch.int64, device="cuda"))
            with autocast("cuda", dtype):
                ours = function(*inputs)
            torch.set_autocast_dtype("cuda", dtype)  # torch.autocast("cuda") itself turns itself off without CUDA
            torch.set_autocast_enabled("cuda", True)
            try:
                theirs = function(*inputs)
            finally:
                torch.set_autocast_enabled("cuda", False)
                torch.clear_autocast_cache()
            assert ours.device.type == theirs.device.type == "cuda"
            assert ours.dtype == theirs.dtype, given


# What torch.autocast casts and our table does not, because nobody can call it, or only from inside something we cast.
INSIDE = {
    "cpu": "_addmm_activation _convolution _grid_sampler_2d_cpu_fallback _lu_with_info _native_multi_head_attention "
    "mkldnn_rnn_layer nll_loss2d cross_entropy_loss multilabel_margin_loss_forward fake_quantize_per_tensor_affine "
    "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d",
    "cuda": "_cudnn_rnn _convolution convolution cudnn_convolution cudnn_convolution_transpose nll_loss2d "
    "_scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell grid_sampler "
    "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d upsample_trilinear3d",
}


@pytest.mark.parametrize(("device_type", "key"), [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")])
def test_the_table_knows_every_operation_that_torch_autocast_casts(device_type, key):
    known = set(TABLES[device_type])
    for operator in torch._C._dispatch_get_all_op_names():
        if operator.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key):
            name = operator.removeprefix("aten::").partition(".")[0]
            if name in INSIDE[device_type].split():
                continue
            public = name.replace("linalg_", "linalg.").replace("fft_", "fft.")
            found = set(functions(public))
            assert found and found <= known, operator


# ---- the context itself


def test_weights_stay_fp32_and_are_cast_once_a_block():
    weight, inputs = nn.Parameter(x()), x()
    with autocast("cpu") as mode:
        for _ in range(3):
            inputs = torch.relu(inputs @ weight)
        assert [held[0] is weight for held in mode._casts.values()] == [True]
    assert not mode._casts  # what the block held, it lets go: the next step has other weights
    inputs.sum().backward()
    assert weight.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("cache", [True, False])
def test_a_weight_changed_inside_the_block_is_cast_again(cache):
    weight = nn.Parameter(torch.ones(2, 2))
    with autocast("cpu", cache_enabled=cache):
        before = torch.ones(2, 2) @ weight
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(torch.ones(2, 2) @ weight, 2 * before)


def test_a_copy_made_without_gradients_is_not_used_where_they_are_wanted():
    weight = nn.Parameter(x())
    with autocast("cpu"):
        with torch.no_grad():
            x() @ weight
        (x() @ weight).sum().backward()
    assert weight.grad is not None  # torch.autocast leaves None here


def test_the_innermost_decides():
    a = x()
    with autocast("cpu", torch.bfloat16):
        with autocast("cpu", enabled=False):
            assert (a @ a).dtype == torch.float32
            with autocast("cpu", torch.float16):
                assert (a @ a).dtype == torch.float16
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16
    assert (a @ a).dtype == torch.float32


def test_one_object_opened_inside_itself():
    mode, weight = autocast("cpu"), nn.Parameter(x())
    with mode:
        with mode:
            inner = x() @ weight
        assert inner.dtype == (x() @ weight).dtype == torch.bfloat16
    assert (x() @ weight).dtype == torch.float32


def test_as_a_decorator_and_after_an_exception():
    @autocast("cpu", torch.float16)
    def product(a, depth=2):
        if depth:
            return product(a, depth - 1)
        return a @ a

    assert product(x()).dtype == torch.float16 and product.__name__ == "product"
    with pytest.raises(RuntimeError):
        product(x(2, 3))
    assert (x() @ x()).dtype == torch.float32


def test_out_and_in_place_are_left_alone():
    a, out = x(), torch.empty(4, 4)
    with autocast("cpu"):
        assert torch.mm(a, a, out=out).dtype == torch.float32
        assert a.clone().addmm_(a, a).dtype == torch.float32


class Two(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.second, self.inner = nn.Linear(4, 4), nn.Linear(4, 4), inner

    def forward(self, inputs):
        with self.inner():
            hidden = self.first(inputs)
        return self.second(hidden)


@pytest.mark.parametrize("inner", [lambda: autocast("cpu", torch.float16), lambda: autocast("cpu", enabled=False)])
def test_recomputed_in_backward_it_is_the_same(inner):
    results = []
    for run in (lambda m, v: m(v), checkpoint):
        torch.manual_seed(0)
        model, inputs = Two(inner), x().requires_grad_()
        with autocast("cpu", torch.bfloat16):
            loss = run(model, inputs).float().square().sum()
        loss.backward()
        results.append([inputs.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_lstm_runs_low_as_a_whole():
    with autocast("cpu"):
        assert nn.LSTM(4, 4)(x(3, 2, 4))[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tpu",), "autocast supports cpu and cuda, not device_type='tpu'"),
        (("cpu", torch.float64), "supports torch.float16 and torch.bfloat16, not dtype=torch.float64"),
        (("cpu", torch.int8), "supports torch.float16 and torch.bfloat16"),
    ],
)
def test_what_cannot_be_is_said(arguments, message):
    with pytest.raises(ValueError, match=message):
        autocast(*arguments)


def test_a_device_that_cannot_is_said(monkeypatch):
    def refuse(*_):
        raise RuntimeError('"addmm_impl_cpu_" not implemented for Half')

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "mm", refuse)
    why_not.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"autocast\('cuda', torch.float16\): this machine has no CUDA device"):
            autocast("cuda")
        with pytest.raises(RuntimeError, match=r"cannot multiply in torch.float16: use the other 16-bit dtype or fp32"):
            autocast("cpu", torch.float16)
        autocast("cpu", torch.float16, enabled=False)  # nothing will be cast
    finally:
        why_not.cache_clear()


@pytest.mark.gpu
def test_probabilities_are_refused_on_a_gpu():
    with autocast("cuda"), pytest.raises(RuntimeError, match="use binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(x().cuda(), x().cuda())
