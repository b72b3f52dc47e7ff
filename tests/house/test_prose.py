"""Numbers in the text of notebooks: where a sentence calculates, the result is right to its last digit."""

import html
import math
import re

import batch
import pytest

WORDS = {"million": "1e6", "billion": "1e9", "trillion": "1e12"}
NUMBER = r"(?:\d[\d,]*(?:\.\d+)?(?: (?:million|billion|trillion))?)"
UNIT = r"(?: ?(?:bytes|GB/s|GB|TB|MB|Gbit/s|µs|ms|s|%))?"
TERM = rf"[√(]*{NUMBER}{UNIT}\)*"
# Two numbers or more, and a result: 2 × 63/64 × 14 = 27.6. No part of a longer formula with letters.
CALCULATION = re.compile(
    rf"(?<![×x·/+−*=^] )(?<![\w.,)×·/+−*^])({TERM}(?: ?[×x·/+−*] ?{TERM})+) = ({NUMBER})(?![\w^]| ?[×x·/+−*] ?[\d(√])"
)


def text_of(path):
    cells = [cell.source for cell in batch.read(path).cells if cell.cell_type == "markdown"]
    text = "\n".join(cells).replace("<sup>", "^")
    text = re.sub(r"<[^>]+>|\]\([^)]*\)|`[^`]*`", "", text)
    return html.unescape(text).replace("\n", " ")


def value_of(expression):
    """Return the value of the calculation, without units."""
    plain = re.sub(r"bytes|GB/s|GB|TB|MB|Gbit/s|µs|ms|(?<=\d) s\b|%|,", "", expression)
    for word, factor in WORDS.items():
        plain = re.sub(rf"([\d.]+) {word}", rf"(\1*{factor})", plain)
    plain = re.sub("[×x·]", "*", plain).replace("−", "-").replace("√", "sqrt")
    return eval(plain, {"__builtins__": {}, "sqrt": math.sqrt})  # digits and signs, by the pattern above


def right(expression, result):
    """Return whether the result is the value, rounded to its digits, but for a power of ten (GB, %)."""
    value = value_of(expression)
    digits = result.split()[0].replace(",", "")
    shown = value_of(result)
    last = 10.0 ** -len(digits.partition(".")[2]) * shown / float(digits)
    power = round(math.log10(value / shown))
    return abs(value / 10.0**power - shown) <= 0.51 * last


def calculations(text):
    return [match.groups() for match in CALCULATION.finditer(text)]


@pytest.mark.parametrize("path", batch.course(), ids=lambda path: path.stem)
def test_calculations_in_the_text_are_right(path):
    wrong = [f"{left} = {result}" for left, result in calculations(text_of(path)) if not right(left, result)]
    assert wrong == []


def test_there_are_calculations():
    assert sum(len(calculations(text_of(path))) for path in batch.course()) >= 40


@pytest.mark.parametrize(
    ("sentence", "holds"),
    [
        ("sends 2 × 63/64 × 14 = 27.6 GB", True),
        ("sends 2 × 63/64 × 14 = 28.6 GB", False),
        ("16 bytes × 70 billion = 1,120 GB", True),
        ("16 bytes × 70 billion = 1,220 GB", False),
        ("so √(2 · 30 · 11,135) = 817 s", True),
        ("lost: 30/817 + 817/22,270 = 7 %", True),
        ("lost: 30/817 + 817/22,270 = 8 %", False),
    ],
)
def test_a_wrong_result_is_found(sentence, holds):
    ((left, result),) = calculations(sentence)
    assert right(left, result) == holds
