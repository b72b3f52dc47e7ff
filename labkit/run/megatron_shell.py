"""Megatron-LM's arguments from a shell script, which is read and never run.

    GPT_ARGS=(--num-layers 24 --lr 1e-4)        an array; NAME="..." and NAME=value, too
    torchrun --nproc-per-node 8 pretrain_gpt.py ${GPT_ARGS[@]} --bf16 2>&1 | tee log

Lines are read in their order, as a shell does. A variable that a command, the caller or a branch
sets, such as $1, stays in the value. "$@", all arguments of the caller, is left out. A default, as
of ${NAME:-2} or ${1-2}, holds if no earlier line can set the variable.
"""

import json
import re
import shlex
from itertools import pairwise

from labkit.run.framework_values import NUMBER

SET = re.compile(  # name, + if it is appended to, an array or a plain value
    r"""^\s*(?:export\s+)?(\w+)(\+?)=(?:\(([^()]*)\)|("[^"]*"|'[^']*'|[^\s"'(`]*)(?=[\s;]|$))""",
    re.MULTILINE,
)
OPENS = re.compile(r"(?:^|[;&|]|\b(?:then|do|else))\s*(?:if|case|for|while|until)\b", re.MULTILINE)
CLOSES = re.compile(r"(?:^|[;&|])\s*(?:fi|esac|done)\b", re.MULTILINE)
LATER = re.compile(
    r"(?:[;&|)]|\b(?:then|do|else))[ \t]*(?:export\s+)?(\w+)\+?="
)  # not first in its line
VARIABLE = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?|\$\{(\w+)\}|\$(\w+)')
DEFAULT = re.compile(r"\$\{(\w+)(:?)-([^{}]*)\}")
CALLER = re.compile(r"\$([@*]|\{[@*](:[^}]*)?\})")  # its arguments
END = re.compile(r"[|&;]+|\d?>.*")  # of the command
COUNTS = {"nproc_per_node": "ranks of a node", "nnodes": "nodes"}  # options of torchrun


class Script(dict):
    """Arguments of a script. counts: {option of torchrun: its value}, of those in COUNTS."""

    def __init__(self, arguments, counts):
        super().__init__(arguments)
        self.counts = counts


def parse(text):
    """Return {argument: value} of a shell script, of a shell line, or of arguments only.

    Words before the first argument of the script, such as torchrun's, are left out. A list is
    several words; a value that is a number becomes one. Raises ValueError.
    """
    found, name = {}, None
    before, words = command_of(text)
    for word in words:
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
    arguments = {name: value_of(words) for name, words in found.items()}
    return Script(arguments, counts_of(before))


def counts_of(words):
    """Return {option in COUNTS: its value} of torchrun's words."""
    words = [part for word in words for part in word.split("=", 1)]
    pairs = pairwise(words)
    options = {name.lstrip("-").replace("-", "_"): plain(value) for name, value in pairs}
    return {name: options[name] for name in COUNTS if name in options}


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
    """Return the words behind the script's name, or all words if none ends with .py."""
    return command_of(text)[1]


def command_of(text):
    """Return (the words up to the script's name, the words of `words_of`).

    Raises ValueError for a quote that is never closed.
    """
    text = text.replace("\\\n", " ")
    starts = [line for line in text.splitlines() if is_start(line)]
    start = starts[-1] if starts else text
    before = re.sub(r"(^|\s)#.*", r"\1", text[: text.rindex(start)])
    line = with_values(start, variables(before), before)
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise ValueError(f"is not a shell line: {error}") from None
    places = [place for place, word in enumerate(words) if word.endswith(".py")]
    first = places[0] + 1 if places else 0
    before, words = words[:first], words[first:]
    ends = [place for place, word in enumerate(words) if END.fullmatch(word)]
    words = words[: ends[0]] if ends else words
    return before, [word for word in words if not CALLER.fullmatch(word)]


def is_start(line):
    """Return whether a line starts a Python script."""
    return not line.lstrip().startswith("#") and re.search(r"\S\.py(\s|$)", line) is not None


def variables(text):
    """Return {name: value} of the variables that lines without comments set, each in one way."""
    found, unknown = {}, set()
    for one in SET.finditer(text):
        name, more, array, value = one.groups()
        words = value.strip("\"'") if array is None else " ".join(array.split())
        words = with_values(words, found, text[: one.start()])
        if in_branch(text, one.start()) or (more and name in unknown):
            unknown.add(name)
            found.pop(name, None)
            continue
        unknown.discard(name)
        joint = "" if array is None else " "
        found[name] = found.get(name, "") + joint + words if more else words
    sometimes = set(LATER.findall(text))
    return {name: value for name, value in found.items() if name not in sometimes}


def in_branch(text, place):
    """Return whether a place of a script is inside of if, case or a loop."""
    before = text[:place]
    return len(OPENS.findall(before)) > len(CLOSES.findall(before))


def with_values(line, known, before):
    """Return a line with the values of known variables, and with defaults of those not set before.

    before: the lines of the script that come first.
    """

    def default(found):
        name, colon, words = found.groups()
        if name in known:
            return words if colon and not known[name] else known[name]
        return found[0] if may_set(name, before) else words

    line = VARIABLE.sub(lambda found: known.get(found[found.lastindex], found[0]), line)
    for _ in range(line.count("${")):  # a default may have one of its own
        line = DEFAULT.sub(default, line)
    return line


def may_set(name, before):
    """Return whether lines may set a variable, in any way."""
    if name.isdigit():  # an argument of the caller
        return re.search(r"\bshift\b|\bset\s+--", before) is not None
    return re.search(rf"(?<![\w$\{{]){name}\b|^\s*(source|\.)\s", before, re.MULTILINE) is not None
