"""Predict what a training job costs on GPUs that are not in this machine, and with what error.

    virtual_clock.py      a clock that only emulated compute moves: the same step on every machine
    simulate.py           a dry run's step with the time of its messages added
    failures.py           failure rates, the best interval between saves, the useful share
    goodput.py            jitter, stragglers, failures: the useful share of a run, seeded

    hardware.py           GPUs and links as data, with a source for each figure: gpus.csv
    cluster.py            a number of GPUs in equal nodes, from Python or a file; checks units
    calibrate.py          this machine as one more GPU: measures matmuls, memory and links
    shapes.py             parameters, FLOPs and activation bytes, from a model's configuration
    bert_shapes.py        the same for BERT: no causal mask, other input and output layers
    resnet_shapes.py      the same for ResNets: convolutions, block by block
    vit_shapes.py         the same for vision transformers
    documents.py          documents packed into sequences: attention's reach, padding's waste
    model_row.py          a model from a row of a table, or from layers=32,hidden=4096,...
    huggingface.py        a model from a config.json of Hugging Face
    job_config.py         a training job from a row of a table, with defaults for missing columns
    collectives.py        the time of a message, by algorithm: rings, levels, trees, switches
    stacks.py             the training stacks: what each keeps, sends, hides and can run
    messages.py           the time of a job's messages, and how much of it the stack hides
    recomputation.py      what recomputation repeats and keeps, by stack
    cost.py               the time of a step, part by part: tokens per second
    memory_model.py       the peak memory of a GPU by kind, and the largest kind
    constants.py          the fitted constants: a table with the meaning, unit and spread of each
    published_rows.py     which published rows are in the fit, kept out of it, or left out
    fit.py                the fit on published rows, and its error on held-out rows
    scores.py             chosen over best, errors by group: python -m labkit.scale.fit --scores
    intervals.py          the interval of a predicted speed, from rows kept out of the fit
    predict.py            the command: rows in, rows with predictions out

    models.csv            named models, and the sources of their figures
    validate_args.py      checks the arguments of the planner
    search.py             every layout of a model on n GPUs, and those that fit
    bucket_size_model.py  the best bucket size: start-up costs against the last bucket
    question.py           a model on a cluster, with a batch that its GPUs can divide
    answer.py             the answer of ./scripts/lab plan and of the dashboard: three layouts
    answer_text.py        the answer in sentences
    launch_options.py     the options that run a layout on its stack
    quantities.py         reads 1T tokens, 400 Gbit/s, a price, a deadline
    plan.py               the table: the fastest, cheapest, smallest; time, money, energy
    explain.py            why another plan lost; which constants the plan depends on
    cases.py              published jobs: predicted and reported in the same unit

    published/            published rows, and the errors of their predictions

Only calibrate.py measures. The messages of a dry run are counted; everything else is simulated or
predicted.
"""
