"""All readers of YAML that a person writes: one line of a ValueError, for a key that is there twice too."""

import config
import grid
import pytest
import terminal

from labkit.once_only import of_yaml
from labkit.run import framework_files, options, sweep
from labkit.run.experiment import Experiment
from labkit.scale import hardware

READERS = {
    "experiment": Experiment.from_yaml,
    "--config": options.from_file,
    "sweep": sweep.read_grid,
    "lab run --grid": grid.read,
    "gpu": hardware.gpu_of_file,
    "lab config": config.read,
    "framework": lambda path: framework_files.from_yaml(path.read_text()),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("? [a, b]\n: 1\n", "YAML"),
        ("!!map [a]\n", "YAML"),
        ("# a flow mapping\n{? {a: 1} : 2}\n", "YAML"),
        ("a: !!timestamp b\n", "YAML"),
        ("a: !!bool b\n", "YAML"),
        ("[" * 2000, "YAML"),
        ("a: [1\n", "YAML"),
        ("a: {b: 1, b: 2}\n", "has the key b twice"),
    ],
)
def test_one_line(reader, text, words, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises((ValueError, terminal.UserError), match=words) as refusal:
        READERS[reader](file)
    assert "\n" not in str(refusal.value)


def test_keys_of_merged_mappings_count_once():
    assert of_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n")["b"] == {"x": 3, "y": 2}
    assert of_yaml("") is None
