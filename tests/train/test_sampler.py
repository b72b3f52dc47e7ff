import math
from functools import partial
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import DistributedSampler as TorchSampler

from labkit import comm, models
from labkit.models import data
from labkit.sampler import DistributedSampler, correct, count_targets, evaluate
from labkit.trainer import Trainer


def shares(samples, ranks, epoch=0, **arguments):
    result = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(samples), ranks, rank, **arguments)
        sampler.set_epoch(epoch)
        result.append(list(sampler))
        assert len(sampler) == len(result[-1])
    return result


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("samples", "ranks"), [(1, 1), (4, 4), (7, 2), (10, 3), (11, 4), (100, 7), (1500, 4)])
def test_every_sample_exactly_once(samples, ranks, shuffle):
    dealt = shares(samples, ranks, shuffle=shuffle)
    assert sorted(chain(*dealt)) == list(range(samples))
    lengths = [len(share) for share in dealt]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("samples", "ranks"), [(7, 2), (10, 3), (8, 4)])
def test_drop_last_gives_equal_shares(samples, ranks):
    dealt = shares(samples, ranks, drop_last=True)
    assert [len(share) for share in dealt] == [samples // ranks] * ranks
    assert len(set(chain(*dealt))) == samples // ranks * ranks


def test_epochs_and_seeds_reshuffle_and_repeat():
    orders = [shares(20, 2, epoch, seed=seed) for epoch, seed in ((0, 0), (1, 0), (0, 100), (0, 0))]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] and orders[0] != orders[2] and orders[1] != orders[2]


@pytest.mark.parametrize("arguments", [{}, {"shuffle": False}, {"seed": 3}, {"drop_last": True}])
def test_the_same_as_torch_where_nothing_needs_padding(arguments):
    for rank in range(4):
        ours, theirs = (kind(range(20), 4, rank, **arguments) for kind in (DistributedSampler, TorchSampler))
        for epoch in (0, 5):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs) and len(ours) == len(theirs)
        assert (ours.total_size, ours.num_samples) == (theirs.total_size, theirs.num_samples)


def test_torch_s_sampler_repeats_samples_where_ours_does_not():
    theirs = list(chain(*(TorchSampler(range(10), 4, rank) for rank in range(4))))
    assert len(theirs) == 12 and len(set(theirs)) == 10
    assert sorted(chain(*shares(10, 4))) == list(range(10))


@pytest.mark.parametrize("samples", [0, 3])
def test_fewer_samples_than_ranks(samples):
    with pytest.raises(ValueError, match=f"has {samples} samples for 4 ranks"):
        DistributedSampler(range(samples), 4, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_out_of_range_is_torch_s_error(rank):
    with pytest.raises(ValueError) as theirs:
        TorchSampler(range(10), 2, rank)
    with pytest.raises(ValueError) as ours:
        DistributedSampler(range(10), 2, rank)
    assert str(ours.value) == str(theirs.value)


def test_with_loader_workers():
    dataset, seen = TensorDataset(torch.arange(13)), []
    for rank in range(2):
        loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, rank), num_workers=2)
        seen += [value for (batch,) in loader for value in batch.tolist()]
    assert sorted(seen) == list(range(13))


def share_of_default_group(rank, world_size):
    return list(DistributedSampler(range(10)))


def test_the_default_group_says_who_we_are(ranks):
    assert ranks(3, share_of_default_group) == shares(10, 3)


# Evaluation

TEST_IMAGES = 297  # 297 = 3 x 99, so that two and four ranks get unequal shares


def digit_model():
    torch.manual_seed(1)
    return models.build("mlp")


def plain_count(model, dataset):
    inputs, targets = dataset[: len(dataset)]
    return int((model(inputs).argmax(1) == targets).sum())


def score(rank, world_size, batch_size):
    with comm.record() as log:
        result = evaluate(digit_model(), data.digits(split="test"), correct, batch_size)
    return result.total, result.count, [(event.op, event.payload_bytes) for event in log]


# 37 x 4 x 2 = 296: with 37 and 2 ranks, one rank has a batch of one sample more than the other.
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1000, 64, 37])
def test_evaluation_counts_what_one_process_counts(ranks, world_size, batch_size):
    model, dataset = digit_model(), data.digits(split="test")
    expected = (plain_count(model, dataset), TEST_IMAGES, [("all_reduce", 16)])
    assert ranks(world_size, score, batch_size=batch_size) == [expected] * world_size
    alone = evaluate(model, dataset, batch_size=batch_size)
    assert alone == expected[:2] and alone.mean == expected[0] / TEST_IMAGES


def padded_score(rank, world_size):
    """What is written everywhere: torch's sampler, a count per rank, a sum over the ranks."""
    model, dataset = digit_model(), data.digits(split="test")
    sums = torch.zeros(2)
    for inputs, targets in DataLoader(dataset, 64, sampler=TorchSampler(dataset, shuffle=False)):
        sums += torch.tensor([correct(model(inputs), targets), len(targets)])
    dist.all_reduce(sums)
    return sums[1].item()


def test_torch_s_padded_sampler_counts_some_samples_twice(ranks):
    assert ranks(4, padded_score) == [TEST_IMAGES + 3] * 4
    assert ranks(4, score, batch_size=64)[0][1] == TEST_IMAGES


def loss_sum(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def text_loss(rank, world_size):
    torch.manual_seed(0)
    model, dataset = models.build("gpt").double(), data.stdlib_text(split="test", max_bytes=40_000)
    return evaluate(model, dataset, loss_sum, batch_size=8)


def test_a_loss_over_tokens(ranks):
    alone = text_loss(0, 1)
    for rank, result in enumerate(ranks(3, text_loss)):
        assert result.count == alone.count == len(data.stdlib_text(split="test", max_bytes=40_000)) * 64, f"rank {rank}"
        assert abs(result.mean - alone.mean) < 1e-12, f"rank {rank}"  # float64: only the order of the sum differs


class Communicates(nn.Module):
    """A forward that waits for all ranks, as DDP's does for buffers and FSDP's for parameters."""

    def __init__(self, group=None):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.group = group
        self.samples = 0

    def forward(self, x):
        self.samples += len(x)
        dist.all_reduce(torch.zeros(1), group=self.group)
        return torch.stack([x, self.scale - x], dim=1)


def uneven(rank, world_size, samples, batch_size):
    dataset = TensorDataset(torch.linspace(0, 1, samples), torch.arange(samples) % 2)
    return evaluate(Communicates(), dataset, correct, batch_size)


@pytest.mark.parametrize(("samples", "batch_size"), [(9, 4), (5, 1), (3, 2), (1, 5)])
def test_uneven_batches_do_not_hang_a_model_that_communicates(ranks, samples, batch_size):
    # (9, 4): 3, 2, 2, 2 samples; (5, 1): one rank has a batch more; (3, 2) and (1, 5): ranks without any sample.
    expected = uneven_alone(samples)
    assert ranks(4, uneven, samples=samples, batch_size=batch_size) == [expected] * 4


def uneven_alone(samples):
    inputs, targets = torch.linspace(0, 1, samples), torch.arange(samples) % 2
    return (int((torch.stack([inputs, 1 - inputs], 1).argmax(1) == targets).sum()), samples)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.bfloat16, torch.float64, None], ids=str)
def test_inputs_are_what_the_dataset_has(dtype):
    """One parameter does not stand for the model: not the first, and there may be none."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            if dtype is not None:
                self.table = nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=False)

        def forward(self, x):
            return x.double()

    inputs = torch.tensor([[0.1], [0.7]])
    dataset = TensorDataset(inputs, torch.zeros(2, 1))
    assert evaluate(Net(), dataset, lambda output, target: output.sum()).total == inputs.double().sum().item()
    assert evaluate(Net(), dataset, lambda output, _: output.sum(), dtype=torch.int8).total == 0


def test_ignored_targets_are_not_counted():
    model, inputs = nn.Linear(4, 7), torch.randn(13, 4)
    targets = torch.arange(13) % 7
    targets[2:9] = -100  # a whole batch of three is ignored
    dataset = TensorDataset(inputs, targets)
    for counted, loss in (
        (count_targets, nn.CrossEntropyLoss(reduction="sum")),
        (partial(count_targets, ignore_index=3), nn.CrossEntropyLoss(ignore_index=3, reduction="sum")),
        (partial(count_targets, weight=(w := torch.rand(7))), nn.CrossEntropyLoss(w, reduction="sum")),
    ):
        if loss.ignore_index == 3:
            targets[2:9] = 3
        mean = nn.CrossEntropyLoss(loss.weight, ignore_index=loss.ignore_index)
        found = evaluate(model, dataset, loss, batch_size=3, count=counted)
        assert found.mean == pytest.approx(mean(model(inputs), targets).item())
        whole = Trainer(model, None, mean).evaluate(dataset)
        assert whole == pytest.approx(found.mean)
        targets[2:9] = -100
    assert evaluate(model, dataset, batch_size=3).count == 6
    bytes_ = torch.tensor([156, 1], dtype=torch.uint8)
    assert count_targets(bytes_) == 2 and count_targets(torch.zeros(3, 2)) == 6
    assert math.isnan(evaluate(model, TensorDataset(inputs, torch.full((13,), -100))).mean)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"input_ids": torch.ones(4), "labels": 1}, "a dict with 'input_ids', 'labels'"),
        ((torch.ones(4), torch.ones(1), 1), r"\(Tensor, Tensor, Tensor\)"),
        (({"x": torch.ones(4)}, 1), r"\(dict, Tensor\)"),
        (torch.ones(4), "a Tensor"),
    ],
)
def test_samples_are_pairs(sample, words):
    with pytest.raises(TypeError, match=rf"samples \(input, target\).* has {words}: wrap it in a dataset of pairs"):
        evaluate(nn.Linear(4, 7), [sample] * 3)


def under_torch_ddp(rank, world_size):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(models.build("resnet"))
    dataset = torch.utils.data.Subset(data.digits("rgb", split="test"), range(9))
    return evaluate(model, dataset, batch_size=4)


def test_a_wrapped_model_whose_forward_broadcasts_buffers(ranks):
    torch.manual_seed(0)
    dataset = torch.utils.data.Subset(data.digits("rgb", split="test"), range(9))
    assert ranks(2, under_torch_ddp) == [evaluate(models.build("resnet"), dataset, batch_size=4)] * 2


def in_a_sub_group(rank, world_size):
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    group = groups[rank % 2]
    dataset = TensorDataset(torch.linspace(0, 1, 7), torch.arange(7) % 2)
    return evaluate(Communicates(group), dataset, correct, 2, group=group)


def test_evaluation_within_a_group(ranks):
    assert ranks(3, in_a_sub_group) == [uneven_alone(7)] * 3


def test_evaluation_leaves_the_modes_as_they_were():
    model = models.build("resnet")
    model.norm.eval()  # a frozen norm
    modes = [module.training for module in model.modules()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    evaluate(model, torch.utils.data.Subset(data.digits("rgb"), range(8)))
    assert [module.training for module in model.modules()] == modes and not all(modes)
    assert all(map(torch.equal, buffers, model.buffers()))  # BatchNorm would count the batches in training mode
    with pytest.raises(RuntimeError, match="shape"):
        evaluate(model, TensorDataset(torch.zeros(3, 3, 4, 4), torch.zeros(3)), lambda output, target: output @ output)
    assert [module.training for module in model.modules()] == modes


def test_nothing_to_evaluate():
    with pytest.raises(ValueError, match="the dataset is empty"):
        evaluate(digit_model(), [])


@pytest.mark.gpu
def test_evaluation_on_cuda():
    dataset = data.digits(split="test")
    assert evaluate(digit_model().double().cuda(), Doubled(dataset)) == evaluate(
        digit_model().double(), Doubled(dataset)
    )


class Doubled(torch.utils.data.Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index][0].double(), self.dataset[index][1]
