"""On NCCL with one rank, and on two ranks that share one GPU, the oracle tests of the CPU hold as well.

Each case is a test of another file, called with other ranks. On the CPU they show that the calling itself is right.
"""

from itertools import product

import pytest
import test_allreduce
import test_comm_hooks
import test_compression
import test_compression_topk
import test_ddp
import test_ddp_semantics
import test_fsdp
import test_fsdp_semantics
import test_fsdp_state_dict
import test_hierarchical
import test_horovod
import test_join
import test_local_sgd
import test_master_weights
import test_mesh
import test_zero
import torch
from on_device import group_of_one, on_the_same_gpu

from labkit.allreduce import ALGORITHMS
from labkit.hierarchical import FORMS
from labkit.models import SIZES
from labkit.run.compare import compare
from labkit.run.experiment import Experiment
from labkit.trainer import STRATEGIES

DOUBLE = torch.float64

# What each test takes besides the ranks, once or several times.
ONE_RANK = {
    test_allreduce.test_equals_gloo_and_the_exact_sum: [(1, name) for name in ALGORITHMS],
    test_hierarchical.test_it_equals_the_flat_one_on_any_grid: [(1, 1, form) for form in FORMS],
    test_hierarchical.test_as_a_hook_of_either_ddp_it_trains_as_one_process_does: [(1, 1, form) for form in FORMS],
    test_mesh.test_axes_of_any_number_and_size: [({"data": 1, "model": 1},)],
    test_ddp.test_ranks_train_what_one_process_trains: [(1, name, DOUBLE) for name in SIZES],
    test_ddp_semantics.test_no_sync_accumulates_and_the_next_backward_averages_the_sum: [({}, True), ({}, False)],
    test_join.test_uneven_inputs_end_as_in_pytorch: [(1, "batch", (3,), True), (1, "plain", (1,), False)],
    test_zero.test_ranks_train_what_one_process_trains: list(product([1], SIZES, [DOUBLE], test_zero.OPTIMIZERS)),
    test_fsdp.test_ranks_train_what_one_process_trains: [(1, name, "sgd", DOUBLE) for name in SIZES],
    test_fsdp_semantics.test_no_sync_keeps_whole_gradients_and_the_next_backward_sends_the_sum: [
        (1, *mode.values) for mode in test_fsdp_semantics.MODES
    ],
    test_fsdp_semantics.test_clipping_sees_the_global_norm: [({}, norm) for norm in (1.0, 2.0, float("inf"))],
    test_fsdp_state_dict.test_names_stay_and_every_element_is_held_once: [(1,)],
    test_fsdp_state_dict.test_resharding: [(1, 1, "", {})],
    test_fsdp_state_dict.test_low_precision_with_full_precision_masters: [
        (1, torch.float32, 0),
        (1, torch.float32, 99),
    ],
    test_local_sgd.test_local_sgd_is_that_of_one_process: [(inner, 1, 2, 0, 25) for inner in test_local_sgd.INNER],
    test_local_sgd.test_diloco_is_that_of_one_process: [(1,)],
    test_horovod.test_it_trains_what_ddp_trains: [(1, 1, False, False, {}), (1, 2, True, False, {})],
    test_comm_hooks.test_a_hook_gives_the_same_on_both: [(name,) for name in test_comm_hooks.HOOKS],
    test_compression.test_ranks_are_equal_to_the_bit: [
        (name, {"bucket_cap_mb": 0.002}) for name in test_compression.MAKE
    ],
    test_compression.test_gradients_of_other_dtypes: list(product(test_compression.MAKE, [torch.bfloat16, DOUBLE])),
    test_compression.test_a_saved_state_goes_on_to_the_bit: [(name,) for name in test_compression.WITH_FEEDBACK],
    test_compression_topk.test_bytes: [(1, "bucket", 30), (1, "tensor", 31)],
}
# Sharing a GPU needs gloo, which has no messages between two CUDA ranks and no futures there: neither hooks nor p2p.
TWO_RANKS = {
    test_ddp.test_ranks_train_what_one_process_trains: [(2, "mlp", DOUBLE), (2, "gpt", DOUBLE)],
    test_join.test_uneven_inputs_end_as_in_pytorch: [(2, "batch", (3, 1), True)],
    test_zero.test_ranks_train_what_one_process_trains: [(2, "mlp", DOUBLE, "sgd")],
    test_fsdp.test_ranks_train_what_one_process_trains: [(2, "mlp", "sgd", DOUBLE)],
    test_local_sgd.test_local_sgd_is_that_of_one_process: [("sgd", 2, 4, 0, 25)],
    test_horovod.test_it_trains_what_ddp_trains: [(2, 3, False, False, {})],
}


def named(test):
    return f"{test.__module__}-{test.__name__}"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.mark.parametrize("test", ONE_RANK, ids=named)
def test_with_one_rank(device, test, tmp_path):
    # On the CPU once is enough: the test's own file does the rest.
    for arguments in ONE_RANK[test] if device == "cuda" else ONE_RANK[test][:1]:
        print(arguments)
        with group_of_one(device, tmp_path) as ranks:
            test(ranks, *arguments)


def test_master_weights_with_one_rank(device, tmp_path):
    for kind, dtype in product(test_master_weights.OPTIMIZERS, (torch.bfloat16, torch.float16)):
        with group_of_one(device, tmp_path):
            test_master_weights.test_masters_are_what_fp32_training_with_these_gradients_makes(kind, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("test", TWO_RANKS, ids=named)
def test_with_two_ranks_on_one_gpu(ranks, test):
    for arguments in TWO_RANKS[test]:
        print(arguments)
        test(lambda n, body, **rest: ranks(n, on_the_same_gpu, body=body, arguments=rest), *arguments)


@pytest.mark.slow
def test_every_strategy_through_trainer_and_compare(device):
    names = [name for name in STRATEGIES if name != "diloco"]  # whose outer step is another training
    experiments = [Experiment(model="mlp", strategy=name, batch_size=16, precision="fp64") for name in names]
    records = compare(experiments, nproc=1, rounds=2, steps_per_round=2, device=device, quiet=True).records
    losses = records.groupby(["label", "step"])["loss"].mean().unstack("label")
    assert losses.sub(losses["single"], axis=0).abs().max().max() < 1e-12
    assert (records["step_ms"] >= records["forward_ms"] + records["backward_ms"]).all()
    told = records[records["label"] != "torch_fsdp"] if device == "cuda" else records
    assert (told["exposed_comm_ms"] >= 0).all() and (told["exposed_comm_ms"] <= told["step_ms"]).all()
