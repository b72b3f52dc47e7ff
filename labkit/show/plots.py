"""All pictures by one name: pure functions from data to a Figure, and two ways to show it.

timeline                    two lanes a rank, compute and network        gantt.py
schedules                   one step in several orders, a band each      schedules.py
pipelines                   a box per action, a row per rank             pipelines.py
simulated_vs_measured       a step simulated, and the same step measured simulated_vs_measured.py
residency                   when each unit of FSDP is unsharded          unit_residency.py
grouped_bars                medians with quartiles, a value on each bar  bars.py
memory_bars                 memory by kind, stacked                      bars.py
measured_against_predicted  ratios around 1                              bars.py
memory_and_traffic          bytes held, and next to them bytes sent      memory_and_traffic.py
stacked_bars                parts of a total, a thin bar a repetition    stacked_bars.py
loss_curves, sweep          lines named at their ends                    curves.py
memory_over_time            the memory of one rank, change by change     curves.py
memory_timelines            the same of several runs, on one scale       memory_timeline.py
efficiency                  efficiency over ranks, and the ideal line    efficiency.py
memory_by_length            bytes over sequence length                   sequence_length_explorer.py
broken                      losses of resumed runs, their difference     resumed_runs.py
race                        seconds and bytes to reach a loss            time_to_loss_curves.py
loss_scales                 the loss scale over time, and skipped steps  loss_scale.py
step_over_link              step time over link speed, and crossovers    time_vs_bandwidth.py
catching_up, transmitted    a gradient through a compressor              gradients.py
bit_layout, reach           a value's bits, gradients in six formats     formats.py
pareto                      two costs, and the Pareto front              pareto.py
switched                    without and with an option, arrows between   with_and_without.py
against_published           predictions compared with published figures  predictions.py
time_and_money              days and GPU-hours by the number of GPUs     predictions.py
before_after, step_by_step, chunks, and the ranks summed in them         collective_chunks.py
side_by_side
load_map                    experts over steps, coloured by their load   expert_load.py
parallelism_map             how each axis divides the batch and model    parallelism_map.py
ring_load                   work of each rank in each round of a ring    ring_load.py
roofline                    FLOP/s over FLOPs per byte, two ceilings     roofline.py
present, save               into the notebook, into figures/             publish.py
"""

from labkit.show.bars import grouped_bars, measured_against_predicted, memory_bars
from labkit.show.collective_chunks import before_after, side_by_side, step_by_step
from labkit.show.curves import loss_curves, memory_over_time, sweep
from labkit.show.efficiency import efficiency
from labkit.show.expert_load import load_map
from labkit.show.formats import bit_layout, reach
from labkit.show.gantt import timeline
from labkit.show.gradients import catching_up, transmitted
from labkit.show.loss_scale import loss_scales
from labkit.show.memory_and_traffic import memory_and_traffic
from labkit.show.memory_timeline import memory_timelines
from labkit.show.parallelism_map import parallelism_map
from labkit.show.pareto import pareto
from labkit.show.pipelines import pipelines
from labkit.show.predictions import against_published, time_and_money
from labkit.show.publish import present, save
from labkit.show.resumed_runs import broken
from labkit.show.ring_load import ring_load
from labkit.show.roofline import roofline
from labkit.show.schedules import schedules
from labkit.show.sequence_length_explorer import memory_by_length
from labkit.show.simulated_vs_measured import simulated_vs_measured
from labkit.show.stacked_bars import stacked_bars
from labkit.show.time_to_loss_curves import race
from labkit.show.time_vs_bandwidth import step_over_link
from labkit.show.unit_residency import residency
from labkit.show.with_and_without import switched

__all__ = [
    "against_published",
    "before_after",
    "bit_layout",
    "broken",
    "catching_up",
    "efficiency",
    "grouped_bars",
    "load_map",
    "loss_curves",
    "loss_scales",
    "measured_against_predicted",
    "memory_and_traffic",
    "memory_bars",
    "memory_by_length",
    "memory_over_time",
    "memory_timelines",
    "parallelism_map",
    "pareto",
    "pipelines",
    "present",
    "race",
    "reach",
    "residency",
    "ring_load",
    "roofline",
    "save",
    "schedules",
    "side_by_side",
    "simulated_vs_measured",
    "stacked_bars",
    "step_by_step",
    "step_over_link",
    "sweep",
    "switched",
    "time_and_money",
    "timeline",
    "transmitted",
]
