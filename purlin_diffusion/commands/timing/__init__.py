"""What `latency` and `compare` are made of.

modes.py      what is timed, and what is known not to run here
opened.py     a pipeline made ready for a mode, and given back
measure.py    on every rank: the visits;  memory.py, likeness.py: what is looked at beside the clock
profile.py    one call, watched
rows.py       on the root: a row a mode
table.py      rows for the terminal;  page.py, plots.py, page.css: for a browser;  record.py: for the record
"""
