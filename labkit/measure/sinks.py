"""Where a monitor's rows go: a file, TensorBoard, Prometheus, Weights & Biases.

    {"step": 7, "rank": 0, "loss": 2.31, ...}
      |--> jsonl        metrics-rank0.jsonl: a line for each row
      |--> tensorboard  a curve for each number
      |--> prometheus   /metrics: the latest row, for whoever asks
      |--> wandb        a run on disk, until `wandb sync` sends it
      |--> Records      run.records of a launch (show/live.py draws them)

TensorBoard and Prometheus take numbers only: they leave out text, the others keep it.
A sink has write(row), close() and a str() that says where to look. It may be slow and may raise:
monitor.py keeps both away from training. Each library is imported by the sink that needs it.

Prometheus asks by itself, so it needs a port: on the loopback, and a free one, unless told
otherwise. Exposition format: prometheus.io/docs/instrumenting/exposition_formats.
"""

import errno
import json
import re
from math import isfinite
from pathlib import Path
from urllib.parse import urlsplit

KNOWN = "jsonl:FOLDER, tensorboard:FOLDER, prometheus[:HOST[:PORT]], wandb:FOLDER"
NAMES = ("step", "rank", "time")  # in a row, but nothing to draw


def numbers(row):
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def open_sinks(places, rank=0):
    """The sinks of this rank: JSON lines on every rank, the others on rank 0.

    places: a list such as ["jsonl:runs/a", "prometheus"], in the words of KNOWN. Raises ValueError
    in one line: an unknown place, no folder, a library that is missing, a port in use.
    """
    sinks = []
    for place in places:
        name, _, rest = place.partition(":")
        if name not in SINKS:
            raise ValueError(f"--metrics {place}: choose from {KNOWN}")
        if not rest and name != "prometheus":
            raise ValueError(f"--metrics {place}: say where, as in {name}:FOLDER")
        if rank > 0 and name != "jsonl":
            continue
        try:
            sinks.append(SINKS[name](rest, rank))
        except ModuleNotFoundError as error:
            raise ValueError(f"--metrics {place}: {error.name} is not installed") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"--metrics {place}: {error}") from None
    return sinks


class JsonLines:
    """Appends a line for every row to metrics-rank0.jsonl. What is not finite becomes null.

    Steps that a resumed run takes again have two lines: the later counts.
    """

    def __init__(self, folder, rank=0):
        self.path = Path(folder) / f"metrics-rank{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab", buffering=0)  # a row is in the file once it is written

    def __str__(self):
        return str(self.path)

    def write(self, row):
        unknown = [name for name, value in numbers(row).items() if not isfinite(value)]
        row = row | dict.fromkeys(unknown)
        self.file.write(json.dumps(row).encode() + b"\n")

    def close(self):
        self.file.close()


class Records:
    """run.records of a launch: what a notebook sees while it runs. record: context.record."""

    def __init__(self, record):
        self.record = record

    def __str__(self):
        return "run.records"

    def write(self, row):
        self.record(**{name: value for name, value in row.items() if name != "rank"})

    def close(self):
        """The launch's file stays open."""


class TensorBoard:
    """Event files for `tensorboard --logdir FOLDER`: a curve for each number of the rows."""

    def __init__(self, folder, rank=0):
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.make, self.writer = folder, SummaryWriter, None
        Path(folder).mkdir(parents=True, exist_ok=True)

    def __str__(self):
        return f"tensorboard --logdir {self.folder}"

    def write(self, row):
        if self.writer is None:  # what a killed run wrote from this step on is taken again
            self.writer = self.make(self.folder, purge_step=row["step"], flush_secs=10)
        for name, value in numbers(row).items():
            if name not in NAMES:
                self.writer.add_scalar(name, value, row["step"], row["time"])

    def close(self):
        if self.writer is not None:
            self.writer.close()


class Prometheus:
    """An HTTP server of its own. Each answer is one row whole: labkit_loss{rank="0"} and so on.

    address: HOST or HOST:PORT; "" is 127.0.0.1 and a free port.
    """

    def __init__(self, address="", rank=0):
        from prometheus_client import CollectorRegistry, start_http_server

        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or "127.0.0.1", parts.port or 0
        if host.isdigit():
            raise ValueError(f"{host} is no host: prometheus:127.0.0.1:{host}")
        self.row, registry = {}, CollectorRegistry()
        registry.register(self)
        try:
            self.server, _ = start_http_server(port, host, registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ValueError(
                f"port {port} is in use: name another, or none (prometheus:{host}) for a free one"
            ) from None
        host = f"[{host}]" if ":" in host else host
        self.url = f"http://{host}:{self.server.server_port}/metrics"

    def __str__(self):
        return self.url

    def write(self, row):
        self.row = row

    def collect(self):
        """What prometheus_client calls for an answer, in the server's thread."""
        from prometheus_client.core import GaugeMetricFamily

        row = self.row
        for name in numbers(row).keys() - {"rank"}:
            words = f"{name} of the latest step"
            known = re.sub(r"\W", "_", name, flags=re.ASCII)
            gauge = GaugeMetricFamily(f"labkit_{known}", words, labels=["rank"])
            gauge.add_metric([str(row["rank"])], row[name])
            yield gauge

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class Wandb:
    """Weights & Biases, offline: nothing leaves this machine until somebody calls `wandb sync`."""

    def __init__(self, folder, rank=0):
        import wandb

        Path(folder).mkdir(parents=True, exist_ok=True)
        self.folder, self.run = folder, wandb.init(project="labkit", dir=folder, mode="offline")

    def __str__(self):
        return f"wandb sync {self.folder}/wandb/offline-run-*"

    def write(self, row):
        self.run.log({name: row[name] for name in row.keys() - NAMES}, step=row["step"])

    def close(self):
        self.run.finish()


SINKS = {"jsonl": JsonLines, "tensorboard": TensorBoard, "prometheus": Prometheus, "wandb": Wandb}
