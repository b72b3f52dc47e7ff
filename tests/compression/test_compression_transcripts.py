"""Several ranks and steps in float64, compared with the papers' algorithms in one process."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

from labkit.compression import DGC, OneBit, OneBitAdam, PowerSGD, TopK
from labkit.ddp.bucket import Bucket

STEPS, RANKS = 8, 3
CLOSE = 1e-12


def noise(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(n, step, rank):
    """Of one rank: a direction that all share and that lasts, and what is its own."""
    return noise(n, 0) + noise(n, 1 + 100 * step + rank)


def parameters(*shapes):
    return [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]


def gap(ours, wanted):
    return float((torch.stack(ours) - torch.stack(wanted)).abs().max())


def largest(sizes, values, ratio):
    """Places of the largest magnitudes of each tensor."""
    places, start = [], 0
    for part in values.split(sizes):
        places.append(start + part.abs().argsort(descending=True)[: round(ratio * len(part))])
        start += len(part)
    return torch.cat(places)


def dgc_in_one_process(world_size, sizes, ratio, momentum, masking):
    """Lin et al., momentum correction and factor masking: averages, all ranks' (v, u), a step."""
    n = sum(sizes)
    u, v = ([torch.zeros(n, dtype=torch.float64) for _ in range(world_size)] for _ in range(2))
    averages, told = [], []
    for step in range(STEPS):
        total = torch.zeros(n, dtype=torch.float64)
        for k in range(world_size):
            u[k] = momentum * u[k] + gradient(n, step, k)
            v[k] = v[k] + u[k]
            sent = largest(sizes, v[k], ratio)
            total[sent] += v[k][sent]
            v[k][sent] = 0
            if masking:
                u[k][sent] = 0
        averages.append(total / world_size)
        told.append([(v[k].clone(), u[k].clone()) for k in range(world_size)])
    return averages, told


def dgc(rank, world_size, sizes, per, **settings):
    compressor, members, told = DGC(0.1, per=per, **settings), parameters(*sizes), []
    for step in range(STEPS):
        bucket = Bucket(members)
        bucket.buffer().copy_(gradient(bucket.numel, step, rank))
        average = compressor.hook(None, bucket).wait().clone()
        kept = compressor.residuals.of(bucket).clone(), compressor.velocities.of(bucket).clone()
        told.append((average, *kept))
    return told


@pytest.mark.parametrize("per", ["bucket", "tensor"])
@pytest.mark.parametrize("masking", [True, False])
def test_dgc_is_its_papers_algorithm_on_several_ranks(ranks, masking, per):
    sizes = [80, 40]
    chosen_in = sizes if per == "tensor" else [120]
    averages, kept = dgc_in_one_process(RANKS, chosen_in, 0.1, 0.9, masking)
    told = ranks(RANKS, dgc, sizes=sizes, per=per, momentum=0.9, masking=masking)
    for rank, steps in enumerate(told):
        ours, residuals, velocities = zip(*steps, strict=True)
        assert gap(ours, averages) < CLOSE, f"rank {rank}"
        assert gap(residuals, [step[rank][0] for step in kept]) < CLOSE, f"rank {rank}"
        assert gap(velocities, [step[rank][1] for step in kept]) < CLOSE, f"rank {rank}"


def one_bit_adam_in_one_process(world_size, n, chunk, lr, betas, warmup):
    """Tang et al., algorithm 1 without the server's second compression: weights by step."""
    b1, b2 = betas
    m, v, p = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
    error, told = [0.0] * world_size, []
    for step in range(STEPS):
        if step < warmup:
            mean = sum(gradient(n, step, k) for k in range(world_size)) / world_size
            m, v = b1 * m + (1 - b1) * mean, b2 * v + (1 - b2) * mean**2
        else:
            sent = []
            for k in range(world_size):
                own = b1 * m + (1 - b1) * gradient(n, step, k) + error[k]
                scale = own.view(-1, chunk).abs().mean(1).repeat_interleave(chunk)
                sent.append(torch.where(own >= 0, scale, -scale))
                error[k] = own - sent[k]
            m = sum(sent) / world_size
        root = (v / (1 - b2 ** min(step + 1, warmup))).sqrt()
        p = p - lr * m / (1 - b1 ** (step + 1)) / (root + 1e-8)
        told.append(p)
    return told


def one_bit_adam(rank, world_size, n, chunk, **settings):
    members, told = parameters(n), []
    optimizer = OneBitAdam(members, compressor=OneBit(chunk), **settings)
    for step in range(STEPS):
        bucket = Bucket(members)
        members[0].grad = bucket.gradients()[0]
        members[0].grad.copy_(gradient(n, step, rank))
        optimizer.hook(None, bucket).wait()
        optimizer.step()
        told.append(members[0].detach().clone())
    return told


def test_one_bit_adam_is_its_papers_algorithm_with_a_compressor_that_loses(ranks):
    settings = {"n": 48, "chunk": 16, "lr": 0.1, "betas": (0.9, 0.99), "warmup": 3}
    wanted = one_bit_adam_in_one_process(RANKS, **settings)
    for rank, told in enumerate(ranks(RANKS, one_bit_adam, **settings)):
        assert gap(told, wanted) < CLOSE, f"rank {rank}"


SHAPES = [(12, 10), (7,), (8, 3, 2)]  # matrices of 12 x 10 and 8 x 6; a vector, which is sent in full


def start():
    """Q of the two matrices, of rank 2, by the number of the parameter."""
    return {0: noise(20, 500).view(10, 2), 2: noise(12, 600).view(6, 2)}


def power_sgd_in_one_process(world_size, feedback):
    """Vogels et al., algorithm 1 inside algorithm 2: averages, and errors by rank, of each step."""
    sizes, q = [120, 7, 48], start()
    error = [torch.zeros(175, dtype=torch.float64) for _ in range(world_size)]
    averages, errors = [], []
    for step in range(STEPS):
        delta = [gradient(175, step, k) + error[k] for k in range(world_size)]
        parts, kept = [], [[] for _ in range(world_size)]
        for number, own in enumerate(zip(*(d.split(sizes) for d in delta), strict=True)):
            if number not in q:
                parts.append(sum(own) / world_size)
                carried = own
            else:
                matrices = [part.view(SHAPES[number][0], -1) for part in own]
                p = torch.linalg.qr(sum(m @ q[number] for m in matrices) / world_size).Q
                mine = [m.t() @ p for m in matrices]
                q[number] = sum(mine) / world_size
                parts.append((p @ q[number].t()).view(-1))
                carried = [(p @ each.t()).view(-1) for each in mine]
            for k in range(world_size):
                kept[k].append(own[k] - carried[k])
        averages.append(torch.cat(parts))
        if feedback:
            error = [torch.cat(rows) for rows in kept]
        errors.append(error)
    return averages, errors


def begin_with(compressor, q):
    named = {f"w{number}": each for number, each in q.items()}
    compressor.load_state_dict(compressor.state_dict() | {"q": named})
    return compressor


def power_sgd(rank, world_size, feedback, two_buckets):
    compressor = begin_with(PowerSGD(2, feedback=feedback, min_saving=1.0), start())
    members, names, told = parameters(*SHAPES), ["w0", "w1", "w2"], []
    lists = [slice(0, 2), slice(2, 3)] if two_buckets else [slice(0, 3)]
    for step in range(STEPS):
        last = len(lists) - 1
        buckets = [Bucket(members[s], i, i == last, names[s]) for i, s in enumerate(lists)]
        whole = gradient(175, step, rank).split([b.numel for b in buckets])
        futures = []
        for bucket, part in zip(buckets, whole, strict=True):
            bucket.buffer().copy_(part)
            futures.append(compressor.hook(None, bucket))
        average = torch.cat([future.wait() for future in futures])
        told.append((average, torch.cat([compressor.residuals.of(bucket) for bucket in buckets])))
    return told


@pytest.mark.parametrize("two_buckets", [False, True])
@pytest.mark.parametrize("feedback", [True, False])
def test_power_sgd_is_its_papers_algorithms_with_a_warm_start(ranks, feedback, two_buckets):
    averages, errors = power_sgd_in_one_process(RANKS, feedback)
    told = ranks(RANKS, power_sgd, feedback=feedback, two_buckets=two_buckets)
    for rank, steps in enumerate(told):
        ours, residuals = zip(*steps, strict=True)
        assert gap(ours, averages) < CLOSE, f"rank {rank}"
        assert gap(residuals, [each[rank] for each in errors]) < CLOSE, f"rank {rank}"


def beside_pytorchs(rank, world_size):
    """The averages of both, and what this rank owes. One bucket: theirs races with several."""
    compressor = begin_with(PowerSGD(2, min_saving=1.0), start())
    settings = {"matrix_approximation_rank": 2, "min_compression_rate": 1, "start_powerSGD_iter": 2}
    state = theirs.PowerSGDState(None, **settings)
    state.iter = state.start_powerSGD_iter  # no steps of plain averaging first
    state.q_memory_dict[0] = torch.cat([q.reshape(-1) for q in start().values()])
    state.p_memory_dict[0] = torch.empty(2 * (12 + 8), dtype=torch.float64)
    members, told = parameters(*SHAPES), []
    for step in range(STEPS):
        averages = []
        for hook, its in ((compressor.hook, None), (theirs.powerSGD_hook, state)):
            bucket = Bucket(members, names=["w0", "w1", "w2"])
            bucket.buffer().copy_(gradient(175, step, rank))
            averages.append(hook(its, bucket).wait())
        owed = compressor.residuals.of(bucket), state.error_dict[0]
        told.append([part.clone() for part in (*averages, *owed)])
    return told


def test_power_sgd_is_pytorchs_from_the_same_start(ranks):
    told = [list(zip(*steps, strict=True)) for steps in ranks(RANKS, beside_pytorchs)]
    for rank, (ours, their, *_) in enumerate(told):
        assert gap(ours, their) < 1e-10, f"rank {rank}"  # they orthonormalise Q as well, which spans the same
    # Ours owes what this rank has not sent, theirs what the average lacks: the same in the mean.
    owed, their_owed = (sum(torch.stack(rank[i]) for rank in told) for i in (2, 3))
    assert float((owed - their_owed).abs().max()) < 1e-10


def under_a_schedule(rank, world_size, scaled):
    """Top-k with feedback compared with Karimireddy et al., algorithm 2: errors of lr x gradient."""
    rates, n = [1.0, 1.0, 0.5, 0.5, 0.1, 0.1, 0.2, 0.2], 50
    compressor, members = TopK(0.1), parameters(n)
    ours, wanted, told = torch.zeros(n).double(), torch.zeros(n).double(), []
    error, before = [torch.zeros(n).double() for _ in range(world_size)], rates[0]
    for step, lr in enumerate(rates):
        bucket = Bucket(members)
        bucket.buffer().copy_(gradient(n, step, rank))
        if scaled:
            compressor.scale_residuals(before / lr)
        before = lr
        ours -= lr * compressor.hook(None, bucket).wait()
        for k in range(world_size):
            p = lr * gradient(n, step, k) + error[k]
            sent = largest([n], p, 0.1)
            wanted[sent] -= p[sent] / world_size
            error[k] = p.index_fill(0, sent, 0.0)
        told.append(float((ours - wanted).abs().max()))
    return told


def test_under_a_schedule_scaled_residuals_are_the_papers(ranks):
    for rank, told in enumerate(ranks(RANKS, under_a_schedule, scaled=True)):
        assert max(told) < CLOSE, f"rank {rank}"
    for rank, told in enumerate(ranks(RANKS, under_a_schedule, scaled=False)):
        assert max(told[:2]) < CLOSE, f"rank {rank}"  # while the rate is constant nothing differs
        assert told[-1] > 0.01, f"rank {rank}"
