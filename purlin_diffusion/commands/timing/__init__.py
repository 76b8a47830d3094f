"""What `latency` and `compare` are made of.

modes.py      what is timed, and what is known not to run here
opened.py     a pipeline made ready for a mode, and given back;  handmade.py: a rival's CUDA graph
measure.py    on every rank: size after size;  rank.py: the visits;  visit.py: what one leaves
              what is looked at beside the clock: memory.py, warmth.py, likeness.py, truth.py (float32), steps.py (a scheduler's)
watch.py      one call more, for the host's cost;  profile.py: one under a profiler
rows.py       on the root: a row a mode
table.py      rows for the terminal;  page.py, plots.py, page.css: for a browser;  record.py: for the record
"""
