"""The checkers of the notebooks' exercises: right answers pass, and plausible wrong ones do not."""

import ast
import importlib.util
import textwrap

import nbformat
import pytest

from labkit.measure.machine import ROOT
from labkit.run.exercise import check

RANKS = {"01_collectives": 8, "20_slow_networks": 6}
AVERAGE = """
def hook(p):
    {}
parameter.register_post_accumulate_grad_hook(hook)
"""
HALF = """
half = bucket.buffer().half() {}
work = dist.all_reduce(half, async_op=True)
{}
return work.get_future().then(lambda future: {})
"""
# (notebook, solution, checker): {what is wrong with an answer: (its body, a part of what is printed)}
WRONG = {
    ("00_start_here", "of_the_last_rank", "everybody_knows"): {
        "the largest": (
            "dist.all_reduce(value, dist.ReduceOp.MAX)\nreturn value",
            "returned [0.0, 1.0, 2.0, 3.0]",
        ),
        "the sum": ("comm.all_reduce(value)\nreturn value", "returned [-10.0, -8.0, -6.0, -4.0]"),
        "nothing": ("comm.all_reduce(value)", "which is no tensor"),
    },
    ("00_start_here", "plan_13b", "is_planned"): {
        "the forward only": ("return 51, 16 * 13 / 51", "2 N FLOPs per token are the forward"),
        "at the peak": ("return 61, 16 * 13 / 61", "divide by the MFU"),
        "rounded down": ("return 152, 16 * 13 / 152", "round up"),
        "not sharded": ("return 153, 208", "divide the model states by the GPUs"),
        "parameters and gradients only": ("return 153, 4 * 13 / 153", "add up all five values"),
    },
    ("01_collectives", "broadcast", "is_tree"): {
        "a chain behind rank 3": (
            """
            for source, target in ((0, 1), (0, 2), (0, 3), (3, 4), (4, 5), (5, 6), (6, 7)):
                if rank == source:
                    comm.send(tensor, target)
                if rank == target:
                    comm.recv(tensor, source)
            """,
            "after 7 steps, not 3",
        ),
    },
    ("02_data_parallel", "average_when_ready", "is_averaged"): {
        "divides what has left": (
            AVERAGE.format("works.append(comm.all_reduce(p.grad, async_op=True)); p.grad /= world_size"),
            "after its message had left",
        ),
        "a synchronous call behind a fake Work": (
            "from types import SimpleNamespace\n"
            + AVERAGE.format(
                "comm.all_reduce(p.grad); p.grad /= world_size; works.append(SimpleNamespace(wait=lambda: None))"
            ),
            "waits for its message",
        ),
        "waits in the hook": (
            AVERAGE.format(
                "p.grad /= world_size; works.append(comm.all_reduce(p.grad, async_op=True)); works[0].wait()"
            ),
            "waits for its message",
        ),
    },
    ("02_data_parallel", "send_half", "is_half"): {
        "an fp16 result": (HALF.format("/ world_size", "", "future.value()[0]"), "average is torch.float16"),
        "a list": (HALF.format("/ world_size", "", "[future.value()[0].float()]"), "holds list"),
        "divides what has left": (HALF.format("", "half /= world_size", "future.value()[0].float()"), ""),
    },
    ("04_compare", "average_flat", "one_message_and_the_mean"): {
        "each gradient gets one number": (
            """
            flat = torch.cat([p.grad.flatten() for p in parameters])
            comm.all_reduce(flat)
            for p in parameters:
                p.grad.fill_(flat[0] / world_size)
            """,
            "not the mean",
        ),
    },
    ("05_scaling", "pairs", "are_not_comparable"): {
        "letters of words": (
            """return {"GH": "base", "HG": "FLOPs", "AB": "base", "CD": "batch"}""",
            "shares of a peak differ in FLOPs",
        ),
    },
    ("10_memory", "gpus_needed", "is_enough"): {
        "activations are divided, too": (
            "return -(-(16 * parameters + activations + 4 * largest_unit) // capacity)",
            "needs its activations and the gathered units in full",
        ),
        "no gathered units": (
            """
            room = capacity - activations
            return -(-16 * parameters // room) if room > 0 else None
            """,
            "two gathered units are missing",
        ),
        "rounded down": (
            """
            room = capacity - activations - 4 * largest_unit
            return 16 * parameters // room if room > 0 else None
            """,
            "round up",
        ),
        "negative room": (
            "return -(-16 * parameters // (capacity - activations - 4 * largest_unit))",
            "return None",
        ),
        "8 bytes a parameter": (
            "return -(-8 * parameters // (capacity - activations - 4 * largest_unit))",
            "16 bytes a parameter",
        ),
    },
    ("10_memory", "kept_by_network", "is_kept"): {
        "x twice": ("return 4 * tokens * (2 * h + 4 * f)", "counts once"),
        "one factor of the product": ("return 4 * tokens * (h + 3 * f)", "both its factors"),
        "numbers, not bytes": ("return tokens * (h + 4 * f)", "4 bytes"),
        "GELU's network": ("return 4 * tokens * (h + 2 * f)", "each operator"),
    },
    ("11_mixed_precision", "any_rank_overflows", "is_agreed"): {
        "the sum is looked at": (
            """
            found = torch.zeros(1, device=device)
            for gradient in gradients:
                found += ~torch.isfinite(gradient.sum())
            comm.all_reduce(found)
            return found.item() > 0
            """,
            "the verdict is True",
        ),
    },
    ("12_zero", "zero_step", "is_a_zero_step"): {
        "all-reduces behind the meter's back": (
            """
            dist.all_reduce(gradient)
            mean = gradient.view(world_size, -1)[rank] / world_size
            momentum.mul_(beta).add_(mean)
            mine = parameter.view(world_size, -1)[rank] - lr * momentum
            dist.all_gather(list(parameter.view(world_size, -1)), mine)
            """,
            "send with comm",
        ),
    },
    ("13_fsdp", "set_up", "is_set_up"): {
        "gradients are never zeroed": (
            """
            from contextlib import nullcontext
            from labkit import models
            from labkit.fsdp import FSDP
            precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
            model = FSDP(module, unit=models.unit("gpt"), **precision)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            def step(micro_batches):
                for index, (input, target) in enumerate(micro_batches):
                    with nullcontext() if index == len(micro_batches) - 1 else model.no_sync():
                        loss = models.cross_entropy(model(input).float(), target) / len(micro_batches)
                        loss.backward()
                optimizer.step()
            return model, step
            """,
            "% off",
        ),
    },
    ("15_attention", "update", "is_update"): {
        "a softmax without its maximum": (
            """
            larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights = scores.exp()
            return larger, total + weights.sum(-1, keepdim=True), output + weights @ values
            """,
            "not finite",
        ),
        "what was known is not made smaller": (
            """
            larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - larger)
            return larger, total + weights.sum(-1, keepdim=True), output + weights @ values
            """,
            "from the softmax of all",
        ),
    },
    ("20_slow_networks", "all_gather", "is_gathered_by_nodes"): {
        "a flat one behind the meter's back": (
            "dist.all_gather(list(output.view(world_size, -1)), part)",
            "comm sent 0 bytes",
        ),
    },
    ("21_compression", "sum_at_indices", "is_sum_at_indices"): {
        "everything is sent behind the meter's back": (
            """
            total = values.new_zeros(numel)
            total[indices.long()] = values
            dist.all_reduce(total)
            return total
            """,
            "send with comm",
        ),
    },
    ("30_checkpoint_and_resume", "save_whole", "is_whole_or_not_there"): {
        "the part lies in another folder": (
            """
            import os
            import tempfile
            number, part = tempfile.mkstemp()
            with open(number, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
            """,
            "within one folder",
        ),
    },
    ("40_tensor_and_sequence", "column_backward", "is_column_backward"): {
        "does not wait for the sum": (
            """
            of_x = gradient @ weight
            comm.all_reduce(of_x, async_op=True)
            return of_x, gradient.t() @ x, gradient.sum(0)
            """,
            "gradient of x is not",
        ),
    },
    ("41_long_context", "attend_one", "is_attend_one"): {
        "a softmax without its maximum": (
            """
            scores = (key @ query.unsqueeze(-1)).squeeze(-1) * query.shape[-1] ** -0.5
            weights = scores.exp()
            output = (weights.unsqueeze(-2) @ value).squeeze(-2)
            both = torch.cat([output, weights.sum(-1, keepdim=True)], -1)
            comm.all_reduce(both)
            return both[:, :-1] / both[:, -1:]
            """,
            "nan from attention",
        ),
    },
    ("43_experts", "balance_loss", "is_balance_loss"): {
        "this rank's shares alone": (
            """
            E = likely.shape[1]
            load = chosen.flatten().bincount(minlength=E).double()
            return E * (load / load.sum() * likely.mean(0)).sum()
            """,
            "and MoE's",
        ),
    },
    ("50_thousand_gpus", "median_step", "is_median"): {
        "work times lateness": (
            """
            from math import log
            return compute * (1 - late * log(1 - 0.5 ** (1 / n)))
            """,
            "s, not",
        ),
    },
}
# right answers that are not the solution's
RIGHT = {
    ("02_data_parallel", "average_when_ready", "is_averaged"): {
        "torch's own, and a mean of copies": AVERAGE.format(
            "p.grad = p.grad / world_size; works.append(dist.all_reduce(p.grad, async_op=True))"
        ),
    },
    ("43_experts", "balance_loss", "is_balance_loss"): {
        f"in {dtype}": f"""
        E = likely.shape[1]
        load = chosen.flatten().bincount(minlength=E)
        comm.all_reduce(load)
        return E * (load.{dtype}() / load.sum() * likely.mean(0)).sum()
        """
        for dtype in ("float", "double")
    },
}
CHECKERS = sorted({*WRONG, *RIGHT})


def source_of(notebook, name):
    """The source of the function of this name in a notebook's cells."""
    for cell in nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", 4).cells:
        if cell.cell_type == "code" and f"def {name}(" in cell.source:
            for node in ast.parse(cell.source).body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return ast.get_source_segment(cell.source, node)
    raise ValueError(f"{notebook} has no function {name}")


def answered(tmp_path, notebook, solution, checker, body):
    """What check() returns for an answer with this body; None: the answer of the solutions."""
    stub = source_of(notebook, solution)
    answer = source_of(f"solutions/{notebook}", solution)
    if body is not None:
        answer = stub.replace("    raise NotImplementedError", textwrap.indent(textwrap.dedent(body), "    "))
    path = tmp_path / f"{notebook}.py"
    path.write_text(f"{answer}\n\n\n{source_of(notebook, checker)}\n")
    found = importlib.util.spec_from_file_location(f"answer_{tmp_path.name}", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    options = {"nproc": RANKS.get(notebook, 2), "device": "cpu"}
    return check(getattr(module, solution), getattr(module, checker), **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", CHECKERS, ids=lambda case: case[1])
def test_the_solution_passes(case, tmp_path):
    assert answered(tmp_path, *case, None)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "words"), [(case, words) for case in WRONG for words in WRONG[case]])
def test_a_wrong_answer_is_refused(case, words, tmp_path, capsys):
    body, told = WRONG[case][words]
    assert not answered(tmp_path, *case, body)
    assert told in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("case", "words"), [(case, words) for case in RIGHT for words in RIGHT[case]])
def test_another_right_answer_passes(case, words, tmp_path):
    assert answered(tmp_path, *case, RIGHT[case][words])


@pytest.mark.parametrize("case", CHECKERS, ids=lambda case: case[1])
def test_the_solutions_have_the_same_checker(case):
    notebook, _, checker = case
    assert source_of(notebook, checker) == source_of(f"solutions/{notebook}", checker)
