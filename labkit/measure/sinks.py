"""Sinks for a monitor's rows: a file, TensorBoard, Prometheus, Weights & Biases.

    {"step": 7, "rank": 0, "loss": 2.31, ...}
      |--> jsonl        metrics-rank0.jsonl: a line for each row
      |--> tensorboard  a curve for each number
      |--> prometheus   /metrics: the latest row
      |--> wandb        a run on disk, until `wandb sync` uploads it
      |--> Records      run.records of a launch (show/live.py draws them)

TensorBoard and Prometheus accept only numbers and leave out text.
A sink has write(row), close() and a str() that says where to look. It may be slow and may raise;
monitor.py isolates training from both. Each library is imported by the sink that needs it.

Prometheus fetches rows itself, so it needs a port: by default a free one on the loopback.
Exposition format: prometheus.io/docs/instrumenting/exposition_formats.
"""

import errno
import json
import re
import sys
from math import isfinite
from pathlib import Path
from urllib.parse import urlsplit

KNOWN = "jsonl:FOLDER, tensorboard:FOLDER, prometheus[:HOST[:PORT]], wandb:FOLDER"
NAMES = ("step", "rank", "time")  # in a row, but not drawn


def numbers(row):
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def open_sinks(places, rank=0):
    """Open the sinks of this rank: JSON lines on every rank, the others on rank 0.

    places: a list such as ["jsonl:runs/a", "prometheus"], as in KNOWN. Raises ValueError for an
    unknown place, a missing folder or library, or a port in use.
    """
    sinks = []
    for place in places:
        name, _, rest = place.partition(":")
        if name not in SINKS:
            raise ValueError(f"--metrics {place}: choose from {KNOWN}")
        if not rest and name != "prometheus":
            raise ValueError(f"--metrics {place}: add a folder, as in {name}:FOLDER")
        if rank > 0 and name != "jsonl":
            continue
        try:
            sinks.append(SINKS[name](rest, rank))
        except ModuleNotFoundError as error:
            install = f"{sys.executable} -m pip install {error.name}"
            raise ValueError(
                f"--metrics {place}: {error.name} is not installed: {install}"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"--metrics {place}: {error}") from None
    return sinks


class JsonLines:
    """Appends a line per row to metrics-rank0.jsonl in a folder. Infinities and NaN become null.

    A step that a resumed run repeats has two lines; the later one counts.
    """

    def __init__(self, folder, rank=0):
        self.path = Path(folder) / f"metrics-rank{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab", buffering=0)  # unbuffered: a written row is in the file

    def __str__(self):
        return str(self.path)

    def write(self, row):
        unknown = [name for name, value in numbers(row).items() if not isfinite(value)]
        row = row | dict.fromkeys(unknown)
        self.file.write(json.dumps(row).encode() + b"\n")

    def close(self):
        self.file.close()


class Records:
    """Appends to run.records of a launch, which a notebook can read. record: context.record."""

    def __init__(self, record):
        self.record = record

    def __str__(self):
        return "run.records"

    def write(self, row):
        self.record(**{name: value for name, value in row.items() if name != "rank"})

    def close(self):
        """Do nothing: the launch closes its file."""


class TensorBoard:
    """Event files for `tensorboard --logdir FOLDER`: a curve for each number of the rows."""

    def __init__(self, folder, rank=0):
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self.make = SummaryWriter
        self.writer = None
        Path(folder).mkdir(parents=True, exist_ok=True)

    def __str__(self):
        return f"tensorboard --logdir {self.folder}"

    def write(self, row):
        if self.writer is None:  # a resumed run repeats steps that a killed run has written
            self.writer = self.make(self.folder, purge_step=row["step"], flush_secs=10)
        for name, value in numbers(row).items():
            if name not in NAMES:
                self.writer.add_scalar(name, value, row["step"], row["time"])

    def close(self):
        if self.writer is not None:
            self.writer.close()


class Prometheus:
    """An HTTP server. Each answer is one complete row: labkit_loss{rank="0"} and so on.

    address: HOST or HOST:PORT; "" is 127.0.0.1 and a free port.
    """

    def __init__(self, address="", rank=0):
        from prometheus_client import CollectorRegistry, start_http_server

        parts = urlsplit(f"//{address}")
        host = parts.hostname or "127.0.0.1"
        port = parts.port or 0
        if host.isdigit():
            raise ValueError(f"{host} is not a host: use prometheus:127.0.0.1:{host}")
        self.row = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self.server, _ = start_http_server(port, host, registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ValueError(
                f"port {port} is in use: use another, or prometheus:{host} for a free one"
            ) from None
        host = f"[{host}]" if ":" in host else host
        self.url = f"http://{host}:{self.server.server_port}/metrics"

    def __str__(self):
        return self.url

    def write(self, row):
        self.row = row

    def collect(self):
        """Yield the metrics; prometheus_client calls this in the server's thread."""
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
    """Weights & Biases, offline: nothing is uploaded before `wandb sync`."""

    def __init__(self, folder, rank=0):
        import wandb

        Path(folder).mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.run = wandb.init(project="labkit", dir=folder, mode="offline")

    def __str__(self):
        return f"wandb sync {self.folder}/wandb/offline-run-*"

    def write(self, row):
        self.run.log({name: row[name] for name in row.keys() - NAMES}, step=row["step"])

    def close(self):
        self.run.finish()


SINKS = {"jsonl": JsonLines, "tensorboard": TensorBoard, "prometheus": Prometheus, "wandb": Wandb}
