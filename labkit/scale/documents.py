"""Documents packed into the sequences of a batch: how far attention reaches, what padding wastes.

    a sequence of 8,192 tokens  | 2,048 | 2,048 | 2,048 | 2,048 |    attention inside a document

    2048           ->  Documents(mean=2048, reach=2048)    all documents have this length
    lengths.txt    ->  Documents(mean, reach)              their lengths, separated by white space

    reach     sum of L^2 / sum of L    the length of the document of a mean token
    padded    one document a sequence: 1 - mean / length of the tokens are padding

A causal token attends to half of its document, as without packing to half of its sequence. So
`reach` takes the place of the length in the FLOPs of attention, and nothing else changes. A
document longer than a sequence is cut into pieces. Sequences are taken as full, all ranks as
equally busy, and kernels as efficient on short documents as on long ones. That is too optimistic:
NeMo 24.07 on packed SQuAD is 1.02 times as fast as in pretraining; with documents of 200 tokens,
the prediction is 1.14. Krell et al., Efficient Sequence Packing without Cross-contamination, 2021,
section 2; Dao, FlashAttention, NeurIPS 2022 (its variant for sequences of different lengths).
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Documents:
    """The documents of a batch. mean, reach: tokens, see above."""

    mean: float
    reach: float

    def wasted(self, length):
        """Return the share of padding if each document had a sequence of `length` tokens."""
        return 1 - self.mean / length


def documents_of(said, length):
    """Return the Documents of a number or of a file of lengths, or None if nothing is said.

    length: tokens of a sequence, at which longer documents are cut. Raises ValueError, one line.
    """
    if not said:
        return None
    lengths = lengths_of(said)
    pieces, squares = 0, 0
    for tokens in lengths:
        whole, rest = divmod(tokens, length)
        pieces += whole + (rest > 0)
        squares += whole * length**2 + rest**2
    return Documents(sum(lengths) / pieces, squares / sum(lengths))


def lengths_of(said):
    """Return the lengths of a number, or of the text file of that name."""
    if whole(said):
        return [int(said)]
    try:
        found = Path(said).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ValueError(
            f"documents must be the tokens of a document, such as 2048, or a file of such numbers, "
            f"got {said!r}: {reason}"
        ) from None
    wrong = [word for word in found if not whole(word)]
    if wrong or not found:
        raise ValueError(
            f"documents: {said} must have whole numbers of tokens, at least 1, got "
            f"{wrong[0] if wrong else 'nothing'!r}"
        )
    return [int(word) for word in found]


def whole(word):
    """Return whether a word is a whole number of at least 1."""
    return word.isascii() and word.isdigit() and int(word) > 0
