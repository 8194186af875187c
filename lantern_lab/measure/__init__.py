"""Programs behind the figures of the pages, each run as `python -m lantern_lab.measure.NAME` from the repository."""
