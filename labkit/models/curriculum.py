"""A curriculum by sequence length: begin with short sequences, and lengthen them step by step.

    length |            .------ longest         fixed_linear    the same growth in every step
           |       .--'                         fixed_root      by step^(1/degree): fast at first
           |  .--'                              fixed_discrete  lengths, each up to its last step
           +--+--------+-------
           shortest  total_steps                a growing length is rounded down to a multiple

    tokens [B, T]  ->  shorten(batch, length)  ->  tokens [B, length]

Early gradients of long sequences vary most, and attention over short ones costs less. The length
depends on the step alone, so all ranks have the same length without a message.
Sent: nothing. A step uses the first `length` of the T tokens of each sequence, and drops the rest.
Li et al., The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT
Models, NeurIPS 2022; the lengths are those of DeepSpeed's CurriculumScheduler.
Experiment(curriculum="fixed_linear") trains with it.
"""

from math import floor

from labkit.models.names import known


def fixed_linear(step, shortest, longest, total_steps, multiple=8):
    """Return the length of a step, counted from 1. Arguments as for fixed_root()."""
    return fixed_root(step, shortest, longest, total_steps, multiple, degree=1)


def fixed_root(step, shortest, longest, total_steps, multiple=8, degree=2):
    """Return the length of a step, counted from 1, in tokens.

    shortest, longest: in tokens. total_steps: the step that reaches longest, if that is a multiple;
    otherwise a later step does. multiple: 8 for tensor cores; a shortest that is not a multiple is
    rounded up. degree: 2 for the square root.
    Raises ValueError for settings that give no lengths.
    """
    if not 0 < shortest <= longest:
        raise ValueError(f"{shortest=} must be at least 1 and at most {longest=}")
    if min(total_steps, multiple, degree) < 1:
        raise ValueError(f"{total_steps=}, {multiple=} and {degree=} must be at least 1")
    share = (step / total_steps) ** (1.0 / degree)
    length = floor(share * (longest - shortest) + shortest)
    first = -(-shortest // multiple) * multiple
    return min(max(length - length % multiple, first), longest)


def fixed_discrete(step, lengths, last_steps):
    """Return the length of a step, counted from 1, in tokens.

    lengths: in tokens. last_steps: the last step of each length but the final one, increasing.
    Raises ValueError for other numbers of them.
    """
    if len(last_steps) != len(lengths) - 1 or sorted(set(last_steps)) != list(last_steps):
        raise ValueError(
            f"{last_steps=} must be {len(lengths) - 1} increasing steps, one fewer than {lengths=}"
        )
    passed = sum(step > last for last in last_steps)
    return lengths[passed]


ENDS = ("min_difficulty", "max_difficulty")
GROWTH = ("total_curriculum_step", "difficulty_step")
# DeepSpeed's name of a schedule -> the function, and DeepSpeed's names of its arguments.
SCHEDULES = {
    "fixed_linear": (fixed_linear, (*ENDS, *GROWTH)),
    "fixed_root": (fixed_root, (*ENDS, *GROWTH, "root_degree")),
    "fixed_discrete": (fixed_discrete, ("difficulty", "max_step")),
}


def length_of(step, config):
    """Return the length of a step, counted from 1, from DeepSpeed's fields of a curriculum.

    config: {"schedule_type", "schedule_config", and for linear and root "min_difficulty" and
    "max_difficulty"}. Raises ValueError for another schedule_type, such as custom, or for a missing
    field.
    """
    kind = config["schedule_type"]
    schedule, names = known("schedule_type", kind, SCHEDULES)
    given = config | config["schedule_config"]
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"a {kind} curriculum needs {', '.join(missing)}")
    return schedule(step, *(given[name] for name in names))


def shorten(batch, length):
    """Cut a batch of (tokens, targets), [B, T] each, to views of [B, length]."""
    return tuple(part[:, :length] for part in batch)
