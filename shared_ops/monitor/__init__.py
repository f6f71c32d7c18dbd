"""Watching a run: its folder, metrics, progress, health, report, failing ranks and interruptions.

    run_folder.py  where the files of a run are        recorder.py  metrics.jsonl, TensorBoard, console
    progress.py    the console's bar or lines          history.py   reads metrics.jsonl back
    health.py      rows → remarks                      report.py    one self-contained report.html
    failure.py     a rank that fails ends its job      interrupt.py a clean stop at Ctrl-C
    files.py       atomic writes                       page.py      the report's template

`python -m shared_ops.monitor report RUN_FOLDER` writes the report again. Nothing is imported here, so
that a rank that only needs `interrupt` does not load plotly.
"""
