"""YAML and JSON whose keys are each there once; the libraries keep a key's last value.

yaml.load(text, OnceOnly)
json.loads(text, object_pairs_hook=without_doubles)
"""

import yaml


def without_doubles(pairs):
    """Return a dict of (key, value) pairs. Raises ValueError for a key that is there twice."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"has the key {name} twice")
    return dict(pairs)


class OnceOnly(yaml.SafeLoader):
    """A loader that raises ValueError for a key that is there twice."""

    def construct_mapping(self, node, deep=False):
        without_doubles([(key.value, None) for key, _ in node.value])
        return super().construct_mapping(node, deep)
