"""Which operations autocast runs in 16 bits and which in fp32, for each kind of device.

    low       matrix products, convolutions    much arithmetic; the hardware sums in fp32 anyway
    fp32      exp, log, losses, norms, sums    beyond fp16's range, or sums that lose small terms
    promote   several input tensors            all become the widest dtype
    (others)  relu, views, dropout, add, ...   run in their input's dtype; add, mul promote anyway

CPU and CUDA differ: CPU kernels of softmax, layer_norm and sum accumulate in fp32 and round once,
so they may stay low; CUDA's table, made for fp16, uses fp32. Both follow torch.autocast, function
by function. Exceptions: padding, which does not round, is unchanged; an LSTM, which is implemented
in C++, runs low as a unit.

Cost: one dict lookup per function call.
Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.3; Kalamkar et al., A Study of
BFLOAT16 for Deep Learning Training, 2019, section 3 (accumulation in fp32).
"""

from operator import attrgetter

import torch
from torch.nn import functional

LOW = """
    linear matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm einsum chain_matmul
    linalg.multi_dot linalg.vecdot
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu
    scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu
"""
LOSSES = """
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss
    hinge_embedding_loss binary_cross_entropy_with_logits cosine_embedding_loss margin_ranking_loss
    multi_margin_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
"""
LOW_OF = {
    "cpu": "tensordot",
    "cuda": "mv addmv addr lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
}
FP32_OF = {
    "cpu": """
        binary_cross_entropy ctc_loss prod trace cdist quantile nanquantile polar
        view_as_complex stft avg_pool3d max_pool3d_with_indices max_pool3d adaptive_avg_pool3d
        adaptive_max_pool3d max_unpool2d max_unpool3d fractional_max_pool2d fractional_max_pool3d
        grid_sampler grid_sampler_2d grid_sampler_3d grid_sample cholesky cholesky_inverse
        cholesky_solve inverse pinverse qr svd geqrf orgqr ormqr lu_solve triangular_solve
        fft.fft fft.fft2 fft.fftn fft.hfft fft.ifft fft.ifft2 fft.ifftn fft.ihfft fft.irfft
        fft.irfft2 fft.irfftn fft.rfft fft.rfft2 fft.rfftn
        linalg.cholesky linalg.cholesky_ex linalg.cond linalg.eig linalg.eigh linalg.eigvals
        linalg.eigvalsh linalg.householder_product linalg.inv linalg.inv_ex linalg.lstsq
        linalg.matrix_rank linalg.matrix_sqrth linalg.qr linalg.solve linalg.svd linalg.svdvals
        linalg.tensorinv linalg.tensorsolve
    """,
    "cuda": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
        softplus logsumexp pow __pow__ __rpow__ __rdiv__ __rtruediv__
        softmax log_softmax softmin gumbel_softmax sum prod cumsum cumprod
        layer_norm native_layer_norm rms_norm group_norm norm frobenius_norm nuclear_norm
        renorm normalize linalg.norm linalg.vector_norm linalg.matrix_norm linalg.matrix_sqrth
        cosine_similarity dist pdist cdist pairwise_distance interpolate upsample
    """,
}
PROMOTE_OF = {
    "cpu": "cat stack index_copy",
    "cuda": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler grid_sample "
    "index_put scatter_add tensordot",
}
FORBIDDEN_OF = {"cpu": "", "cuda": "binary_cross_entropy"}
SPACES = (torch, torch.Tensor, functional)


def functions(names):
    """Yield every torch function and method of these names, as autocast receives them."""
    for name in names.split():
        for space in SPACES:
            try:
                yield attrgetter(name)(space)
            except AttributeError:
                continue  # most names exist in some of the spaces only


def table(device_type):
    """Return {function: "low", "fp32", "promote" or "forbidden"} for "cpu" or "cuda"."""
    names = {
        "low": f"{LOW} {LOW_OF[device_type]}",
        "fp32": f"{LOSSES} {FP32_OF[device_type]}",
        "promote": PROMOTE_OF[device_type],
        "forbidden": FORBIDDEN_OF[device_type],
    }
    return {function: rule for rule, words in names.items() for function in functions(words)}


TABLES = {device_type: table(device_type) for device_type in LOW_OF}
