"""sbatch files: an Experiment on the nodes of a Slurm cluster, until it is done.

    Path("gpt.sbatch").write_text(script(Experiment(model="gpt", strategy="fsdp"), nodes=2, gpus=8))
    sbatch gpt.sbatch

    sbatch -> batch script, on the first node -> srun -> node 0: torchrun -> ranks 0 ... 7
                                                      -> node 1: torchrun -> ranks 8 ... 15

    preempted, or the time is nearly up   SIGTERM: all ranks save after the same step and end
    stopped before the last step          the script requeues its job, which resumes
    a node fails                          Slurm requeues the job, which resumes from the last save
    nodes=(1, 2), and a node comes back   the ranks save, and the requeued job gets both

The options are those of sbatch(1) and srun(1) of Slurm 22.05 and newer, and of PyTorch's torchrun.
launch(..., on=Slurm(...)) of labkit.run submits the file of launch_script.
"""

import re
import shlex
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
# Partitions may be a list. Sites put project and GPU into an account: abc@v100.
OF_SLURM = re.compile(r"[A-Za-z0-9][\w.,:@+-]{0,127}", re.ASCII)
LISTS = {"partition": "sinfo", "account": "sacctmgr show associations user=$USER"}
INTERFACE = re.compile(r"[\w.-]{1,15}", re.ASCII)  # Linux allows 15 characters
TIMES = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(\d+)|(\d+):(\d+)|(\d+):(\d+):(\d+))")
DAY, HOUR, MINUTE = 86_400, 3_600, 60
PORTS = 10_000  # of the rendezvous: 20000 ... 29999, below those of outgoing connections
FIXED = (
    "# One torchrun a node, which starts the ranks of its node.",
    "#SBATCH --ntasks-per-node=1",
)
RANGE = ("# As many as are free. With a number of tasks, Slurm would give the fewest.",)
# What the batch script does after it has started srun.
ENDING = (
    "# SIGTERM ends `wait`, so it is repeated until srun has ended.",
    'while kill -0 "$step" 2>/dev/null; do wait "$step"; status=$?; done',
    'outcome=$(cat "$LABKIT_OUTCOME" 2>/dev/null)',
    'rm -f "$LABKIT_OUTCOME"',
    "",
    'if [ "$outcome" = done ]; then exit 0; fi',
    "# For Slurm, a job that has saved is complete: only the script can requeue it. A job that was",
    "# preempted before it had begun to train has nothing to save. A cancelled job ends.",
    'job=$(scontrol --oneliner show job "$SLURM_JOB_ID")',
    'if [ "$outcome" = stopped ] || [[ "$job" =~ PreemptTime=[0-9] ]]; then',
    '    [[ "$job" =~ JobState=RUNNING ]] && scontrol requeue "$SLURM_JOB_ID"',
    "fi",
    'exit "${status:-1}"',
)


@dataclass(frozen=True)
class Slurm:
    """Where launch(..., on=Slurm(...)) runs. Raises ValueError.

    folder: where the run's folder is made, on a file system that all nodes share; None: the working
    directory. partition: None for the cluster's default. interface: the network of the ranks, such
    as "ib0"; None: the one of the nodes' host names. Other options of sbatch: its environment
    variables, such as SBATCH_ACCOUNT.
    """

    folder: str | None = None
    partition: str | None = None
    interface: str | None = None

    def __post_init__(self):
        check_names(self.partition, self.interface)


def script(
    experiment,
    *,
    nodes=1,
    gpus=0,
    ranks=1,
    time="1:00:00",
    name=None,
    partition=None,
    account=None,
    checkpoints=None,
    checkpoint_every=100,
    save_seconds=60,
    grow_seconds=600,
    interface=None,
    path=None,
    options=(),
):
    """Return the text of an sbatch file that trains the experiment. Raises ValueError.

    experiment: a labkit.run.experiment.Experiment.
    nodes: their number, or (fewest, most): the job uses as many as are free, goes on with the rest
    after a node has failed, and takes a node that comes back.
    gpus: of each node, one for each rank. 0: `ranks` CPU ranks on each node, which use gloo.
    time: the limit of one attempt, in a format of sbatch: "90" (minutes), "1:30:00", "2-12".
    checkpoints: a folder that all nodes share, or s3://...; None: runs/NAME, where sbatch runs.
    save_seconds: time to save before Slurm ends the job; measure a save, and take twice as long.
    grow_seconds: how often a job with fewer than the most nodes looks for a free one. To get it,
    all ranks save and the job returns to the queue, where others may overtake it.
    account: whom Slurm charges; None: your default one. interface: as in Slurm.
    path: the folder of torchrun, which all nodes see; None: found on the PATH of `sbatch`.
    options: further options of labkit.train, a list of strings.
    """
    fewest, most = node_range(nodes)
    check_whole("gpus", gpus, 0)
    check_whole("ranks", ranks, 1)
    check_whole("checkpoint_every", checkpoint_every, 1)
    check_whole("save_seconds", save_seconds, 1)
    check_whole("grow_seconds", grow_seconds, 1)
    name = name or re.sub(r"[^\w.-]", "-", f"{experiment.model}-{experiment.strategy}")
    check_name("name", name)
    check_names(partition, interface, account)
    if seconds(time) <= save_seconds:
        raise ValueError(
            f"time={time!r} leaves no time to train: must exceed save_seconds={save_seconds}"
        )
    for count in range(fewest, most + 1):
        experiment.check_ranks(count * (gpus or ranks))
    training = [*experiment.arguments(), "--checkpoint-dir", checkpoints or f"runs/{name}"]
    training += ["--checkpoint-every", str(checkpoint_every), *options]
    limits = ["--shutdown-timeout", str(save_seconds)]
    tasks = "" if fewest == most else ' --ntasks="$SLURM_NNODES" --ntasks-per-node=1'
    count = str(most) if fewest == most else f"{fewest}-{most}"
    lines = [
        "#!/bin/bash",
        *header(name, count, gpus, time, partition, account),
        *returning(name, save_seconds),
        "",
        "# Slurm also signals this script, which must outlive the ranks that save.",
        "trap : TERM",
        "",
        *tools(path),
        *surroundings(interface),
        "",
        "# The ranks write how training ended: done, or stopped and saved.",
        f'export LABKIT_OUTCOME="$PWD/{name}-$SLURM_JOB_ID.outcome"',
        'rm -f "$LABKIT_OUTCOME"',
        "",
        "# In the background: a trap waits for a foreground command. A torchrun whose ranks were",
        "# stopped exits with 1, and must not end the others.",
        "# No binding: one task may get one core, which all its ranks would share.",
        f"srun --kill-on-bad-exit=0 --cpu-bind=none{tasks} torchrun \\",
        *torchrun(gpus or ranks, limits, ["-m", "--", "labkit.train", *training], " &"),
        "step=$!",
        *(growing(most, grow_seconds) if fewest < most else []),
        *ENDING,
    ]
    return "\n".join(lines) + "\n"


def growing(most, seconds):
    """Return the lines that look for a free node and then let all ranks save and end."""
    return [
        "",
        "# A running job gets no more nodes. If one is free, all ranks save and it is requeued.",
        f'while [ "$SLURM_NNODES" -lt {most} ] && sleep {seconds}; do',
        "    # idle~: switched off to save power. drained and idle* can take no job.",
        '    if sinfo --noheader --partition="$SLURM_JOB_PARTITION" --format=%T |',
        r"        grep -qx 'idle~\?'; then",
        "        # Also for ranks that have not begun to train; those that finish write done.",
        '        echo stopped >"$LABKIT_OUTCOME"',
        '        scancel --signal=TERM "$SLURM_JOB_ID"',
        "        break",
        "    fi",
        "done &",
        "",
    ]


def returning(name, save_seconds):
    """Return the #SBATCH lines of a job that may be stopped and come back."""
    return [
        f"#SBATCH --output={name}-%j.out",
        "# A requeued job continues the same file.",
        "#SBATCH --open-mode=append",
        "# Preempted, or on a node that failed, the job returns to the queue.",
        "#SBATCH --requeue",
        f"# All ranks save when {save_seconds} s are left.",
        f"#SBATCH --signal=TERM@{save_seconds}",
    ]


def launch_script(slurm, job, cwd, nodes, nproc, gpus, limit, python):
    """Return the sbatch file of a launch: the workers of a job.json, whose folder gets the results.

    job: path of job.json, a Path; cwd: the working directory of the ranks; all nodes must see both.
    gpus: of each node. limit: seconds. python: the interpreter. The folder gets `refused`, with a
    line for each node that cannot read them or lacks the interface, and `status`, torchrun's.
    """
    # launch ends the job earlier; this is for a launch that has died
    minutes = int(min(limit, 365 * DAY) // MINUTE) + 2
    look = 'for path; do test -r "$path" || { echo "$(hostname) cannot read $path"; exit 1; }; done'
    if slurm.interface:
        look += f"; ip link show dev {slurm.interface} >/dev/null 2>&1 || "
        look += f'{{ echo "$(hostname) has no network interface {slurm.interface}"; exit 1; }}'
    lines = [
        "#!/bin/bash",
        *header(job.parent.name, str(nodes), gpus, str(minutes), slurm.partition),
        "#SBATCH --no-requeue",
        "",
        shlex.join(["cd", str(job.parent)]),
        f"srun {shlex.join(['sh', '-c', look, 'sh', str(job), cwd])} >refused || exit 1",
        "",
        *surroundings(slurm.interface),
        "",
        f"srun --cpu-bind=none {shlex.join([python, '-m', 'torch.distributed.run'])} \\",
        *torchrun(nproc, [], ["-m", "labkit.run.worker", str(job)], ""),
        "echo $? >status",
    ]
    return "\n".join(lines) + "\n"


def header(name, nodes, gpus, time, partition, account=None):
    """Return the #SBATCH lines that both files need."""
    return [
        f"#SBATCH --job-name={name}",
        *([f"#SBATCH --partition={partition}"] if partition else []),
        *([f"#SBATCH --account={account}"] if account else []),
        f"#SBATCH --nodes={nodes}",
        *(RANGE if "-" in nodes else FIXED),
        *([f"#SBATCH --gpus-per-node={gpus}"] if gpus else []),
        "# Whole nodes: other jobs would slow down a rank, and all ranks wait for the slowest.",
        "#SBATCH --exclusive",
        f"#SBATCH --time={time}",
    ]


def tools(path):
    """Return the lines that find torchrun, or end the job with one line."""
    return [
        *([f"export PATH={shlex.quote(path)}:$PATH"] if path else []),
        "if ! command -v torchrun >/dev/null; then",
        '    echo "$(hostname) cannot find torchrun: activate .venv, then sbatch" >&2',
        "    exit 1",
        "fi",
    ]


def surroundings(interface):
    """Return the lines that set the environment of the ranks, and where they meet."""
    lines = ["# One thread a rank: sums keep their order, and ranks do not compete for cores."]
    lines += ["export OMP_NUM_THREADS=1"]
    if interface:
        lines += [
            f"if ! ip link show dev {interface} >/dev/null 2>&1; then",
            f'    echo "$(hostname) has no network interface {interface}" >&2',
            "    exit 1",
            "fi",
            f"export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}",
        ]
    return [
        *lines,
        "# The first node is the meeting point.",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "# Each job has a port of its own: another job may run on the same node.",
        f"port=$((20000 + SLURM_JOB_ID % {PORTS}))",
    ]


def torchrun(ranks, more, words, end):
    """Return the lines of torchrun's arguments, then of what it runs."""
    return [
        f'    --nnodes "$SLURM_NNODES" --nproc-per-node {ranks} \\',
        '    --rdzv-backend c10d --rdzv-endpoint "$head:$port" \\',
        '    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \\',
        *([f"    {shlex.join(more)} \\"] if more else []),
        f"    {shlex.join(map(str, words))}{end}",
    ]


def seconds(time):
    """Return the seconds of a time limit in sbatch's formats. Raises ValueError for other text."""
    found = TIMES.fullmatch(time) if isinstance(time, str) else None
    if not found:
        raise ValueError(
            f"time={time!r}: must be minutes, hours:minutes:seconds or days-hours, "
            'such as "90", "1:30:00" or "2-12"'
        )
    groups = [int(group) if group else 0 for group in found.groups()]
    days, hours, minutes, rest, alone, *others = groups
    short_minutes, short_seconds, long_hours, long_minutes, long_seconds = others
    return (
        days * DAY
        + (hours + long_hours) * HOUR
        + (minutes + alone + short_minutes + long_minutes) * MINUTE
        + (rest + short_seconds + long_seconds)
    )


def node_range(nodes):
    """Return (fewest, most) of a number or a pair. Raises ValueError."""
    pair = nodes if isinstance(nodes, (tuple, list)) else (nodes, nodes)
    whole = len(pair) == 2 and all(type(count) is int for count in pair)
    if not whole or not 1 <= pair[0] <= pair[1]:
        raise ValueError(
            f"nodes={nodes!r}: must be a whole number of at least 1, or a pair (fewest, most)"
        )
    return tuple(pair)


def check_whole(what, value, least):
    if type(value) is not int or value < least:
        raise ValueError(f"{what}={value!r}: must be a whole number of at least {least}")


def check_name(what, name):
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"{what}={name!r}: must be 1 to 64 letters, digits, '.', '_' and '-', "
            "and begin with a letter or digit"
        )


def check_names(partition, interface, account=None):
    """Raise ValueError for a partition, interface or account that is no name."""
    for what, name in (("partition", partition), ("account", account)):
        if name is not None and not (isinstance(name, str) and OF_SLURM.fullmatch(name)):
            raise ValueError(
                f"{what}={name!r}: must be a name that Slurm knows; `{LISTS[what]}` lists them"
            )
    if interface is not None and not (
        isinstance(interface, str) and INTERFACE.fullmatch(interface)
    ):
        raise ValueError(
            f"interface={interface!r}: must be the name of a network interface, such as ib0; "
            "`ip link` on a node lists them"
        )
