"""Nodes in network namespaces: the same Run over a real, shaped link, and nothing left behind however it ends."""

import pytest

from labkit.run import launch

QUICK = {"collective_timeout": 10, "timeout": 60, "quiet": True}


@pytest.fixture(scope="module")
def namespaces():
    """Skips, with the system's reason, where no network namespaces can be made."""
    network = launch("pass", nodes=2, nproc=1, **QUICK).network
    if network["how"] == "loopback":
        pytest.skip(network["notes"][0])


def test_two_nodes_give_the_same_run_as_one(namespaces):
    source = "x = torch.full((1 << 18,), rank + 1.0)\ncomm.all_reduce(x)\nrecord(sum=x[0].item(), node=node)"
    run = launch(source, nodes=2, nproc=2, link_mbit=200, **QUICK)
    assert run.records["sum"].tolist() == [10.0] * 4
    assert run.records["node"].tolist() == [0, 0, 1, 1] and run.records["rank"].tolist() == [0, 1, 2, 3]
    # A ring of four ranks, two a node, crosses each link once: 2 (n-1)/n of 1 MiB, and the headers.
    assert (run.wire["sent_bytes"] > 1.5 * 2**20).all()
    assert run.wire["counted_bytes"].tolist() == [2 * 1.5 * 2**20] * 2
