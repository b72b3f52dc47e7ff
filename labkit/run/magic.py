"""`%%torchrun`: run the cell on real ranks.

    %load_ext labkit

    %%torchrun --nproc 4 --into result
    total = torch.tensor([float(rank)], device=device)
    comm.all_reduce(total)
    record(total=total.item())

    %%torchrun --nodes 2 --nproc 2 --link 200 --into result   # two nodes, a real link of 200 Mbit/s

The cell can use rank, world_size, local_rank, node, device, attempt, record, progress, torch, dist
and comm. `--nproc $n` and `{n}` take the notebook's own variable n. `result` is a Run:
result.records, result.logs, result.command.
"""

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from labkit.run.launch import launch


@magics_class
class TorchrunMagic(Magics):
    @magic_arguments()
    @argument("--nproc", type=int, default=2, help="number of ranks (2)")
    @argument("--nodes", type=int, default=1, help="number of nodes, each of --nproc ranks (1)")
    @argument(
        "--link",
        dest="link_mbit",
        type=float,
        metavar="MBIT",
        help="speed of each node's link, 10^6 bits a second",
    )
    @argument(
        "--delay",
        dest="link_ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="delay of each link, milliseconds (0)",
    )
    @argument(
        "--mtu",
        dest="link_mtu",
        type=int,
        default=9000,
        metavar="BYTES",
        help="largest frame of the links (9000)",
    )
    @argument(
        "--into", default=None, metavar="NAME", help="notebook variable that receives the Run"
    )
    @argument(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds until all ranks are stopped (600)",
    )
    @argument(
        "--collective-timeout",
        type=float,
        default=60.0,
        help="seconds a collective waits for its peers (60)",
    )
    @argument("--restarts", type=int, default=0, help="how often a failed run is started again (0)")
    @argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    @argument("--cold", action="store_true", help="a plain torchrun instead of the warm agent")
    @argument("--quiet", action="store_true", help="print nothing while the ranks run")
    @cell_magic
    def torchrun(self, line, cell):
        """Run the cell on real ranks, through torchrun's launcher."""
        options = vars(parse_argstring(self.torchrun, line))
        into = options.pop("into")
        if into is not None and not into.isidentifier():
            raise UsageError(f"--into {into}: must be the name of a variable")
        run = launch(cell, **options)
        if into is not None:
            self.shell.user_ns[into] = run
