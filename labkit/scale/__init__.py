"""Beyond this machine: what a model costs on GPUs that are not here, with its error beside it.

    rehearse.py    the lab's own code as one rank of n, alone and without data: what it sends, holds
    clock.py       a clock that only emulated compute moves: the same step on every machine
    simulate.py    a rehearsed step with the time of its messages put back
    goodput.py     jitter, stragglers, failures: what is left of a run, seeded

    hardware.py    GPUs and links as data, a source per figure
    cluster.py     so many GPUs in equal nodes, told in Python or by a file; wrong units asked about
    calibrate.py   this machine as one more of them: products, memory, links, timed and fitted
    shapes.py      parameters, FLOPs and activation bytes, from the numbers of a configuration
    encoders.py    the same of BERT: no mask, other ends
    images.py      the same of ResNets: convolutions, block by block
    row.py         a row's columns read, and the shape of the model that they tell
    job.py         a training job as a row of a table: what is missing has a stated default
    collectives.py the time of a message, by algorithm: rings, levels, trees, switches that add
    cost.py        the time of layers and a pipeline: tokens per second
    memory.py      what a GPU holds, by kind: the peak, and what is the largest
    constants.py   what the two cannot know, fitted: a table, each with its meaning, unit and spread
    fit.py         the fit on others' published rows, and its error on those kept out
    predict.py     the command: rows in, rows with predictions out

    models.csv     named models and where their figures were read
    given.py       what is asked of the planner, checked
    search.py      every way to lay a model out on n GPUs, and those that fit
    bucket.py      how large a bucket of gradients: starts against the last one
    plan.py        the command: the fastest, the cheapest, the fewest GPUs; time, money, energy
    explain.py     who lost and by what; what hangs on which constant
    cases.py       jobs as their papers describe them: predicted, and what is reported, in one unit

    published/     the rows of others, and how far off the predictions of them are

Only calibrate.py measures: what is rehearsed is counted, and the rest is simulated or predicted.
"""
