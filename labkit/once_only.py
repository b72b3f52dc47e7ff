"""YAML and JSON whose keys are each there once; the libraries keep a key's last value.

of_yaml(text)   documents(text)
json.loads(text, object_pairs_hook=without_doubles)
"""

import yaml


def without_doubles(pairs):
    """Return a dict of (key, value) pairs. Raises ValueError for a key that is there twice."""
    check_names([name for name, _ in pairs])
    return dict(pairs)


def check_names(names):
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"has the key {name} twice")


class NotYaml(ValueError):
    """A text is not YAML; the message is one line."""


class OnceOnly(yaml.SafeLoader):
    """A loader that raises ValueError for a key that is there twice."""

    def construct_mapping(self, node, deep=False):
        if isinstance(node, yaml.MappingNode):
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            check_names([key.value for key in keys])
        return super().construct_mapping(node, deep)


def documents(text):
    """Return the objects of a YAML text's documents, without empty ones. Raises ValueError."""
    try:
        return [found for found in yaml.load_all(text, OnceOnly) if found is not None]
    except yaml.YAMLError as error:
        raise NotYaml(f"is not YAML{problem_of(error)}") from None
    except (AttributeError, KeyError):  # !!timestamp a, !!bool a
        raise NotYaml("is not YAML: a value does not fit its !! tag") from None
    except RecursionError:
        raise NotYaml("is not YAML that can be read: it is nested too deep") from None


def problem_of(error):
    """Return the line and the problem of a YAMLError, whose own text has several lines."""
    mark = getattr(error, "problem_mark", None)
    where = f" (line {mark.line + 1})" if mark else ""
    return f"{where}: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"


def of_yaml(text):
    """Return the object of the one document of a YAML text, None if it is empty."""
    found = documents(text)
    if len(found) > 1:
        raise NotYaml(f"is {len(found)} YAML documents, and must be one")
    return found[0] if found else None
