"""Real data, by name, in the form that a model takes: map-style datasets of (input, target).

    digits        handwritten digits, inside scikit-learn        always there   -> mlp, resnet
    stdlib_text   Python's own library as bytes, inside Python   always there   -> gpt
    cifar10       colour photographs, the official archive       when asked     -> resnet

Each says what it is with str(dataset). `Slow` makes a loader starve.
"""

import time

from torch.utils.data import Dataset

from labkit.models.cifar import cifar10
from labkit.models.digits import digits
from labkit.models.names import known
from labkit.models.own import is_own, task
from labkit.models.text import stdlib_text

DATASETS = {"digits": digits, "stdlib_text": stdlib_text, "cifar10": cifar10}
FITTING = {  # model -> dataset -> arguments that make it fit; the first is "auto"
    "mlp": {"digits": {"image": "flat"}},
    "resnet": {"digits": {"image": "rgb"}, "cifar10": {}},
    "gpt": {"stdlib_text": {}},
}


def load(name, model, split="train", **options):
    """The dataset `name` as model "mlp", "resnet" or "gpt" takes it; "auto": what is always there.

    A model of one's own has its own, whatever `name` is.

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
    """`dataset` that waits `ms` milliseconds before each item: a loader starved by slow storage."""

    def __init__(self, dataset, ms):
        self.dataset = dataset
        self.seconds = ms / 1000

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.dataset[index]
