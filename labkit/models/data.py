"""Real data by name, in the format of a model: map-style datasets of (input, target).

    digits        handwritten digits, digits.csv.gz              always available   -> mlp, resnet
    stdlib_text   Python's own library as bytes, from Python     always available   -> gpt
    cifar10       colour photographs, the official archive       on request         -> resnet

str(dataset) describes a dataset. `Slow` starves a loader.
"""

import time

from torch.utils.data import Dataset

from labkit.models.cifar import cifar10
from labkit.models.custom import is_own, task
from labkit.models.digits import digits
from labkit.models.names import known
from labkit.models.text import stdlib_text

DATASETS = {"digits": digits, "stdlib_text": stdlib_text, "cifar10": cifar10}
FITTING = {  # model -> dataset -> arguments that fit the model; the first dataset is "auto"
    "mlp": {"digits": {"image": "flat"}},
    "resnet": {"digits": {"image": "rgb"}, "cifar10": {}},
    "gpt": {"stdlib_text": {}},
}


def load(name, model, split="train", **options):
    """Load the dataset `name` for model "mlp", "resnet" or "gpt"; "auto": an available one.

    A custom model has its own data, whatever `name` is.

    `options` go to the dataset: stdlib_text(context=, max_bytes=), cifar10(root=, download=).
    Raises ValueError for an unknown model, dataset or split, or for data that does not fit.
    """
    if is_own(model):
        return task(model).train if split == "train" else task(model).held_out
    fitting = known("model", model, FITTING)
    if name == "auto":
        name = next(iter(fitting))
    dataset = known("data", name, DATASETS)
    arguments = known(f"data for the model {model!r}:", name, fitting)
    return dataset(split=split, **arguments, **options)


class Slow(Dataset):
    """A dataset that waits `ms` milliseconds before each item, like one on slow storage."""

    def __init__(self, dataset, ms):
        self.dataset = dataset
        self.seconds = ms / 1000

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.dataset[index]
