"""Predict the speed and memory of training jobs: rows of a CSV file in, rows with predictions out.

    python -m labkit.scale.predict ROWS.csv -o OUT.csv

    model, GPUs, axes, batch  ->  cost.py          ->  pred_tok_s_gpu  tokens per second and GPU
                              ->  memory_model.py  ->  pred_mem_gib    GiB of the fullest GPU
                                                   ->  pred_fits       whether the job runs
                                                   ->  pred_refused    the error of an invalid cell

The columns are those of published/training_steps.csv. Results in the rows (tok_s_gpu, mem_gib,
status) and unknown columns are ignored; a missing column has the default of
labkit/scale/job_config.py. A row with an invalid cell is written without a prediction, with an
error that names the column; all other rows are predicted. The speed of a job that does not fit
assumes a GPU with more memory. `python -m labkit.scale.fit` prints the prediction errors.
"""

import argparse
import csv
import sys

from labkit.scale.constants import values
from labkit.scale.cost import predict_step
from labkit.scale.job_config import job_of
from labkit.scale.memory_model import predict_memory

PREDICTED = ("pred_tok_s_gpu", "pred_mem_gib", "pred_fits")
REFUSED = "pred_refused"


def predict(row, c):
    """Return the predictions of a row: {column: text}."""
    job = job_of(row)
    peak = predict_memory(job, c)
    speed = predict_step(job, c).tokens_per_second
    return dict(zip(PREDICTED, (f"{speed:.6g}", f"{peak.shown:.4g}", str(peak.fits)), strict=True))


def read(path):
    """Return (columns, rows) of a CSV file. Raises ValueError if it is not a CSV file."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows, names = list(reader), reader.fieldnames or ()
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a CSV file of text: {error}") from None
    columns = [column for column in names if column not in (*PREDICTED, REFUSED)]
    if not columns:
        raise ValueError(f"{path}: it has no line of column names")
    if any(None in row for row in rows):
        line = next(number for number, row in enumerate(rows, 2) if None in row)
        raise ValueError(f"{path}, line {line}: more fields than columns")
    return columns, rows


def predict_file(source, target):
    """Write the rows of `source` with predictions to `target`; return [(line, error)] of bad rows.

    Raises ValueError, one line, if the file itself cannot be read or written.
    """
    columns, rows = read(source)
    c, refused = values(), []
    for line, row in enumerate(rows, 2):
        try:
            row |= predict(row, c) | {REFUSED: ""}
        except (ValueError, ArithmeticError) as error:
            row |= dict.fromkeys(PREDICTED, "") | {REFUSED: str(error)}
            refused.append((line, str(error)))
    try:
        with open(target, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, (*columns, *PREDICTED, REFUSED), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ValueError(f"{target}: cannot be written: {error.strerror}") from None
    return refused


def main():
    parser = argparse.ArgumentParser(
        prog="python -m labkit.scale.predict", description=__doc__.splitlines()[0]
    )
    parser.add_argument("rows", metavar="ROWS.csv")
    parser.add_argument("-o", "--output", metavar="OUT.csv", required=True)
    asked = parser.parse_args()
    try:
        refused = predict_file(asked.rows, asked.output)
    except ValueError as error:
        sys.exit(f"labkit.scale.predict: {error}")
    for line, why in refused:
        print(f"labkit.scale.predict: {asked.rows}, line {line}: {why}", file=sys.stderr)
    sys.exit(1 if refused else 0)


if __name__ == "__main__":
    main()
