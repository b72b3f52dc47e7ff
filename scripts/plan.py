"""`lab plan MODEL`: which layout trains a model fastest on these GPUs, over this network? Nothing is run.

    ./scripts/lab plan llama3-8b --gpus 8 --gpu h100
    ./scripts/lab plan config.json --gpus 64 --gpu a100-80gb --network 200 --tokens 2T --stack megatron --price 2

The answer is labkit.scale.answer.answer(); all its figures are predicted.
"""

import argparse
import shutil
import sys
import textwrap

from terminal import UserError, main, say

from labkit.scale.answer import STACKS_TRIED, answer
from labkit.scale.answer_text import billions
from labkit.scale.cluster import Cluster
from labkit.scale.hardware import GPUS
from labkit.scale.model_row import models, shape_of, whole
from labkit.scale.stacks import STACKS

EXAMPLES = __doc__.partition("\n\n")[2].rstrip()
WIDTH = 100
USUAL = {"gpu": "h100", "gpus": 8}
AXES = {
    "dp": "ranks of data parallelism",
    "tp": "ranks of tensor parallelism",
    "pp": "stages of the pipeline",
    "cp": "ranks of context parallelism",
    "ep": "ranks that share the experts of a layer",
    "vpp": "virtual stages of each GPU",
    "zero": "ZeRO stage, 0 to 3; 3 is FSDP",
    "micro_batch": "sequences of a micro-batch",
}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"plan: {message} (see ./scripts/lab plan --help)")


def parser():
    found = Parser(
        prog="./scripts/lab plan",
        usage="./scripts/lab plan MODEL [options]",
        description="Plan the training of a model: the three fastest layouts that fit, predicted.",
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = found.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help='a name of --list-models, a Hugging Face config.json ("-": on stdin), or layers=32,hidden=4096,...',
    )
    add("--gpus", metavar="N", help="number of GPUs, any from 1 on (default: 8)")
    add("--gpu", metavar="NAME", help="a name of --list-gpus, or a YAML file that describes one (default: h100)")
    add("--network", metavar="GBPS", help="network of each GPU in Gbit/s, such as 400 (default: usual for the GPU)")
    add("--gpus-per-node", metavar="N", help="GPUs that NVLink or PCIe connects (default: usual for the GPU, 8)")
    add("--cluster", metavar="FILE", help="YAML file of a cluster, instead of the four options above")
    add("--tokens", metavar="N", default="1T", help="tokens of the whole run: 300B, 15.6e12 (default: 1T)")
    add("--batch", metavar="N", help="sequences of a step (default: the published ones, or 4M tokens)")
    add("--length", metavar="N", help="tokens of a sequence (default: the model's, at most 8,192)")
    add("--precision", metavar="P", help="bf16, fp8, fp16, tf32 or fp32 (default: bf16, fp16 if the GPU lacks it)")
    add("--stack", metavar="NAME", help=f"{', '.join(STACKS)} (default: the fastest of {', '.join(STACKS_TRIED)})")
    add("--price", metavar="P", help="price of a GPU-hour, in any currency (default: none)")
    add("--deadline", metavar="DATE", help="a date such as 2027-03-01, or days such as 30d (default: none)")
    add("--spare", metavar="SHARE", default="0.1", help="share of GPU memory that stays free (default: 0.1)")
    add("--recompute", metavar="KIND", help="none, selective or full (default: the fastest that fits)")
    for name, what in AXES.items():
        add(f"--{name.replace('_', '-')}", metavar="N", help=f"{what} (default: the fastest)")
    add(
        "--lora", metavar="RANK", help="train LoRA adapters of this rank; the model is frozen (default: all is trained)"
    )
    add(
        "--train",
        metavar="WHAT",
        help="all, decoder (all but an image encoder), head (the output layer), last:N (N layers more) (default: all)",
    )
    add(
        "--documents",
        metavar="N",
        help="pack documents of N tokens, or of the lengths in a file, into a sequence (default: one a sequence)",
    )
    add("--json", action="store_true", help="print the answer as JSON")
    add("--list-models", action="store_true", help="list the named models")
    add("--list-gpus", action="store_true", help="list the GPUs, with the source of their figures")
    return found


def run(arguments):
    asked = parser().parse_args(arguments)
    if asked.list_models:
        say("\n".join(model_lines()))
        return 0
    if asked.list_gpus:
        say("\n".join(gpu_lines()))
        return 0
    if asked.model is None:
        raise UserError("plan: which model? Give a name of --list-models, a config.json, or layers=32,hidden=4096,...")
    try:
        found = answer_to(asked)
    except ValueError as error:
        raise UserError(f"plan: {error}") from None
    say(found.to_json() if asked.json else "\n".join(text(found)))
    return 0


def answer_to(asked):
    """Return the Answer to parsed arguments. ValueError, one line, if one of them is wrong."""
    given = {name: count(getattr(asked, name), name, least=0) for name in AXES if getattr(asked, name)}
    given |= {"recompute": asked.recompute} if asked.recompute else {}
    return answer(
        asked.model,
        cluster=cluster_of(asked),
        tokens=asked.tokens,
        batch=asked.batch,
        length=asked.length,
        precision=asked.precision,
        stack=asked.stack,
        price=asked.price,
        deadline=asked.deadline,
        spare=number(asked.spare, "spare"),
        lora=count(asked.lora, "lora"),
        train=asked.train,
        documents=asked.documents,
        stdin=sys.stdin,
        **given,
    )


def cluster_of(asked):
    """Return the Cluster of a file, or of the options."""
    told = {name: getattr(asked, name) for name in ("gpu", "gpus", "gpus_per_node", "network")}
    told = {name: figure for name, figure in told.items() if figure is not None}
    if asked.cluster and told:
        raise ValueError("--cluster has the GPUs and the network: give them there or as options")
    return Cluster.from_yaml(asked.cluster) if asked.cluster else Cluster.from_dict(USUAL | told)


def count(said, name, least=1):
    """Return a whole number, or None if it is not given."""
    if said is None:
        return None
    try:
        value = int(said.replace(",", ""))
    except ValueError:
        value = least - 1
    if value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {said!r}")
    return value


def number(said, name):
    try:
        return float(said)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {said!r}") from None


def text(found):
    """Return the lines of an Answer: its sentences, and the options that run the fastest layout."""
    head, *rest = found.sentences()
    lines = [wrapped(head, ""), *(wrapped(sentence, "  ") for sentence in rest)]
    command, *options = found.options()
    if all(line.startswith("--") for line in options):
        command, options = " ".join([command, *options]), []
    stack = found.best.job.stack.name
    return [*lines, f"To run layout 1 ({stack}):", wrapped(command, "  "), *(f"  {line}" for line in options)]


def wrapped(sentence, indent):
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    form = {"initial_indent": indent, "subsequent_indent": indent + "   ", "break_on_hyphens": False}
    return textwrap.fill(sentence, width, break_long_words=False, **form)


def model_lines():
    for name, row in models().items():
        shape = shape_of(row, whole(row, "seq_len", 2048))
        yield f"{name:16}{billions(shape.parameters):>18}  {row['source']}"


def gpu_lines():
    for gpu in GPUS.values():
        peak = f"{gpu.tflops['bf16']:,.0f} TFLOP/s"
        yield f"{gpu.name:18}{peak:>16}{gpu.memory_gib:>7.0f} GiB  {' '.join(gpu.precisions)}; {gpu.source}"


if __name__ == "__main__":
    sys.exit(main(run, sys.argv[1:]))
