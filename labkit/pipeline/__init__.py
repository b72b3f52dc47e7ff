"""Pipeline parallelism: schedules as data, validated before they run, and one executor."""

from labkit.pipeline.pipeline import (
    Action,
    Pipeline,
    dual_pipe,
    gpipe,
    interleaved,
    one_f_one_b,
    v_shaped,
    zero_bubble,
)

__all__ = [
    "Action",
    "Pipeline",
    "dual_pipe",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "v_shaped",
    "zero_bubble",
]
