"""Single cells of notebooks, run with numbers of other devices and of other numbers of ranks."""

from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
import torch

from labkit import models
from labkit.measure.machine import ROOT
from labkit.memory.memory_tracker import MemoryTracker
from labkit.models.gpt import Block
from labkit.offload import Offloaded, offload_activations
from labkit.recompute import checkpoint_every


def cell(notebook, part):
    """The source of the one code cell of a notebook that has this part."""
    cells = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", 4).cells
    (found,) = [one.source for one in cells if one.cell_type == "code" and part in one.source]
    return found


def verdict(source, **names):
    """The claims of the last verdict of a cell."""
    claims = []
    exec(source, names | {"show": SimpleNamespace(verdict=claims.append)})
    return claims[-1]


@pytest.mark.parametrize(("device", "states"), [("cpu", 8 * 100 + 4 * 3), ("cuda", 8 * 100)])
def test_adamws_counters_lie_on_the_host(device, states):
    held = {"parameters": 400, "gradients": 400, "optimizer_states": states, "activations": 4}
    names = {"memory": SimpleNamespace(current=held), "value": torch.ones(1), "N": 100, "tensors": 3}
    source = cell("10_memory", "activations left: the loss")
    assert all(verdict(source, here=torch.device(device), **names).values())
    held["optimizer_states"] += 4
    assert not all(verdict(source, here=torch.device(device), **names).values())


@pytest.mark.parametrize(("device", "off", "holds"), [("cpu", 0, 1), ("cpu", 1, 0), ("cuda", 40, 1), ("cuda", 200, 0)])
def test_what_is_held_is_exact_on_a_cpu_and_near_on_a_gpu(device, off, holds):
    names = {"numbers": ["kept"], "predicted": {"kept": 100_000}, "measured": {"kept": 100_000 + off}}
    source = cell("14_recompute_and_offload", "measured[variant] / predicted[variant]")
    claims = verdict(source, here=torch.device(device), **names)
    assert list(claims.values()) == [bool(holds)]
    assert ("within 0.1 %" in next(iter(claims))) == (device == "cuda")


def rows_of(ranks, infs):
    """Records of three steps; the ranks in infs see an inf in the second, and all halve their scale."""
    return pd.DataFrame(
        {"step": step, "rank": rank, "scale": 8.0 if step < 2 else 4.0, "inf_here": step == 1 and rank in infs}
        for step in range(3)
        for rank in range(ranks)
    )


@pytest.mark.parametrize(("ranks", "infs", "holds"), [(1, {0}, 1), (2, {1}, 1), (2, {0, 1}, 0), (1, set(), 0)])
def test_one_rank_claims_what_one_rank_can_see(ranks, infs, holds, capsys):
    names = {"world_size": ranks, "runs": {"together": rows_of(ranks, infs)}}
    claims = verdict(cell("11_mixed_precision", "by_some = "), **names)
    assert all(claims.values()) == bool(holds)
    assert ("set world_size to 2" in capsys.readouterr().out) == (ranks == 1)


def test_a_step_holds_no_gradients_of_the_last_one_while_it_goes_forward():
    names = {"models": models, "Offloaded": Offloaded, "offload_activations": offload_activations}
    source = cell("14_recompute_and_offload", "def stepper(")
    data = torch.zeros(2, 65, dtype=torch.int64)
    names |= {"data": data, "torch": torch, "layers": 2, "build": build}
    exec("from contextlib import nullcontext\nfrom functools import partial\n" + source, names)
    model, optimizer, run = names["stepper"]()
    run()
    with MemoryTracker(model, optimizer) as memory:
        run()
    loss = models.loss("gpt")
    with MemoryTracker(model, optimizer) as expected:
        optimizer.zero_grad()
        loss(model(data[:, :-1]), data[:, 1:]).backward()
        optimizer.step()
    assert memory.peak_total == expected.peak_total


def test_the_capstone_knows_how_far_bf16_rounds():
    (line,) = [line for line in cell("45_capstone", "rounding = ").splitlines() if line.startswith("rounding = ")]
    exec(line, names := {"torch": torch})
    numbers = torch.linspace(1, 2, 100_001, dtype=torch.float64)
    furthest = ((numbers.to(torch.bfloat16).double() - numbers) / numbers).abs().max()
    assert 0.98 * names["rounding"] < furthest <= names["rounding"] == 2**-8


def build(layers, options=None):
    torch.manual_seed(0)
    model = models.build("gpt", "small", layers=layers, width=32)
    return model if options is None else checkpoint_every(model, Block, **options)
