"""The largest batch that fits, against a machine whose memory is known."""

import pytest
import torch

from labkit import comm, models
from labkit.memory import estimate
from labkit.memory.batch_size import between, find_batch_size, first_true, last_true
from labkit.memory.memory_tracker import MemoryTracker


@pytest.mark.parametrize("edge", [0, 1, 2, 3, 7, 8, 9, 63, 64, 100])
def test_edges_are_found(edge):
    assert last_true(lambda size: size <= edge, 100) == edge
    assert last_true(lambda size: True, 100) == 100
    assert first_true(lambda size: size > edge, 1, 1000) == edge + 1
    assert first_true(lambda size: size > edge, edge + 1, 1000) == edge + 1
    assert first_true(lambda size: False, 1, 1000) == 0
    assert between(lambda size: size <= edge, 0, 101) == edge


def test_prediction_alone():
    found = find_batch_size(lambda size: 100 + 10 * size, 1000)
    assert (found.size, found.predicted, found.tried) == (90, 90, ())
    assert find_batch_size(lambda size: 0, 1, largest=48).size == 48
    with pytest.raises(MemoryError, match="not even a batch of 1 fits: it needs 110 bytes, 60 more than there are"):
        find_batch_size(lambda size: 100 + 10 * size, 50)


def machine(real, error):
    """A step that fails beyond `real` samples, as `error` does."""

    def step(size):
        if size > real:
            raise error

    return step


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("real", "error"), [*((60, e) for e in ERRORS), *((n, MemoryError()) for n in (1, 90, 97, 4096))]
)
def test_real_steps_correct_the_prediction(real, error):
    """Within a sixteenth below what really fits, wherever the prediction was, and never above."""
    found = find_batch_size(lambda size: 100 + 10 * size, 1000, machine(real, error), largest=4096)
    assert found.predicted == 90 and real - max(1, real // 16) < found.size <= real
    assert (found.size, True) in found.tried and len(found.tried) < 45
    assert all(fitted == (size <= real) for size, fitted in found.tried)


def test_a_step_may_say_what_it_used():
    found = find_batch_size(lambda size: 100 + 10 * size, 1000, lambda size: 100 + 20 * size)
    assert 42 < found.size <= 45


@pytest.mark.slow
def test_nothing_fits_and_other_errors_are_not_hidden():
    with pytest.raises(MemoryError, match="not even a batch of 1 fits"):
        find_batch_size(lambda size: size, 100, machine(0, MemoryError()))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        find_batch_size(lambda size: size, 100, machine(3, RuntimeError("shapes do not match")))


def test_a_real_model_needs_one_try_and_its_neighbours():
    """The prediction is exact, so the first try holds and the next, an eighth larger, does not."""
    model, loss = models.build("mlp"), models.loss("mlp")
    optimizer = torch.optim.AdamW(model.parameters())

    def data(size):
        return torch.randn(size, 64), torch.randint(10, (size,))

    def predict(size):
        input, target = data(size)
        return estimate(model, input, loss, target=target).peak_total

    def step(size):
        input, target = data(size)
        optimizer.zero_grad()
        with MemoryTracker(model, optimizer) as seen:
            loss(model(input), target).backward()
            optimizer.step()
        return seen.peak_total

    room = predict(500)
    step(1)  # optimizer states are there from now on
    found = find_batch_size(predict, room, step, largest=2000)
    assert found.predicted == 500 <= found.size + 31 and found.tried[:2] == ((500, True), (562, False))


def least_of_all(rank, world_size):
    return find_batch_size(lambda size: 10 * size, 1000, machine(60 if rank else 90, MemoryError())).size


def test_all_ranks_take_what_fits_everyone(ranks):
    sizes = ranks(2, least_of_all)
    assert sizes[0] == sizes[1] and 56 < sizes[0] <= 60


def uneven_predictions(rank, world_size):
    return find_batch_size(lambda size: 10 * size, 1000 - 500 * rank).size


def test_all_ranks_take_the_smallest_prediction(ranks):
    assert ranks(2, uneven_predictions) == [50, 50]


def talking_step(rank, world_size):
    tried = []

    def step(size):
        tried.append(size)
        comm.all_reduce(torch.ones(size))

    with pytest.raises(ValueError, match=r"the step sends a message \(all_reduce\)"):
        find_batch_size(lambda size: 10 * size, 1000, step)
    return tried


def test_a_step_that_sends_is_refused_before_a_rank_without_memory_leaves_the_others_waiting(ranks):
    assert ranks(2, talking_step) == [[100], [100]]
    assert ranks(1, alone_it_may)[0] >= 100


def alone_it_may(rank, world_size):
    return find_batch_size(lambda size: 10 * size, 1000, lambda size: comm.all_reduce(torch.ones(size))).size
