"""Every algorithm with slow, poisoned communication, against the oracles of its own tests."""

from functools import partial
from unittest import mock

import pytest
import test_allreduce
import test_amp
import test_amp_sharded
import test_comm
import test_comm_hooks
import test_compression
import test_compression_dgc
import test_compression_scaler
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
import test_recompute
import test_sampler
import test_zero
import test_zero_semantics
import test_zero_state_dict
import torch
from poison import poisoned, under_poison
from torch.nn.parallel import DistributedDataParallel

from labkit import hierarchical, models
from labkit.compression import COMPRESSORS
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.local_sgd import DiLoCo, LocalSGD
from labkit.trainer import STRATEGIES, Trainer, make_optimizer, parallelize
from labkit.zero import ZeRO1, ZeRO2

F32, F64 = torch.float32, torch.float64
SEGMENTED = {"elements": 1009, "segment_bytes": 256}
NAIVE, OVERLAPPED = {"bucket_cap_mb": 0, "overlap": False}, {"bucket_cap_mb": 0}
REPLICATED, KEPT = {"root": "replicate", "prefetch": 2}, {"shard": "grad_op"}


def cases():  # (test of another file, its arguments)
    for body in (test_comm.every_operation, partial(test_comm.over_a_cable, test_comm.every_operation)):
        yield test_comm.test_every_operation_is_right_and_counted, {"n": 3, "body": body}
    yield test_comm.test_exchange, {"n": 3, "async_op": True}
    yield test_comm.test_all_to_all_of_uneven_parts, {}
    yield test_comm.test_arguments_reach_torch, {"async_op": True}
    for name in test_allreduce.ALGORITHMS:
        yield (
            test_allreduce.test_any_number_of_segments_and_ranks_end_bitwise_equal,
            {"n": 3, "name": name, **SEGMENTED},
        )
    yield test_allreduce.test_the_two_phases_of_the_ring_alone, {"n": 4, "elements": 101}
    for form in test_hierarchical.FORMS:
        grid = {"world_size": 4, "nodes": 2, "form": form}
        yield test_hierarchical.test_as_a_hook_of_either_ddp_it_trains_as_one_process_does, grid
    yield from of_ddp()
    yield from of_zero()
    yield from of_fsdp()
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        yield (
            test_amp_sharded.test_all_ranks_decide_as_one_process_does,
            {"world_size": 2, "strategy": strategy},
        )
    yield test_amp.test_one_ranks_inf_skips_the_step_on_all, {"world_size": 3, "empty": 0}
    yield test_master_weights.test_under_ddp_the_ranks_stay_one_model, {}
    plain = {"n": 3, "inner": "sgd", "every": 3, "start": 4, "cap": 0}
    yield test_local_sgd.test_local_sgd_is_that_of_one_process, plain
    yield test_local_sgd.test_diloco_is_that_of_one_process, {"n": 2}
    for kind, name in ((LocalSGD, "whole"), (DiLoCo, "power")):
        yield (
            test_local_sgd.test_the_average_can_be_compressed,
            {"kind": kind, "name": name, "cap": 0},
        )
    yield (
        test_sampler.test_evaluation_counts_what_one_process_counts,
        {"world_size": 2, "batch_size": 64},
    )
    yield test_sampler.test_evaluation_within_a_group, {}


def of_ddp():
    yield (
        test_ddp.test_ranks_train_what_one_process_trains,
        {"world_size": 2, "name": "resnet", "dtype": F64},
    )
    yield (
        test_recompute.test_under_ddp_every_gradient_arrives_once,
        {"world_size": 2, "options": {}},
    )
    yield test_ddp.test_the_six_line_idea_gives_the_same_gradients, {}
    yield test_ddp_semantics.test_buffers_are_broadcast_when_pytorch_would, {"world_size": 2}
    for settings in (NAIVE, OVERLAPPED):
        odd = {"settings": settings, "set_to_none": True}
        yield (
            test_ddp_semantics.test_control_flow_may_differ_between_steps_and_ranks,
            {"world_size": 3, **odd},
        )
        yield (
            test_ddp_semantics.test_no_sync_accumulates_and_the_next_backward_averages_the_sum,
            odd,
        )
        raised = {"where": "backward", "everybody": False, **odd}
        yield test_ddp_semantics.test_after_an_exception_the_next_step_works, raised
    joined = {"world_size": 3, "kind": "batch", "counts": [1, 4, 2], "divide": False}
    yield test_join.test_uneven_inputs_end_as_in_pytorch, joined
    yield test_join.test_unused_parameters_and_join, {}
    for name in ("allreduce", "fp16", "halved_sum"):
        yield (
            test_comm_hooks.test_a_hook_gives_the_same_with_many_buckets,
            {"name": name, "form": OVERLAPPED},
        )
    for name in COMPRESSORS:
        yield test_compression.test_the_same_on_ours_and_on_pytorchs, {"name": name}
        yield (
            test_compression.test_ranks_are_equal_to_the_bit,
            {"name": name, "settings": OVERLAPPED},
        )
    for name in sorted(test_compression.WHOLE):
        yield test_compression.test_at_full_ratio_or_rank_it_is_plain_averaging, {"name": name}
    yield test_compression_dgc.test_one_bit_adam_warms_up_as_adam, {"wrap": DDP}
    yield test_compression_dgc.test_the_frozen_phase_is_the_formula, {}
    for name in ("topk", "powersgd"):
        yield (
            test_compression_scaler.test_an_inf_on_one_rank_is_a_step_that_no_rank_takes,
            {"name": name, "wrap": DDP},
        )
    for passes, clip, closure in ((1, False, False), (2, True, False), (1, False, True)):
        told = {
            "passes": passes,
            "clip": clip,
            "closure": closure,
            "settings": {"bucket_cap_mb": 0},
        }
        yield test_horovod.test_it_trains_what_ddp_trains, {"world_size": 2, **told}
    yield test_horovod.test_a_compression_of_ones_own, {}
    yield (
        test_horovod.test_optimizer_state_reaches_ranks_that_have_none,
        {"name": "adamw", "root": 1},
    )


def of_zero():
    yield (
        test_zero.test_ranks_train_what_one_process_trains,
        {"world_size": 2, "name": "mlp", "dtype": F64, "kind": "sgd"},
    )
    for zero in (ZeRO1, ZeRO2):
        added = {"world_size": 3, "zero": zero, "how": "mean,local,mean"}
        yield test_zero_semantics.test_gradients_add_up_however_they_are_averaged, added
        norm = {"world_size": 2, "zero": zero, "norm_type": 2.0, "max_norm": 0.5}
        yield test_zero_semantics.test_clipping_is_by_the_norm_over_all_ranks, norm
        yield (
            test_zero_semantics.test_a_backward_that_raises_leaves_the_next_one_whole,
            {"zero": zero, "victims": [1]},
        )
    yield (
        test_zero_state_dict.test_training_goes_on_on_another_number_of_ranks,
        {"zero": ZeRO1, "other": ZeRO2, "n": 2, "m": 2},
    )


def of_fsdp():
    trained = {"world_size": 2, "name": "mlp", "dtype": F64, "optimizer": "sgd"}
    yield test_fsdp.test_ranks_train_what_one_process_trains, trained
    for root in ("shard", "replicate"):
        grid = {"axes": (2, 2), "name": "gpt", "root": root, "dtype": F64, "optimizer": "sgd"}
        yield test_fsdp.test_hybrid_shards_along_one_axis_and_replicates_along_the_other, grid
    for settings in ({}, {"prefetch": 0}, REPLICATED, KEPT):
        yield test_fsdp_semantics.test_a_forward_sees_the_values_of_now, {"settings": settings}
        between = {"loss": "evaluation between", "settings": settings}
        yield test_fsdp_semantics.test_whatever_forwards_a_loss_is_made_of, between
        kept = {"world_size": 3, "settings": settings}
        yield (
            test_fsdp_semantics.test_no_sync_keeps_whole_gradients_and_the_next_backward_sends_the_sum,
            kept,
        )
    yield test_fsdp_semantics.test_unused_parameters, {}
    for settings in ({}, REPLICATED):
        yield test_fsdp_semantics.test_after_a_forward_that_raises_half_way_the_next_step_works, {"settings": settings}
        yield (
            test_fsdp_semantics.test_after_a_backward_that_raises_the_next_step_works,
            {"settings": settings},
        )
    for forward in (
        "branches",
        "checkpointed units, by ours",
        "checkpoint of two units, reentrant",
    ):
        yield (
            test_fsdp_semantics.test_gradients_are_the_mean_over_ranks,
            {"forward": forward, "settings": REPLICATED},
        )
    yield (
        test_fsdp_semantics.test_clipping_sees_the_global_norm,
        {"settings": REPLICATED, "norm_type": 2.0},
    )
    yield test_fsdp_semantics.test_loss_scaling_sees_every_shard, {}
    yield (
        test_fsdp_state_dict.test_resharding,
        {"saving": 2, "loading": 3, "by": "shards", "settings": REPLICATED},
    )
    for dtype in (None, F32):
        yield (
            test_fsdp_state_dict.test_low_precision_with_full_precision_masters,
            {"world_size": 2, "reduce_dtype": dtype, "threshold": 99},
        )
    yield test_fsdp_state_dict.test_units_in_low_precision_beside_a_replicated_root, {}


def identify(case):
    test, arguments = case
    values = [getattr(value, "func", value) for value in arguments.values()]  # of a partial its function
    told = [getattr(value, "__name__", str(value)) for value in values]
    return "-".join([f"{test.__module__}:{test.__name__}".replace("test_", ""), *told])


@pytest.mark.parametrize("case", list(cases()), ids=identify)
def test_poisoned(ranks, case):
    test, arguments = case

    def run(world_size, body, **settings):
        is_oracle = settings.get("wrap") in ("torch", DistributedDataParallel)
        return ranks(world_size, body if is_oracle else partial(under_poison, body), **settings)

    test(run, **arguments)


def in_segments(rank, world_size, form):
    """Several segments on their way at once, and a rest."""
    (inside, across), _, _ = test_hierarchical.groups(2, 2)
    tensor = torch.full((2, 31), 1.0 + rank)
    with mock.patch.object(hierarchical, "SEGMENT_BYTES", 48):
        hierarchical.FORMS[form](tensor, inside, across)
    return tensor.eq(10).all().item()


@pytest.mark.parametrize("form", hierarchical.FORMS)
def test_hierarchical_segments_poisoned(ranks, form):
    assert ranks(4, partial(under_poison, in_segments), form=form) == [True] * 4


def with_trainer(rank, world_size, strategy):
    """Three steps of two micro-batches on this rank's half; all weights afterwards."""
    torch.manual_seed(0)
    module = models.build("mlp", sizes=(8, 16, 16, 10)).double()
    model = parallelize(module, strategy, bucket_cap_mb=0.001)
    options = {"bucket_cap_mb": 0.001, "lr": 0.1, "momentum": 0.9}
    optimizer = make_optimizer(model, strategy, torch.optim.SGD, **options)
    trainer = Trainer(model, optimizer, models.loss("mlp"), accumulation=2)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(8, 8, generator=generator).double(), torch.arange(8)
        # Every second sample: micro-batch by micro-batch the ranks see what one process sees.
        trainer.train_step(inputs[rank::world_size], targets[rank::world_size])
    weights = model.full_state_dict() if hasattr(model, "full_state_dict") else module.state_dict()
    return torch.cat([weight.detach().flatten() for weight in weights.values()])


@pytest.mark.parametrize("strategy", sorted(STRATEGIES.keys() - {"single", "diloco", "torch_fsdp"}))
def test_the_trainer_poisoned(ranks, strategy):
    alone = with_trainer(0, 1, "single")
    for rank, weights in enumerate(ranks(2, partial(under_poison, with_trainer), strategy=strategy)):
        # Local SGD, too: by default it averages after every step.
        assert float((weights - alone).abs().max()) < 1e-12, f"rank {rank}"


nccl = test_ddp.nccl  # a group of one rank: its streams and futures are the real ones


def of_cuda():
    for form in test_ddp.FORMS:
        yield test_ddp.test_on_cuda_gradients_are_the_mean_too, {"form": form, "find": True}
    yield test_ddp.test_on_cuda_a_hooks_future_is_waited_for, {}
    for form in test_zero.FORMS:
        yield test_zero.test_on_cuda_it_trains_what_the_plain_optimizer_trains, {"form": form, "options": {}}


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(of_cuda()), ids=identify)
def test_poisoned_on_cuda(nccl, case):
    test, arguments = case
    with poisoned(0):
        test(nccl, **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, REPLICATED, KEPT, {"offload": True}], ids=str)
def test_fsdp_poisoned_on_cuda(nccl, settings):
    plain, module = (test_fsdp.build("gpt", F32, seed=0).cuda() for _ in range(2))
    arguments = ("gpt", F32, "sgd", lambda whole: whole.cuda(), 1)
    test_fsdp.fit(plain, *arguments)
    with poisoned(0):
        model = FSDP(module, models.unit("gpt"), **settings)
        test_fsdp.fit(model, *arguments)
        torch.testing.assert_close(model.full_state_dict(), plain.state_dict())
