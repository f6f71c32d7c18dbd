"""From text to batches: corpus → tokenizer → token files → packed rows → sampled batches.

`python -m shared_ops.data prepare --help` is the command; `prepare.prepare` is the same as a function.
"""
