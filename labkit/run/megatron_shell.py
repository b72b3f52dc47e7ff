"""Megatron-LM's arguments from a shell script, which is read and never run.

    GPT_ARGS=(--num-layers 24 --lr 1e-4)        an array; NAME="..." and NAME=value, too
    torchrun --nproc-per-node 8 pretrain_gpt.py ${GPT_ARGS[@]} --bf16 2>&1 | tee log

A variable that a command or the caller sets, such as $1, stays in the value. "$@", all arguments of
the caller, is left out.
"""

import json
import re
import shlex

from labkit.run.framework_values import NUMBER

ARRAY = re.compile(r"^\s*(?:export\s+)?(\w+)=\(([^()]*)\)", re.MULTILINE)
PLAIN = re.compile(
    r"""^\s*(?:export\s+)?(\w+)=("[^"]*"|'[^']*'|[^\s"'(`]*)(?=[\s;]|$)""", re.MULTILINE
)
VARIABLE = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?|\$\{(\w+)\}|\$(\w+)')
CALLER = re.compile(r"\$([@*]|\{[@*](:[^}]*)?\})")  # its arguments
END = re.compile(r"[|&;]+|\d?>.*")  # of the command
DEEPEST = 10  # of variables in variables


def parse(text):
    """Return {argument: value} of a shell script, of a shell line, or of arguments only.

    Words before the first argument of the script, such as torchrun's, are left out. A list is
    several words; a value that is a number becomes one. Raises ValueError.
    """
    found, name = {}, None
    for word in words_of(text):
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            if name in found:
                raise ValueError(f"--{name} is there twice")
            found[name] = [value] if has_value else []
        elif name is None:
            hint = "; write out the arguments that a shell variable has" if "$" in word else ""
            raise ValueError(f"{word!r}: must be an argument, such as --lr 1e-3{hint}")
        else:
            found[name].append(word)
    return {name: value_of(words) for name, words in found.items()}


def value_of(words):
    """Return true for a flag, a value, or a list of values."""
    values = [plain(word) for word in words]
    return values if len(values) > 1 else values[0] if values else True


def plain(word):
    """Return a number if a word is one, else the word."""
    if not NUMBER.fullmatch(word):
        return word
    try:
        return json.loads(word)
    except json.JSONDecodeError:  # .95 and 1.
        return float(word)


def words_of(text):
    """Return the words behind the script's name, or all words if none ends with .py.

    Raises ValueError for a quote that is never closed.
    """
    text = text.replace("\\\n", " ")
    starts = [line for line in text.splitlines() if is_start(line)]
    line = with_values(starts[-1], variables(text)) if starts else text
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise ValueError(f"is not a shell line: {error}") from None
    places = [place for place, word in enumerate(words) if word.endswith(".py")]
    words = words[places[0] + 1 :] if places else words
    ends = [place for place, word in enumerate(words) if END.fullmatch(word)]
    words = words[: ends[0]] if ends else words
    return [word for word in words if not CALLER.fullmatch(word)]


def is_start(line):
    """Return whether a line starts a Python script."""
    return not line.lstrip().startswith("#") and re.search(r"\S\.py(\s|$)", line) is not None


def variables(text):
    """Return {name: value} of the variables that a script sets itself."""
    text = re.sub(r"(^|\s)#.*", r"\1", text)
    found = {name: value.strip("\"'") for name, value in PLAIN.findall(text)}
    return found | {name: " ".join(value.split()) for name, value in ARRAY.findall(text)}


def with_values(line, known):
    """Return a line with the values of known variables, also of variables within them."""
    for _ in range(DEEPEST):
        line = VARIABLE.sub(lambda found: known.get(found[found.lastindex], found[0]), line)
    return line
